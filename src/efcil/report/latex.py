"""The table as LaTeX in the manner of the paper: a row per method, columns per scenario, the best in bold."""

from __future__ import annotations

from collections.abc import Sequence

from efcil.errors import printable
from efcil.report.cells import any_paper, mean_of, notes_of, one_line, ours
from efcil.report.groups import Group, best_and_second, differing, value_of
from efcil.report.paired import MEANING, Comparison, Difference, comparisons
from efcil.report.paper import PaperValue
from efcil.report.table import CLASSIFIER_METRICS, METRICS, Row, Statistic, Table

_HEADINGS = {"A_step": r"$A_{\mathrm{step}}$", "A_inc": r"$A_{\mathrm{inc}}$"}
_SPREAD = r" {\scriptsize $\pm$ %s}"


def latex(table: Table, metrics: Sequence[str]) -> str:
    """Return a tabular per dataset. It needs the package booktabs and nothing else."""
    lines = [
        r"% In the preamble: \usepackage{booktabs}",
        "% Means and standard deviations over seeds, in percent; bold: best, underlined: second.",
    ]
    by_dataset: dict[tuple[str, str | None], list[Group]] = {}
    for group in table.groups:
        by_dataset.setdefault((group.dataset, group.held_out), []).append(group)
    compared = comparisons(table, metrics)
    for place, groups in by_dataset.items():
        lines += _tabular(groups, metrics)
        lines += _classifiers(groups, metrics)
        lines += _differences([each for each in compared if (each.group.dataset, each.group.held_out) == place])
    lines.append("")
    lines += [f"% {one_line(note)}" for each in compared for note in each.notes]
    # On one line: after a line break in a name, the rest would be typeset or executed.
    for group in table.groups:
        if group.shared:
            lines.append(f"% {one_line(group.title)}: all rows have {one_line(', '.join(group.shared))}")
        lines += [f"% {one_line(note)}" for note in notes_of(group)]
        if group.unpaired is None:
            lines.append(f"% {one_line(group.title)}: seeds {' '.join(map(str, group.rows[0].seeds))}")
    lines += [f"% Not in the table: {one_line(f'{problem.path}: {problem.reason}')}" for problem in table.problems]
    return "\n".join(lines) + "\n"


def escape_latex(text: str) -> str:
    """Escape the characters that LaTeX reads as commands."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\char34{}"}
    return "".join(special.get(c, "\\" + c if c in "&%$#_{}" else c) for c in printable(text))


def _tabular(groups: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    settings = differing(groups)
    columns = [[(metric, any_paper(group.rows, metric)) for metric in metrics] for group in groups]
    wide = [sum(1 + has_paper for _, has_paper in each) for each in columns]
    names = 1 + len(settings)
    held_out = "" if groups[0].held_out is None else " (held out)"
    top, rules, place = [escape_latex(groups[0].dataset) + held_out, *[""] * len(settings)], "", names + 1
    for group, width in zip(groups, wide, strict=True):
        top.append(rf"\multicolumn{{{width}}}{{c}}{{{escape_latex(group.scenario)}}}")
        rules += rf"\cmidrule(lr){{{place}-{place + width - 1}}}"
        place += width
    heading = ["Method", *map(escape_latex, settings)]
    for each in columns:
        for metric, has_paper in each:
            heading += [_HEADINGS.get(metric, escape_latex(METRICS[metric])), *(["paper"] if has_paper else [])]
    title = f"{groups[0].dataset}, tested on {groups[0].tested_on}"
    lines = ["", f"% {one_line(title)}", rf"\begin{{tabular}}{{{'l' * names}{'c' * sum(wide)}}}", r"\toprule"]
    lines += [" & ".join(top) + r" \\", rules, " & ".join(heading) + r" \\", r"\midrule"]
    for key, rows in _pivot(groups, settings).items():
        cells = [escape_latex(text) for text in key]
        for index, group in enumerate(groups):
            cells += _cells(group, rows.get(index), columns[index])
        lines.append(" & ".join(cells) + r" \\")
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _pivot(groups: Sequence[Group], settings: Sequence[str]) -> dict[tuple[str, ...], dict[int, Row]]:
    """Return the rows by what names them, and then by the place of their group."""
    found: dict[tuple[str, ...], dict[int, Row]] = {}
    for index, group in enumerate(groups):
        for row in group.rows:
            key = (row.method or row.label, *(value_of(row, name) for name in settings))
            if index in found.get(key, {}):  # told apart by nothing but its label
                key = (row.label, *key[1:])
            found.setdefault(key, {})[index] = row
    return dict(sorted(found.items()))


def _cells(group: Group, row: Row | None, columns: Sequence[tuple[str, bool]]) -> list[str]:
    cells = []
    for metric, has_paper in columns:
        place = "" if row is None else best_and_second(group.rows, metric).get(row.label, "")
        cells.append("" if row is None else _number(row.ours.get(metric), metric, place))
        if has_paper:
            cells.append("" if row is None else _published(row.paper.get(metric)))
    return cells


def _number(value: Statistic | None, metric: str, place: str = "") -> str:
    mean, whole = mean_of(value, metric), ours(value, metric, "+")
    command = {"best": rf"\textbf{{{mean}}}", "second": rf"\underline{{{mean}}}"}.get(place, mean)
    return command + (_SPREAD % whole.partition("+")[2] if "+" in whole else "")


def _published(value: PaperValue | None) -> str:
    if value is None:
        return ""
    return f"{value.mean:.2f}" + ("" if value.std is None else _SPREAD % f"{value.std:.2f}")


def _classifiers(groups: Sequence[Group], metrics: Sequence[str]) -> list[str]:
    shown = [metric for metric in CLASSIFIER_METRICS if metric in metrics]
    body = [
        [*map(escape_latex, (row.scenario, group.name(row), classifier))]
        + [_number(values.get(metric), metric) for metric in shown]
        for group in groups
        for row in group.rows
        for classifier, values in row.by_classifier(metrics).items()
    ]
    if not body:
        return []
    heading = ["Scenario", "Method", "Classifier", *(_HEADINGS[metric] for metric in shown)]
    lines = ["", rf"\begin{{tabular}}{{lll{'c' * len(shown)}}}", r"\toprule", " & ".join(heading) + r" \\", r"\midrule"]
    lines += [" & ".join(cells) + r" \\" for cells in body]
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _differences(chosen: Sequence[Comparison]) -> list[str]:
    body = []
    for found in chosen:
        for each in found.paired:
            names = (each.row.scenario, found.group.name(each.row), found.name, " ".join(map(str, each.seeds)))
            cells = [_difference(each.differences.get(metric)) for metric in found.metrics]
            body.append([*map(escape_latex, names), *cells])
    if not body:
        return []
    metrics = chosen[0].metrics
    heading = ["Scenario", "Method", "Difference from", "Seeds"]
    heading += [_HEADINGS.get(metric, escape_latex(METRICS[metric])) for metric in metrics]
    lines = ["", f"% Differences, {MEANING}", rf"\begin{{tabular}}{{llll{'c' * len(metrics)}}}", r"\toprule"]
    lines += [" & ".join(heading) + r" \\", r"\midrule", *(" & ".join(cells) + r" \\" for cells in body)]
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _difference(value: Difference | None) -> str:
    if value is None:
        return ""
    mean, _, error = value.text("|").partition("|")
    return f"${mean}$" + (_SPREAD % error if error else "")
