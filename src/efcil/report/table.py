"""Runs gathered into rows: one per dataset, scenario and label, with mean and deviation over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efcil.errors import EfcilError
from efcil.report.paper import PaperValue, paper_value
from efcil.runfolder import RunFolder

# Name in summary.json -> heading. Accuracies and forgetting are in percent.
METRICS = {
    "A_step": "A_step",
    "A_inc": "A_inc",
    "task_mean": "task mean",
    "forgetting": "forgetting",
    "task_aware_A_step": "task-aware",
    "seconds": "seconds",
}


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
class Row:
    """All seeds of one method (by label) on one dataset and scenario."""

    dataset: str
    scenario: str
    label: str
    seeds: tuple[int, ...]
    ours: dict[str, Statistic]
    paper: dict[str, PaperValue]


@dataclass(frozen=True)
class Problem:
    """A run that is not in the table, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Table:
    """Rows in the order of dataset, scenario and label, and the runs that could not be counted."""

    rows: tuple[Row, ...]
    problems: tuple[Problem, ...] = field(default=())


def table(runs: Iterable[RunFolder]) -> Table:
    """Gather runs. Unfinished, damaged and repeated ones become problems, never silently missing rows."""
    problems: list[Problem] = []
    groups: dict[tuple[str, str, str], dict[int, tuple[RunFolder, dict[str, Any]]]] = {}
    for run in runs:
        if not run.summary_file.exists():
            problems.append(Problem(run.path, "not finished"))
            continue
        try:
            summary = run.read_summary()
        except EfcilError as error:
            problems.append(Problem(run.path, str(error)))
            continue
        seeds = groups.setdefault((summary["dataset"], summary["scenario"], summary["label"]), {})
        other = seeds.get(summary["seed"])
        if other is not None:
            older, newer = sorted([other, (run, summary)], key=lambda pair: str(pair[1].get("finished") or ""))
            problems.append(Problem(older[0].path, f"the same run as {newer[0].path}, which is counted instead"))
            seeds[summary["seed"]] = newer
        else:
            seeds[summary["seed"]] = (run, summary)
    rows = [_row(key, [seeds[seed][1] for seed in sorted(seeds)]) for key, seeds in groups.items()]
    return Table(
        tuple(sorted(rows, key=lambda row: (row.dataset, *_scenario_key(row.scenario), row.label))), tuple(problems)
    )


def _row(key: tuple[str, str, str], summaries: Sequence[dict[str, Any]]) -> Row:
    ours, paper = {}, {}
    for metric in METRICS:
        values = [value for value in (_number(summary, metric) for summary in summaries) if value is not None]
        if values:
            ours[metric] = Statistic.of(values)
        published = paper_value(*key, metric)
        if published is not None:
            paper[metric] = published
    return Row(*key, tuple(summary["seed"] for summary in summaries), ours, paper)


def _number(summary: dict[str, Any], metric: str) -> float | None:
    value = summary.get(metric)
    if isinstance(value, dict):
        value = value.get("total")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _scenario_key(name: str) -> tuple[str, int, str]:
    letters = name.rstrip("0123456789")
    return letters, int(name[len(letters) :] or 0), name
