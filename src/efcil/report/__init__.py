"""Tables of finished runs, with the paper's values next to ours, and the accuracy matrix on the console."""

from __future__ import annotations

from efcil.report.matrix import matrices_text, matrix_text
from efcil.report.paper import PaperValue, paper_value
from efcil.report.render import FORMATS, render
from efcil.report.table import METRICS, Problem, Row, Statistic, Table, table

__all__ = [
    "FORMATS",
    "METRICS",
    "PaperValue",
    "Problem",
    "Row",
    "Statistic",
    "Table",
    "matrices_text",
    "matrix_text",
    "paper_value",
    "render",
    "table",
]
