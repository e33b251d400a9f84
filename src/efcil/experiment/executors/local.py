"""Executors of this machine: in this process, or in a process for each job."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from efcil.experiment.executors.base import CommandOf, Job, State, failure


class InProcess:
    """Trains jobs in this process, each when its result is asked for."""

    def __init__(self, train: Callable[[Job], Path]) -> None:
        self._train = train

    def submit(self, job: Job) -> InProcessHandle:
        """Accept a job; it waits until its result is asked for."""
        return InProcessHandle(job, self._train)

    def close(self) -> None:
        """Do nothing: a job has ended when its result has returned."""


class InProcessHandle:
    """A job that this process trains. Its error is raised and not kept, as it holds the memory of the run."""

    def __init__(self, job: Job, train: Callable[[Job], Path]) -> None:
        self.job = job
        self._train = train
        self._state = State.WAITING
        self._cancelled = False

    def state(self) -> State:
        """Return what the job is doing now."""
        return self._state

    def places(self) -> Sequence[str]:
        """Return this machine once the job has started."""
        return [] if self._state is State.WAITING else [""]

    def result(self) -> Path:
        """Train the job, and return its folder."""
        if self._state is State.DONE or self._cancelled:
            return self.job.folder
        self._state = State.RUNNING
        try:
            folder = self._train(self.job)
        except BaseException:
            self._state = State.FAILED
            raise
        self._state = State.DONE
        return folder

    def cancel(self) -> None:
        """Never start a job that waits; a running one is stopped by a signal to this process."""
        self._cancelled = True

    def log(self) -> str:
        """Return nothing: this process writes to its own error output."""
        return ""


class Processes:
    """Starts a process for every job at once. Their error output is kept in `scratch`."""

    def __init__(self, command: CommandOf, scratch: Path, environment: Mapping[str, str]) -> None:
        self._command = command
        self._scratch = scratch
        self._environment = environment
        self._started: list[ProcessHandle] = []

    def submit(self, job: Job) -> ProcessHandle:
        """Start the process of a job."""
        errors = self._scratch / f"{job.number}.err"
        with open(errors, "wb") as stream:
            process = subprocess.Popen(
                self._command(job),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env={**self._environment, **job.environment},
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
            )
        handle = ProcessHandle(job, process, errors)
        self._started.append(handle)
        return handle

    def close(self) -> None:
        """Ask the running processes to save and exit, and wait for them."""
        for handle in self._started:
            handle.cancel()
        for handle in self._started:
            handle.wait()


class ProcessHandle:
    """A job that a process of its own trains."""

    def __init__(self, job: Job, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.job = job
        self._process = process
        self._errors = errors

    def state(self) -> State:
        """Return what the process is doing now."""
        code = self._process.poll()
        if code is None:
            return State.RUNNING
        return State.DONE if code == 0 else State.FAILED

    def places(self) -> Sequence[str]:
        """Return this machine."""
        return [""]

    def result(self) -> Path:
        """Wait for the process, and return the folder of the run."""
        code = self.wait()
        if code != 0:
            raise failure(code, self.log(), self.job.folder)
        return self.job.folder

    def wait(self) -> int:
        """Wait for the process, and return its exit code."""
        return self._process.wait()

    def cancel(self) -> None:
        """Ask the process to save and exit."""
        self._process.terminate()

    def log(self) -> str:
        """Return what the process has written to its error output."""
        return self._errors.read_text(encoding="utf-8", errors="replace").strip()
