"""What produced a result: versions, commit, hardware, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import efcil

#: Names the commit if the code was copied to a machine without its git history.
COMMIT_VARIABLE = "EFCIL_COMMIT"
#: Holds the command that the user typed, for the processes that it started.
COMMAND_VARIABLE = "EFCIL_COMMAND"
#: Starts one run in several processes.
LAUNCHER = "torchrun"


def environment() -> dict[str, Any]:
    """Return versions, commit (None outside a git checkout), whether it had changes, hardware and command."""
    commit, dirty = _own_commit()
    return {
        "versions": versions(),
        "commit": commit,
        "uncommitted_changes": dirty,
        "hardware": hardware(),
        "command": command(),
    }


@cache
def _own_commit() -> tuple[str | None, bool | None]:
    # Read once: commits and edits after the start do not change the code that a run executes.
    return source_commit(Path(efcil.__file__).resolve())


def code() -> str | None:
    """Return the name of the code that this process runs, None if that is unknown."""
    return code_name(*_own_commit())


def code_name(commit: str | None, changed: bool | None) -> str | None:
    """Return the commit, followed by `+changes` if there were uncommitted changes."""
    return f"{commit}+changes" if commit is not None and changed else commit


def versions() -> dict[str, str]:
    """Return the versions of Python, efcil and the libraries that affect the numbers."""
    found = {"python": platform.python_version(), "efcil": efcil.__version__}
    for package in ("torch", "numpy", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Return processor, cores and, if there are any, GPUs."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    return {"cpu": _processor(), "cores": os.cpu_count(), "gpus": gpus, "system": platform.platform()}


def command() -> str:
    """Return the command line of this process, or of the one that started it, ready to be typed again."""
    if COMMAND_VARIABLE in os.environ:
        return os.environ[COMMAND_VARIABLE]
    path = Path(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    # `python -m efcil` runs efcil/__main__.py, and `python -m pytest` another one.
    program = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join([*_launcher(program), program, *sys.argv[1:]])


def _launcher(program: str) -> list[str]:
    """Return how the processes of this run were started, if there are several."""
    size, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if "TORCHELASTIC_RUN_ID" not in os.environ or size == "1" or not (size.isdecimal() and local.isdecimal()):
        return []
    machines = [] if size == local else ["--nnodes", str(int(size) // int(local))]
    # Without a -- before the program, torchrun takes --log for a short form of two of its own options.
    end = ["--"] if any(word.partition("=")[0] == "--log" for word in sys.argv) else []
    return [LAUNCHER, *machines, "--nproc-per-node", local, *(["-m"] if program == "efcil" else []), *end]


def source_commit(file: Path) -> tuple[str | None, bool | None]:
    """Return commit and whether there are uncommitted changes, of the checkout that tracks `file`."""
    # A package installed into an environment inside some repository is not part of that repository: only for a file
    # that git tracks does the commit describe this code.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return os.environ.get(COMMIT_VARIABLE), None
    commit = _git(file.parent, "rev-parse", "HEAD")
    status = _git(file.parent, "status", "--porcelain", "--untracked-files=no", "--", ":/")
    return commit, None if commit is None or status is None else bool(status)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
