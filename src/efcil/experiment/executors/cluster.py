"""What executors of clusters share: files on shared storage by which a run is started, followed and stopped."""

from __future__ import annotations

import abc
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import efcil
from efcil import methods
from efcil.environment import COMMAND_VARIABLE, COMMIT_VARIABLE, command
from efcil.errors import EfcilError, TrainingError
from efcil.experiment.executors.base import INTERRUPTED, CommandOf, Job, State, failure
from efcil.experiment.executors.remote import STOP, RemoteRun
from efcil.network import backbones

FOLDER = ".cluster"
POLL_SECONDS = 0.5
#: How long a file that another machine wrote may take to appear on shared storage.
GRACE_SECONDS = 60.0
#: How long runs may take to save their state when everything is stopped.
SAVE_SECONDS = 300.0
#: How often a run is submitted again after it was interrupted from outside, unless set otherwise.
RETRIES = 5
#: Exit codes of commands that somebody else has stopped: interrupted, killed, terminated.
_LOST = (INTERRUPTED, -9, -15)
#: Variables by which people choose what efcil finds.
OWN_VARIABLES = (methods.VARIABLE, backbones.TRUSTED, "EFCIL_CACHE", COMMIT_VARIABLE)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def make_scratch(output: Path) -> Path:
    """Return a new folder below the output folder, for settings, notes and error output of jobs."""
    place = Path(output).absolute() / FOLDER / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    place.mkdir(parents=True)
    return place


def remove_scratch(place: Path) -> None:
    """Remove a folder of jobs that have ended."""
    shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):  # others may use it
        place.parent.rmdir()


@dataclass(frozen=True)
class Orders:
    """How jobs become text for the cluster. `threads` is the number of threads of runs on CPUs."""

    command: CommandOf
    scratch: Path
    threads: int
    retries: int = RETRIES

    def write(self, job: Job) -> RemoteRun:
        """Write the files of a job, and return what the cluster executes."""
        stem, token = self.scratch / str(job.number), secrets.token_hex(16)
        Path(f"{stem}.control").write_text(token, encoding="utf-8")
        return RemoteRun(
            command=self.command(job),
            environment={**self.environment(job), **job.environment},
            stem=str(stem),
            folder=str(job.folder.absolute()),
            token=token,
            version=efcil.__version__,
            working_folder=str(Path.cwd()),
        )

    def environment(self, job: Job) -> dict[str, str]:
        """Return the variables that a run must have as it would have them here."""
        own = {name: os.environ[name] for name in OWN_VARIABLES if name in os.environ}
        # The number of threads is part of a result on a CPU, and Ray and Slurm would choose others.
        threads = {} if job.settings.device.startswith("cuda") else dict.fromkeys(_THREADS, str(self.threads))
        return {**own, **threads, COMMAND_VARIABLE: command()}


def facts(run: RemoteRun) -> str:
    """Return a run as JSON, which `remote.train` reads."""
    return json.dumps({name: value for name, value in vars(run).items() if not name.startswith("_")})


class ClusterHandle(abc.ABC):
    """A job on a cluster. A run that was interrupted from outside is submitted again and resumes."""

    def __init__(self, job: Job, run: RemoteRun, retries: int) -> None:
        self.job = job
        self.run = run
        self._left = retries
        self._cancelled: float | None = None
        self._ended: float | None = None
        self._error: EfcilError | None = None
        self._state = State.WAITING

    @abc.abstractmethod
    def submit(self) -> None:
        """Give the job to the cluster, for the first time or again."""

    @abc.abstractmethod
    def returned(self) -> str | None:
        """Return None while the job is queued or runs, else the text that it returned, or "" where there is none."""

    @abc.abstractmethod
    def withdraw(self) -> None:
        """Take the job from the queue, or kill it."""

    @abc.abstractmethod
    def lost(self) -> str:
        """Return a sentence about a job that ended without having said why."""

    # -- the interface of handles --------------------------------------------------------------------------------------

    def state(self) -> State:
        """Return what the job is doing now, and submit it again if it was lost."""
        if not self._state.over:
            self._state = self._look()
        return self._state

    def places(self) -> Sequence[str]:
        """Return the machines on which the run has started so far."""
        return self._notes("started")

    def result(self) -> Path:
        """Wait for the end, and return the folder of the results."""
        while not self.state().over:
            time.sleep(POLL_SECONDS)
        if self._error is not None:
            raise self._error
        return self.job.folder

    def cancel(self) -> None:
        """Ask the run to save its state and to end; a job that waits is taken from the queue."""
        if self._state.over or self._cancelled is not None:
            return
        self._cancelled = time.monotonic()
        # Written in place: machines that have the file open elsewhere must see the change, not a new file.
        Path(f"{self.run.stem}.control").write_text(STOP, encoding="utf-8")
        if not self._trains():
            self.withdraw()  # if it starts all the same, the control file stops it
            self._state = self._failed(TrainingError("The run was stopped while it waited for its turn."))

    def log(self) -> str:
        """Return what the last attempt has written to its error output."""
        try:
            return Path(f"{self.run.stem}.err").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    # ------------------------------------------------------------------------------------------------------------------

    def _look(self) -> State:
        returned = self.returned()
        if returned is None and self._cancelled is not None and time.monotonic() - self._cancelled > SAVE_SECONDS:
            self.withdraw()
            return self._failed(TrainingError("The run was stopped, and took too long to save its state."))
        if returned is None:
            return State.RUNNING if self._trains() else State.WAITING
        outcome = self._outcome(returned)
        if outcome is None:
            if self._ended is None:
                self._ended = time.monotonic()
            if self._cancelled is None and time.monotonic() - self._ended < GRACE_SECONDS:
                return State.RUNNING
            return self._failed(TrainingError(self.lost()))
        if "problem" in outcome:
            return self._failed(TrainingError(str(outcome["problem"])))
        code = int(outcome["code"])
        if code == 0:
            return State.DONE
        if code in _LOST and self._cancelled is None and self._left > 0:
            self._left -= 1
            self._ended = None
            with open(f"{self.run.stem}.requeued", "a", encoding="utf-8") as notes:
                notes.write("\n")
            Path(f"{self.run.stem}.json").unlink(missing_ok=True)
            try:
                self.submit()
            except EfcilError as error:
                return self._failed(error)
            return State.WAITING
        return self._failed(failure(code, self.log(), self.job.folder))

    def _notes(self, kind: str) -> list[str]:
        try:
            return Path(f"{self.run.stem}.{kind}").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []

    def _trains(self) -> bool:
        return len(self._notes("started")) > len(self._notes("requeued"))

    def _outcome(self, returned: str) -> Mapping[str, Any] | None:
        text = returned
        if not text:
            try:
                text = Path(f"{self.run.stem}.json").read_text(encoding="utf-8")
            except OSError:
                return None
        found = json.loads(text)
        return found if isinstance(found, dict) else None

    def _failed(self, error: EfcilError) -> State:
        self._error = error
        return State.FAILED


def stop_all(handles: Sequence[ClusterHandle]) -> None:
    """Ask all jobs to save and end, and wait for them."""
    for handle in handles:
        handle.cancel()
    for handle in handles:
        with suppress(EfcilError):
            handle.result()
