"""What a cluster executes for a run: it starts the command, watches it, and notes what became of it.

This module is sent to the workers as it is, so it uses the standard library alone. Everything that it needs to know is
text: the command line, which names the settings file, and the places of a few files in a folder that all machines see.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

#: What the control file contains once the run must stop; until then it contains the token.
STOP = "stop"
#: Exit code of a command that was interrupted and has saved its state.
INTERRUPTED = 130
POLL_SECONDS = 0.25
#: How long to wait for a run that another process still holds: one that was asked to stop may be saving.
LOCK_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1


class RemoteRun:
    """The command of one run, and the files by which the machine that submitted it follows it.

    `stem` is the path of these files without their ending: `.control` has the token as long as the run may train,
    `.started` a line for each attempt and `.requeued` one for each that waits for its turn again, `.err` the error
    output of the last attempt, and `.json` what became of it.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        stem: str,
        folder: str,
        token: str,
        version: str,
        working_folder: str,
    ) -> None:
        self.command = command
        self.environment = environment
        self.stem = stem
        self.folder = folder
        self.token = token
        self.version = version
        self.working_folder = working_folder
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "_stopped": False}

    def __call__(self) -> str:
        """Train the run, and return as JSON what became of it: the exit code, or a problem in words."""
        outcome: dict[str, Any] = {"host": platform.node()}
        problem = self._problem()
        if problem is not None:
            outcome["problem"] = problem
        elif self._allowed() == STOP:
            outcome |= {"code": INTERRUPTED, "stopped": True}
        else:
            outcome["code"] = self._train()
            outcome["stopped"] = self._stopped
        text = json.dumps(outcome)
        with suppress(OSError):  # where the folder is not shared, only the returned text arrives
            temporary = Path(f"{self.stem}.json.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(f"{self.stem}.json")
        return text

    def checkpoint(self, *_: Any, **__: Any) -> Any:
        """Stop the run because the time of the job ends; submitit calls this from a signal handler, and requeues."""
        from submitit.helpers import DelayedSubmission  # the job runs under submitit, so it is installed

        self._end()
        with open(f"{self.stem}.requeued", "a", encoding="utf-8") as notes:
            notes.write(f"{platform.node()}\n")
        return DelayedSubmission(self)

    # -- before it starts --------------------------------------------------------------------------------------------

    def _allowed(self) -> str | None:
        # Opened anew each time: network file systems ask the server for the newest content then.
        try:
            return Path(f"{self.stem}.control").read_text(encoding="utf-8")
        except OSError:
            return None

    def _problem(self) -> str | None:
        if self._allowed() not in (self.token, STOP):
            return (
                f"{platform.node()} does not see {Path(self.stem).parent}, where the settings of the runs are. The "
                "output folder must be on storage that all machines of the cluster share, under the same path; choose "
                "another --output."
            )
        try:
            import efcil
        except ImportError:
            return f"efcil is not installed for {sys.executable} on {platform.node()}. Install version {self.version}."
        if efcil.__version__ != self.version:
            return (
                f"{platform.node()} has version {efcil.__version__} of efcil, and this machine {self.version}. "
                "Install the same version everywhere."
            )
        return None

    def _wait_for_lock(self) -> None:
        """Wait while another process holds the run, such as one that saves after it lost its worker."""
        import fcntl

        until = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < until:
            try:
                with open(Path(self.folder) / ".lock", "rb") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            except OSError:  # there is no lock, or the file system has none: the command itself decides
                return

    # -- the command -------------------------------------------------------------------------------------------------

    def _train(self) -> int:
        self._wait_for_lock()
        with open(f"{self.stem}.started", "a", encoding="utf-8") as notes:
            notes.write(f"{platform.node()}\n")
        where = self.working_folder if os.path.isdir(self.working_folder) else str(Path(self.stem).parent)
        with open(f"{self.stem}.err", "wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, *self.command[1:]],  # the Python of this machine
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, **self.environment},
                cwd=where,
                start_new_session=True,
                preexec_fn=_prepared(),
            )
        try:
            while (code := self._process.poll()) is None:
                if not self._stopped and self._allowed() == STOP:
                    self._stopped = True
                    self._process.terminate()
                time.sleep(POLL_SECONDS)
        except BaseException:  # a cancelled task, or a job that is requeued
            self._end()
            raise
        return code

    def _end(self) -> None:
        """Ask the command to save and exit, and wait for it.

        This may run in a signal handler that has interrupted `poll`, so it uses neither `poll` nor `wait`.
        """
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGTERM)
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)


def _prepared() -> Any:
    """Return what a new process does before the command starts."""
    try:
        library = ctypes.CDLL(None)
        ask = library.prctl
    except (OSError, AttributeError):  # not Linux
        ask = None

    def prepare() -> None:
        # Schedulers send these to every process of a job; the one that started the command answers them.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        if ask is not None:  # if the worker dies, the command saves its state and ends, so that another can resume it
            ask(_PR_SET_PDEATHSIG, int(signal.SIGTERM))

    return prepare


def train(text: str) -> str:
    """Train the run that a JSON object describes, and return what became of it."""
    return RemoteRun(**json.loads(text))()
