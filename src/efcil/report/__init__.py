"""Tables of finished runs, with the paper's values next to ours; one page of them with figures; figures as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from efcil.report.figure import Figure, HeatMap, Reference, Series
from efcil.report.files import FIGURE_FORMATS, write_figure
from efcil.report.matrix import matrix_text
from efcil.report.paired import against
from efcil.report.paper import PaperValue, paper_value
from efcil.report.render import FORMATS, render
from efcil.report.table import METRICS, Problem, Row, Statistic, Table, table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from efcil.runfolder import RunFolder

__all__ = [
    "FIGURE_FORMATS",
    "FORMATS",
    "METRICS",
    "Figure",
    "HeatMap",
    "PaperValue",
    "Problem",
    "Reference",
    "Row",
    "Series",
    "Statistic",
    "Table",
    "against",
    "matrix_text",
    "paper_value",
    "render",
    "table",
    "write_figure",
    "write_page",
]


def write_page(
    runs: Iterable[RunFolder], file: Path | str, metrics: Sequence[str] | None = None, reference: str | None = None
) -> Table:
    """Write the report of runs as one self-contained HTML page, and return the table that it shows.

    `reference` names the row that the others are compared with, seed by seed.
    """
    from efcil.files import write_atomically

    gathered = table(runs) if reference is None else against(table(runs), reference)
    write_atomically(Path(file), render(gathered, "html", metrics))
    return gathered
