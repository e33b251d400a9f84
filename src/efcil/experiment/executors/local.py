"""The executor of this machine: a process for each job."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from efcil.experiment.executors.base import CommandOf, Job, State, failure


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
