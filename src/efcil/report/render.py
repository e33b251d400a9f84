"""The table as text for a terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Sequence

from efcil.errors import SettingsError, unknown
from efcil.report.paper import PaperValue
from efcil.report.table import METRICS, Row, Statistic, Table

# A terminal of 80 columns has room for these; the other formats show everything.
TEXT_METRICS = ("A_step", "A_inc", "forgetting", "seconds")
PUBLISHED = ("A_step", "A_inc")  # the metrics that the paper reports


def render(table: Table, format: str = "text", metrics: Sequence[str] | None = None, width: int = 80) -> str:
    """Write the table in one of the FORMATS; `metrics` chooses columns, `width` is that of the text format."""
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    for metric in metrics or ():
        if metric not in METRICS:
            raise unknown("metric", metric, METRICS)
    if metrics is not None and not metrics:
        raise SettingsError("A table needs at least one metric; name one or leave the choice out.")
    if format == "text":
        return _text(table, metrics or TEXT_METRICS, width)
    return FORMATS[format](table, metrics or tuple(METRICS))


def _text(table: Table, metrics: Sequence[str], width: int = 80) -> str:
    groups = itertools.groupby(table.rows, key=lambda row: (row.dataset, row.scenario))
    blocks = [_text_group(list(rows), f"{dataset} {scenario}", metrics, width) for (dataset, scenario), rows in groups]
    if table.problems:
        # Paths stay whole so that they can be copied.
        blocks.append("\n".join(["Not in the table:", *(f"  {item.path}: {item.reason}" for item in table.problems)]))
    return "\n\n".join(blocks if table.rows else ["No finished runs.", *blocks]) + "\n"


def _text_group(rows: Sequence[Row], title: str, metrics: Sequence[str], width: int) -> str:
    heading = ["seeds"]
    for metric in metrics:
        heading += [METRICS[metric], "paper"] if _any_paper(rows, metric) else [METRICS[metric]]
    body = [_text_cells(row, metrics, [_any_paper(rows, metric) for metric in metrics]) for row in rows]
    widths = [max(map(len, column)) for column in zip(heading, *body, strict=True)]
    numbers = sum(widths) + 2 * len(widths)
    first = max(len("method"), min(max(len(row.label) for row in rows), width - numbers))
    lines = [title, "method".ljust(first) + _right(heading, widths), "-" * (first + numbers)]
    for row, cells in zip(rows, body, strict=True):
        label = row.label
        if len(label) > first:
            # A long label takes a line of its own rather than pushing the numbers out of their columns.
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
    heading, body = _cells(table, metrics, " ± ", _escape_markdown)
    lines = [heading, ["---"] * 3 + ["---:"] * (len(heading) - 3), *body]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    notes = [f"- `{_one_line(problem.path)}`: {_one_line(problem.reason)}" for problem in table.problems]
    return text + "\n" + ("\nNot in the table:\n\n" + "\n".join(notes) + "\n" if notes else "")


def _latex(table: Table, metrics: Sequence[str]) -> str:
    heading, body = _cells(table, metrics, r" $\pm$ ", escape_latex)
    lines = [
        rf"\begin{{tabular}}{{lll{'r' * (len(heading) - 3)}}}",
        r"\toprule",
        " & ".join(heading) + r" \\",
        r"\midrule",
    ]
    for index, (row, cells) in enumerate(zip(table.rows, body, strict=True)):
        previous = table.rows[index - 1]
        if index and (row.dataset, row.scenario) != (previous.dataset, previous.scenario):
            lines.append(r"\midrule")
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    # On one line: the rest of a name with a line break would be typeset, or run.
    lines += [f"% Not in the table: {_one_line(f'{problem.path}: {problem.reason}')}" for problem in table.problems]
    return "\n".join(lines) + "\n"


def _csv(table: Table, metrics: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = [
        f"{metric}_{part}"
        for metric in metrics
        for part in ("mean", "std", *(("paper_mean", "paper_std") if metric in PUBLISHED else ()))
    ]
    writer.writerow(["dataset", "scenario", "method", "n", "seeds", *columns, "problem"])
    for row in table.rows:
        line: list[str] = [row.dataset, row.scenario, row.label, str(len(row.seeds)), " ".join(map(str, row.seeds))]
        for metric in metrics:
            ours, published = row.ours.get(metric), row.paper.get(metric)
            line += ["", ""] if ours is None else [f"{ours.mean:.4f}", "-" if ours.std is None else f"{ours.std:.4f}"]
            if metric in PUBLISHED:
                line.append("" if published is None else f"{published.mean:.2f}")
                line.append("" if published is None or published.std is None else f"{published.std:.2f}")
        writer.writerow([*line, ""])
    for problem in table.problems:
        writer.writerow([""] * (5 + len(columns)) + [f"{problem.path}: {problem.reason}"])
    return text.getvalue()


FORMATS: dict[str, Callable[[Table, Sequence[str]], str]] = {
    "text": _text,
    "markdown": _markdown,
    "latex": _latex,
    "csv": _csv,
}


def _escape_markdown(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def escape_latex(text: str) -> str:
    """Escape the characters that LaTeX reads as commands."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return "".join(special.get(c, "\\" + c if c in "&%$#_{}" else c) for c in text)


def _cells(
    table: Table, metrics: Sequence[str], plus_minus: str, escape: Callable[[str], str]
) -> tuple[list[str], list[list[str]]]:
    """Heading and body for Markdown and LaTeX: the paper's column only where it holds something."""
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
