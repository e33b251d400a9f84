"""Folders that are written to: whole files or none, whether there is room, and who is working there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from efcil.errors import RunFolderError

try:
    import fcntl
except ImportError:  # not a POSIX system: nobody is kept out, but every file still appears whole
    fcntl = None  # type: ignore[assignment]

POLL_SECONDS = 0.2


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


# Asked once: asking means changing it for a moment, which other threads would see.
_UMASK = _umask()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` so that readers, and a crash at any moment, see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
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


def refuse_unwritable(folder: Path, needed: int) -> None:
    """Make `folder`, write into it for a try, and compare what a run needs with what the disk has left."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if folder.is_file():
            raise NotADirectoryError(20, "it is a file")
        # Taken at its word even where we are the superuser, who could write there all the same.
        if not existing.stat().st_mode & 0o222:
            raise PermissionError(13, "it is read-only")
        folder.mkdir(parents=True, exist_ok=True)
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


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold the lock file `path`. If another process holds it, wait, telling `waiting` every so often, or raise.

    The lock belongs to the process, so it ends with it, however that happens. `waiting` may raise to give up.
    """
    if fcntl is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    stream: IO[str] | None = None
    while stream is None:
        stream = _try_lock(path)
        if stream is None:
            owner = _owner(path)
            if waiting is None:
                raise RunFolderError(
                    f"{path.parent} is being worked on by another process ({owner}). Wait for it to end."
                )
            waiting(owner)
            time.sleep(POLL_SECONDS)
    try:
        yield
    finally:
        # Removed while still held; whoever waits for this very file notices that it is gone and takes a new one.
        path.unlink(missing_ok=True)
        stream.close()


def _try_lock(path: Path) -> IO[str] | None:
    stream = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - kept open as long as the lock is held
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(stream.fileno()).st_ino != os.stat(path).st_ino:
            raise FileNotFoundError
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
    except (BlockingIOError, FileNotFoundError):
        stream.close()
        return None
    except OSError:  # a file system without locks: better to work unprotected than not at all
        return stream
    return stream


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return f"number {int(path.read_text(encoding='utf-8'))}"
    return "number unknown"


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
