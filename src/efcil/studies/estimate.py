"""How long runs will take: from epochs of this machine where there are some, else from measured step times.

Seconds are those of a run that has its device for itself. Several at a time on one GPU (`--jobs-per-gpu`) are slower
each, and faster together.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from efcil.errors import EfcilError
from efcil.files import read_regular
from efcil.resolution import Resolved, chosen_class_order, identity, resolve
from efcil.resolution.data import chosen_images_per_class
from efcil.runfolder import RunFolder, find_runs
from efcil.settings import NAMED_CLASS_ORDERS, Settings
from efcil.studies.measures import WARM_UP, at_a_time, where

FIRST, LATER, END = "epoch of the first task", "epoch of a later task", "end of a later task"
TOGETHER = "runs at a time"
#: Where a number is from: this machine's own epochs, measured elsewhere on the same images, or on smaller ones.
HERE, MEASURED, SCALED = "here", "measured", "scaled"
#: Of an image in the first task, where steps were measured: it is turned.
_MEASURED_VIEWS = 4
_MOST_LOGGED = 1 << 24
#: What a first task does not depend on; of the scenario its number of classes counts.
_AFTER_FIRST_TASK = ("method", "scenario", "answers", "classifier", "test_views", "later", "method_settings")
#: Loading the images and the libraries, and writing the results.
_START_UP = 6.0


@dataclass(frozen=True)
class Facts:
    """A dataset: classes, training images of a class, and what an image is to compute, where CIFAR-100's is 1."""

    title: str
    classes: int
    images_per_class: int
    work: float | None


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run alone on its device, by what they are for; `first_task` names the one that other runs share."""

    first: float
    rest: float
    first_task: tuple[object, ...]
    source: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.first + self.rest


@dataclass(frozen=True)
class Speed:
    """Seconds of an epoch for each image (`per_image`), or of the end of a task."""

    seconds: float
    source: str


@cache
def facts() -> dict[str, Facts]:
    """Return what is known of the datasets."""
    return {
        row["dataset"]: Facts(
            row["title"],
            int(row["classes"]),
            int(row["images_per_class"]),
            float(row["work"]) if row["work"] else None,
        )
        for row in _rows("datasets.csv")
    }


def title(dataset: str) -> str:
    """Return a dataset's name as people write it."""
    return facts()[dataset].title if dataset in facts() else dataset


@cache
def _rows(name: str) -> tuple[dict[str, str], ...]:
    with (resources.files(__package__) / name).open(encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def measured_on() -> str:
    """Return the hardware of the measured step times."""
    return ", ".join(dict.fromkeys(row["hardware"] for row in _rows("step-times.csv")))


def task_sizes(settings: Settings) -> tuple[int, ...]:
    """Return the classes of every task; empty if the dataset's number of classes is not known.

    Tasks and a named class order that so many classes cannot have are an error.
    """
    from efcil.data.scenario import class_order, make_scenario
    from efcil.data.sources import find_source

    known, listed = facts().get(settings.dataset), settings.class_list
    if known is None or (listed is not None and listed not in find_source(settings.dataset).class_lists):
        return ()
    named = chosen_class_order(settings)
    by_name = named in NAMED_CLASS_ORDERS  # a file may list names, which are not known without the files
    scenario = make_scenario(
        settings.scenario,
        known.classes,
        order=class_order(named, known.classes, settings.effective_class_seed) if by_name else range(known.classes),
        tasks=settings.tasks,
        first_task_classes=settings.first_task_classes,
        task_sizes=settings.sizes,
        dataset=settings.dataset,
    )
    return scenario.task_sizes


def speed_up(runs: float) -> float:
    """Return how many times the work of one run a GPU does with this many at a time; between measurements, a line."""
    known = sorted((float(row["method"]), float(row["seconds"])) for row in _rows("step-times.csv") if _together(row))
    points = [(1.0, 1.0), *known]
    for (low, slow), (high, fast) in itertools.pairwise(points):
        if low <= runs <= high:
            return slow + (fast - slow) * (runs - low) / (high - low)
    return points[-1][1]


def _together(row: Mapping[str, str]) -> bool:
    return row["what"] == TOGETHER


class Times:
    """Speeds by dataset, network and method: measured here where possible."""

    def __init__(self, output: Path | None = None, hardware: str = "") -> None:
        self._here: dict[tuple[str, str | None, str, str], list[float]] = {}
        self._measured = {
            (row["dataset"], row["method"], row["what"]): _per_image(row)
            for row in _rows("step-times.csv")
            if not _together(row)
        }
        if output is not None and output.is_dir():
            for run in find_runs([output]):
                with suppress(EfcilError, KeyError, TypeError, ValueError):  # what cannot be read tells no time
                    self._learn(run, hardware)

    def _learn(self, run: RunFolder, hardware: str) -> None:
        """Take the epochs of a run, unless it was trained on other hardware."""
        if run.summary_file.exists():
            summary = run.read_summary()
            if hardware and where(summary) != hardware:
                return
            together = at_a_time(str(summary.get("command", "")))
        else:
            together = at_a_time(_logged(run))
        settings = run.read_settings()
        resolved, sizes = resolve(settings), task_sizes(settings)
        share = speed_up(together) / together  # of the GPU
        seconds: dict[tuple[str, str, int], list[float]] = {}
        for line in run.read_metrics():
            if line["kind"] == "epoch" and line["epoch"] > WARM_UP:
                what, method = (FIRST, "*") if line["task"] == 1 else (LATER, settings.method)
                seconds.setdefault((what, method, line["task"]), []).append(line["seconds"])
            elif line["kind"] == "task" and line["task"] > 1:
                end = line["seconds"]["statistics"] + line["seconds"]["evaluation"]
                self._note(settings, resolved, settings.method, END, end * share)
        for (what, method, task), values in seconds.items():
            recipe = resolved.first_task if task == 1 else resolved.later
            images = _images(settings, sizes[task - 1]) * recipe.views
            self._note(settings, resolved, method, what, statistics.median(values) * share / images)

    def _note(self, settings: Settings, resolved: Resolved, method: str, what: str, seconds: float) -> None:
        self._here.setdefault((settings.dataset, resolved.network, method, what), []).append(seconds)

    def speed(self, settings: Settings, resolved: Resolved, what: str) -> Speed | None:
        """Return the time of an image in an epoch, or of the end of a task; None if nobody has measured it."""
        method = "*" if what == FIRST else settings.method
        if own := self._here.get((settings.dataset, resolved.network, method, what)):
            return Speed(statistics.median(own), HERE)
        known = facts().get(settings.dataset)
        if known is None or known.work is None or resolved.network != _preset_network(settings):
            return None
        if (direct := self._measured.get((settings.dataset, method, what))) is not None:
            return Speed(direct, MEASURED)
        other = self._measured.get(("cifar100", method, what))
        return None if other is None else Speed(other * self._factor(settings.dataset, what, known.work), SCALED)

    def _factor(self, dataset: str, what: str, work: float) -> float:
        """Return how much longer an image takes than CIFAR-100's: as for EFC, if that was measured, or by its work."""
        there, here = (self._measured.get((name, "efc", LATER)) for name in (dataset, "cifar100"))
        return there / here if what == LATER and there and here else work

    def of(self, settings: Settings) -> Estimate | None:
        """Return the time of a whole run; None if it cannot be said."""
        from efcil import methods

        sizes = task_sizes(settings)
        resolved = resolve(settings)
        traits = methods.get(settings.method).traits(resolved.method)
        first = self.speed(settings, resolved, FIRST)
        if not sizes or first is None:
            return None
        work = resolved.first_task.epochs * resolved.first_task.views
        if traits.images == "all":
            seen = [sum(sizes)] if traits.trained_after != "every" else [sum(sizes[: n + 1]) for n in range(len(sizes))]
            seconds = first.seconds * work * sum(_images(settings, classes) for classes in seen)
            return Estimate(0.0, seconds + _START_UP, (), first.source)
        trained = first.seconds * work * _images(settings, sizes[0])
        later = self.speed(settings, resolved, LATER) if traits.trains_later else Speed(0.0, first.source)
        if later is None:
            return None
        end = self.speed(settings, resolved, END) or Speed(0.0, later.source)
        work = resolved.later.epochs * resolved.later.views
        rest = later.seconds * work * _images(settings, sum(sizes[1:])) + end.seconds * len(sizes[1:])
        sources = [speed.source for speed in (first, later)]
        worst = next(source for source in (SCALED, MEASURED, HERE) if source in sources)
        return Estimate(trained, rest + _START_UP, _first_task(settings, sizes[0]), worst)


def _first_task(settings: Settings, classes: int) -> tuple[object, ...]:
    """Return what tells a first task from others; runs in which it is alike train it once."""
    decides = {name: value for name, value in identity(settings).items() if name not in _AFTER_FIRST_TASK}
    if decides["class_order"] != "efc":  # the others do not depend on a seed
        del decides["class_seed"]
    return (classes, repr(decides))


def _logged(run: RunFolder) -> str:
    """Return what a run has printed, its commands included; empty if that cannot be read."""
    with suppress(OSError, ValueError):
        return read_regular(run.log_file, _MOST_LOGGED).decode(errors="replace")
    return ""


def _per_image(row: Mapping[str, str]) -> float:
    if row["what"] == END:
        return float(row["seconds"])
    views = _MEASURED_VIEWS if row["what"] == FIRST else 1
    return float(row["seconds"]) / (float(row["images"]) * views)


def _images(settings: Settings, classes: int) -> float:
    """Return how many images so many classes are trained with: fewer than there are, where the settings say so."""
    of_class, most = facts()[settings.dataset].images_per_class, chosen_images_per_class(settings)
    return classes * min(of_class, int(most) if most.isdecimal() else of_class) * (1.0 - (settings.held_out or 0.0))


def _preset_network(settings: Settings) -> str | None:
    from efcil.presets import load_preset

    return load_preset(settings.dataset).network()


def total(estimates: Iterable[Estimate], jobs: int = 1, gpus: int = 1) -> float:
    """Return the seconds of all runs together; a first task that several share is trained once."""
    listed = list(estimates)
    shared: dict[tuple[object, ...], float] = {each.first_task: each.first for each in listed}
    work = sum(each.rest for each in listed) + sum(shared.values())
    longest = max((each.seconds for each in listed), default=0.0)
    together = min(jobs, max(len(listed), 1))
    return max(work / speed_up(together) / gpus, longest)


def done_share(run: RunFolder, settings: Settings) -> float:
    """Return the share of a run's epochs that have been trained, 0 if that cannot be said."""
    with suppress(EfcilError, KeyError, TypeError, ValueError):
        resolved, sizes = resolve(settings), task_sizes(settings)
        first, later = resolved.first_task.views, resolved.later.views
        lines = [line for line in run.read_metrics() if line["kind"] == "epoch"]
        weights = [sizes[line["task"] - 1] * (first if line["task"] == 1 else later) for line in lines]
        whole = sizes[0] * resolved.first_task.epochs * first + sum(sizes[1:]) * resolved.later.epochs * later
        return min(1.0, sum(weights) / whole) if whole else 0.0
    return 0.0


def in_words(seconds: float | None) -> str:
    """Return a time as people say it."""
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


def sources_in_words(sources: Sequence[str], hardware: str, output: Path) -> list[str]:
    """Return sentences on where the estimates are from, and whether that is this machine."""
    found = []
    if HERE in sources:
        found.append(f"Times are from epochs of this machine in {output}.")
    if MEASURED in sources or SCALED in sources:
        found.append(f"Times are from steps of the paper's recipe, measured on one {measured_on()}.")
        if SCALED in sources:
            found.append("Some are scaled from CIFAR-100's to larger images, which is rough.")
        if hardware != measured_on():
            found.append(
                f"This machine has {hardware or 'other hardware'}: runs take another time here, and very much longer "
                "without a GPU. Once some epochs are trained here, the same command uses their times."
            )
    if not any(sources):
        found.append("Nobody has measured how long that takes; once some epochs are trained, the same command says it.")
    return found
