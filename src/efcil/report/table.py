"""Runs gathered into rows: one per dataset, scenario and label, with mean and deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efcil.data.domains import counted
from efcil.errors import EfcilError
from efcil.network.weights import UNSTATED
from efcil.report.groups import Group, changes_of, groups
from efcil.report.paper import PaperValue, paper_value
from efcil.resolution import label
from efcil.resolution.identity import differences
from efcil.runfolder import RunFolder
from efcil.settings import Settings

# Name in summary.json -> heading. Accuracies and forgetting are in percent.
METRICS = {
    "A_step": "A_step",
    "A_inc": "A_inc",
    "task_mean": "task mean",
    "forgetting": "forgetting",
    "task_aware_A_step": "task-aware",
    "seconds": "seconds",
    "stored": "stored MB",
}
#: What a number in summary.json is multiplied by to be shown.
SCALES = {"stored": 1e-6}


# The metrics of classifiers other than the method's own.
CLASSIFIER_METRICS = ("A_step", "A_inc")


@dataclass(frozen=True)
class Statistic:
    """Mean and sample standard deviation (n - 1); `std` is None for a single value."""

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic:
        """Summarise at least one value."""
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Trial:
    """One seed of a row: its values by metric, and what another row's must share to be paired with it.

    `images` is the digest of its images, `order` the order of its classes; None where that was not recorded. `answers`
    are those that classes share, None where every class is an answer of its own.
    """

    seed: int
    values: dict[str, float]
    images: str | None = None
    order: tuple[Any, ...] | None = None
    answers: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Row:
    """All seeds of one method (by label) on one dataset and scenario.

    `runs` are their folders and `trials` their values, in the order of the seeds. `classifiers` has the results by
    classifier if several were measured, the method's own first. `notes` say what a reader of the means must know.
    `changes` is what differs from the preset, and `settings` everything that it was trained with (empty if that was not
    recorded). `images` are digests of the images that its seeds were made with.
    """

    dataset: str
    scenario: str
    label: str
    seeds: tuple[int, ...]
    ours: dict[str, Statistic]
    paper: dict[str, PaperValue]
    classifiers: dict[str, dict[str, Statistic]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    runs: tuple[RunFolder, ...] = ()
    method: str = ""
    changes: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()

    def by_classifier(self, metrics: Sequence[str]) -> dict[str, dict[str, Statistic]]:
        """Return the classifiers' results if any of the `metrics` is measured for them."""
        return self.classifiers if set(metrics) & set(CLASSIFIER_METRICS) else {}


@dataclass(frozen=True)
class Problem:
    """A run that is not in the table, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Table:
    """Rows in the order of dataset, scenario and label, and the runs that could not be counted.

    `against` names the row that the others are compared with, seed by seed.
    """

    rows: tuple[Row, ...]
    problems: tuple[Problem, ...] = field(default=())
    against: str | None = None

    @property
    def groups(self) -> list[Group]:
        """The rows by dataset, scenario and what they were tested on: results that may stand in one table."""
        return groups(self.rows)


def table(runs: Iterable[RunFolder]) -> Table:
    """Gather runs. Unfinished, damaged and repeated ones become problems, never silently missing rows."""
    problems: list[Problem] = []
    groups: dict[tuple[str, str, str], dict[int, tuple[RunFolder, dict[str, Any]]]] = {}
    for run in runs:
        if not run.summary_file.exists():
            problems.append(Problem(run.path, "not finished"))
            continue
        try:
            summary = run.verified_summary()
        except EfcilError as error:
            problems.append(Problem(run.path, str(error)))
            continue
        seeds = groups.setdefault((summary["dataset"], summary["scenario"], summary["label"]), {})
        other = seeds.get(summary["seed"])
        if other is not None:
            older, newer = sorted([other, (run, summary)], key=lambda pair: str(pair[1].get("finished") or ""))
            problems.append(Problem(older[0].path, _repeated(older, newer)))
            seeds[summary["seed"]] = newer
        else:
            seeds[summary["seed"]] = (run, summary)
    rows = [_row(key, [seeds[seed] for seed in sorted(seeds)]) for key, seeds in groups.items()]
    return Table(
        tuple(sorted(rows, key=lambda row: (row.dataset, *_scenario_key(row.scenario), row.label))), tuple(problems)
    )


def _row(key: tuple[str, str, str], members: Sequence[tuple[RunFolder, dict[str, Any]]]) -> Row:
    summaries = [summary for _, summary in members]
    ours = _statistics(summaries, tuple(METRICS))
    dataset, scenario, name = key
    known = [_settings_today(run) for run, _ in members]
    today = {name if settings is None else label(settings) for settings in known}
    found = {metric: paper_value(dataset, scenario, name, metric) if today == {name} else None for metric in METRICS}
    paper = {metric: value for metric, value in found.items() if value is not None}
    beside = [mapping(summary, "classifiers") for summary in summaries]
    others = {
        name: _statistics([mapping(each, name) for each in beside], CLASSIFIER_METRICS)
        for name in dict.fromkeys(name for each in beside for name in each)
    }
    own = {metric: ours[metric] for metric in CLASSIFIER_METRICS if metric in ours}
    return Row(
        *key,
        seeds=tuple(summary["seed"] for summary in summaries),
        ours=ours,
        paper=paper,
        classifiers={"own": own, **others} if others else {},
        notes=(
            *_in_full(name, known[0]),
            *_pretrained(summaries),
            *_answers(summaries),
            *(f"with today's presets and defaults its label is {other}" for other in sorted(today - {name})),
            *_differences(summaries, "images", _data),
            *_differences(summaries, "versions of the method", _version),
            *_unlike(members),
            *_differences(summaries, "ways of computing", _computing),
            *_mixed(summaries),
            *_missing(ours, others, len(summaries)),
        ),
        runs=tuple(run for run, _ in members),
        method=summaries[0]["method"],
        changes=_changes(summaries[0]["method"], name, known[0]),
        settings=_settings(*members[0]),
        images=tuple(dict.fromkeys(digest for summary in summaries if (digest := _data(summary)) is not None)),
        trials=tuple(map(_trial, summaries)),
    )


def _trial(summary: dict[str, Any]) -> Trial:
    order, answers = (
        tuple(value) if isinstance(value := summary.get(name), list) else None for name in ("class_order", "answers")
    )
    values = {metric: value for metric in METRICS if (value := _number(summary, metric)) is not None}
    return Trial(summary["seed"], values, _data(summary), order, answers)


def _changes(method: str, name: str, settings: Settings | None) -> dict[str, str]:
    """Return what differs from the preset, also where the label was shortened to fit a folder's name."""
    if settings is not None and label(settings) == name:
        return changes_of(method, label(settings, whole=True))
    return changes_of(method, name)


def _settings(run: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved settings of a run, from its summary or, of earlier versions, from settings.yaml."""
    found = mapping(summary, "identity")
    with suppress(EfcilError):
        return found or run.read_identity() or {}
    return found


def _statistics(summaries: Sequence[dict[str, Any]], metrics: Sequence[str]) -> dict[str, Statistic]:
    numbers = {metric: [_number(summary, metric) for summary in summaries] for metric in metrics}
    measured = {metric: [value for value in values if value is not None] for metric, values in numbers.items()}
    return {metric: Statistic.of(values) for metric, values in measured.items() if values}


def _differences(
    summaries: Sequence[dict[str, Any]], what: str, say: Callable[[dict[str, Any]], str | None]
) -> tuple[str, ...]:
    """Return a note if `say` gives different texts for the seeds; it gives None for summaries without that fact."""
    seeds: dict[str, list[int]] = {}
    for summary in summaries:
        value = say(summary)
        if value is not None:
            seeds.setdefault(value, []).append(summary["seed"])
    if len(seeds) < 2:
        return ()
    listed = (f"{value} (seed {' '.join(map(str, numbers))})" for value, numbers in seeds.items())
    return (f"seeds of different {what}: {', '.join(listed)}",)


def _unlike(members: Sequence[tuple[RunFolder, dict[str, Any]]]) -> tuple[str, ...]:
    """Return a note if runs differ in something their label does not show, such as a default that has changed."""
    known = [identity for member in members if (identity := _settings(*member))]
    names = {name for other in known[1:] for name in differences(known[0], other)} - {"seed", "class_seed"}
    return (f"seeds with different settings: {', '.join(sorted(names))}",) if names else ()


def _repeated(older: tuple[RunFolder, dict[str, Any]], newer: tuple[RunFolder, dict[str, Any]]) -> str:
    """Return why the older of two runs with one name and seed is not counted; they need not be the same run."""
    pairs = [(_settings(*each), each[1]) for each in (older, newer)]
    names = sorted(differences(pairs[0][0], pairs[1][0])) if all(settings for settings, _ in pairs) else []
    other = [f"other settings ({', '.join(names)})"] if names else []
    for what, say in (("another version of the method", _version), ("other images", _data)):
        if len({value for _, summary in pairs if (value := say(summary)) is not None}) > 1:
            other.append(what)
    if not other:
        return f"the same run as {newer[0].path}, which is counted instead"
    return f"{newer[0].path} has the same name and seed, but {' and '.join(other)}; the newer one is counted"


def _settings_today(run: RunFolder) -> Settings | None:
    """Return the settings of the run as of now: a preset or a default may have changed since it was trained."""
    try:
        settings = run.read_settings()
        label(settings)  # of a method that no longer exists, there is none
        return settings
    except EfcilError:
        return None


def _in_full(name: str, settings: Settings | None) -> tuple[str, ...]:
    """Return a note with the full text of a label that was shortened to fit a folder's name."""
    if settings is None or label(settings) != name or label(settings, whole=True) == name:
        return ()
    return (f"in full: {label(settings, whole=True)}",)


def _pretrained(summaries: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return a note on networks that have seen other images before the first task."""
    found = [mapping(summary, "pretrained") for summary in summaries]
    return tuple(dict.fromkeys(_of_weights(facts) for facts in found if facts))


def _of_weights(facts: Mapping[str, Any]) -> str:
    data = facts.get("trained_on")
    return f"pre-trained{'' if data == UNSTATED else f' on {data}'} ({facts.get('source')})"


def _answers(summaries: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Return a note on classes that share their answers: accuracies are of the answers then."""
    found = [each for summary in summaries if isinstance(each := summary.get("answers"), list)]
    return tuple(dict.fromkeys(f"{counted(list(map(str, each)))}, each right in whichever domain" for each in found))


def _version(summary: dict[str, Any]) -> str | None:
    digest = summary.get("method_source")
    return digest[:8] if isinstance(digest, str) else None


def _data(summary: dict[str, Any]) -> str | None:
    digest = summary.get("data")
    return digest[:8] if isinstance(digest, str) else None


def _computing(summary: dict[str, Any]) -> str | None:
    execution = mapping(summary, "execution")
    if not {"precision", "path", "deterministic"} <= execution.keys():
        return None
    threads = f" with {execution['threads']} threads" if "threads" in execution else ""
    deterministic = " deterministic" if execution["deterministic"] else ""
    return f"{execution['precision']} {execution['path']}{deterministic}{threads}"


def _mixed(summaries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a note for every seed whose tasks were not all computed alike, and for lost lines of metrics."""
    for summary in summaries:
        tasks: dict[str, list[int]] = {}
        made_with = summary.get("made_with")
        for number, ways in enumerate(made_with if isinstance(made_with, list) else [], start=1):
            for way in ways if isinstance(ways, list) else []:
                words = ", ".join(f"{name} {value}" for name, value in way.items() if value is not False)
                tasks.setdefault(words, []).append(number)
        if len(tasks) > 1:
            listed = "; ".join(f"tasks {_range(numbers)}: {words}" for words, numbers in tasks.items())
            yield f"seed {summary['seed']} was computed in more than one way ({listed})"
        if summary.get("metrics_lost") is True:
            yield f"seed {summary['seed']} has lost lines of metrics.jsonl"


def _range(numbers: Sequence[int]) -> str:
    whole = len(numbers) > 1 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else " ".join(map(str, numbers))


def _missing(ours: dict[str, Statistic], others: dict[str, dict[str, Statistic]], seeds: int) -> tuple[str, ...]:
    """Return a note for means that do not include all seeds."""
    named = dict(ours)
    for classifier, statistics_of in others.items():
        named |= {f"{metric} of {classifier}": value for metric, value in statistics_of.items()}
    names: dict[int, list[str]] = {}
    for name, value in named.items():
        if value.count < seeds:
            names.setdefault(value.count, []).append(name)
    return tuple(f"not measured for all seeds: {', '.join(n)} ({k} of {seeds})" for k, n in names.items())


def mapping(summary: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the part of a summary called `name`; empty if it is missing or of another type."""
    value = summary.get(name)
    return value if isinstance(value, dict) else {}


def _number(summary: dict[str, Any], metric: str) -> float | None:
    value = summary.get(metric)
    if isinstance(value, dict):
        value = value.get("bytes" if metric == "stored" else "total")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value) * SCALES.get(metric, 1.0)


def _scenario_key(name: str) -> tuple[str, int, str]:
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0), name
