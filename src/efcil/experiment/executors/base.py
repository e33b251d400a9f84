"""The interface of executors: jobs, handles and their states."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from efcil.errors import EfcilError, SettingsError, TrainingError
from efcil.settings import Settings


@dataclass(frozen=True)
class Job:
    """One run of a grid, and the folder of its results.

    `first_task` is the key and folder of the first task that it may share with other runs, None if that is unknown.
    `environment` has variables that its process gets besides those that all processes get.
    """

    number: int
    settings: Settings
    folder: Path
    first_task: tuple[str, Path] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


#: Returns the command line that trains a job, after writing its settings to a file that the command names.
CommandOf = Callable[[Job], list[str]]

#: Exit codes of `efcil run`, as in cli.py.
MISTAKE, INTERRUPTED = 2, 130


class Refused(TrainingError):
    """A job cannot be accepted now, because of a limit or a busy moment. It may be submitted again later."""


class State(enum.Enum):
    """What a job is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self in (State.DONE, State.FAILED)


class Handle(Protocol):
    """A job that an executor has accepted."""

    @property
    def job(self) -> Job:
        """What was submitted; `job.folder` is where the results are."""

    def state(self) -> State:
        """Return what the job is doing now. This never waits."""

    def places(self) -> Sequence[str]:
        """Return where the job has started so far: one place per attempt, "" for this machine."""

    def result(self) -> Path:
        """Wait for the end, and return the folder of the results; if the job failed, raise why.

        Refused: it was lost, and could not be submitted again.
        """

    def cancel(self) -> None:
        """Ask the job to save its state and to end. `result` waits until it has."""

    def log(self) -> str:
        """Return what the job has written to its error output, "" if there is nothing."""


class Executor(Protocol):
    """Starts jobs somewhere."""

    def submit(self, job: Job) -> Handle:
        """Accept a job. It starts now, or as soon as there is room for it.

        Raises Refused if it cannot be accepted now.
        """

    def close(self) -> None:
        """Release what the executor holds. Jobs that have not ended are stopped."""


def last_words(text: str) -> str:
    """Return the last line of an error output: the sentence that a command ends with."""
    found = text.strip().splitlines()
    return found[-1].removeprefix("efcil: ") if found else ""


def failure(code: int, log: str, folder: Path) -> EfcilError:
    """Return why a command that ended with `code` failed, in its own words if it had some."""
    reason = last_words(log) or f"The process ended with code {code}; see {folder}."
    return SettingsError(reason) if code == MISTAKE else TrainingError(reason)
