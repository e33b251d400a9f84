"""The figures of a report, as data: what a group of rows and a single row look like."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from efcil.report.details import Details, spread
from efcil.report.figure import Figure, HeatMap, Reference, Series
from efcil.report.groups import Group, number_of, value_of
from efcil.report.table import METRICS, Row, Statistic

#: What a metric is called on an axis.
AXES = {
    "A_step": "accuracy over all classes seen (%)",
    "A_inc": "accuracy, mean over tasks so far (%)",
    "task_mean": "accuracy, mean over tasks seen (%)",
    "forgetting": "forgetting (points)",
    "task_aware_A_step": "accuracy within the known task (%)",
    "seconds": "seconds",
    "stored": "stored besides the network (MB)",
}
_FINAL = {**AXES, "A_step": "A_step (%)", "A_inc": "A_inc (%)"}
_PERCENT = (0.0, 100.0)


@dataclass(frozen=True)
class Shown:
    """A group, its rows with their files, and the key and style that each row has in all charts."""

    group: Group
    details: tuple[Details, ...]
    prefix: str = ""

    @classmethod
    def of(cls, group: Group, prefix: str = "") -> Shown:
        """Return a group ready to be drawn; `prefix` makes keys unique in a page."""
        return cls(group, tuple(Details(row) for row in group.rows), prefix)

    def key(self, index: int) -> str:
        """Return the key of a row."""
        return f"{self.prefix}r{index}"

    def named(self) -> list[tuple[int, Row, str, Details]]:
        """Return place, row, name and files of every row."""
        rows = self.group.rows
        return [(i, row, self.group.name(row), self.details[i]) for i, row in enumerate(rows)]


def curves(shown: Shown, metric: str) -> Figure | None:
    """A metric after every task, a line for every row, and the paper's values; None if no row has two tasks."""
    series, references = [], []
    for index, row, name, details in shown.named():
        series.append(_over_tasks(name, details.per_task(metric), index, shown.key(index)))
        paper = row.paper.get(metric)
        if paper is not None:
            label = f"paper, {name}"
            references.append(Reference(paper.mean, label, style=index, key=shown.key(index)))
    note = "Bands are one standard deviation." if any(each.low for each in series) else ""
    if references:
        note += f" Dotted lines are the paper's {METRICS[metric]} after the last task."
    title = f"{METRICS[metric]} after every task"
    return _tasks(title, AXES[metric], series, tuple(references), note.strip())


def old_classes(shown: Shown) -> Figure | None:
    """Accuracy on the classes of earlier tasks, after every task."""
    found = [(i, name, details.old_and_new()[0]) for i, _, name, details in shown.named()]
    series = [_over_tasks(name, values, i, shown.key(i)) for i, name, values in found]
    return _tasks("Old classes", "accuracy on earlier tasks (%)", series)


def new_classes(shown: Shown) -> Figure | None:
    """Accuracy on the classes of the task just learned."""
    found = [(i, name, details.old_and_new()[1]) for i, _, name, details in shown.named()]
    series = [_over_tasks(name, values, i, shown.key(i)) for i, name, values in found]
    return _tasks("New classes", "accuracy on classes of this task (%)", series)


def forgetting_by_task(shown: Shown) -> Figure | None:
    """How much each task has lost at the end, since its best."""
    found = [(i, name, details.forgetting_per_task()) for i, _, name, details in shown.named()]
    series = [_over_tasks(name, values, i, shown.key(i)) for i, name, values in found]
    return _tasks("Forgetting of every task", "points lost at the end", series, limits=(-100.0, 100.0))


def _over_tasks(name: str, per_seed: Sequence[Sequence[float]], index: int, key: str) -> Series:
    means, low, high = spread(per_seed)
    banded = any(value is not None for value in low)
    places = [float(task + 1) for task in range(len(means))]
    return Series(name, places, means, low if banded else (), high if banded else (), style=index, key=key)


def _tasks(
    title: str,
    y_title: str,
    series: Sequence[Series],
    references: tuple[Reference, ...] = (),
    note: str = "",
    limits: tuple[float, float] = _PERCENT,
) -> Figure | None:
    if not any(sum(map(math.isfinite, each.y)) > 1 for each in series):
        return None
    return Figure(title, "task", y_title, tuple(series), references, whole_x=True, limits=limits, note=note)


# -- one metric against another, or against a setting ----------------------------------------------------------------


def against(shown: Shown, metric: str, other: str) -> Figure | None:
    """A metric against seconds or against what is stored, a point for every row; None if they do not differ."""
    series = []
    for index, row, name, _ in shown.named():
        x, y = row.ours.get(other), row.ours.get(metric)
        if x is not None and y is not None:
            low, high = _ends(y)
            series.append(Series(name, [x.mean], [y.mean], low, high, index, joined=False, key=shown.key(index)))
    places = [each.x[0] for each in series]
    if len(series) < 2 or max(places) == min(places):
        return None
    log = min(places) > 0 and max(places) / min(places) > 20
    title = f"{METRICS[metric]} against {'time' if other == 'seconds' else 'storage'}"
    note = _machines(shown) if other == "seconds" else ""
    drawn = tuple(series)
    return Figure(
        title, AXES[other], _FINAL[metric], drawn, (), log_x=log, limits=_limits(metric), named_points=True, note=note
    )


def sweeps(shown: Shown, metric: str) -> list[Figure]:
    """A metric against every setting that rows of one method vary, a line for every method."""
    return [figure for name in shown.group.settings if (figure := _sweep(shown, metric, name)) is not None]


def _sweep(shown: Shown, metric: str, setting: str) -> Figure | None:
    families: dict[str, list[tuple[str, Statistic]]] = {}
    for row in shown.group.rows:
        value, result = value_of(row, setting), row.ours.get(metric)
        others = [f"{name}={value_of(row, name)}" for name in shown.group.settings if name != setting]
        if value and result is not None:
            told = ", ".join([row.method or row.label, *(each for each in others if not each.endswith("="))])
            families.setdefault(told, []).append((value, result))
    families = {name: found for name, found in families.items() if len({value for value, _ in found}) > 1}
    if not families:
        return None
    words = list(dict.fromkeys(value for found in families.values() for value, _ in found))
    numbers = {word: number_of(word) for word in words}
    numeric = all(number is not None for number in numbers.values())
    places = {word: numbers[word] if numeric else index for index, word in enumerate(words)}
    series = []
    for name, found in families.items():
        pairs = sorted(((float(places[value] or 0.0), result) for value, result in found), key=lambda pair: pair[0])
        ends = [_ends(result) for _, result in pairs]
        banded = all(low for low, _ in ends)
        low, high = ([e[0][0] for e in ends], [e[1][0] for e in ends]) if banded else ((), ())
        series.append(Series(name, [x for x, _ in pairs], [r.mean for _, r in pairs], low, high, joined=numeric))
    found_numbers = [number for number in numbers.values() if number is not None]
    log = numeric and min(found_numbers) > 0 and max(found_numbers) / min(found_numbers) >= 10
    labels = () if numeric else tuple(words)
    whole = numeric and all(number.is_integer() for number in found_numbers)
    title = f"{METRICS[metric]} against {setting}"
    y_title, limits = _FINAL[metric], _limits(metric)
    return Figure(title, setting, y_title, tuple(series), (), log, whole_x=whole, x_labels=labels, limits=limits)


def _ends(value: Statistic) -> tuple[list[float | None], list[float | None]]:
    if value.std is None:
        return [], []
    return [value.mean - value.std], [value.mean + value.std]


def _limits(metric: str) -> tuple[float, float]:
    return (-100.0, 100.0) if metric == "forgetting" else _PERCENT


def _machines(shown: Shown) -> str:
    found = {machine(summary) for details in shown.details for summary in details.summaries if summary}
    return f"Measured on {len(found)} kinds of machines: times do not compare." if len(found) > 1 else ""


def machine(summary: dict[str, Any]) -> str:
    """Return what a run was computed on: the GPU, or the processor."""
    hardware = summary.get("hardware")
    hardware = hardware if isinstance(hardware, dict) else {}
    execution = summary.get("execution")
    on_gpu = isinstance(execution, dict) and execution.get("device") == "cuda"
    gpus = hardware.get("gpus")
    where = hardware.get("cpu") if not on_gpu else gpus[0] if isinstance(gpus, list) and gpus else None
    return str(where or "unknown hardware")


# -- figures of one row ----------------------------------------------------------------------------------------------


def accuracy_map(name: str, details: Details) -> HeatMap | None:
    """The accuracy on every task after every task, averaged over seeds."""
    if not details.matrices:
        return None
    mean = np.mean(details.matrices, axis=0)
    tasks = tuple(str(task + 1) for task in range(len(mean)))
    return HeatMap(name, mean.tolist(), "after task", "accuracy on task (%)", tasks, tasks)


def class_map(details: Details) -> HeatMap | None:
    """The accuracy of every class after every task, classes in the order in which they were learned."""
    found = details.classes
    if found is None:
        return None
    matrix, names, _ = found
    tasks = tuple(str(task + 1) for task in range(matrix.shape[1]))
    note = "Mean over seeds. The seeds have different class orders: classes are numbered as they were learned."
    same = names != tuple(map(str, range(1, len(names) + 1)))
    return HeatMap(
        "Accuracy of every class (%)", matrix.tolist(), "class", "after task", names, tasks, note="" if same else note
    )


def confusion_map(details: Details) -> HeatMap | None:
    """Which class was taken for which after the last task, in percent of the true class."""
    found = details.confusion
    if found is None or not found[0].size:
        return None
    shares, names, _ = found
    empty = np.where(shares > 0, shares, math.nan)
    title = "Confusion after the last task (% of the true class)"
    return HeatMap(title, empty.tolist(), "true class", "answer", names, names, emphasise_small=True)


def losses(details: Details) -> list[Figure]:
    """Every term of the loss over all epochs, a line for every seed; upright lines are where tasks begin."""
    per_seed = details.losses
    terms = dict.fromkeys(term for seed in per_seed for _, values in seed for term in values)
    longest = max(per_seed, key=len, default=[])
    begins = [i for i in range(1, len(longest)) if longest[i][0] != longest[i - 1][0]]
    marks = tuple(Reference(place + 0.5, axis="x") for place in begins)
    figures = []
    for term in terms:
        series = []
        for number, epochs in zip(details.row.seeds, per_seed, strict=True):
            # If a task lacks a term, the line has a gap.
            found = [values.get(term) for _, values in epochs]
            y = [float(v) if isinstance(v, int | float) else math.nan for v in found]
            series.append(Series(f"seed {number}", [float(i + 1) for i in range(len(y))], y))
        figures.append(Figure(term, "epoch, over all tasks", "loss", tuple(series), marks, whole_x=True))
    return figures


def spectrum(details: Details) -> Figure | None:
    """The eigenvalues of the feature matrix after every task, and where the damping outweighs them."""
    found = details.spectrum()
    if not found:
        return None
    # What is smaller is rounding, and would make the axis ten times as long.
    least = 1e-9 * max(float(values.max()) for values in found.values())
    series = tuple(
        Series(
            f"after task {task}",
            [float(i + 1) for i in range(len(values))],
            [float(v) if v > least else math.nan for v in values],
        )
        for task, values in found.items()
    )
    references = []
    note = "Mean over seeds; the stronger a line, the later the task."
    damping, weight = (number_of(value_of(details.row, name)) for name in ("damping", "efm_weight"))
    if damping and weight:
        references.append(Reference(damping / weight, f"damping / efm_weight = {damping / weight:g}"))
        note += " Below the level line, damping outweighs."
    elif damping == 0:
        note += " There is no damping: the feature matrix alone weighs the drift."
    classes = sum(details.sizes)
    if classes and classes < max(len(values) for values in found.values()):
        references.append(Reference(float(classes), f"{classes} classes", axis="x"))
    return Figure(
        "Spectrum of the feature matrix", "eigenvalue, largest first", "eigenvalue", series, tuple(references),
        log_y=True, ordered=True, note=note,
    )  # fmt: skip


def noise(details: Details) -> Figure | None:
    """How much noise along principal and other directions of feature space changes the probabilities."""
    found = details.noise()
    series = []
    for directions, by_sigma in found.items():
        sigmas = sorted(by_sigma)
        values = [Statistic.of(by_sigma[sigma]) for sigma in sigmas]
        banded = all(value.std is not None for value in values)
        low = [value.mean - (value.std or 0.0) for value in values] if banded else ()
        high = [value.mean + (value.std or 0.0) for value in values] if banded else ()
        series.append(Series(directions, sigmas, [value.mean for value in values], low, high))
    if not series:
        return None
    title, y_title = "Noise in feature space after the last task", "change of the probabilities"
    return Figure(title, "standard deviation of the noise", y_title, tuple(series), limits=(0.0, 1.0))
