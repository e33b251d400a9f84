"""Numbers and notes as all formats of a table write them."""

from __future__ import annotations

from collections.abc import Sequence

from efcil.errors import printable
from efcil.report.groups import Group
from efcil.report.paper import PaperValue
from efcil.report.table import Row, Statistic


def notes_of(group: Group) -> list[str]:
    """Return what a reader of the group's means must know, on one line each."""
    of_rows = [f"{group.name(row)}: {note}" for row in group.rows for note in row.notes]
    known = (group.unpaired, group.unlike, group.begun_apart)
    of_all = [f"{group.title}: {note}" for note in known if note is not None]
    return [printable(note) for note in (*of_rows, *of_all)]


def any_paper(rows: Sequence[Row], metric: str) -> bool:
    """Return whether the paper has a value of this metric for any of the rows."""
    return any(metric in row.paper for row in rows)


def mean_of(value: Statistic | None, metric: str) -> str:
    """Return a mean as tables show it; nothing if it was not measured."""
    if value is None:
        return ""
    decimals = 1 if metric == "seconds" else 2
    return f"{value.mean:.{decimals}f}" if metric != "stored" or value.mean >= 0.1 else f"{value.mean:.2g}"


def ours(value: Statistic | None, metric: str, plus_minus: str) -> str:
    """Return mean and deviation as tables show them; of one seed, and of what never differs, the value alone."""
    if value is None or value.std is None or (metric == "stored" and not value.std):
        return mean_of(value, metric)
    return f"{mean_of(value, metric)}{plus_minus}{value.std:.{1 if metric == 'seconds' else 2}f}"


def with_spread(value: Statistic | PaperValue | None, digits: int = 2) -> str:
    """Return mean and standard deviation, the latter where there is one; nothing for no value."""
    if value is None:
        return ""
    return f"{value.mean:.{digits}f}" + ("" if value.std is None else f" ± {value.std:.{digits}f}")


def seeds_in_words(seeds: Sequence[int]) -> str:
    """Return seeds as people write them: 0-4 for five in a row, or 0 2 5."""
    listed = sorted(seeds)
    whole = len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1))
    return f"{listed[0]}-{listed[-1]}" if whole else " ".join(map(str, listed))


def one_line(text: object) -> str:
    """Return text on one line: after a line break in a name, the rest would be read as something else."""
    return printable(" ".join(str(text).split()))


def escape_markdown(text: str) -> str:
    """Return text on one line for a cell of a Markdown table: no cell ends inside it, and no HTML begins."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
