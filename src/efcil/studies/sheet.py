"""A table as plain cells, written as text, Markdown, CSV or LaTeX."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from efcil.errors import printable
from efcil.output import csv_line
from efcil.report.cells import escape_markdown
from efcil.report.latex import escape_latex


@dataclass(frozen=True)
class Sheet:
    """Cells under a heading. The first `names` columns are words, the others numbers; `notes` belong below it.

    `groups` is the number of columns at the left that name a block of rows: rules separate blocks in LaTeX, and text
    has a table for each.
    """

    title: str
    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    groups: int = 0
    notes: tuple[str, ...] = ()

    def blocks(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Return the rows by what their group columns say, those columns left out."""
        found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
        for row in self.rows:
            found.setdefault(row[: self.groups], []).append(row[self.groups :])
        return list(found.items())


def text(sheet: Sheet, width: int = 80) -> str:
    """Return the sheet for a terminal: a table for each group; one that is too wide is cut into two after its names."""
    parts = [_filled(sheet.title, width)]
    heading = sheet.heading[sheet.groups :]
    names = sheet.names - sheet.groups
    for group, rows in sheet.blocks():
        widths = [max(len(printable(cell)) for cell in column) for column in zip(heading, *rows, strict=True)]
        for columns in _cut(widths, names, width):
            lines = [" ".join(map(printable, group))] if group else []
            cells = [tuple(row[column] for column in columns) for row in (heading, *rows)]
            written = [_aligned(row, [widths[column] for column in columns], names) for row in cells]
            rule = "-" * max(map(len, written))
            parts.append("\n".join([*lines, written[0], rule, *written[1:]]))
    parts += [_filled(note, width) for note in sheet.notes]
    return "\n\n".join(parts) + "\n"


def _cut(widths: Sequence[int], names: int, width: int) -> list[list[int]]:
    """Return the columns of each part: names and as many numbers as fit; never fewer than half of them."""
    columns = list(range(len(widths)))
    if sum(widths) + 2 * (len(widths) - 1) <= width or len(widths) - names < 4:
        return [columns]
    middle = names + (len(widths) - names) // 2
    return [columns[:middle], columns[:names] + columns[middle:]]


def _aligned(row: Sequence[str], widths: Sequence[int], names: int) -> str:
    cells = [
        printable(cell).ljust(width) if place < names else printable(cell).rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _filled(words: str, width: int) -> str:
    return textwrap.fill(printable(words), width, break_long_words=False, break_on_hyphens=False)


def markdown(sheet: Sheet) -> str:
    """Return the sheet as Markdown, its title in bold above it."""
    lines = [f"**{escape_markdown(sheet.title)}**", "", *markdown_table(sheet)]
    lines += [f"\n{escape_markdown(note)}" for note in sheet.notes]
    return "\n".join(lines) + "\n"


def markdown_table(sheet: Sheet) -> list[str]:
    """Return the lines of the table alone."""
    rule = ["---"] * sheet.names + ["---:"] * (len(sheet.heading) - sheet.names)
    rows = [sheet.heading, rule, *sheet.rows]
    return ["| " + " | ".join(map(escape_markdown, row)) + " |" for row in rows]


def comma_separated(sheet: Sheet) -> str:
    """Return the sheet as CSV; title and notes are in the first column of lines of their own, below the rows.

    What was not measured is empty.
    """
    rows = (tuple("" if cell == "-" else cell for cell in row) for row in sheet.rows)
    lines = [sheet.heading, *rows, *((words,) for words in (sheet.title, *sheet.notes))]
    return "".join(csv_line(map(printable, line)) for line in lines)


def latex(sheet: Sheet) -> str:
    """Return the sheet as a LaTeX table that needs the package booktabs."""
    columns = "l" * sheet.names + "r" * (len(sheet.heading) - sheet.names)
    body = [_latex_row(sheet.heading), r"\midrule"]
    for number, (group, rows) in enumerate(sheet.blocks()):
        body += [r"\midrule"] * (number > 0)
        body += [_latex_row((*group, *row)) for row in rows]
    return latex_table(columns, body, sheet.title, sheet.notes)


def latex_table(columns: str, body: Sequence[str], title: str, notes: Sequence[str] = ()) -> str:
    """Return a LaTeX table of lines that are LaTeX already; title and notes are its caption."""
    caption = " ".join(for_latex(words if words.endswith(".") else f"{words}.") for words in (title, *notes))
    size = [r"\footnotesize", r"\setlength{\tabcolsep}{3pt}"] if len(columns) > 6 else []
    lines = [r"\begin{table}", r"\centering", *size, rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{columns}}}"]
    lines += [r"\toprule", *body, r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def _latex_row(cells: Sequence[str]) -> str:
    return " & ".join(map(for_latex, cells)) + r" \\"


def for_latex(words: str) -> str:
    """Escape the characters that LaTeX reads as commands; plus-minus is one of its signs."""
    return escape_latex(words).replace("±", r"$\pm$")
