"""All figures of a report as files, under names that say what they show."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from efcil.report import figures
from efcil.report.figure import Figure, HeatMap
from efcil.report.figures import Shown
from efcil.report.files import FIGURE_FORMATS, write_figure
from efcil.report.groups import RANKED
from efcil.report.table import Table

LONGEST_STEM = 120


def write_figures(
    table: Table, folder: Path, formats: Sequence[str] = FIGURE_FORMATS, metrics: Sequence[str] | None = None
) -> list[Path]:
    """Write every figure of a report below `folder`, and return the files."""
    written: list[Path] = []
    for stem, figure in figures_of(table, metrics or ("A_step", "A_inc")):
        written += write_figure(figure, folder / stem, formats)
    return written


def figures_of(table: Table, metrics: Sequence[str]) -> Iterator[tuple[str, Figure | HeatMap]]:
    """Yield every figure with its name: of the groups by `metrics`, and of every row."""
    used: set[str] = set()
    for group in table.groups:
        shown = Shown.of(group)
        place = f"{group.dataset}-{group.scenario}" + ("" if group.held_out is None else f"-held-out-{group.held_out}")
        for name, figure in (*_of_group(shown, metrics), *_of_rows(shown)):
            if figure is not None:
                stem = slug(f"{place}-{name}")
                while stem in used:
                    stem += "-again"
                used.add(stem)
                yield stem, figure


def _of_group(shown: Shown, metrics: Sequence[str]) -> Iterator[tuple[str, Figure | HeatMap | None]]:
    for metric in (metric for metric in metrics if metric in RANKED):
        yield f"{metric}-after-every-task", figures.curves(shown, metric)
        for figure in figures.sweeps(shown, metric):
            yield f"{metric}-against-{figure.x_title}", figure
        yield f"{metric}-against-seconds", figures.against(shown, metric, "seconds")
        yield f"{metric}-against-storage", figures.against(shown, metric, "stored")
    yield "old-classes", figures.old_classes(shown)
    yield "new-classes", figures.new_classes(shown)
    yield "forgetting-by-task", figures.forgetting_by_task(shown)


def _of_rows(shown: Shown) -> Iterator[tuple[str, Figure | HeatMap | None]]:
    for _, _, name, details in shown.named():
        yield f"{name}-accuracy", figures.accuracy_map(name, details)
        yield f"{name}-classes", figures.class_map(details)
        yield f"{name}-confusion", figures.confusion_map(details)
        yield f"{name}-spectrum", figures.spectrum(details)
        yield f"{name}-noise", figures.noise(details)
        for figure in figures.losses(details):
            yield f"{name}-loss-{figure.title}", figure


def slug(text: str) -> str:
    """Return text as the name of a file on any system; where too much of it is lost, a digest tells names apart."""
    plain = re.sub(r"[^\w.+=-]+", "-", text.replace(", ", "-"), flags=re.ASCII).strip("-.")
    whole = plain == re.sub(r",? +", "-", text) and len(plain) <= LONGEST_STEM
    return plain if whole else f"{plain[:LONGEST_STEM]}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}"
