"""The table as text for a terminal, Markdown, LaTeX, CSV, or part of an HTML page."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Sequence

from efcil.errors import SettingsError, printable, unknown
from efcil.output import csv_line
from efcil.report.html import html
from efcil.report.paper import PaperValue
from efcil.report.table import CLASSIFIER_METRICS, METRICS, Row, Statistic, Table

# A terminal of 80 columns has room for these; the other formats show everything.
TEXT_METRICS = ("A_step", "A_inc", "forgetting", "seconds")
HTML_METRICS = ("A_step", "A_inc", "forgetting", "task_aware_A_step", "seconds")
PUBLISHED = ("A_step", "A_inc")  # the metrics that the paper reports


def render(table: Table, format: str = "text", metrics: Sequence[str] | None = None, width: int = 80) -> str:
    """Write the table in one of the FORMATS; `metrics` chooses columns, `width` is that of the text format."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    for metric in metrics or ():
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS)
    if metrics is not None and not metrics:
        raise SettingsError("A table needs at least one metric. Name one, or leave out --metric.")
    if format == "text":
        return _text(table, metrics or TEXT_METRICS, width)
    return FORMATS[format](table, metrics or (HTML_METRICS if format == "html" else tuple(METRICS)))


def _text(table: Table, metrics: Sequence[str], width: int = 80) -> str:
    blocks = []
    for (dataset, scenario), group in itertools.groupby(table.rows, key=lambda row: (row.dataset, row.scenario)):
        rows, title = list(group), printable(f"{dataset} {scenario}")
        blocks.append(_text_group(rows, title, metrics, width))
        blocks += [_text_classifiers(row, title, metrics, width) for row in rows if row.by_classifier(metrics)]
        notes = [textwrap.fill(note, width, subsequent_indent="  ", break_long_words=False) for note in _notes(rows)]
        if notes:
            blocks.append("\n".join(notes))
    if table.problems:
        # Paths stay whole so that they can be copied.
        listed = [printable(f"  {item.path}: {item.reason}") for item in table.problems]
        blocks.append("\n".join(["Not in the table:", *listed]))
    return "\n\n".join(blocks if table.rows else ["No finished runs.", *blocks]) + "\n"


def _text_group(rows: Sequence[Row], title: str, metrics: Sequence[str], width: int) -> str:
    heading = ["seeds"]
    for metric in metrics:
        heading += [METRICS[metric], "paper"] if _any_paper(rows, metric) else [METRICS[metric]]
    body = [_text_cells(row, metrics, [_any_paper(rows, metric) for metric in metrics]) for row in rows]
    return _text_table(title, ["method", *(row.label for row in rows)], heading, body, width)


def _text_classifiers(row: Row, title: str, metrics: Sequence[str], width: int) -> str:
    found = row.by_classifier(metrics)
    shown = [metric for metric in CLASSIFIER_METRICS if metric in metrics]
    body = [[_ours(values.get(metric), metric, " ± ") for metric in shown] for values in found.values()]
    heading = [METRICS[metric] for metric in shown]
    return _text_table(printable(f"{title} {row.label}"), ["classifier", *found], heading, body, width)


def _notes(rows: Sequence[Row]) -> list[str]:
    return [printable(f"{row.label}: {note}") for row in rows for note in row.notes]


def _text_table(
    title: str, names: Sequence[str], heading: Sequence[str], body: Sequence[Sequence[str]], width: int
) -> str:
    """Write a table of numbers; `names` is the first column with its heading."""
    names = [printable(name) for name in names]
    widths = [max(map(len, column)) for column in zip(heading, *body, strict=True)]
    numbers = sum(widths) + 2 * len(widths)
    first = max(len(names[0]), min(max(map(len, names)), width - numbers))
    lines = [title, names[0].ljust(first) + _right(heading, widths), "-" * (first + numbers)]
    for label, cells in zip(names[1:], body, strict=True):
        if len(label) > first:
            # A long label gets its own line, so that it does not push the numbers out of their columns.
            lines.append(label)
            label = ""
        lines.append(label.ljust(first) + _right(cells, widths))
    return "\n".join(line.rstrip() for line in lines)


def _text_cells(row: Row, metrics: Sequence[str], with_paper: Sequence[bool]) -> list[str]:
    cells = [str(len(row.seeds))]
    for metric, paper in zip(metrics, with_paper, strict=True):
        ours, published = row.ours.get(metric), row.paper.get(metric)
        cells.append(_ours(ours, metric, " ± ") if metric in PUBLISHED else _mean(ours, metric))
        if paper:
            cells.append("" if published is None else f"{published.mean:.2f}")
    return cells


def _right(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join("  " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _markdown(table: Table, metrics: Sequence[str]) -> str:
    parts = []
    for left, (heading, body) in _tables(table, metrics, " ± ", _escape_markdown):
        lines = [heading, ["---"] * left + ["---:"] * (len(heading) - left), *body]
        parts.append("".join("| " + " | ".join(line) + " |\n" for line in lines))
    problems = [
        f"`{_one_line(problem.path).replace('`', chr(39))}`: {_escape_markdown(_one_line(problem.reason))}"
        for problem in table.problems
    ]
    for title, items in (("Notes", list(map(_escape_markdown, _notes(table.rows)))), ("Not in the table", problems)):
        if items:
            parts.append(f"{title}:\n\n" + "".join(f"- {item}\n" for item in items))
    return "\n".join(parts)


def _latex(table: Table, metrics: Sequence[str]) -> str:
    lines = []
    for left, (heading, body) in _tables(table, metrics, r" $\pm$ ", escape_latex):
        lines += [rf"\begin{{tabular}}{{{'l' * left}{'r' * (len(heading) - left)}}}", r"\toprule"]
        lines += [" & ".join(heading) + r" \\", r"\midrule"]
        for index, cells in enumerate(body):
            if index and cells[:2] != body[index - 1][:2]:  # another dataset or scenario
                lines.append(r"\midrule")
            lines.append(" & ".join(cells) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
    # On one line: after a line break in a name, the rest would be typeset or executed.
    lines += [f"% {_one_line(note)}" for note in _notes(table.rows)]
    lines += [f"% Not in the table: {_one_line(f'{problem.path}: {problem.reason}')}" for problem in table.problems]
    return "\n".join(lines) + "\n"


def _csv(table: Table, metrics: Sequence[str]) -> str:
    """Text that a spreadsheet would read as a formula starts with an apostrophe; numbers are unchanged."""
    columns = [
        f"{metric}_{part}"
        for metric in metrics
        for part in ("mean", "std", "n", *(("paper_mean", "paper_std") if metric in PUBLISHED else ()))
    ]
    others = [
        (classifier, metric)
        for classifier in dict.fromkeys(name for row in table.rows for name in row.by_classifier(metrics))
        for metric in CLASSIFIER_METRICS
        if metric in metrics and classifier != "own"
    ]
    columns += [f"{classifier}_{metric}_{part}" for classifier, metric in others for part in ("mean", "std", "n")]
    lines = [["dataset", "scenario", "method", "n", "seeds", *columns, "notes", "problem"]]
    for row in table.rows:
        line: list[str] = [row.dataset, row.scenario, row.label, str(len(row.seeds)), " ".join(map(str, row.seeds))]
        for metric in metrics:
            published = row.paper.get(metric)
            line += _csv_cells(row.ours.get(metric))
            if metric in PUBLISHED:
                line.append("" if published is None else f"{published.mean:.2f}")
                line.append("" if published is None or published.std is None else f"{published.std:.2f}")
        for classifier, metric in others:
            line += _csv_cells(row.classifiers.get(classifier, {}).get(metric))
        lines.append([*line, "; ".join(row.notes), ""])
    for problem in table.problems:
        lines.append([""] * (6 + len(columns)) + [f"{problem.path}: {problem.reason}"])
    return "".join(csv_line(map(printable, line)) for line in lines)


def _csv_cells(value: Statistic | None) -> list[str]:
    if value is None:
        return ["", "", "0"]
    return [f"{value.mean:.4f}", "" if value.std is None else f"{value.std:.4f}", str(value.count)]


FORMATS: dict[str, Callable[[Table, Sequence[str]], str]] = {
    "text": _text,
    "markdown": _markdown,
    "latex": _latex,
    "csv": _csv,
    "html": html,
}


def _escape_markdown(text: str) -> str:
    return printable(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _one_line(text: object) -> str:
    return printable(" ".join(str(text).split()))


def escape_latex(text: str) -> str:
    """Escape the characters that LaTeX reads as commands."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, "\\" + c if c in "&%$#_{}" else c) for c in printable(text))


def _tables(
    table: Table, metrics: Sequence[str], plus_minus: str, escape: Callable[[str], str]
) -> list[tuple[int, tuple[list[str], list[list[str]]]]]:
    """The tables of Markdown and LaTeX: how many columns are names, heading and body; the second is by classifier."""
    shown = [metric for metric in CLASSIFIER_METRICS if metric in metrics]
    body = [
        [*map(escape, (row.dataset, row.scenario, row.label, classifier))]
        + [_ours(values.get(metric), metric, plus_minus) for metric in shown]
        for row in table.rows
        for classifier, values in row.by_classifier(metrics).items()
    ]
    heading = [*map(escape, ("dataset", "scenario", "method", "classifier", *(METRICS[metric] for metric in shown)))]
    tables = [(3, _cells(table, metrics, plus_minus, escape))]
    return [*tables, (4, (heading, body))] if body else tables


def _cells(
    table: Table, metrics: Sequence[str], plus_minus: str, escape: Callable[[str], str]
) -> tuple[list[str], list[list[str]]]:
    """Heading and body for Markdown and LaTeX: the paper's column only if it is not empty."""
    heading = ["dataset", "scenario", "method", "seeds"]
    for metric in metrics:
        heading += [METRICS[metric], "paper"] if _any_paper(table.rows, metric) else [METRICS[metric]]
    body = []
    for row in table.rows:
        cells = [escape(row.dataset), escape(row.scenario), escape(row.label), str(len(row.seeds))]
        for metric in metrics:
            cells.append(_ours(row.ours.get(metric), metric, plus_minus))
            if _any_paper(table.rows, metric):
                cells.append(_paper(row.paper.get(metric), plus_minus))
        body.append(cells)
    return [escape(name) for name in heading], body


def _any_paper(rows: Sequence[Row], metric: str) -> bool:
    return any(metric in row.paper for row in rows)


def _decimals(metric: str) -> int:
    return 1 if metric == "seconds" else 2


def _mean(value: Statistic | None, metric: str) -> str:
    return "" if value is None else f"{value.mean:.{_decimals(metric)}f}"


def _ours(value: Statistic | None, metric: str, plus_minus: str) -> str:
    if value is None:
        return ""
    deviation = "-" if value.std is None else f"{value.std:.{_decimals(metric)}f}"
    return _mean(value, metric) + plus_minus + deviation


def _paper(value: PaperValue | None, plus_minus: str) -> str:
    if value is None:
        return ""
    return f"{value.mean:.2f}" + ("" if value.std is None else f"{plus_minus}{value.std:.2f}")
