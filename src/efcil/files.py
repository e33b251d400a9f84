"""Folders that are written to: whole files or none, files of our own only, room on the disk, and who works there.

What lies inside a run folder or a model folder is ours: regular files and plain folders. A link, a pipe or a device in
their place is never followed, opened or written to. The folder itself is named by the user, and may be a link.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from efcil.errors import RunFolderError

try:
    import fcntl
except ImportError:  # not a POSIX system: a lock file is all there is
    fcntl = None  # type: ignore[assignment]

POLL_SECONDS = 0.2
#: Bytes of a lock file that are read: a process number and the name of a computer.
LONGEST_LOCK = 128
# Whatever is put in place between looking and opening: a link is not followed, and a pipe does not wait for a writer.
_CAREFULLY = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_KINDS = (
    (stat.S_ISREG, "a file"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
)


class ForeignFile(RunFolderError):
    """Something that efcil did not put there, in the place of a file or folder of its own."""

    def __init__(self, path: Path, mode: int, wanted: str) -> None:
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")
        super().__init__(
            f"{path} is {kind}, where efcil keeps {wanted} of its own. It was neither read nor written. Move it away, "
            "and give the same command again."
        )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


# Asked once: asking means changing it for a moment, which other threads would see.
_UMASK = _umask()


# -- files of our own ------------------------------------------------------------------------------------------------


def refuse_foreign_file(path: Path) -> None:
    """Raise unless `path` is a regular file, or nothing."""
    _refuse_others(path, stat.S_ISREG, "a file")


def refuse_foreign_folder(path: Path) -> None:
    """Raise unless `path` is a folder and no link to one, or nothing."""
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
    """Return the content of a file of our own; one of more than `limit` bytes raises."""
    with open_regular(path, "rb") as file:
        if limit is not None and os.fstat(file.fileno()).st_size > limit:
            raise OSError(f"it has more than {limit} bytes")
        content: bytes = file.read()
    return content


def is_regular(path: Path) -> bool:
    """Say whether `path` is a regular file and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def write_own(path: Path, content: str | bytes) -> None:
    """Replace a file of our own as `write_atomically` does; a link, a pipe, a device or a folder raises."""
    refuse_foreign_file(path)
    write_atomically(path, content)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` so that readers, and a crash at any moment, see the old file or the new one."""
    make_folder(path.parent)
    data = content.encode("utf-8") if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files only their owner can read; results are meant to be shared like any other file.
        os.chmod(temporary, 0o666 & ~_UMASK)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that a power cut loses none of them."""
    new = []
    for place in (folder, *folder.parents):
        if place.exists():
            break
        new.append(place)
    if new:
        folder.mkdir(parents=True, exist_ok=True)
    for place in new:
        _sync_folder(place.parent)


# -- room ------------------------------------------------------------------------------------------------------------


def refuse_unwritable(folder: Path, needed: int) -> None:
    """Make `folder`, write into it for a try, and compare what a run needs with what the disk has left."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.is_file():
            raise NotADirectoryError(20, "it is a file")
        # Taken at its word even where we are the superuser, who could write there all the same.
        if not existing.stat().st_mode & 0o222:
            raise PermissionError(13, "it is read-only")
        make_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"efcil")
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise RunFolderError(
            f"Nothing can be written to {folder} ({error.strerror or error}). Nothing has been trained; choose another "
            "folder, or make this one writable."
        ) from error
    refuse_full(folder, needed, free)


def refuse_full(folder: Path, needed: int, free: int | None = None) -> None:
    """Raise if the disk of `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free if free is None else free
    if free < needed:
        raise RunFolderError(
            f"The disk of {folder} has {free / 1e6:.0f} MB left, but the checkpoints of this run need about "
            f"{needed / 1e6:.0f} MB. Free some space, or choose another folder."
        )


# -- one writer at a time --------------------------------------------------------------------------------------------

# The lock files that this process holds, by device and number: its own name in another one is that of a process that
# had the same number before.
_HELD: set[tuple[int, int]] = set()


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`. If another process holds it, wait, telling `waiting` every so often, or raise.

    The lock belongs to the process, so it ends with it, however that happens. `waiting` may raise to give up.

    Where the file system has no locks, the file itself is the lock: it names its process, and counts as long as that
    process runs. This is said once, because a process on another computer cannot be seen that way.
    """
    while (stream := _begin_lock(path)) is None:
        owner = _owner(path)
        if waiting is None:
            raise RunFolderError(
                f"{path.parent} is being worked on by another process ({owner}). Wait for it to end; if it has ended, "
                f"remove {path}."
            )
        waiting(owner)
        time.sleep(POLL_SECONDS)
    held = _identity(stream)
    _HELD.add(held)
    try:
        yield
    finally:
        # Removed while still held; whoever waits for this very file notices that it is gone and makes a new one.
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
            f"The lock file {path} cannot be written ({error.strerror or error}). Nothing has been changed; put that "
            "right and give the same command again."
        ) from error


def is_lock(path: Path) -> bool:
    """Say whether a file holds no more than a lock: the number of a process and the name of a computer."""
    try:
        return re.fullmatch(rb"[0-9]{1,20}( [!-~]{1,64})?\n?", read_regular(path, LONGEST_LOCK)) is not None
    except (OSError, RunFolderError):
        return False


def _try_lock(path: Path) -> IO[bytes] | None:
    """Return the lock file, locked and open, or None where another process has it."""
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
    """Open the lock file; also say whether it was made just now."""
    try:
        return open(path, "xb", opener=lambda name, flags: os.open(name, flags | _CAREFULLY, 0o666)), True
    except FileExistsError:
        return open_regular(path, "ab"), False


def _is_ours(path: Path, stream: IO[bytes], created: bool) -> bool | None:
    """Lock an open lock file; return whether that succeeded, None where the file is gone meanwhile."""
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
    """Say whether the process that a lock file names may still be running."""
    if _identity(stream) in _HELD:
        return True
    number, host = _named(path)
    if number is None:  # one that is just being made has no content for a moment
        time.sleep(POLL_SECONDS)
        number, host = _named(path)
    if number is None:
        return False
    if host != _host():
        return True  # nobody can tell from here
    if number == os.getpid():
        return False
    try:
        os.kill(number, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it runs, as another user
        return True
    return True


def _identity(stream: IO[Any]) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


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
    """Say once that locks cannot be had."""
    warnings.warn(
        f"Files cannot be locked here ({reason}). A second efcil command in the same folder is noticed only if it runs "
        "on the same computer; do not start two of them from different computers.",
        stacklevel=2,
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename durable where the system lets folders be synced."""
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
