"""Writing into folders: whole files or none, only files of efcil itself, free disk space, and locks.

A run folder or a model folder contains only regular files and plain folders written by efcil. A link, a pipe or a
device in their place is never followed, opened or written to. The folder itself is named by the user and may be a link.
"""

from __future__ import annotations

import errno
import functools
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from efcil.errors import RunFolderError

try:
    import fcntl
except ImportError:  # not a POSIX system: only the lock file itself is available
    fcntl = None  # type: ignore[assignment]

POLL_SECONDS = 0.2
#: Most bytes of a lock file that are read: a process number and the name of a computer.
LONGEST_LOCK = 128
# Even if the file is replaced between check and opening: a link is not followed, and a pipe does not block.
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ForeignFile(RunFolderError):
    """Something that efcil did not write, in the place of one of its files or folders."""

    def __init__(self, path: Path, mode: int, wanted: str) -> None:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")
        super().__init__(
            f"{path} is {kind}, but efcil writes {wanted} there. It was neither read nor written. Move it elsewhere, "
            "and run the same command again."
        )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


# Read once: reading it means changing it for a moment, which other threads would see.
_UMASK = _umask()


# -- files of our own ------------------------------------------------------------------------------------------------


def refuse_foreign_file(path: Path) -> None:
    """Raise unless `path` is a regular file, or nothing."""
    _refuse_others(path, stat.S_ISREG, "a file")


def refuse_foreign_folder(path: Path) -> None:
    """Raise unless `path` is a folder (not a link to one), or nothing."""
    _refuse_others(path, stat.S_ISDIR, "a folder")


def _refuse_others(path: Path, is_ours: Callable[[int], bool], wanted: str) -> None:
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if not is_ours(mode):
        raise ForeignFile(path, mode, wanted)


def open_regular(path: Path, mode: str, **keywords: Any) -> IO[Any]:
    """Open a file of our own as `open` does; a link, a pipe, a device or a folder raises."""

    def opener(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | _CAREFULLY, 0o666)
        found = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(found):
            os.close(descriptor)
            raise ForeignFile(path, found, "a file")
        return descriptor

    refuse_foreign_file(path)
    return open(path, mode, opener=opener, **keywords)


def read_regular(path: Path, limit: int | None = None) -> bytes:
    """Return the content of a file of our own; a file of more than `limit` bytes raises."""
    with open_regular(path, "rb") as file:
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise OSError(f"it has more than {limit} bytes")
        content: bytes = file.read()
    return content


def is_regular(path: Path) -> bool:
    """Return whether `path` is a regular file and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def write_own(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Replace a file of our own as `write_atomically` does; a link, a pipe, a device or a folder raises."""
    refuse_foreign_file(path)
    write_atomically(path, content)


def write_atomically(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Replace `path` by `content` so that readers, and a crash at any moment, see the old file or the new one.

    Content that is too large to hold twice can be given in pieces.
    """
    make_folder(path.parent)
    content = content.encode("utf-8") if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates files that only their owner can read; results should be readable like any other file.
        os.chmod(temporary, 0o666 & ~_UMASK)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            # It names the file that was asked for, not the temporary one, or none.
            error.filename, error.filename2 = str(path), None
        raise
    _sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, so that a power cut loses none of them."""
    new = []
    for place in (folder, *folder.parents):
        if place.exists():
            break
        new.append(place)
    if new:
        folder.mkdir(parents=True, exist_ok=True)
    for place in new:
        _sync_folder(place.parent)


# -- disk space ------------------------------------------------------------------------------------------------------


def refuse_unwritable(folder: Path, needed: int) -> None:
    """Create `folder`, try to write into it, and compare what a run needs with the free space of the disk."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.is_file():
            raise NotADirectoryError(20, "it is a file")
        # Respected even for the superuser, who could write there anyway.
        if not existing.stat().st_mode & 0o222:
            raise PermissionError(13, "it is read-only")
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"efcil")
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if full else "make this one writable"
        raise RunFolderError(
            f"Nothing can be written to {folder} ({error.strerror or error}). Nothing has been changed; choose another "
            f"folder, or {remedy}."
        ) from error
    refuse_full(folder, needed, free)


def refuse_full(folder: Path, needed: int, free: int | None = None) -> None:
    """Raise if the disk of `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free if free is None else free
    if free < needed:
        raise RunFolderError(
            f"The disk of {folder} has {free / 1e6:.0f} MB left, but about {needed / 1e6:.0f} MB are needed. Free some "
            "space, or choose another folder."
        )


# -- one writer at a time --------------------------------------------------------------------------------------------

# The lock files that this process holds, by device and inode: any other lock file with this process's number was left
# by an earlier process with the same number.
_HELD: set[tuple[int, int]] = set()


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`. If another process holds it, wait, calling `waiting` regularly, or raise.

    The lock ends with the process, however that ends. `waiting` may raise to give up.

    If the file system has no locks, the file itself is the lock: it names its process, and counts as long as that
    process runs. A warning says so once, because a process on another computer cannot be seen that way.
    """
    while (stream := _begin_lock(path)) is None:
        owner = _owner(path)
        if waiting is None:
            raise RunFolderError(
                f"{path.parent} is in use by another process ({owner}). Wait for it to end; if it has ended, "
                f"remove {path}."
            )
        waiting(owner)
        time.sleep(POLL_SECONDS)
    held = _identity(stream)
    _HELD.add(held)
    try:
        yield
    finally:
        # Removed while still held; a process that waits for this file notices that it is gone and creates a new one.
        with suppress(OSError):
            path.unlink(missing_ok=True)
        _HELD.discard(held)
        stream.close()


def _begin_lock(path: Path) -> IO[bytes] | None:
    try:
        make_folder(path.parent)
        return _try_lock(path)
    except OSError as error:
        raise RunFolderError(
            f"The lock file {path} cannot be written ({error.strerror or error}). Nothing has been changed; fix "
            "the cause and run the same command again."
        ) from error


def is_lock(path: Path) -> bool:
    """Return whether a file contains only what a lock file does: a process number and the name of a computer."""
    try:
        return re.fullmatch(rb"[0-9]{1,20}( [!-~]{1,64})?\n?", read_regular(path, LONGEST_LOCK)) is not None
    except (OSError, RunFolderError):
        return False


def _try_lock(path: Path) -> IO[bytes] | None:
    """Return the lock file, locked and open, or None if another process has it."""
    while True:
        stream, created = _open_lock(path)
        try:
            ours = _is_ours(path, stream, created)
            if ours:
                stream.truncate(0)
                stream.write(f"{os.getpid()} {_host()}\n".encode())
                stream.flush()
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()
        if ours is not None:
            return None


def _open_lock(path: Path) -> tuple[IO[bytes], bool]:
    """Open the lock file; also return whether it was created just now."""
    try:
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags | _CAREFULLY, 0o666)), True
    except FileExistsError:
        return open_regular(path, "ab"), False


def _is_ours(path: Path, stream: IO[bytes], created: bool) -> bool | None:
    """Lock an open lock file; return whether that succeeded, None if the file has been removed meanwhile."""
    try:
        if fcntl is None:
            raise OSError("this system has no locks")
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _warn_of_no_locks(error.strerror or str(error))
        if created or _is_alive(path, stream):
            return created
        path.unlink(missing_ok=True)  # its process has ended
        return None
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return True if _identity(stream) == (status.st_dev, status.st_ino) else None


def _is_alive(path: Path, stream: IO[bytes]) -> bool:
    """Return whether the process that a lock file names may still be running."""
    if _identity(stream) in _HELD:
        return True
    number, host = _named(path)
    if number is None:  # a lock file has no content for a moment after it is created
        time.sleep(POLL_SECONDS)
        number, host = _named(path)
    if number is None:
        return False
    if number == os.getpid() and host == _host():
        return False
    return is_alive(number, host) is not False  # on another computer this is unknown


def is_alive(process: int, computer: str) -> bool | None:
    """Return whether a process is running; None if it is on another computer, where that is not known."""
    if computer != _host():
        return None
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, as another user
        return True
    return True


def lock_is_held(path: Path) -> bool | None:
    """Return whether the process that a lock file names is running, without touching the lock; None if unknown."""
    number, computer = _named(path)
    return False if number is None else is_alive(number, computer)


def _identity(stream: IO[Any]) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


def this_computer() -> str:
    """Return the name of this computer, as lock files have it."""
    return _host()


def _host() -> str:
    return re.sub(r"[^!-~]", "", platform.node())[:64] or "unknown"


def _named(path: Path) -> tuple[int | None, str]:
    """Return the process and the computer that a lock file names."""
    try:
        number, *host = read_regular(path, LONGEST_LOCK).decode().split()
        return int(number), "".join(host) or _host()
    except (OSError, ValueError, RunFolderError):
        return None, ""


def _owner(path: Path) -> str:
    number, host = _named(path)
    if number is None:
        return "number unknown"
    return f"number {number}" + ("" if host == _host() else f" on {host}")


@functools.cache
def _warn_of_no_locks(reason: str) -> None:
    """Warn once that files cannot be locked."""
    warnings.warn(
        f"Files cannot be locked here ({reason}). A second efcil command in the same folder is noticed only if it runs "
        "on the same computer; do not start two of them from different computers.",
        stacklevel=2,
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename durable if the system can sync folders."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
