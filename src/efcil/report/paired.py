"""Differences between rows, seed by seed.

Runs of one seed share the class order, and often the first task. What that brings all of them alike drops out of a
difference, so it varies less from seed to seed than the results themselves do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from efcil.errors import SettingsError, unknown
from efcil.report.groups import RANKED, Group
from efcil.report.table import Row, Statistic, Table, Trial

#: What a difference is, in words.
MEANING = "mean ± standard error over the seeds that both have"


@dataclass(frozen=True)
class Difference:
    """The mean of a row's values less those of another over `seeds`, and its standard error: None for one seed."""

    mean: float
    error: float | None
    seeds: tuple[int, ...]

    @classmethod
    def between(cls, ours: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
        """Compare values by seed; None if there is no seed that both have."""
        seeds = tuple(sorted(ours.keys() & reference.keys()))
        if not seeds:
            return None
        found = Statistic.of([ours[seed] - reference[seed] for seed in seeds])
        return cls(found.mean, None if found.std is None else found.std / math.sqrt(len(seeds)), seeds)

    def text(self, plus_minus: str = " ± ") -> str:
        """Return the difference with its sign, and its error if there is one."""
        return f"{self.mean:+.2f}" + ("" if self.error is None else f"{plus_minus}{self.error:.2f}")


@dataclass(frozen=True)
class Compared:
    """A row beside the reference: the seeds that are paired, differences by metric, and what is not paired, and why."""

    row: Row
    seeds: tuple[int, ...]
    differences: Mapping[str, Difference]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The rows of a group beside one of them; without a `reference`, the group has no row of that name."""

    group: Group
    metrics: tuple[str, ...]
    asked: str
    reference: Row | None = None
    rows: tuple[Compared, ...] = field(default=())

    @property
    def name(self) -> str:
        """The name of the reference, as tables show it."""
        return self.asked if self.reference is None else self.group.name(self.reference)

    @property
    def paired(self) -> list[Compared]:
        """The rows of which at least one seed is paired."""
        return [each for each in self.rows if each.seeds]

    @property
    def notes(self) -> list[str]:
        """What a reader of the differences must know, on one line each."""
        if self.reference is None:
            return [f"{self.group.title}: no row is called {self.asked}, so there are no differences"]
        return [f"{self.group.name(each.row)}: {note}" for each in self.rows for note in each.notes]


def comparisons(table: Table, metrics: Sequence[str]) -> list[Comparison]:
    """Return a comparison for every group; none where no reference was asked for."""
    if table.against is None:
        return []
    shown = tuple(metric for metric in metrics if metric in RANKED)
    if not shown:
        raise SettingsError(f"There are no differences of {', '.join(metrics)}. Add one of {', '.join(RANKED)}.")
    return [_compare(group, table.against, shown) for group in table.groups]


def against(table: Table, name: str) -> Table:
    """Return the table with its rows beside the one called `name`; a name that no row or several have is refused."""
    groups = table.groups
    found = [find(group, name) for group in groups]
    if groups and not any(found):
        raise unknown("row", name, {group.name(row) for group in groups for row in group.rows})
    return replace(table, against=name)


def find(group: Group, name: str) -> Row | None:
    """Return the row that is called so: by its label, its name in the table, or as the only one of its method."""
    for names in (
        {row.label: [row.label] for row in group.rows},
        {row.label: [group.name(row), group.whole_name(row)] for row in group.rows},
        {row.label: [row.method] for row in group.rows},
    ):
        found = [row for row in group.rows if name in names[row.label]]
        if len(found) > 1:
            listed = ", ".join(repr(group.name(row)) for row in found)
            raise SettingsError(f"Several rows of {group.title} are called {name!r}. Name one of them: {listed}.")
        if found:
            return found[0]
    return None


def _compare(group: Group, name: str, metrics: tuple[str, ...]) -> Comparison:
    reference = find(group, name)
    if reference is None:
        return Comparison(group, metrics, name)
    rows = [_compared(row, reference, metrics, group) for row in group.rows if row is not reference]
    return Comparison(group, metrics, name, reference, tuple(rows))


def _compared(row: Row, reference: Row, metrics: Sequence[str], group: Group) -> Compared:
    ours, theirs = ({trial.seed: trial for trial in each.trials} for each in (row, reference))
    reasons: dict[str, list[int]] = {}
    for seed in sorted(ours.keys() | theirs.keys()):
        if seed not in theirs:
            reasons.setdefault(f"no run of {group.name(reference)}", []).append(seed)
        elif seed not in ours:
            reasons.setdefault(f"no run of {group.name(row)}", []).append(seed)
        elif unlike := _unlike(ours[seed], theirs[seed]):
            reasons.setdefault(unlike, []).append(seed)
    left_out = {seed for seeds in reasons.values() for seed in seeds}
    seeds = tuple(seed for seed in sorted(ours) if seed not in left_out)
    differences = {}
    for metric in metrics:
        values = [
            {seed: trials[seed].values[metric] for seed in seeds if metric in trials[seed].values}
            for trials in (ours, theirs)
        ]
        if (found := Difference.between(*values)) is not None:
            differences[metric] = found
    notes = [f"not paired: {in_words(seeds)} ({reason})" for reason, seeds in reasons.items()]
    notes += [f"{metric} over {in_words(d.seeds)} alone" for metric, d in differences.items() if d.seeds != seeds]
    return Compared(row, seeds, differences, tuple(notes))


def _unlike(one: Trial, other: Trial) -> str | None:
    """Return why two runs of a seed cannot be paired; what was not recorded does not count."""
    if None not in (one.images, other.images) and one.images != other.images:
        return "other images"
    if None not in (one.order, other.order) and one.order != other.order:
        return "another class order"
    return "other answers" if one.answers != other.answers else None


def in_words(seeds: Sequence[int]) -> str:
    """Return seeds as a sentence names them."""
    return f"seed{'s' if len(seeds) > 1 else ''} {' '.join(map(str, seeds))}"
