"""The report as one self-contained HTML page: tables, curves, accuracy matrices, and how they were produced."""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

import efcil
from efcil.errors import EfcilError
from efcil.output import escape
from efcil.report.charts import Line, line_chart, style
from efcil.report.table import CLASSIFIER_METRICS, METRICS, Row, Table, mapping

MEANINGS = {
    "A_step": "A_step is the accuracy over all classes after the last task.",
    "A_inc": "A_inc is the accuracy over all classes seen, averaged over tasks.",
    "forgetting": "Forgetting is how far a task's accuracy has fallen since its best.",
    "task_aware_A_step": "Task-aware: the classifier knows which task an image is from.",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --soft: #666; --rule: #ddd; --cell: 0, 114, 178; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --paper: #161616; --soft: #a0a0a0; --rule: #3a3a3a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 64rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin-bottom: .3rem; }
p.soft, figcaption, .soft { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { padding: .2rem .45rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.matrix td, table.matrix th { padding: .15rem .35rem; font-size: .8rem; border: 0; }
figure { margin: 1rem 0; } svg { width: 100%; max-width: 46rem; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg .grid { stroke: var(--rule); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; list-style: none; margin: .2rem 0; }
.legend svg, td svg { width: 26px; height: 8px; vertical-align: middle; margin-right: .4rem; }
details { border-top: 1px solid var(--rule); padding: .4rem 0; } summary { cursor: pointer; }
code { font-size: .85rem; overflow-wrap: anywhere; }
"""


def html(table: Table, metrics: Sequence[str]) -> str:
    """Return the page. Files of a run that cannot be read are reported in their place; the tables do not need them."""
    now = datetime.datetime.now().astimezone()
    runs = sum(len(row.seeds) for row in table.rows)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>efcil report</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style></head><body><h1>Class-incremental learning without exemplars</h1>",
        f'<p class="soft">{runs} finished run{"s" if runs != 1 else ""}, written {now:%Y-%m-%d %H:%M %Z} by efcil '
        f"{escape(efcil.__version__)}. Accuracies are in percent, means and standard deviations over seeds. "
        + " ".join(text for metric, text in MEANINGS.items() if metric in metrics)
        + "</p>",
    ]
    for (dataset, scenario), group in itertools.groupby(table.rows, key=lambda row: (row.dataset, row.scenario)):
        parts.append(_section(f"{dataset} {scenario}", list(group), metrics))
    if not table.rows:
        parts.append("<p>No finished runs.</p>")
    if table.problems:
        items = "".join(f"<li><code>{escape(str(p.path))}</code>: {escape(p.reason)}</li>" for p in table.problems)
        parts.append(f"<h2>Not in the tables</h2><ul>{items}</ul>")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _section(title: str, rows: Sequence[Row], metrics: Sequence[str]) -> str:
    notes = "".join(f"<li>{escape(row.label)}: {escape(note)}</li>" for row in rows for note in row.notes)
    return "\n".join(
        [
            f"<section><h2>{escape(title)}</h2>",
            _results(rows, metrics),
            f"<ul>{notes}</ul>" if notes else "",
            _curves(rows),
            *(_details(row, metrics) for row in rows),
            "</section>",
        ]
    )


def _swatch(index: int) -> str:
    colour, dash = style(index)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<svg viewBox="0 0 26 8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" stroke="{colour}" '
        f'stroke-width="2.5"{dashes}/></svg>'
    )


def _results(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    published = [metric for metric in metrics if any(metric in row.paper for row in rows)]
    head = ["method", "seeds"]
    for metric in metrics:
        head += [METRICS[metric], "paper"] if metric in published else [METRICS[metric]]
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    for index, row in enumerate(rows):
        cells = [_swatch(index) + escape(row.label), str(len(row.seeds))]
        for metric in metrics:
            ours, paper, digits = row.ours.get(metric), row.paper.get(metric), 1 if metric == "seconds" else 2
            cells.append("" if ours is None else _number(ours.mean, ours.std, digits))
            if metric in published:
                cells.append("" if paper is None else f'<span class="soft">{_number(paper.mean, paper.std)}</span>')
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _number(mean: float, std: float | None, digits: int = 2) -> str:
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def _curves(rows: Sequence[Row]) -> str:
    """Accuracy over all seen classes after every task, a line for every method."""
    lines = [_curve(row) for row in rows]
    if not any(len(line.x) > 1 for line in lines):
        return ""
    chart = line_chart(lines, "task", "accuracy over all classes seen (%)", whole_x=True)
    return _figure(chart, [line.name for line in lines], "After every task; bands are one standard deviation.")


def _curve(row: Row) -> Line:
    per_seed = []
    for run in row.runs:
        values = _quietly(run.read_summary).get("A_step_per_task")
        if isinstance(values, list):
            per_seed.append([float(value) if isinstance(value, int | float) else math.nan for value in values])
    if not per_seed or len({len(values) for values in per_seed}) > 1:
        return Line(row.label, [], [])  # it keeps its colour for the row
    columns = list(zip(*per_seed, strict=True))
    whole = [len(column) > 1 and all(map(math.isfinite, column)) for column in columns]
    deviations = [statistics.stdev(column) if known else None for column, known in zip(columns, whole, strict=True)]
    means = [statistics.fmean(column) for column in columns]
    return Line(row.label, [float(task + 1) for task in range(len(means))], means, deviations)


def _figure(chart: str, names: Sequence[str], caption: str) -> str:
    legend = "".join(f"<li>{_swatch(index)}{escape(name)}</li>" for index, name in enumerate(names))
    return f'<figure>{chart}<ul class="legend">{legend}</ul><figcaption>{escape(caption)}</figcaption></figure>'


def _details(row: Row, metrics: Sequence[str]) -> str:
    """The details of a row: its classifiers, the accuracy on every task after every task, losses, and commands."""
    return "\n".join(
        [
            f"<details><summary>{escape(row.label)}</summary>",
            _classifiers(row, metrics),
            _matrix(row),
            _losses(row),
            _provenance(row),
            "</details>",
        ]
    )


def _classifiers(row: Row, metrics: Sequence[str]) -> str:
    found = row.by_classifier(metrics)
    if not found:
        return ""
    names = [name for name in CLASSIFIER_METRICS if name in metrics]
    lines = ["<tr><th>classifier</th>" + "".join(f"<th>{METRICS[name]}</th>" for name in names) + "</tr>"]
    for classifier, values in found.items():
        cells = [_number(values[name].mean, values[name].std) if name in values else "" for name in names]
        lines.append(f"<tr><td>{escape(classifier)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<h3>By classifier</h3><table>{''.join(lines)}</table>"


def _matrix(row: Row) -> str:
    """The accuracy matrix, averaged over seeds, as a table whose cells are shaded by their values."""
    matrices = []
    for run in row.runs:
        try:
            matrices.append(run.read_accuracy()[0])
        except EfcilError as error:
            return f"<p>{escape(str(error))}</p>"
    if len({matrix.shape for matrix in matrices}) > 1:
        return "<p>The seeds have different tasks, so there is no average accuracy matrix.</p>"
    mean = np.mean(matrices, axis=0)
    head = "".join(f"<th>{task + 1}</th>" for task in range(len(mean)))
    lines = [f"<tr><th>after task</th>{head}</tr>"]
    for task, values in enumerate(mean):
        cells = "".join(map(_shaded, values[: task + 1]))
        lines.append(f"<tr><td>{task + 1}</td>{cells}</tr>")
    return (
        "<h3>Accuracy on every task (%), among all seen classes</h3>"
        f'<div class="wide"><table class="matrix">{"".join(lines)}</table></div>'
    )


def _shaded(value: float) -> str:
    if not math.isfinite(value):
        return "<td></td>"
    return f'<td style="background: rgba(var(--cell), {0.55 * value / 100:.3f})">{value:.1f}</td>'


def _losses(row: Row) -> str:
    """The terms of the loss over all epochs of the first seed, one chart for every term."""
    lines = [line for line in _quietly(row.runs[0].read_metrics, []) if isinstance(line, dict)]
    losses = [mapping(line, "losses") for line in lines if line.get("kind") == "epoch"]
    terms = dict.fromkeys(term for each in losses for term in each)
    charts = []
    for term in terms:
        # If a task lacks a term, the line has a gap.
        values = [each.get(term) for each in losses]
        y = [float(value) if isinstance(value, int | float) else math.nan for value in values]
        chart = line_chart([Line(term, [float(i + 1) for i in range(len(y))], y)], "epoch, over all tasks", term)
        charts.append(f"<figure>{chart}</figure>")
    return f"<h3>Loss, seed {row.seeds[0]}</h3>{''.join(charts)}" if charts else ""


def _provenance(row: Row) -> str:
    facts: dict[str, list[int]] = {}
    for seed, run in zip(row.seeds, row.runs, strict=True):
        summary = _quietly(run.read_summary)
        hardware, versions = mapping(summary, "hardware"), mapping(summary, "versions")
        gpus, on_gpu = hardware.get("gpus"), mapping(summary, "execution").get("device") == "cuda"
        where = hardware.get("cpu") if not on_gpu else gpus[0] if isinstance(gpus, list) and gpus else None
        changed = " with uncommitted changes" if summary.get("uncommitted_changes") else ""
        earlier = summary.get("earlier_commits")
        if isinstance(earlier, list) and earlier:
            changed += f" (started with {escape(', '.join(str(each)[:12] for each in earlier))})"
        said = (
            f"<code>{escape(str(summary.get('command') or 'no command recorded'))}</code><br>"
            f"commit {escape(str(summary.get('commit') or 'unknown')[:12])}{changed}, torch "
            f"{escape(str(versions.get('torch', 'unknown')))}, {escape(str(where or 'unknown hardware'))}"
        )
        facts.setdefault(said, []).append(seed)
    items = "".join(f"<li>seed {' '.join(map(str, seeds))}: {said}</li>" for said, seeds in facts.items())
    return f"<h3>Made with</h3><ul>{items}</ul>"


def _quietly(read: Any, otherwise: Any = None) -> Any:
    """Return what `read` reads, or something empty: the table already reports runs that cannot be read."""
    try:
        return read()
    except EfcilError:
        return {} if otherwise is None else otherwise
