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


def paper(value: PaperValue | None, plus_minus: str) -> str:
    """Return a published number with its deviation, if one was published."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" + ("" if value.std is None else f"{plus_minus}{value.std:.2f}")


def one_line(text: object) -> str:
    """Return text on one line: after a line break in a name, the rest would be read as something else."""
    return printable(" ".join(str(text).split()))


def escape_markdown(text: str) -> str:
    """Return text on one line for a cell of a Markdown table: no cell ends inside it, and no HTML begins."""
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
