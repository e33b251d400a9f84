"""Faults at chosen I/O calls: every call that changes files below one folder is counted, and one of them goes wrong.

Nothing in efcil knows of this. `install` replaces the functions of `os` and `open` through which Python changes files,
in a child process that has nothing else to do. A call is known by what it does and to which file, and by how many times
that has happened before, so that it is the same call in every run, whichever thread makes it.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: What can happen at a call: the process dies before it, or with half of it done; it fails once; or the disk is full
#: from there on.
KILL, HALF, ERROR, FULL = "kill", "half", "error", "full"
#: Calls that a full disk refuses.
NEED_ROOM = ("open", "write", "mkdir", "fsync")
_RANDOM = re.compile(r"(\.)[a-z0-9_]{8}(\.(?:tmp|building))|^tmp[a-z0-9_]{8}$")
#: The note of a command on the runs that it will train is named after its process.
_PROCESS = re.compile(r"^(\.{1,2}grid-.*-)\d+(\.json)")

_original_open = io.open
_original_fdopen = os.fdopen


class Faults:
    """Counts the calls below a folder, and lets one of them go wrong."""

    def __init__(self, folder: Path, point: str | None, fault: str | None) -> None:
        self.folder = os.path.realpath(folder)
        self.point, self.fault = point, fault
        self.calls: list[str] = []
        self.seen: Counter[str] = Counter()
        self.full = False
        self.hit = False

    def name(self, path: Any) -> str | None:
        """Return the name of a file below the folder, random parts removed; None for files elsewhere."""
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        text = os.path.abspath(os.fsdecode(path))
        parent = os.path.realpath(os.path.dirname(text))
        text = os.path.join(parent, os.path.basename(text))
        if text != self.folder and not text.startswith(self.folder + os.sep):
            return None
        if text.endswith(" (deleted)"):
            return "(a file without a name)"
        parts = os.path.relpath(text, self.folder).split(os.sep)
        return "/".join(_PROCESS.sub(r"\1*\2", _RANDOM.sub(r"\1*\2", part)) for part in parts)

    def happens(self, kind: str, path: Any, half: Callable[[], object] | None = None) -> None:
        """Count a call that is about to be made, and let it go wrong if it is the chosen one."""
        name = self.name(path)
        if name is None:
            return
        call = f"{kind} {name}"
        self.seen[call] += 1
        call += f" #{self.seen[call]}"
        self.calls.append(call)
        if self.full and kind in NEED_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if call != self.point:
            return
        self.hit = True
        if self.fault in (KILL, HALF):
            if self.fault == HALF and half is not None:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault == ERROR:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        elif self.fault == FULL:
            self.full = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


class _File(io.FileIO):
    """A file whose writes are counted."""

    faults: Faults

    def write(self, content: Any) -> int:
        self.faults.happens(
            "write", self.fileno(), lambda: io.FileIO.write(self, memoryview(content)[: len(content) // 2])
        )
        return super().write(content)

    def truncate(self, size: int | None = None) -> int:
        self.faults.happens("truncate", self.fileno())
        return super().truncate(size)


def install(faults: Faults) -> None:
    """Let everything that changes files in this process be counted from now on."""
    _File.faults = faults

    def opened(file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
               newline: Any = None, closefd: bool = True, opener: Any = None) -> Any:  # fmt: skip
        if not set(mode) & set("wax+"):
            return _original_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int) and opener is None:
            faults.happens("open", file)
        raw = _File(file, "".join(sorted(set(mode) - set("tb"))), closefd, opener)
        if buffering == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    def fdopen(descriptor: int, mode: str = "r", buffering: int = -1, *rest: Any, **keywords: Any) -> Any:
        return opened(descriptor, mode, buffering, *rest, **keywords)

    def counted(kind: str, function: Callable[..., Any], which: int = 0) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            path = arguments[which]
            if keywords.get("dir_fd") is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{keywords['dir_fd']}"), path)
            faults.happens(kind, path)
            return function(*arguments, **keywords)

        return call

    original_open, original_write = os.open, os.write

    def os_open(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            faults.happens("open", path)
        return original_open(path, flags, *rest, **keywords)

    def os_write(descriptor: int, content: Any) -> int:
        faults.happens("write", descriptor, lambda: original_write(descriptor, content[: len(content) // 2]))
        return original_write(descriptor, content)

    changed: dict[str, Any] = {"open": os_open, "write": os_write, "fdopen": fdopen}
    for kind in ("fsync", "mkdir", "rmdir", "unlink", "truncate", "ftruncate", "chmod", "link", "symlink"):
        changed[kind] = counted(kind, getattr(os, kind))
    changed["remove"] = changed["unlink"]
    changed["replace"] = counted("replace", os.replace, 1)
    changed["rename"] = counted("rename", os.rename, 1)
    for name, function in changed.items():
        setattr(os, name, function)
    builtins.open = io.open = opened  # type: ignore[assignment]
    import _io

    _io.open = opened  # type: ignore[assignment] # tempfile asks here
