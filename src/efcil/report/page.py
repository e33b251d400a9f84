"""The report as one self-contained HTML page: it loads nothing, reads without JavaScript, and is interactive with it.

Text is escaped by the template engine, charts are drawn here as SVG, and what the script reads is JSON in the page.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import efcil
from efcil.errors import printable
from efcil.output import escape
from efcil.report import figures
from efcil.report.cells import any_paper, ours, seeds_in_words, with_spread
from efcil.report.details import Details
from efcil.report.figure import COLOURS, Figure, HeatMap, styles
from efcil.report.figures import Shown
from efcil.report.groups import RANKED, UPPER_BOUNDS, best_and_second, comparable, number_of
from efcil.report.paired import MEANING, Comparison, comparisons
from efcil.report.svg import chart_data, draw, swatch
from efcil.report.table import CLASSIFIER_METRICS, METRICS, Row, Table, mapping

if TYPE_CHECKING:
    from jinja2 import Environment

MEANINGS = {
    "A_step": "accuracy over all classes after the last task",
    "A_inc": "accuracy over all classes seen, averaged over tasks",
    "task_mean": "accuracy averaged over the tasks, after the last one",
    "forgetting": "how far a task's accuracy has fallen since its best",
    "task_aware_A_step": "accuracy where the task of an image is known",
    "seconds": "time of training, statistics and evaluation",
    "stored": "what the method keeps besides the network",
}
SHOWN_CLASSES, SHOWN_CONFUSIONS, MOST_LOSS_CHARTS = 8, 8, 12


@dataclass(frozen=True)
class Cell:
    """A cell of the overview: what it says, what it is sorted by, and whether it is the best of its column."""

    text: str
    value: float | str
    spread: str = ""
    place: str = ""
    metric: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Block:
    """A figure in the page: the drawing, and the metric or row that it belongs to."""

    identifier: str
    drawing: str
    title: str
    note: str = ""
    metric: str = ""
    key: str = ""
    legend: tuple[tuple[str, str], ...] = ()


@dataclass
class Drawing:
    """Draws the figures of a page and collects what the script needs to know of them."""

    data: dict[str, Any] = field(default_factory=dict)

    def block(
        self, figure: Figure | HeatMap | None, metric: str = "", key: str = "", legend: bool = False
    ) -> Block | None:
        """Return the figure as a part of the page; nothing for no figure."""
        if figure is None:
            return None
        identifier = f"f{len(self.data)}"
        self.data[identifier] = chart_data(figure)
        named: list[tuple[str, str]] = []
        if legend and isinstance(figure, Figure) and len(figure.series) > 1:
            named = [(swatch(i), each.label) for i, each in zip(styles(figure), figure.series, strict=True)]
        return Block(identifier, draw(figure), figure.title, figure.note, metric, key, tuple(named))

    def blocks(self, found: Sequence[tuple[Figure | HeatMap | None, str, str]], legend: bool = False) -> list[Block]:
        """Return all figures that there are, each given with its metric and key."""
        made = [self.block(figure, metric, key, legend) for figure, metric, key in found]
        return [block for block in made if block is not None]


def page(table: Table, metrics: Sequence[str]) -> str:
    """Return the page. Files of a run that cannot be read are reported in their place; the tables do not need them."""
    drawing = Drawing()
    switched = [metric for metric in metrics if metric in RANKED and any(metric in row.ours for row in table.rows)]
    compared = {each.group.title: each for each in comparisons(table, metrics)}
    sections = []
    for number, group in enumerate(table.groups):
        shown = Shown.of(group, f"g{number}")
        beside = _differences(shown, compared.get(group.title))
        sections.append({**_section(shown, metrics, switched, drawing), "differences": beside})
    runs = sum(len(row.seeds) for row in table.rows)
    script, style = _text("report.js"), _text("report.css")
    facts = {
        "title": f"{runs} run{'s' if runs != 1 else ''} of {_listed(sorted({row.dataset for row in table.rows}))}"
        if runs
        else "No finished runs",
        "runs": runs,
        "written": f"{datetime.datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "version": efcil.__version__,
        "meanings": [(metric, METRICS[metric], MEANINGS[metric]) for metric in metrics],
        "switched": [(metric, METRICS[metric], MEANINGS[metric]) for metric in switched],
        "sections": sections,
        "problems": table.problems,
        "script": _safe(script),
        "style": _safe(style),
        "policy": _policy(script),
        "data": _safe(_json({"figures": drawing.data, "ranked": {metric: RANKED[metric] for metric in switched}})),
    }
    return _environment().get_template("report.html").render(facts)


# -- sections --------------------------------------------------------------------------------------------------------


def _section(shown: Shown, metrics: Sequence[str], switched: Sequence[str], drawing: Drawing) -> dict[str, Any]:
    group = shown.group
    return {
        "identifier": shown.prefix,
        "dataset": group.dataset,
        "scenario": group.scenario,
        "held_out": group.held_out is not None,
        "tested_on": group.tested_on,
        "tasks": _tasks_of(shown),
        "steps": max((len(details.sizes) for details in shown.details), default=0),
        "shared": group.shared,
        "columns": _columns(group.rows, metrics),
        "settings": group.settings,
        "scales": [(metric, *(f"{end:.0f}" for end in _range(group.rows, metric))) for metric in switched],
        "paper": any(any_paper(group.rows, metric) for metric in metrics),
        "seeds_differ": len({row.seeds for row in group.rows}) > 1,
        "bounds": [name for name in UPPER_BOUNDS if any(row.method == name for row in group.rows)],
        "rows": [_row(shown, index, metrics, switched) for index in range(len(group.rows))],
        "notes": [
            *((group.name(row), note) for row in group.rows for note in row.notes),
            *(("Not comparable", note) for note in [group.unlike] if note is not None),
            *(("Compare with care", note) for note in [group.begun_apart] if note is not None),
        ],
        "charts": _charts(shown, switched, drawing),
        "maps": drawing.blocks(
            [(figures.accuracy_map(name, details), "", shown.key(i)) for i, _, name, details in shown.named()]
        ),
        "details": [_details(shown, index, metrics, drawing) for index in range(len(group.rows))],
    }


def _columns(rows: Sequence[Row], metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (metric, heading, kind) of the columns of numbers: ours, and the paper's where it has one."""
    columns = []
    for metric in (metric for metric in metrics if any(metric in row.ours for row in rows)):
        columns.append((metric, METRICS[metric], "ours"))
        if any_paper(rows, metric):
            columns.append((metric, "paper", "paper"))
    return columns


def _row(shown: Shown, index: int, metrics: Sequence[str], switched: Sequence[str]) -> dict[str, Any]:
    group, row = shown.group, shown.group.rows[index]
    settings = []
    for value in group.values(row):
        number = number_of(value)
        settings.append(Cell(value, value if number is None else number))
    cells = []
    for metric, _, kind in _columns(group.rows, metrics):
        if kind == "paper":
            cells.append(_cell(row.paper.get(metric), with_spread(row.paper.get(metric)), metric, kind))
        else:
            place = best_and_second(group.rows, metric).get(row.label, "")
            cells.append(_cell(row.ours.get(metric), ours(row.ours.get(metric), metric, " ± "), metric, kind, place))
    return {
        "key": shown.key(index),
        "swatch": _safe(swatch(index)),
        "method": row.method or row.label,
        "name": group.name(row),
        "label": row.label,
        "seeds": row.seeds,
        "said_seeds": seeds_in_words(row.seeds),
        "settings": settings,
        "cells": cells,
        "bound": row.method in UPPER_BOUNDS or not comparable(group.rows),
        "lanes": [(metric, _safe(_lane(shown, index, metric))) for metric in switched],
    }


def _cell(value: Any, text: str, metric: str, kind: str, place: str = "") -> Cell:
    if value is None:
        return Cell("", "", metric=metric, kind=kind)
    mean, _, deviation = text.partition(" ± ")
    return Cell(mean, float(value.mean), deviation, place, metric, kind)


def _lane(shown: Shown, index: int, metric: str) -> str:
    """A row's value on the scale of its group: the mean as a dot, its deviation as a line, the paper as a stroke."""
    row = shown.group.rows[index]
    value, published = row.ours.get(metric), row.paper.get(metric)
    if value is None:
        return ""
    low, high = _range(shown.group.rows, metric)

    def place(number: float) -> float:
        return 6 + 128 * (min(max(number, low), high) - low) / (high - low) if high > low else 70.0

    colour, spoken = f"c{index % len(COLOURS)}", _spoken(row, metric)
    parts = [f'<svg class="lane {colour}" viewBox="0 0 140 18" role="img" aria-label="{spoken}">']
    parts.append('<line class="grid" x1="0" x2="140" y1="9" y2="9"/>')
    if published is not None:
        at = place(published.mean)
        parts.append(f'<line class="paper" x1="{at:.1f}" x2="{at:.1f}" y1="1" y2="17"/>')
    if value.std is not None:
        ends = place(value.mean - value.std), place(value.mean + value.std)
        parts.append(f'<line class="bar" x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="9" y2="9"/>')
    parts.append(f'<circle cx="{place(value.mean):.1f}" cy="9" r="4"/></svg>')
    return "".join(parts)


def _range(rows: Sequence[Row], metric: str) -> tuple[float, float]:
    """Return the ends of the scale on which all values of a metric and the paper's fit, with their deviations."""
    ends = [
        value.mean + sign * (value.std or 0.0)
        for row in rows
        for value in (row.ours.get(metric), row.paper.get(metric))
        if value is not None
        for sign in (-1, 1)
    ]
    return (min(ends), max(ends)) if ends else (0.0, 0.0)


def _spoken(row: Row, metric: str) -> str:
    published = row.paper.get(metric)
    beside = "" if published is None else f", paper {with_spread(published)}"
    return escape(f"{METRICS[metric]} {ours(row.ours.get(metric), metric, ' ± ')}{beside}")


def _differences(shown: Shown, comparison: Comparison | None) -> dict[str, Any] | None:
    """Return the table of differences from a row, and what is not paired."""
    if comparison is None:
        return None
    places = {row.label: index for index, row in enumerate(shown.group.rows)}
    rows = []
    for each in comparison.paired:
        index, found = places[each.row.label], [(metric, each.differences.get(metric)) for metric in comparison.metrics]
        cells = [_cell(value, "" if value is None else value.text(), metric, "ours") for metric, value in found]
        rows.append(
            {
                "key": shown.key(index),
                "swatch": _safe(swatch(index)),
                "name": shown.group.name(each.row),
                "seeds": each.seeds,
                "said_seeds": seeds_in_words(each.seeds),
                "cells": cells,
            }
        )
    return {
        "name": comparison.name,
        "meaning": MEANING,
        "columns": [(metric, METRICS[metric]) for metric in comparison.metrics],
        "rows": rows,
        "notes": comparison.notes,
    }


def _charts(shown: Shown, switched: Sequence[str], drawing: Drawing) -> list[Block]:
    found: list[tuple[Figure | HeatMap | None, str, str]] = []
    found += [(figures.curves(shown, metric), metric, "") for metric in switched]
    found += [(figures.old_classes(shown), "", ""), (figures.new_classes(shown), "", "")]
    found += [(figures.forgetting_by_task(shown), "", "")]
    blocks = drawing.blocks(found)
    for metric in switched:
        blocks += drawing.blocks([(figure, metric, "") for figure in figures.sweeps(shown, metric)], legend=True)
    for other in ("seconds", "stored"):
        blocks += drawing.blocks([(figures.against(shown, metric, other), metric, "") for metric in switched])
    return blocks


def _tasks_of(shown: Shown) -> str:
    sizes = next((details.sizes for details in shown.details if details.sizes), [])
    if not sizes:
        return ""
    split = f"{len(sizes)} tasks of {sizes[0]}" if len(set(sizes)) == 1 else f"tasks of {' + '.join(map(str, sizes))}"
    return f"{sum(sizes)} classes, {split}"


# -- rows ------------------------------------------------------------------------------------------------------------


def _details(shown: Shown, index: int, metrics: Sequence[str], drawing: Drawing) -> dict[str, Any]:
    row, details = shown.group.rows[index], shown.details[index]
    shown_losses = figures.losses(details)[:MOST_LOSS_CHARTS]
    confusion = details.confusion
    maps = [(figures.class_map(details), "", ""), (figures.confusion_map(details), "", "")]
    return {
        "key": shown.key(index),
        "swatch": _safe(swatch(index)),
        "name": shown.group.name(row),
        "label": row.label,
        "problem": details.problem,
        "classifiers": _classifiers(row, metrics),
        "maps": drawing.blocks([*maps, (figures.spectrum(details), "", "")])
        + drawing.blocks([(figures.noise(details), "", "")], legend=True),
        **_ends(details),
        "confusions": [] if confusion is None else confusion[2][:SHOWN_CONFUSIONS],
        "losses": drawing.blocks([(figure, "", "") for figure in shown_losses]),
        "seeds": [(_safe(swatch(place)), seed) for place, seed in enumerate(row.seeds)],
        "made": _provenance(row, details),
        "stored": _stored(details),
        "folders": [str(run.path) for run in row.runs],
    }


def _stored(details: Details) -> str:
    found = details.stored
    if found is None:
        return ""
    network, besides = (f"{count / 1e6:,.2f} MB" for count in (found.network, found.statistics))
    return f"network {network}, besides {besides}"


def _ends(details: Details) -> dict[str, Any]:
    """Return the classes with the lowest and with the highest accuracy, none of them twice."""
    found = details.classes
    classes = [] if found is None else found[2]
    most = min(SHOWN_CLASSES, (len(classes) + 1) // 2)
    return {"weakest": classes[:most], "strongest": classes[most:][::-1][:most]}


def _classifiers(row: Row, metrics: Sequence[str]) -> dict[str, Any] | None:
    found = row.by_classifier(metrics)
    if not found:
        return None
    names = [name for name in CLASSIFIER_METRICS if name in metrics]
    lines = [(name, [ours(values.get(metric), metric, " ± ") for metric in names]) for name, values in found.items()]
    return {"heading": [METRICS[name] for name in names], "lines": lines}


def _provenance(row: Row, details: Details) -> list[dict[str, Any]]:
    """Return what the seeds were made with, those that were made alike together."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for seed, summary in zip(row.seeds, details.summaries, strict=True):
        versions, execution = mapping(summary, "versions"), mapping(summary, "execution")
        earlier = summary.get("earlier_commits")
        listed = [str(commit)[:12] for commit in earlier] if isinstance(earlier, list) else []
        begun = f" (started with {', '.join(listed)})" if listed else ""
        changed = " with uncommitted changes" if summary.get("uncommitted_changes") else ""
        computed = [str(execution[name]) for name in ("precision", "path") if name in execution]
        known = [f"{name} {versions[name]}" for name in ("efcil", "torch", "python") if name in versions]
        facts = {
            "command": str(summary.get("command") or "no command recorded"),
            "commit": f"{str(summary.get('commit') or 'unknown')[:12]}{changed}{begun}",
            "hardware": figures.machine(summary) + (f", {' '.join(computed)}" if computed else ""),
            "versions": ", ".join(known) or "unknown",
        }
        found.setdefault(tuple(facts.items()), []).append(seed)
    return [{"seeds": seeds, **dict(facts)} for facts, seeds in found.items()]


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# -- the template ----------------------------------------------------------------------------------------------------


@cache
def _environment() -> Environment:
    import jinja2

    def finalize(value: Any) -> Any:
        """Spell out control characters in text that comes from data."""
        return printable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("efcil.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters["drawn"] = _safe  # SVG of ours, in which all text is escaped already
    return environment


def _safe(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)  # made by us, with all text from data escaped


def _json(value: Any) -> str:
    """Return JSON that cannot end the element that it stands in, whatever names it has."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return (resources.files("efcil.report") / "templates" / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Return a content security policy under which nothing is loaded and no script but ours is run."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
