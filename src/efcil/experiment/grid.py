"""The grid: many runs, one after the other or several on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine.hardware import choose_device, wake
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.errors import EfcilError, GridError
from efcil.experiment import first_tasks
from efcil.experiment.run import run_one
from efcil.experiment.workers import Job, run_jobs
from efcil.runfolder import locate
from efcil.settings import Settings


@dataclass(frozen=True)
class LoadedData:
    """A dataset and the fingerprint of its images."""

    dataset: Dataset
    fingerprint: str


class DataShelf:
    """Loads each dataset once, however many runs use it. Only the last one is kept: grids go by dataset."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._loaded: LoadedData | None = None

    def get(self, settings: Settings) -> LoadedData:
        """Return the images that a run is trained on."""
        key = (settings.dataset, settings.data, settings.held_out, settings.image_size)
        if self._loaded is None or key != self._key:
            self._loaded = None  # let go of the old images before the new ones come
            options = SourceOptions(held_out=settings.held_out, image_size=settings.image_size)
            dataset = load_dataset(settings.dataset, None if settings.data is None else Path(settings.data), options)
            self._key, self._loaded = key, LoadedData(dataset, first_tasks.fingerprint(dataset))
        return self._loaded


def run_grid(
    settings: list[Settings],
    output: Path,
    jobs_per_gpu: int = 1,
    quiet: bool = False,
    checkpoint_steps: int | None = None,
) -> list[Path]:
    """Train every run and return their folders, in order.

    Finished runs are skipped and unfinished ones resumed. A run that fails does not keep the others from running; at
    the end its error is raised (a `GridError` where the grid has several runs). An interruption stops everything.
    """
    output = Path(output)

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    failures: dict[int, Exception] = {}
    if jobs_per_gpu > 1 and _all_on_gpu(settings, say):
        _run_beside_each_other(settings, output, jobs_per_gpu, checkpoint_steps, failures, say)
    else:
        _run_in_turn(settings, output, quiet, checkpoint_steps, failures, say)
    paths = [locate(output, each).path for each in settings]
    if failures:
        if len(settings) == 1:
            raise failures[0]
        raise GridError(_what_failed(failures, paths), paths)
    return paths


def _what_failed(failures: dict[int, Exception], paths: Sequence[Path]) -> str:
    """Return one text for all failures, each reason once."""
    by_reason: dict[str, list[str]] = {}
    for number, error in sorted(failures.items()):
        by_reason.setdefault(str(error), []).append(str(paths[number]))
    if len(failures) == len(paths) and len(by_reason) == 1:
        return f"{next(iter(by_reason))} (None of the {len(paths)} runs was possible.)"
    reasons = " ".join(f"{', '.join(places)}: {reason}" for reason, places in by_reason.items())
    return f"{len(failures)} of {len(paths)} runs failed. {reasons}"


def _run_in_turn(
    settings: Sequence[Settings],
    output: Path,
    quiet: bool,
    checkpoint_steps: int | None,
    failures: dict[int, Exception],
    say: Callable[[str], None],
) -> None:
    shelf = DataShelf()
    stop = StopRequest()
    for number, each in enumerate(settings):
        try:
            if _is_finished(each, output, say):
                continue
            if stop.requested:  # during the last moments of the run before, which has finished since
                place = locate(output, each).path
                raise Interrupted(f"Stopped before {place}. Give the same command again to go on with it.")
            wake(choose_device(each.device))
            data = shelf.get(each)
            run_one(
                each,
                output,
                data.dataset,
                quiet=quiet,
                stop=stop,
                checkpoint_steps=checkpoint_steps,
                fingerprint=data.fingerprint,
            )
        except Exception as error:
            failures[number] = error
            if len(settings) > 1:
                say(f"{locate(output, each).path}: failed. {_reason(error)}")


def _run_beside_each_other(
    settings: Sequence[Settings],
    output: Path,
    slots: int,
    checkpoint_steps: int | None,
    failures: dict[int, Exception],
    say: Callable[[str], None],
) -> None:
    """Give every unfinished run a process of its own, `slots` at a time."""
    shelf = DataShelf()
    jobs: list[Job] = []
    for number, each in enumerate(settings):
        try:
            if not _is_finished(each, output, say):
                # Loading here also decodes the images before several processes want to.
                jobs.append(_job(number, each, output, shelf.get(each)))
        except Exception as error:
            failures[number] = error
            say(f"{locate(output, each).path}: failed. {_reason(error)}")
    failures.update(run_jobs(jobs, output, slots, checkpoint_steps, say))


def _job(number: int, settings: Settings, output: Path, data: LoadedData) -> Job:
    from efcil.experiment.run import Run

    run = Run(settings, output, data.dataset, data.fingerprint)
    waits_for = None
    if not run.joint:
        key = first_tasks.digest(run.first_task_description(run.scenario.task_sizes[0], run.recipe(0)))
        waits_for = (key, run.store.place(key))
    return Job(number, settings, run.folder.path, waits_for)


def _is_finished(settings: Settings, output: Path, say: Callable[[str], None]) -> bool:
    folder = locate(output, settings)
    if not folder.is_finished(settings):
        return False
    say(f"{folder.path}: finished before, skipped.")
    return True


def _all_on_gpu(settings: Sequence[Settings], say: Callable[[str], None]) -> bool:
    if all(choose_device(each.device).type == "cuda" for each in settings):
        return True
    say("--jobs-per-gpu is for GPUs; on this device the runs take turns.")
    return False


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, EfcilError) else f"{type(error).__name__}: {error}"
