"""Several runs at a time: a process for each, on all GPUs, and NVIDIA's MPS so that kernels on one card overlap.

Without MPS, kernels of different processes only take turns. Runs that share a first task wait until the first of them
has trained it; meanwhile, other runs start.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from efcil.engine import checkpoint
from efcil.engine.hardware import MPS_SHARE, VISIBLE
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.progress import EVERY_SECONDS, FIRST_SECONDS
from efcil.environment import COMMAND_VARIABLE, command
from efcil.errors import SettingsError, TrainingError
from efcil.experiment.shared_tasks import STEM
from efcil.output import duration
from efcil.resolution import to_yaml
from efcil.settings import Settings
from efcil.watching import Watched

POLL_SECONDS = 0.2
#: The exit code of a command that names a mistake in its settings or data.
MISTAKE = 2
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_TOTAL_SHARE = 200


@dataclass(frozen=True)
class Job:
    """A run to train in its own process. `first_task` is the key and folder of the first task it may share."""

    number: int
    settings: Settings
    folder: Path
    first_task: tuple[str, Path]


@dataclass
class _Worker:
    job: Job
    process: subprocess.Popen[bytes]
    errors: Path
    started: float
    gpu: int


def run_jobs(
    jobs: Sequence[Job],
    output: Path,
    slots: int,
    checkpoint_steps: int | None,
    say: Callable[[str], None],
    gpus: Sequence[str] = (),
    debug: bool = False,
    log: Sequence[str] = (),
) -> dict[int, Exception]:
    """Run all jobs, `slots` at a time on each of the `gpus` that are named, or on the one that the settings choose.

    Returns the failures by the number of the job; `debug` prints their tracebacks when they happen.
    """
    if not jobs:
        return {}
    together = min(slots, math.ceil(len(jobs) / max(len(gpus), 1)))
    with (
        tempfile.TemporaryDirectory(prefix="efcil-") as scratch,
        StopRequest() as stop,
        mps(say, together) if together > 1 else contextlib.nullcontext(dict(os.environ)) as environment,
    ):
        scheduler = _Scheduler(jobs, output, slots, checkpoint_steps, say, Path(scratch), environment, gpus, debug, log)
        return scheduler.run(stop)


def worker_command(
    job: Job,
    output: Path,
    scratch: Path,
    checkpoint_steps: int | None,
    debug: bool = False,
    log: Sequence[str] = (),
) -> list[str]:
    """Return the command that trains one run, its settings written to a file in `scratch`."""
    config = scratch / f"{job.number}.yaml"
    config.write_text(to_yaml(job.settings), encoding="utf-8")
    command = [sys.executable, "-m", "efcil", "run", "--config", str(config), "--output", str(output), "--quiet"]
    if debug:
        command.append("--debug")
    if log:
        command += ["--log", *log]
    return command if checkpoint_steps is None else [*command, "--checkpoint-steps", str(checkpoint_steps)]


class _Scheduler:
    def __init__(
        self,
        jobs: Sequence[Job],
        output: Path,
        slots: int,
        checkpoint_steps: int | None,
        say: Callable[[str], None],
        scratch: Path,
        environment: Mapping[str, str],
        gpus: Sequence[str],
        debug: bool,
        log: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.gpus = gpus
        self.debug = debug
        self.waiting = list(jobs)
        self.number = len(jobs)
        self.running: list[_Worker] = []
        self.failures: dict[int, Exception] = {}
        self.output = output
        self.slots = slots
        self.checkpoint_steps = checkpoint_steps
        self.say = say
        self.scratch = scratch
        self.environment = {**environment, COMMAND_VARIABLE: command()}
        self.clock = time.monotonic
        self._watched: dict[Path, Watched] = {}
        self._line = self.clock() - EVERY_SECONDS + FIRST_SECONDS

    def run(self, stop: StopRequest) -> dict[int, Exception]:
        try:
            while self.waiting or self.running:
                if stop.requested:
                    raise Interrupted("Stopped. Run the same command again to resume the runs that are not finished.")
                self._collect()
                while (gpu := self._free_gpu()) is not None and (job := self._next()) is not None:
                    self._start(job, gpu)
                self.say_if_due()
                time.sleep(POLL_SECONDS)
        finally:
            self._stop_all()
        return self.failures

    def say_if_due(self) -> None:
        """Say by the clock how far the runs are: their own lines are in their logs."""
        if self.clock() - self._line < EVERY_SECONDS or not self.running:
            return
        self._line = self.clock()
        seen = [self._watched.setdefault(each.job.folder, Watched(each.job.folder)).look() for each in self.running]
        left = [each.seconds_left for each in seen if each.seconds_left is not None]
        waiting = f", {len(self.waiting)} wait" if self.waiting else ""
        rest = f"{duration(max(left))} left of those that run" if left else "time left not known yet"
        tasks = ", ".join(f"task {min(each.task + 1, each.tasks)}/{each.tasks}" for each in seen if each.tasks)
        where = f" ({tasks})" if tasks else ""
        self.say(f"{len(self.running)} of {self.number} runs train{where}{waiting}; {rest}")

    def _free_gpu(self) -> int | None:
        """Return the GPU with the fewest runs, None if all are full."""
        load = [sum(worker.gpu == gpu for worker in self.running) for gpu in range(max(len(self.gpus), 1))]
        return load.index(min(load)) if min(load) < self.slots else None

    def _next(self) -> Job | None:
        """Return the first job that need not wait for a first task that another job is training."""
        busy = {worker.job.first_task[0] for worker in self.running}
        for job in self.waiting:
            if job.first_task[0] not in busy or checkpoint.exists(job.first_task[1], STEM):
                return job
        return None

    def _start(self, job: Job, gpu: int) -> None:
        self.waiting.remove(job)
        errors = self.scratch / f"{job.number}.err"
        with open(errors, "wb") as stream:
            process = subprocess.Popen(
                worker_command(job, self.output, self.scratch, self.checkpoint_steps, self.debug, self.log),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env={**self.environment, VISIBLE: self.gpus[gpu]} if self.gpus else self.environment,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
            )
        self.running.append(_Worker(job, process, errors, time.monotonic(), gpu))
        where = f" on GPU {self.gpus[gpu]}" if len(self.gpus) > 1 else ""
        self.say(f"{job.folder}: started{where}.")

    def _collect(self) -> None:
        for worker in list(self.running):
            code = worker.process.poll()
            if code is None:
                continue
            self.running.remove(worker)
            if code == 0:
                self.say(f"{worker.job.folder}: done after {time.monotonic() - worker.started:.0f} s.")
                continue
            if self.debug:
                print(_printed(worker.errors), file=sys.stderr, flush=True)
            reason = _last_words(worker.errors) or f"The process ended with code {code}; see {worker.job.folder}."
            known = reason in map(str, self.failures.values())
            self.failures[worker.job.number] = (SettingsError if code == MISTAKE else TrainingError)(reason)
            self.say(f"{worker.job.folder}: failed{', for the same reason.' if known else f'. {reason}'}")

    def _stop_all(self) -> None:
        """Ask the running processes to save and exit, and wait for them."""
        for worker in self.running:
            worker.process.terminate()
        for worker in self.running:
            worker.process.wait()
        self.running.clear()


def _printed(errors: Path) -> str:
    return errors.read_text(encoding="utf-8", errors="replace").strip()


def _last_words(errors: Path) -> str:
    lines = _printed(errors).splitlines()
    return lines[-1].removeprefix("efcil: ") if lines else ""


def share_of_card(slots: int) -> int:
    """Return how many percent of the card's multiprocessors each of `slots` runs may use.

    One run cannot fill the card; if each may use all of it, the runs slow each other down.
    """
    return min(100, round(MPS_TOTAL_SHARE / slots))


@contextmanager
def mps(say: Callable[[str], None], slots: int) -> Iterator[dict[str, str]]:
    """Run an MPS server for this grid; yield the environment in which `slots` processes find it."""
    environment = dict(os.environ)
    program = shutil.which(MPS_CONTROL)
    if program is None:
        say(f"{MPS_CONTROL} is not installed; the runs share the GPU by taking turns.")
        yield environment
        return
    with tempfile.TemporaryDirectory(prefix="efcil-mps-") as folder:
        for name in ("PIPE", "LOG"):
            place = Path(folder) / name.lower()
            place.mkdir()
            environment[f"CUDA_MPS_{name}_DIRECTORY"] = str(place)
        environment.setdefault(MPS_SHARE, str(share_of_card(slots)))
        # The server must see all GPUs: otherwise the clients' GPU numbers would count only those that it sees.
        control = {name: value for name, value in environment.items() if name != VISIBLE}
        try:
            subprocess.run([program, "-d"], env=control, check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            say(f"{MPS_CONTROL} could not be started ({error}); the runs share the GPU by taking turns.")
            yield dict(os.environ)
            return
        try:
            yield environment
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([program], input=b"quit\n", env=control, capture_output=True, timeout=60)
