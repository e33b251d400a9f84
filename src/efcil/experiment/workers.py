"""Several runs at a time: a process for each, on all GPUs, and NVIDIA's MPS so that kernels on one card overlap.

Without MPS, kernels of different processes only take turns. Runs that share a first task wait until the first of them
has trained it; meanwhile, other runs start. The same scheduler gives runs to clusters: an executor starts them there.
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
from dataclasses import dataclass, replace
from pathlib import Path

from efcil.engine import checkpoint
from efcil.engine.hardware import MPS_SHARE, VISIBLE
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.progress import EVERY_SECONDS, FIRST_SECONDS
from efcil.environment import COMMAND_VARIABLE, command
from efcil.errors import EfcilError
from efcil.experiment.engines import open_executor
from efcil.experiment.executors import Executor, Handle, Job, Refused, State
from efcil.experiment.executors.cluster import make_scratch, remove_scratch
from efcil.experiment.executors.local import Processes
from efcil.experiment.shared_tasks import STEM
from efcil.output import duration
from efcil.resolution import to_yaml
from efcil.settings.engine import Engine
from efcil.watching import Watched

POLL_SECONDS = 0.2
#: A cluster that refuses a run, because of a limit or a busy moment, is asked again after so many seconds.
REFUSED_SECONDS = 60.0
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_TOTAL_SHARE = 200


@dataclass
class _Worker:
    job: Job
    handle: Handle
    started: float
    gpu: int
    seen: int = 0


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


def run_on_engine(
    jobs: Sequence[Job],
    output: Path,
    engine: Engine,
    jobs_per_gpu: int | None,
    checkpoint_steps: int | None,
    say: Callable[[str], None],
    debug: bool = False,
    log: Sequence[str] = (),
) -> dict[int, Exception]:
    """Run all jobs on a cluster, and return the failures by the number of the job."""
    if not jobs:
        return {}
    output = output.absolute()  # other machines have other working folders
    slots = engine.at_once or len(jobs)
    scratch = make_scratch(output)
    scheduler = _Scheduler(jobs, output, slots, checkpoint_steps, say, scratch, os.environ, (), debug, log)
    try:
        # Before signals are handled here: Ray replaces the handlers that it finds.
        scheduler.executor = open_executor(engine, scheduler.command, scratch, jobs_per_gpu, say)
        try:
            with StopRequest() as stop:
                return scheduler.run(stop)
        finally:
            scheduler.executor.close()
    finally:
        if not scheduler.failures:
            remove_scratch(scratch)


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
        self.executor: Executor = Processes(self.command, scratch, {**environment, COMMAND_VARIABLE: command()})
        self.clock = time.monotonic
        self._watched: dict[Path, Watched] = {}
        self._next_try, self._refusal = -math.inf, ""
        self._line = self.clock() - EVERY_SECONDS + FIRST_SECONDS

    def command(self, job: Job) -> list[str]:
        """Return the command that trains a job."""
        return worker_command(job, self.output, self.scratch, self.checkpoint_steps, self.debug, self.log)

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
        started = [each.job.folder for each in self.running if each.seen]
        seen = [self._watched.setdefault(folder, Watched(folder)).look() for folder in started]
        left = [each.seconds_left for each in seen if each.seconds_left is not None]
        wait = len(self.waiting) + len(self.running) - len(started)
        waiting = f", {wait} wait" if wait else ""
        rest = f"{duration(max(left))} left of those that run" if left else "time left not known yet"
        tasks = ", ".join(f"task {min(each.task + 1, each.tasks)}/{each.tasks}" for each in seen if each.tasks)
        where = f" ({tasks})" if tasks else ""
        self.say(f"{len(started)} of {self.number} runs train{where}{waiting}; {rest}")

    def _free_gpu(self) -> int | None:
        """Return the GPU with the fewest runs, None if all are full."""
        load = [sum(worker.gpu == gpu for worker in self.running) for gpu in range(max(len(self.gpus), 1))]
        return load.index(min(load)) if min(load) < self.slots else None

    def _next(self) -> Job | None:
        """Return the first job that need not wait for a first task that another job is training, or for the cluster."""
        if self.clock() < self._next_try:
            return None
        busy = {worker.job.first_task[0] for worker in self.running if worker.job.first_task is not None}
        for job in self.waiting:
            if job.first_task is None or job.first_task[0] not in busy or checkpoint.exists(job.first_task[1], STEM):
                return job
        return None

    def _start(self, job: Job, gpu: int) -> None:
        placed = job
        if self.gpus:
            placed = replace(job, environment={**job.environment, VISIBLE: self.gpus[gpu]})
        try:
            handle = self.executor.submit(placed)
        except Refused as error:
            self._put_off(error)
            return
        self.waiting.remove(job)
        worker = _Worker(placed, handle, time.monotonic(), gpu)
        self.running.append(worker)
        self._announce(worker)
        if worker.seen == 0 and handle.state() is State.WAITING:
            self.say(f"{job.folder}: queued.")

    def _put_off(self, error: Refused) -> None:
        """Wait before the cluster is asked again. If nothing runs that could make room, this raises."""
        if not self.running:
            raise error
        if str(error) != self._refusal:  # a limit may last for hours
            self.say(f"{error} It is submitted again every {REFUSED_SECONDS:.0f} s; the other runs continue.")
        self._refusal = str(error)
        self._next_try = self.clock() + REFUSED_SECONDS

    def _announce(self, worker: _Worker) -> None:
        """Say where a job has started, and where it has started again."""
        places = worker.handle.places()
        for place in places[worker.seen :]:
            named = f" on GPU {self.gpus[worker.gpu]}" if len(self.gpus) > 1 else f" on {place}" if place else ""
            self.say(f"{worker.job.folder}: started{' again' if worker.seen else ''}{named}.")
            worker.started = worker.started if worker.seen else time.monotonic()
            worker.seen += 1

    def _collect(self) -> None:
        for worker in list(self.running):
            state = worker.handle.state()
            self._announce(worker)
            if not state.over:
                continue
            self.running.remove(worker)
            if state is State.DONE:
                self.say(f"{worker.job.folder}: done after {time.monotonic() - worker.started:.0f} s.")
                continue
            if self.debug:
                print(worker.handle.log(), file=sys.stderr, flush=True)
            try:
                worker.handle.result()
            except Refused as error:
                self.waiting.insert(0, worker.job)
                self._put_off(error)
            except EfcilError as error:
                known = str(error) in map(str, self.failures.values())
                self.failures[worker.job.number] = error
                self.say(f"{worker.job.folder}: failed{', for the same reason.' if known else f'. {error}'}")

    def _stop_all(self) -> None:
        """Ask the running processes to save and exit, and wait for them."""
        for worker in self.running:
            worker.handle.cancel()
        for worker in self.running:
            with contextlib.suppress(EfcilError):  # it was stopped before its end
                worker.handle.result()
        self.running.clear()


def share_of_card(slots: int) -> int:
    """Return how many percent of the card's multiprocessors each of `slots` runs may use.

    One run cannot fill the card; if each may use all of it, the runs slow each other down.
    """
    return min(100, round(MPS_TOTAL_SHARE / slots))


@contextmanager
def mps(say: Callable[[str], None], slots: int) -> Iterator[dict[str, str]]:
    """Run an MPS server for this grid unless one is named; yield the environment in which `slots` processes find it."""
    environment = dict(os.environ)
    if MPS_PIPE in environment:  # another grid on this card, or whoever runs the machine, has started one
        yield {MPS_SHARE: str(share_of_card(slots)), **environment}
        return
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
            # In a session of its own: what stops this process may stop its group, and runs that save need the server.
            subprocess.run(
                [program, "-d"], env=control, check=True, capture_output=True, timeout=30, start_new_session=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            say(f"{MPS_CONTROL} could not be started ({error}); the runs share the GPU by taking turns.")
            yield dict(os.environ)
            return
        try:
            yield environment
        finally:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                subprocess.run([program], input=b"quit\n", env=control, capture_output=True, timeout=60)
