"""The grid: many runs, one after the other, or several on every GPU."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from efcil import ranks
from efcil.activity import doing
from efcil.data.images import Dataset
from efcil.engine.hardware import choose_device, visible_gpus, wake
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.progress import Waiting
from efcil.errors import EfcilError, GridError, SettingsError, TrainingError, some
from efcil.experiment import shared_tasks
from efcil.experiment.plan import Plan
from efcil.experiment.run import run_one
from efcil.experiment.summary import changed_since, finished_before, source_digest
from efcil.experiment.workers import Job, run_jobs, run_on_engine
from efcil.output import lines
from efcil.presets import load_preset
from efcil.resolution import load_images, source_options
from efcil.runfolder import RunFolder, locate
from efcil.settings import Settings
from efcil.settings.benchmark import TASK_SETTINGS
from efcil.settings.engine import LOCAL, Engine
from efcil.watching import planned


@dataclass(frozen=True)
class LoadedData:
    """A dataset and the fingerprint of its images."""

    dataset: Dataset
    fingerprint: str


class DataShelf:
    """Loads each dataset once, however many runs use it. Only the last one is kept: grids are sorted by dataset."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._loaded: LoadedData | None = None
        self._refused: dict[tuple[object, ...], EfcilError] = {}

    def get(self, settings: Settings) -> LoadedData:
        """Return the images that a run is trained on. What could not be loaded once is not tried again."""
        key = (settings.dataset, settings.data, source_options(settings))
        if key in self._refused:
            raise self._refused[key]
        if self._loaded is None or key != self._key:
            self._loaded = None  # free the old images before the new ones are loaded
            try:
                self._loaded = self._load(settings)
            except EfcilError as error:
                self._refused[key] = error
                raise
            self._key = key
        return self._loaded

    def _load(self, settings: Settings) -> LoadedData:
        with doing(f"loading the images of {settings.dataset}"):
            dataset = load_images(settings)
            return LoadedData(dataset, shared_tasks.fingerprint(dataset))


def run_grid(
    settings: list[Settings],
    output: Path,
    jobs_per_gpu: int | None = None,
    quiet: bool = False,
    checkpoint_steps: int | None = None,
    debug: bool = False,
    log: Sequence[str] = (),
    engine: Engine | None = None,
) -> list[Path]:
    """Train every run and return their folders, in order.

    With `jobs_per_gpu`, that many train at a time on every visible GPU (or on the one that the settings name), each in
    its own process. Without it, they train one after the other. Finished runs are skipped and unfinished ones resumed.
    If a run fails, the others still run, and its error is raised at the end (a `GridError` if the grid has several
    runs; `debug` prints their tracebacks when they fail). An interruption stops everything. In several processes
    (`ranks`), the first failure does too. `log` names trackers (tensorboard, wandb, mlflow) of every run. `engine`
    names a cluster that trains the runs; their folders are the same.
    """
    output = Path(output)
    if ranks.several() and (jobs_per_gpu is not None or (engine is not None and engine.name != LOCAL)):
        raise SettingsError("torchrun shares one run at a time. Leave out --jobs-per-gpu and --engine, or torchrun.")

    def say(text: str) -> None:
        if not quiet and ranks.first():
            with suppress(BrokenPipeError):  # the reader of the output has closed it; training continues
                print(lines(text), flush=True)

    def warn(text: str) -> None:
        if not quiet:
            say(text)
        elif ranks.first():  # old results that look like new ones: nobody wants that left out
            print(lines(text), file=sys.stderr, flush=True)

    for each in settings:
        source_digest(each.method)  # now: the files may be edited while earlier runs train
    grid = _Grid(settings, output, checkpoint_steps, say, warn, debug, log)
    paths = [grid.place(number) for number in range(len(settings))]
    with Waiting(say), planned(output, paths) if ranks.first() else nullcontext():
        if engine is not None and engine.name != LOCAL:
            _run_on_cluster(grid, engine, jobs_per_gpu)
        elif jobs_per_gpu is not None and _all_on_gpu(settings, say):
            _run_beside_each_other(grid, jobs_per_gpu)
        else:
            _run_in_turn(grid, quiet)
    if failures := grid.failures:
        mistake = all(failure.mistake for failure in failures.values())
        if len(settings) == 1:
            raise (SettingsError if mistake else TrainingError)(failures[0].reason)
        raise GridError(_what_failed(failures, paths), paths, mistake)
    return paths


@dataclass(frozen=True)
class Failure:
    """Why a run failed, and whether that is a mistake in its settings or data."""

    reason: str
    mistake: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return why: an error of ours in its own words, another one with its kind."""
        ours = isinstance(error, EfcilError)
        reason = str(error) if ours else f"{type(error).__name__}: {error}"
        return cls(reason, ours and not isinstance(error, TrainingError))


@dataclass(frozen=True)
class _Grid:
    """The runs of a command, and how all of them are trained; `failures` fills up."""

    settings: Sequence[Settings]
    output: Path
    checkpoint_steps: int | None
    say: Callable[[str], None]
    warn: Callable[[str], None]
    debug: bool
    log: Sequence[str]
    #: Reasons, not errors: an error keeps its stack frames alive, and with them the GPU memory of the run.
    failures: dict[int, Failure] = field(default_factory=dict)

    def place(self, number: int) -> Path:
        """Return the folder of a run."""
        return locate(self.output, self.settings[number]).path


def _what_failed(failures: dict[int, Failure], paths: Sequence[Path]) -> str:
    """Return one text for all failures, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for number in sorted(failures):
        by_reason.setdefault(failures[number].reason, []).append(str(paths[number]))
    if len(failures) == len(paths) and len(by_reason) == 1:
        return f"{next(iter(by_reason))} (None of the {len(paths)} runs was possible.)"
    reasons = " ".join(f"{some(places)}: {reason}" for reason, places in by_reason.items())
    return f"{len(failures)} of {len(paths)} runs failed. {reasons}"


def _run_in_turn(grid: _Grid, quiet: bool) -> None:
    shelf = DataShelf()
    stop = StopRequest()

    def train(settings: Settings) -> None:
        with doing("starting the device"):
            wake(choose_device(settings.device))
        data = ranks.in_turn(partial(shelf.get, settings))  # one process decodes what is not decoded yet
        run_one(
            settings,
            grid.output,
            data.dataset,
            quiet=quiet,
            stop=stop,
            checkpoint_steps=grid.checkpoint_steps,
            fingerprint=data.fingerprint,
            log=grid.log,
        )

    for number, each in enumerate(grid.settings):
        try:
            if ranks.first_does(partial(_is_finished, grid, each, shelf)):
                continue
            if stop.agreed():  # requested while the previous run was finishing
                raise Interrupted(f"Stopped before {grid.place(number)}. Run the same command again to resume.")
            train(each)
        except Exception as error:
            # Processes that failed in different places do not find together again for the next run.
            if len(grid.settings) == 1 or ranks.several():
                raise
            _tell(grid, number, error)
        if number in grid.failures:
            _free_memory()


def _run_beside_each_other(grid: _Grid, slots: int) -> None:
    """Train every unfinished run in its own process, `slots` at a time."""
    shelf = DataShelf()
    # Loading here also decodes the images before several processes need them.
    jobs = _unfinished(grid, shelf, lambda number, each: _job(number, each, grid.output, shelf.get(each)))
    failed = run_jobs(
        jobs, grid.output, slots, grid.checkpoint_steps, grid.say, _choice(grid.settings), grid.debug, grid.log
    )
    grid.failures.update((number, Failure.of(error)) for number, error in failed.items())


def _run_on_cluster(grid: _Grid, engine: Engine, jobs_per_gpu: int | None) -> None:
    """Give every unfinished run to a cluster. Images are not needed here: other machines load them."""
    jobs = _unfinished(grid, DataShelf(), lambda number, each: Job(number, each, grid.place(number)))
    failed = run_on_engine(
        leaders_first(jobs), grid.output, engine, jobs_per_gpu, grid.checkpoint_steps, grid.say, grid.debug, grid.log
    )
    grid.failures.update((number, Failure.of(error)) for number, error in failed.items())


def _unfinished(grid: _Grid, shelf: DataShelf, make: Callable[[int, Settings], Job]) -> list[Job]:
    """Return the jobs of the runs that have not finished; one that is not possible is noted, and the others go on."""
    jobs: list[Job] = []
    for number, each in enumerate(grid.settings):
        try:
            if not _is_finished(grid, each, shelf):
                jobs.append(make(number, each))
        except Exception as error:
            if len(grid.settings) == 1:
                raise
            _tell(grid, number, error)
    return jobs


def leaders_first(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs so that those come first which begin with different first tasks.

    Runs that share a first task follow each other in a grid. On a cluster they would start together, and all but one
    of them would wait for that task.
    """
    alike = ("dataset", "data", "scenario", *TASK_SETTINGS, "class_order", "network", "seed")
    before: dict[tuple[object, ...], int] = {}
    rank = []
    for job in jobs:
        key = (*(getattr(job.settings, name) for name in alike), job.settings.effective_class_seed)
        rank.append(before.setdefault(key, 0))
        before[key] += 1
    return [job for _, job in sorted(zip(rank, jobs, strict=True), key=lambda pair: pair[0])]


def _job(number: int, settings: Settings, output: Path, data: LoadedData) -> Job:
    plan = Plan.make(settings, output, data.dataset, data.fingerprint)
    key = plan.first_training()
    return Job(number, settings, plan.folder.path, (key, plan.store.place(key)))


def _is_finished(grid: _Grid, settings: Settings, shelf: DataShelf) -> bool:
    folder = locate(grid.output, settings)
    if not folder.is_finished(settings):
        return False
    changed = out_of_date(folder, settings, shelf)
    (grid.warn if changed else grid.say)(finished_before(folder, changed))
    return True


def out_of_date(folder: RunFolder, settings: Settings, shelf: DataShelf) -> list[str]:
    """Return a sentence for everything that has changed since a run finished: its method's file, or its images."""

    def now() -> str | None:
        with suppress(EfcilError, OSError):  # a finished run does not need its images
            loaded = shelf.get(settings)
            return shared_tasks.data_digest(loaded.dataset, loaded.fingerprint)
        return None

    # Published datasets do not change, and checking them takes time; in another place there may be a part of one.
    doubtful = load_preset(settings.dataset).named_by_data or _moved(folder, settings)
    return changed_since(folder, settings, now if doubtful else None)


def _moved(folder: RunFolder, settings: Settings) -> bool:
    """Return whether a run was made with data of another place than the settings name."""
    with suppress(EfcilError, OSError):
        return settings.data is not None and folder.read_settings().data != settings.data
    return False


def _all_on_gpu(settings: Sequence[Settings], say: Callable[[str], None]) -> bool:
    if all(choose_device(each.device).type == "cuda" for each in settings):
        return True
    say("--jobs-per-gpu is for GPUs; on this device the runs take turns.")
    return False


def _choice(settings: Sequence[Settings]) -> list[str]:
    """Return the GPUs to distribute runs over; none if there is no choice."""
    if any(":" in each.device for each in settings):  # the user chose a device by number
        return []
    gpus = visible_gpus()
    return gpus if len(gpus) > 1 else []


def _tell(grid: _Grid, number: int, error: Exception) -> None:
    """Note that a run failed, and say so while others follow: a reason in full when it occurs first.

    A mistake in settings or data is said once: it fails all runs that share it before anything is trained.
    """
    if grid.debug:
        traceback.print_exception(error)
    failure = Failure.of(error)
    known = failure in grid.failures.values()
    grid.failures[number] = failure
    if not known:
        grid.say(f"{grid.place(number)}: failed. {failure.reason}")
    elif not failure.mistake:
        grid.say(f"{grid.place(number)}: failed, for the same reason.")


def _free_memory() -> None:
    """Free the memory of a failed run before the next one needs it."""
    gc.collect()
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):  # a GPU in an error state: the next run that uses it reports the error
            torch.cuda.empty_cache()
