"""The table as text for a terminal, Markdown, LaTeX, CSV, or in an HTML page."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from efcil.errors import SettingsError, printable, unknown
from efcil.output import csv_line
from efcil.report.cells import any_paper, escape_markdown, mean_of, notes_of, one_line, ours, with_spread
from efcil.report.groups import Group, best_and_second, differing, value_of
from efcil.report.latex import latex
from efcil.report.paired import MEANING, Compared, Comparison, comparisons
from efcil.report.table import CLASSIFIER_METRICS, METRICS, Row, Statistic, Table

# A terminal of 80 columns has room for these; the other formats show more.
TEXT_METRICS = ("A_step", "A_inc", "forgetting", "seconds")
HTML_METRICS = ("A_step", "A_inc", "forgetting", "task_aware_A_step", "seconds", "stored")
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
    defaults = {"html": HTML_METRICS, "latex": PUBLISHED}
    return FORMATS[format](table, metrics or defaults.get(format, tuple(METRICS)))


# -- text ------------------------------------------------------------------------------------------------------------


def _text(table: Table, metrics: Sequence[str], width: int = 80) -> str:
    blocks = []
    compared = {each.group.title: each for each in comparisons(table, metrics)}
    for group in table.groups:
        blocks.append(_text_group(group, metrics, width))
        for row in group.rows:
            if row.by_classifier(metrics):
                blocks.append(_text_classifiers(row, f"{group.title} {group.name(row)}", metrics, width))
        blocks += _text_notes(notes_of(group), width)
        if group.title in compared:
            blocks += _text_differences(compared[group.title], width)
    if table.problems:
        # Paths stay whole so that they can be copied.
        listed = [printable(f"  {item.path}: {item.reason}") for item in table.problems]
        blocks.append("\n".join(["Not in the table:", *listed]))
    return "\n\n".join(blocks if table.rows else ["No finished runs.", *blocks]) + "\n"


def _text_group(group: Group, metrics: Sequence[str], width: int) -> str:
    heading = ["seeds"]
    for metric in metrics:
        heading += [METRICS[metric], "paper"] if any_paper(group.rows, metric) else [METRICS[metric]]
    body = [_text_cells(row, metrics, [any_paper(group.rows, metric) for metric in metrics]) for row in group.rows]
    told_apart = [["method", *group.settings], *([row.method or row.label, *group.values(row)] for row in group.rows)]
    names = _side_by_side(told_apart)
    if len(names[0]) + sum(2 + max(map(len, column)) for column in zip(heading, *body, strict=True)) > width:
        # Too many columns for this screen: what they would say is the name of the row.
        names = ["method", *(group.whole_name(row) for row in group.rows)]
    title = group.title + (f" (all rows: {', '.join(group.shared)})" if group.shared else "")
    return _text_table(_filled(title, width), names, heading, body, width)


def _filled(words: str, width: int) -> str:
    return textwrap.fill(printable(words), width, subsequent_indent="  ", break_long_words=False)


def _text_notes(notes: Sequence[str], width: int) -> list[str]:
    return ["\n".join(_filled(note, width) for note in notes)] if notes else []


def _side_by_side(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return each line as one text, its cells below each other."""
    lines = [[printable(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _text_classifiers(row: Row, title: str, metrics: Sequence[str], width: int) -> str:
    found = row.by_classifier(metrics)
    shown = [metric for metric in CLASSIFIER_METRICS if metric in metrics]
    body = [[ours(values.get(metric), metric, " ± ") for metric in shown] for values in found.values()]
    heading = [METRICS[metric] for metric in shown]
    return _text_table(printable(title), ["classifier", *found], heading, body, width)


def _text_differences(comparison: Comparison, width: int) -> list[str]:
    notes = _text_notes(comparison.notes, width)
    if not comparison.paired:
        return notes
    names = ["method", *(comparison.group.name(each.row) for each in comparison.paired)]
    heading = ["seeds", *(METRICS[metric] for metric in comparison.metrics)]
    body = [[" ".join(map(str, each.seeds)), *_differences(comparison, each)] for each in comparison.paired]
    title = _filled(f"{comparison.group.title}, differences from {comparison.name}: {MEANING}", width)
    return [_text_table(title, names, heading, body, width), *notes]


def _differences(comparison: Comparison, compared: Compared) -> list[str]:
    """Return the cells of a row, empty where a metric was not measured."""
    found = (compared.differences.get(metric) for metric in comparison.metrics)
    return ["" if each is None else each.text() for each in found]


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
    for metric, has_paper in zip(metrics, with_paper, strict=True):
        value, published = row.ours.get(metric), row.paper.get(metric)
        cells.append(ours(value, metric, " ± ") if metric in PUBLISHED else mean_of(value, metric))
        if has_paper:
            cells.append("" if published is None else f"{published.mean:.2f}")
    return cells


def _right(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "".join("  " + cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


# -- Markdown --------------------------------------------------------------------------------------------------------


def _markdown(table: Table, metrics: Sequence[str]) -> str:
    """A table of the runs on test images, one of those on held-out images, and one by classifier for each."""
    parts, every = [], table.groups
    compared = comparisons(table, metrics)
    for held_out in (False, True):
        chosen = [group for group in every if (group.held_out is not None) == held_out]
        tables = [_markdown_table(chosen, metrics), _markdown_classifiers(chosen, metrics)] if chosen else []
        tables.append(
            _markdown_differences([each for each in compared if (each.group.held_out is not None) == held_out])
        )
        if held_out and chosen:
            parts.append("Tested on held-out training images, not on test images:\n")
        parts += [each for each in tables if each]
    problems = [
        f"`{one_line(problem.path).replace('`', chr(39))}`: {escape_markdown(one_line(problem.reason))}"
        for problem in table.problems
    ]
    notes = [note for group in every for note in (*_shared(group), *notes_of(group))]
    notes += [printable(note) for each in compared for note in each.notes]
    for title, items in (("Notes", list(map(escape_markdown, notes))), ("Not in the table", problems)):
        if items:
            parts.append(f"{title}:\n\n" + "".join(f"- {item}\n" for item in items))
    return "\n".join(parts)


def _shared(group: Group) -> list[str]:
    return [printable(f"{group.title}: all rows have {', '.join(group.shared)}")] if group.shared else []


def _markdown_table(chosen: Sequence[Group], metrics: Sequence[str]) -> str:
    settings = differing(chosen)
    rows = [(group, row) for group in chosen for row in group.rows]
    heading = ["dataset", "scenario", *(["held out"] if chosen[0].held_out is not None else []), "method", *settings]
    left = len(heading)
    heading.append("seeds")
    published = [metric for metric in metrics if any_paper([row for _, row in rows], metric)]
    for metric in metrics:
        heading += [METRICS[metric], "paper"] if metric in published else [METRICS[metric]]
    lines = [list(map(escape_markdown, heading)), ["---"] * left + ["---:"] * (len(heading) - left)]
    for group, row in rows:
        names = [row.dataset, row.scenario, *([group.held_out] if group.held_out is not None else [])]
        names += [row.method or row.label, *(value_of(row, name) for name in settings), str(len(row.seeds))]
        cells = list(map(escape_markdown, names))
        for metric in metrics:
            place = best_and_second(group.rows, metric).get(row.label, "")
            cells.append(_marked(ours(row.ours.get(metric), metric, " ± "), place))
            if metric in published:
                cells.append(with_spread(row.paper.get(metric)))
        lines.append(cells)
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _markdown_classifiers(chosen: Sequence[Group], metrics: Sequence[str]) -> str:
    shown = [metric for metric in CLASSIFIER_METRICS if metric in metrics]
    body = [
        [*map(escape_markdown, (row.dataset, row.scenario, group.name(row), classifier))]
        + [ours(values.get(metric), metric, " ± ") for metric in shown]
        for group in chosen
        for row in group.rows
        for classifier, values in row.by_classifier(metrics).items()
    ]
    heading = ["dataset", "scenario", "method", "classifier", *(METRICS[metric] for metric in shown)]
    lines = [list(map(escape_markdown, heading)), ["---"] * 4 + ["---:"] * len(shown), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) if body else ""


def _markdown_differences(chosen: Sequence[Comparison]) -> str:
    body = []
    for found in chosen:
        place = [found.group.dataset, found.group.scenario, *([found.group.held_out] if found.group.held_out else [])]
        for each in found.paired:
            names = [*place, found.group.name(each.row), found.name, " ".join(map(str, each.seeds))]
            body.append([*map(escape_markdown, names), *_differences(found, each)])
    if not body:
        return ""
    heading = ["dataset", "scenario", *(["held out"] if chosen[0].group.held_out else [])]
    heading += ["method", "difference from", "seeds"]
    metrics = [METRICS[metric] for metric in chosen[0].metrics]
    rule = ["---"] * len(heading) + ["---:"] * len(metrics)
    lines = [list(map(escape_markdown, [*heading, *metrics])), rule, *body]
    return f"Differences, {MEANING}:\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _marked(text: str, place: str) -> str:
    return {"best": f"**{text}**", "second": f"<u>{text}</u>"}.get(place, text)


# -- CSV -------------------------------------------------------------------------------------------------------------


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
    paired_columns, paired = _csv_differences(comparisons(table, metrics))
    columns += paired_columns
    settings = differing(table.groups)
    names = ["dataset", "scenario", "method", "n", "seeds"]
    lines = [[*names, *columns, "tested_on", *(f"set {name}" for name in settings), "notes", "problem"]]
    for group in table.groups:
        tested_on = "test images" if group.held_out is None else f"held out {group.held_out}"
        for row in group.rows:
            line = [row.dataset, row.scenario, row.label, str(len(row.seeds)), " ".join(map(str, row.seeds))]
            for metric in metrics:
                line += _csv_metric(row, metric)
            for classifier, metric in others:
                line += _csv_cells(row.classifiers.get(classifier, {}).get(metric))
            cells, notes = paired.get((row.dataset, row.scenario, row.label), ([""] * len(paired_columns), ()))
            line += [*cells, tested_on, *(value_of(row, name) for name in settings)]
            lines.append([*line, "; ".join((*row.notes, *notes)), ""])
    for problem in table.problems:
        lines.append([""] * (len(lines[0]) - 1) + [f"{problem.path}: {problem.reason}"])
    return "".join(csv_line(map(printable, line)) for line in lines)


def _csv_differences(
    found: Sequence[Comparison],
) -> tuple[list[str], dict[tuple[str, str, str], tuple[list[str], tuple[str, ...]]]]:
    """Return the columns of differences, and their cells and notes by dataset, scenario and label."""
    if not found:
        return [], {}
    columns = [f"{metric}_difference_{part}" for metric in found[0].metrics for part in ("mean", "error", "n")]
    rows = {}
    for comparison in found:
        for each in comparison.rows:
            cells = [comparison.name, " ".join(map(str, each.seeds))]
            for metric in comparison.metrics:
                value = each.differences.get(metric)
                cells += _csv_cells(None if value is None else Statistic(value.mean, value.error, len(value.seeds)))
            rows[each.row.dataset, each.row.scenario, each.row.label] = cells, each.notes
    return ["against", "paired_seeds", *columns], rows


def _csv_metric(row: Row, metric: str) -> list[str]:
    cells, published = _csv_cells(row.ours.get(metric), 6 if metric == "stored" else 4), row.paper.get(metric)
    if metric in PUBLISHED:
        cells.append("" if published is None else f"{published.mean:.2f}")
        cells.append("" if published is None or published.std is None else f"{published.std:.2f}")
    return cells


def _csv_cells(value: Statistic | None, digits: int = 4) -> list[str]:
    if value is None:
        return ["", "", "0"]
    return [f"{value.mean:.{digits}f}", "" if value.std is None else f"{value.std:.{digits}f}", str(value.count)]


def _html(table: Table, metrics: Sequence[str]) -> str:
    from efcil.report.page import page  # a template engine is needed for nothing else

    return page(table, metrics)


FORMATS: dict[str, Callable[[Table, Sequence[str]], str]] = {
    "text": _text,
    "markdown": _markdown,
    "latex": latex,
    "csv": _csv,
    "html": _html,
}
