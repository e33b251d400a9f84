"""How the runs of a study become tables and figures. A study names a reader; a reader knows no study."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from efcil.report import Figure, Reference, Series, Statistic
from efcil.report.cells import seeds_in_words, with_spread
from efcil.report.export import slug
from efcil.report.paired import MEANING, Difference, in_words
from efcil.report.paper import agrees
from efcil.resolution import resolve
from efcil.studies import sheet
from efcil.studies.estimate import title
from efcil.studies.measures import IMAGES, METRICS, Measured, Rows
from efcil.studies.sheet import Sheet

if TYPE_CHECKING:
    from efcil.studies.study import Cell

TOLERANCE = "A mean agrees if it is within one standard deviation of the paper's, or one point where that is more."
FULL_SEEDS = 5
FEWER = "The paper's values are over five seeds; rows with fewer say which."
#: In their place where a table is laid out as the paper's.
MARKED = {
    TOLERANCE: f"{TOLERANCE[:-1]}; a dagger marks those that do not.",
    FEWER: "The paper's values are over five seeds; some of ours are over fewer, and without a deviation over one.",
}


@dataclass(frozen=True)
class Question:
    """What a reader is asked: rows and seeds of a study, what was measured of them, the reader's options.

    `fast` runs follow another schedule than the paper's: whether they agree with it is not said.
    """

    cells: Sequence[Cell]
    seeds: Sequence[int]
    measured: Measured
    options: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""
    fast: bool = False

    def figure_title(self, cell: Cell) -> str:
        """Return what a figure shows, in few words; a short schedule is named in it."""
        mark = f"FAST SCHEDULE, {cell.study.fast_schedule}: " if self.fast else ""
        images = ", held-out images" if cell.settings.held_out else ""
        return f"{mark}{title(cell.dataset)} {cell.scenario}{images}"

    def several(self) -> bool:
        """Say whether the study compares several runs: a figure of one of them then says which."""
        return len({cell.variant.name for cell in self.cells}) > 1

    def rows(self, measure: str, cell: Cell) -> dict[int, Rows]:
        """Return what was measured of a row of runs, by seed."""
        found = {seed: self.measured.of(measure, cell, seed) for seed in self.seeds}
        return {seed: rows for seed, rows in found.items() if rows}


@dataclass(frozen=True)
class Outcome:
    """What a reader makes: sheets, LaTeX in place of theirs if it is laid out otherwise, and figures by name."""

    sheets: tuple[Sheet, ...] = ()
    latex: str | None = None
    figures: Mapping[str, Figure] = field(default_factory=dict)


@dataclass(frozen=True)
class Reader:
    """A way to read runs: what it needs of each, the options it has, and what it makes."""

    measures: Callable[[Mapping[str, Any]], tuple[str, ...]]
    make: Callable[[Question], Outcome]
    options: tuple[str, ...] = ()


# -- a table of results beside the paper's -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A row of a table: what was reached, by metric, over which seeds, and in each of them."""

    cell: Cell
    seeds: tuple[int, ...]
    ours: Mapping[str, Statistic]
    by_seed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    def digits(self, metric: str) -> int:
        """Digits after the point."""
        return 0 if metric == "components" else 2

    def agrees(self, metric: str) -> bool | None:
        """Say whether it agrees with the paper, None if one of the two has no number."""
        published, ours = self.cell.published(metric), self.ours.get(metric)
        return None if published is None or ours is None else agrees(ours.mean, published)

    def difference(self, metric: str) -> str:
        """Return ours less the paper's."""
        published, ours = self.cell.published(metric), self.ours.get(metric)
        if published is None or ours is None:
            return ""
        return f"{round(ours.mean, 2) - published.mean:+.{self.digits(metric)}f}"


def entries(question: Question, metrics: Sequence[str]) -> list[Entry]:
    """Return the rows of a table, with and without measured values."""
    found = []
    for cell in question.cells:
        values: dict[str, dict[int, float]] = {metric: {} for metric in metrics}
        spreads: dict[int, float] = {}
        for metric in metrics:
            for seed, rows in question.rows(METRICS[metric], cell).items():
                if rows[0][metric]:
                    values[metric][seed] = float(rows[0][metric])
                if metric == "components" and rows[0]["components_std"]:
                    spreads[seed] = float(rows[0]["components_std"])
        ours = {metric: Statistic.of(list(by_seed.values())) for metric, by_seed in values.items() if by_seed}
        if "components" in ours and spreads:  # their spread is over classes, as in the paper
            known = ours["components"]
            ours["components"] = Statistic(known.mean, sum(spreads.values()) / len(spreads), known.count)
        seeds = tuple(sorted({seed for by_seed in values.values() for seed in by_seed}))
        found.append(Entry(cell, seeds, ours, values))
    return found


def _table(question: Question) -> Outcome:
    metrics = list(question.options.get("metrics", ("A_step", "A_inc")))
    listed = entries(question, metrics)
    heading = ["dataset", "scenario", "method", "seeds"]
    # A short schedule is not compared with the paper's.
    beside = ["paper"] if question.fast else ["paper", "difference", "agrees"]
    for metric in metrics:
        heading += [metric, *(beside if _has_paper(listed, metric) else [])]
    rows = []
    for entry in listed:
        cell = entry.cell
        line = [cell.dataset, cell.scenario, cell.variant.name, seeds_in_words(entry.seeds) or "none"]
        for metric in metrics:
            digits = entry.digits(metric)
            line.append(with_spread(entry.ours.get(metric), digits) or "-")
            if _has_paper(listed, metric):
                verdict = {True: "yes", False: "no", None: ""}[_verdict(question, entry, metric)]
                compared = [with_spread(cell.published(metric), digits), entry.difference(metric), verdict]
                line += compared[: len(beside)]
        rows.append(tuple(line))
    notes = list(_table_notes(question, listed, metrics))
    table = Sheet(question.title, tuple(heading), tuple(rows), names=4, groups=2, notes=tuple(notes))
    latex = _paper_layout(question, listed, metrics, notes)
    paired = _differences(question, listed, metrics)
    if paired is None:
        return Outcome((table,), latex=latex)
    return Outcome((table, paired), latex=f"{latex}\n{sheet.latex(paired)}")


def _has_paper(listed: Sequence[Entry], metric: str) -> bool:
    return any(entry.cell.published(metric) is not None for entry in listed)


def _table_notes(question: Question, listed: Sequence[Entry], metrics: Sequence[str]) -> Iterator[str]:
    if not question.fast and any(_has_paper(listed, metric) for metric in metrics):
        yield TOLERANCE
        yield from _tally(question, listed, metrics)
    few = [entry for entry in listed if 0 < len(entry.seeds) < FULL_SEEDS]
    published = [entry.cell.published(metric) for entry in listed for metric in metrics]
    if few and any(value.table for value in published if value is not None):  # of numbers of others nobody knows
        yield FEWER
    yield from _partly_measured(listed)
    names = {entry.cell.variant.name for entry in listed if entry.seeds}
    for name in question.options.get("reconstructed", []):
        if name in names:
            yield f"{name} is a reconstruction of a method whose code was never published: it is not judged."
    if question.options.get("order") and not question.fast:
        yield from _order(listed, metrics[0])


def _partly_measured(listed: Sequence[Entry]) -> Iterator[str]:
    """Say which means are not over all seeds of their row: earlier versions measured less."""
    for entry in listed:
        for metric, by_seed in entry.by_seed.items():
            if by_seed and len(by_seed) < len(entry.seeds):
                place = f"{title(entry.cell.dataset)} {entry.cell.scenario}, {entry.cell.variant.name}"
                yield f"{place}: {metric} is over {in_words(sorted(by_seed))} alone."


def _tally(question: Question, listed: Sequence[Entry], metrics: Sequence[str]) -> Iterator[str]:
    """Say how many values agree with the paper's."""
    judged = [_verdict(question, entry, metric) for entry in listed for metric in metrics]
    known = [verdict for verdict in judged if verdict is not None]
    if known:
        yield f"Of {len(known)} values that both have, {sum(known)} agree."


def _order(listed: Sequence[Entry], metric: str) -> Iterator[str]:
    """Say in which scenarios rows come in the paper's order, if the paper's own differ by more than a deviation."""
    verdicts: dict[bool, list[str]] = {True: [], False: []}
    groups: dict[str, list[Entry]] = {}
    for entry in listed:
        groups.setdefault(f"{title(entry.cell.dataset)} {entry.cell.scenario}", []).append(entry)
    for name, members in groups.items():
        pairs = [(a, b) for number, a in enumerate(members) for b in members[number + 1 :]]
        judged = [_same_order(a, b, metric) for a, b in pairs]
        known = [verdict for verdict in judged if verdict is not None]
        if known:
            verdicts[all(known)].append(name)
    if verdicts[True]:
        yield f"Same order as in the paper: {', '.join(verdicts[True])}."
    if verdicts[False]:
        yield f"Another order than in the paper: {', '.join(verdicts[False])}."


def _same_order(one: Entry, other: Entry, metric: str) -> bool | None:
    published = one.cell.published(metric), other.cell.published(metric)
    ours = one.ours.get(metric), other.ours.get(metric)
    if published[0] is None or published[1] is None or ours[0] is None or ours[1] is None:
        return None
    gap = published[0].mean - published[1].mean
    if abs(gap) <= max(published[0].std or 0.0, published[1].std or 0.0):
        return None
    return (ours[0].mean - ours[1].mean) * gap > 0


def _paper_layout(question: Question, listed: Sequence[Entry], metrics: Sequence[str], notes: Sequence[str]) -> str:
    """Return LaTeX as the paper has it: methods below each other, scenarios side by side, the paper's below ours."""
    parts = []
    for dataset in dict.fromkeys(entry.cell.dataset for entry in listed):
        here = [entry for entry in listed if entry.cell.dataset == dataset]
        scenarios = list(dict.fromkeys(entry.cell.scenario for entry in here))
        names = list(dict.fromkeys(entry.cell.variant.name for entry in here))
        by_place = {(entry.cell.variant.name, entry.cell.scenario): entry for entry in here}
        count = len(scenarios)
        spans = [rf"\multicolumn{{{count}}}{{c}}{{{sheet.for_latex(metric)}}}" for metric in metrics]
        rules = [rf"\cmidrule(lr){{{3 + count * n}-{2 + count * (n + 1)}}}" for n in range(len(metrics))]
        body = [" & & " + " & ".join(spans) + r" \\", "".join(rules)]
        body.append(" & ".join(["method", "", *scenarios * len(metrics)]) + r" \\")
        for name in names:
            cells = [by_place.get((name, scenario)) for _ in metrics for scenario in scenarios]
            columns = list(zip(cells, (metric for metric in metrics for _ in scenarios), strict=True))
            ours = [_latex_value(question, e, m) for e, m in columns]
            paper = ["" if e is None else with_spread(e.cell.published(m), e.digits(m)) for e, m in columns]
            body += [r"\midrule", " & ".join([sheet.for_latex(name), "ours", *ours]) + r" \\"]
            if any(paper):
                body.append(" & ".join(["", "paper", *map(sheet.for_latex, paper)]) + r" \\")
        caption = f"{question.title}, {title(dataset)}"
        said = [MARKED.get(note, note) for note in notes]
        parts.append(sheet.latex_table("ll" + "r" * count * len(metrics), body, caption, said))
    return "\n".join(parts)


def _latex_value(question: Question, entry: Entry | None, metric: str) -> str:
    """Return ours in LaTeX, marked if it does not agree with the paper's."""
    value = "" if entry is None else with_spread(entry.ours.get(metric), entry.digits(metric))
    mark = r"$^\dagger$" if entry is not None and _verdict(question, entry, metric) is False else ""
    return sheet.for_latex(value) + mark if value else "--"


def _verdict(question: Question, entry: Entry, metric: str) -> bool | None:
    """Say whether a value agrees with the paper's; None if that is not judged."""
    judged = not question.fast and entry.cell.variant.name not in question.options.get("reconstructed", [])
    return entry.agrees(metric) if judged else None


# -- differences between rows, seed by seed ----------------------------------------------------------------------------


def _differences(question: Question, listed: Sequence[Entry], metrics: Sequence[str]) -> Sheet | None:
    """Return every row less the reference of the study; None without one, or where no other row has its seeds."""
    metrics = [metric for metric in metrics if metric != "components"]
    references = {
        (entry.cell.dataset, entry.cell.scenario): entry
        for entry in listed
        if entry.cell.variant.name == entry.cell.study.reference
    }
    rows, notes = [], []
    for entry in listed:
        reference = references.get((entry.cell.dataset, entry.cell.scenario))
        if reference is None or reference is entry or not entry.seeds:
            continue
        unlike = _unlike(question, entry, reference)
        found = [_difference(entry, reference, metric, unlike) for metric in metrics]
        seeds = sorted({seed for each in found if each is not None for seed in each.seeds})
        place = (entry.cell.dataset, entry.cell.scenario, entry.cell.variant.name, seeds_in_words(seeds) or "none")
        rows.append((*place, *("-" if each is None else each.text() for each in found)))
        if unlike:
            notes.append(f"{' '.join(place[:3])}: not paired: {in_words(unlike)} (other images)")
    if all(row[3] == "none" for row in rows) and not notes:
        return None
    name = listed[0].cell.study.reference
    said = f"Row less {name}, seed by seed: {MEANING}."
    heading = ("dataset", "scenario", "method", "seeds", *metrics)
    return Sheet(f"{question.title}: differences from {name}", heading, tuple(rows), 4, 2, (said, *notes))


def _difference(entry: Entry, reference: Entry, metric: str, unlike: Sequence[int]) -> Difference | None:
    ours = {seed: value for seed, value in entry.by_seed[metric].items() if seed not in unlike}
    return Difference.between(ours, reference.by_seed[metric])


def _unlike(question: Question, entry: Entry, reference: Entry) -> list[int]:
    """Return the seeds of which two rows have seen different images; where that was not recorded, it is not so."""
    ours, theirs = (question.rows(IMAGES, each.cell) for each in (entry, reference))
    return [seed for seed in sorted(ours.keys() & theirs.keys()) if ours[seed] != theirs[seed]]


# -- accuracy after every task -----------------------------------------------------------------------------------------


def _curves(question: Question) -> Outcome:
    figures: dict[str, list[Series]] = {}
    titles: dict[str, str] = {}
    rows = []
    for cell in question.cells:
        found = _per_task(question, cell)
        steps = [Statistic.of(values) for values in zip(*found.values(), strict=False)]
        line = (cell.dataset, cell.scenario, cell.variant.name, seeds_in_words(list(found)) or "none")
        places = (0, len(steps) // 2, len(steps) - 1) if steps else ()
        shown = [f"{with_spread(steps[place])} ({place + 1})" for place in places] or ["-"] * 3
        rows.append((*line, *shown))
        if steps:
            name = f"{cell.dataset}-{cell.scenario}"
            titles[name] = question.figure_title(cell)
            # Every row keeps its colour, whichever of the others were measured.
            place = cell.study.runs.index(cell.variant)
            figures.setdefault(name, []).append(replace(_curve(cell.variant.name, steps), style=place))
    heading = ("dataset", "scenario", "method", "seeds", "first task", "half way", "last task")
    notes = ("Accuracy over all seen classes, in percent; the number of the task is in brackets.",)
    drawn = {
        name: Figure(titles[name], "task", "accuracy (%)", tuple(series), whole_x=True, limits=(0.0, 100.0))
        for name, series in figures.items()
    }
    return Outcome((Sheet(question.title, heading, tuple(rows), 4, 2, notes),), figures=drawn)


def _per_task(question: Question, cell: Cell) -> dict[int, list[float]]:
    """Return the accuracy after every task, by seed."""
    found = {}
    for seed, rows in question.rows("accuracy", cell).items():
        values = [float(word) for word in rows[0]["A_step_per_task"].split()]
        if values:
            found[seed] = values
    return found


def _curve(name: str, steps: Sequence[Statistic]) -> Series:
    x = [float(number) for number in range(1, len(steps) + 1)]
    bands = all(step.std is not None for step in steps)
    low = [step.mean - (step.std or 0.0) for step in steps] if bands else []
    high = [step.mean + (step.std or 0.0) for step in steps] if bands else []
    return Series(name, x, [step.mean for step in steps], low, high)


# -- eigenvalues of the feature matrix ---------------------------------------------------------------------------------


def elbow(values: Sequence[float]) -> int:
    """Return after how many eigenvalues (largest first) the steepest fall comes."""
    floor = max(values[0], 1e-300) * 1e-9  # what is smaller is rounding
    clipped = [max(value, floor) for value in values]
    ratios = [before / after for before, after in itertools.pairwise(clipped)]
    return max(range(len(ratios)), key=ratios.__getitem__) + 1 if ratios else len(values)


def _spectrum(question: Question) -> Outcome:
    rows: list[tuple[str, ...]] = []
    figures = {}
    lines = [_damping_line(cell) for cell in question.cells]
    for cell, line in zip(question.cells, lines, strict=True):
        for seed, listed in question.rows("spectrum", cell).items():
            values_of = {int(row["task"]): [float(word) for word in row["values"].split()] for row in listed}
            classes = {int(row["task"]): int(row["classes"]) for row in listed}
            for task, values in values_of.items():
                found, seen = elbow(values), classes[task]
                above = "-" if line is None else str(sum(value > line for value in values))
                verdict = "yes" if found in (seen - 1, seen) else "no"
                place = (cell.dataset, cell.scenario, cell.variant.name, str(seed))
                rows.append((*place, str(task), str(seen), str(found), verdict, above))
            which = f"-{slug(cell.variant.name)}" if question.several() else ""
            name = f"{cell.dataset}-{cell.scenario}{which}-seed{seed}"
            figures[name] = _spectrum_figure(question, cell, values_of, classes, line)
    heading = ["dataset", "scenario", "method", "seed", "task", "seen classes", "elbow", "as expected", "above line"]
    notes = [
        "The elbow is where the steepest fall between two eigenvalues comes; it is expected at the number of seen "
        "classes, or one before it, since probabilities sum to one.",
        "The line is damping / efm_weight: larger eigenvalues weigh more in the drift penalty than the identity does.",
    ]
    if None in lines:
        notes.append("Without damping there is no line: the feature matrix alone weighs the drift.")
    if set(lines) == {None}:
        rows = [row[:-1] for row in rows]
        del heading[-1], notes[1]
    return Outcome((Sheet(question.title, tuple(heading), tuple(rows), 4, 4, tuple(notes)),), figures=figures)


def _damping_line(cell: Cell) -> float | None:
    """Return the eigenvalue that weighs as much as the damping; None where there is no damping."""
    method = resolve(cell.settings).method
    damping, weight = (getattr(method, name, 0.0) for name in ("damping", "efm_weight"))
    return damping / weight if damping and weight else None


def _spectrum_figure(
    question: Question,
    cell: Cell,
    values_of: Mapping[int, Sequence[float]],
    classes: Mapping[int, int],
    line: float | None,
) -> Figure:
    most = min(max(map(len, values_of.values())), round(1.5 * max(classes.values())) + 5)
    series = tuple(
        Series(f"task {task}", [float(n + 1) for n in range(most)], [v if v > 0 else math.nan for v in values[:most]])
        for task, values in values_of.items()
    )
    references = [Reference(float(seen), str(seen), axis="x") for seen in classes.values()]
    if line is not None:
        references.append(Reference(line, "damping / efm_weight"))
    name = question.figure_title(cell) + (f", {cell.variant.name}" if question.several() else "")
    words = "number of the eigenvalue; dashed: seen classes"
    return Figure(name, words, "eigenvalue", series, tuple(references), log_y=True, whole_x=True, ordered=True)


# -- seconds -----------------------------------------------------------------------------------------------------------


def _timing(question: Question) -> Outcome:
    rows = []
    columns = ("first_epoch", "later_epoch", "end_of_task")
    for cell in question.cells:
        groups: dict[tuple[str, str], dict[int, dict[str, str]]] = {}
        for seed, listed in question.rows("timing", cell).items():
            groups.setdefault((listed[0]["at_a_time"], listed[0]["hardware"]), {})[seed] = listed[0]
        for (beside, hardware), members in groups.items():
            known = [[float(each[column]) for each in members.values() if each[column]] for column in columns]
            means = [f"{sum(values) / len(values):.3f}" if values else "-" for values in known]
            place = (cell.dataset, cell.scenario, cell.variant.name, hardware)
            rows.append((*place, beside, seeds_in_words(list(members)), *means))
        if not groups:
            rows.append((cell.dataset, cell.scenario, cell.variant.name, "-", "", "none", "-", "-", "-"))
    heading = (
        "dataset",
        "scenario",
        "method",
        "hardware",
        "at a time",
        "seeds",
        "first task",
        "later task",
        "task end",
    )
    notes = (
        "Seconds: medians over the epochs of the first task and of later ones, the first epoch of a task left out, and "
        "what the method does at the end of a later task. Of runs that shared a GPU it is said how many did.",
        "Methods that train in the first task only have no epoch in later ones.",
    )
    return Outcome((Sheet(question.title, heading, tuple(rows), 4, 2, notes),))


# -- noise along directions --------------------------------------------------------------------------------------------


def _perturbation(question: Question) -> Outcome:
    rows = []
    figures: dict[str, list[Series]] = {}
    titles: dict[str, str] = {}
    for cell in question.cells:
        seeds = question.rows("perturbation", cell)
        found: dict[tuple[str, float], dict[int, Mapping[str, str]]] = {}
        for seed, row in ((seed, row) for seed, listed in seeds.items() for row in listed):
            # The left end of the curves is what the run reached without noise.
            none = {**row, "change": "0", "accuracy": row["unperturbed"]}
            found.setdefault((row["directions"], 0.0), {})[seed] = none
            found.setdefault((row["directions"], float(row["sigma"])), {})[seed] = row
        place = (cell.dataset, cell.scenario, cell.variant.name, seeds_in_words(list(seeds)) or "none")
        for (directions, sigma), members in sorted(found.items()):
            stats = [_over_seeds(members, name) for name in ("change", "accuracy")]
            shown = (with_spread(stat, digits) for stat, digits in zip(stats, (4, 2), strict=True))
            rows.append((*place, directions, f"{sigma:g}", *shown))
        if not found:
            rows.append((*place, "-", "-", "-", "-"))
        for what in ("change", "accuracy") if found else ():
            stem = f"{cell.dataset}-{cell.scenario}-{what}"
            titles[stem] = question.figure_title(cell)
            for directions in dict.fromkeys(kind for kind, _ in found):
                curve = _noise(found, directions, what)
                name = f"{cell.variant.name}, {directions}" if question.several() else directions
                figures.setdefault(stem, []).append(replace(curve, label=name))
    heading = ("dataset", "scenario", "method", "seeds", "directions", "sigma", "change", "accuracy")
    notes = (
        "Noise of standard deviation sigma in the features: along the directions of the feature matrix that matter "
        "(principal), or along all others. Change is the mean total variation between the probabilities with and "
        "without noise, from 0 to 1; accuracy is in percent, over all classes after the last task.",
    )
    drawn = {stem: _noise_figure(titles[stem], stem, series) for stem, series in figures.items()}
    return Outcome((Sheet(question.title, heading, tuple(rows), 5, 2, notes),), figures=drawn)


def _over_seeds(members: Mapping[int, Mapping[str, str]], name: str) -> Statistic:
    return Statistic.of([float(each[name]) for each in members.values()])


def _noise(found: Mapping[tuple[str, float], Mapping[int, Mapping[str, str]]], directions: str, what: str) -> Series:
    sigmas = sorted(sigma for kind, sigma in found if kind == directions)
    curve = _curve(directions, [_over_seeds(found[directions, sigma], what) for sigma in sigmas])
    return replace(curve, x=sigmas)


def _noise_figure(name: str, stem: str, series: Sequence[Series]) -> Figure:
    percent = stem.endswith("accuracy")
    words = "accuracy (%)" if percent else "change of probabilities"
    limits = (0.0, 100.0) if percent else (0.0, 1.0)
    return Figure(name, "standard deviation of the noise", words, tuple(series), limits=limits)


def _table_measures(options: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(["accuracy", *(METRICS[metric] for metric in options.get("metrics", ()))]))


READERS = {
    "table": Reader(_table_measures, _table, ("metrics", "reconstructed", "order")),
    "curves": Reader(lambda _: ("accuracy",), _curves),
    "spectrum": Reader(lambda _: ("spectrum",), _spectrum),
    "perturbation": Reader(lambda _: ("perturbation",), _perturbation),
    "timing": Reader(lambda _: ("timing",), _timing),
}
