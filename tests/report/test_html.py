"""The HTML page and its charts: well formed, complete, honest about what is missing."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from efcil.report import render, table
from efcil.report.charts import COLOURS, MOST_POINTS, Line, line_chart, style, ticks
from efcil.runfolder import RunFolder, find_runs

VOID = {"meta", "br", "line", "path", "circle"}


class Balance(HTMLParser):
    """Raises where a tag is closed that is not open, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag not in VOID or (tag in ("path", "circle", "line") and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def text_of(page: str) -> str:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(parser.text)


def write_run(root: Path, label: str, seed: int, steps: list[float], **changes: Any) -> RunFolder:
    run = RunFolder(root / "cifar100" / "cs10" / label / f"seed{seed}")
    summary = {
        "method": label, "label": label, "dataset": "cifar100", "scenario": "cs10", "seed": seed, "A_step": steps[-1],
        "A_inc": sum(steps) / len(steps), "A_step_per_task": steps, "command": f"efcil run --seed {seed}",
        "commit": "0123456789abcdef", "hardware": {"cpu": "abacus", "gpus": []}, "versions": {"torch": "2.0"},
    }  # fmt: skip
    run.write_summary({**summary, **changes})
    matrix = [[steps[k] if i <= k else math.nan for i in range(len(steps))] for k in range(len(steps))]
    run.write_accuracy(matrix, matrix, [1] * len(steps))
    for epoch, losses in enumerate(({"current": 2.0}, {"current": 1.0, "drift": 0.5})):
        run.append_metrics({"kind": "epoch", "task": epoch + 1, "epoch": 1, "losses": losses})
    return run


def page_of(root: Path, **options: Any) -> str:
    return render(table(find_runs([root])), "html", **options)


def test_a_page_says_with_which_code_a_run_was_begun(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0], earlier_commits=["fedcba9876543210", "two+changes"])
    assert "commit 0123456789ab (started with fedcba987654, two+changes), torch" in text_of(page_of(tmp_path))


def test_a_page_shows_means_curves_matrices_losses_and_commands(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    write_run(tmp_path, "efc", 1, [80.0, 40.0])
    write_run(tmp_path, "finetune", 0, [70.0, 10.0])
    page = page_of(tmp_path)
    text = text_of(page)
    assert "45.00 ± 7.07" in text  # A_step of efc
    assert "43.62 ± 0.70" in text  # the paper's
    matrix = page[page.index('class="matrix"') :]
    assert [float(v) for v in re.findall(r">(\d+\.\d)</td>", matrix)[:3]] == [85.0, 45.0, 45.0]
    assert "efcil run --seed 0" in text
    assert "commit 0123456789ab, torch 2.0, abacus" in text
    charts = [ElementTree.fromstring(chart) for chart in re.findall(r"<svg viewBox.*?</svg>", page, re.DOTALL)]
    titles = [chart.get("aria-label") for chart in charts]
    assert titles.count("current over epoch, over all tasks") == 2
    assert titles.count("accuracy over all classes seen (%) over task") == 1
    # A row and its curve have one colour.
    curves = next(chart for chart in charts if "over task" in (chart.get("aria-label") or ""))
    assert [circle.get("fill") for circle in curves.iter("circle")] == 2 * [COLOURS[0]] + 2 * [COLOURS[1]]
    for outside in ("http:", "https:", "src=", "href=", "url(", "@import"):
        assert outside not in page, "The page needs nothing from elsewhere."


def test_metrics_are_chosen(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    page = page_of(tmp_path, metrics=["A_inc"])
    assert "<th>A_inc</th>" in page
    assert "<th>A_step</th>" not in page


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    write_run(tmp_path, "<script>&", 0, [90.0, 50.0], command="efcil <b>")
    page = page_of(tmp_path)
    assert "<script>" not in page
    assert "&lt;script&gt;&amp;" in page
    assert "efcil &lt;b&gt;" in page


def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, "efc", 0, [90.0, 50.0])
    run.accuracy_file.write_text("nonsense")
    run.metrics_file.write_text("nonsense\n")
    write_run(tmp_path, "lwf", 0, [90.0, 30.0], A_step_per_task=None, hardware=None, commit=None)
    unfinished = RunFolder(tmp_path / "cifar100" / "cs10" / "pass" / "seed0")
    unfinished.append_metrics({"kind": "epoch"})
    unfinished.settings_file.write_text("")
    text = text_of(page_of(tmp_path))
    assert "50.00" in text
    assert "accuracy.csv is damaged" in text
    assert "commit unknown" in text
    assert "not finished" in text


def test_a_page_without_runs() -> None:
    assert "No finished runs." in text_of(render(table([]), "html"))


def test_a_line_has_a_gap_where_nothing_was_measured() -> None:
    chart = ElementTree.fromstring(line_chart([Line("a", [1, 2, 3, 4], [1.0, math.nan, 2.0, 3.0])], "x", "y"))
    path = next(chart.iter("path")).get("d") or ""
    assert [part[0] for part in re.findall(r"[ML][^ML]+", path)] == ["M", "M", "L"]
    assert line_chart([Line("a", [1, 2], [math.nan, math.nan])], "x", "y") == "<p>Nothing was measured.</p>"


def test_points_lie_where_the_numbers_are() -> None:
    chart = ElementTree.fromstring(line_chart([Line("a", [0, 5, 10], [0.0, 50.0, 100.0])], "x", "y"))
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in chart.iter("circle")]
    (left, bottom), (middle, centre), (right, top) = circles
    assert (left, right, bottom, top) == (52.0, 700.0, 280.0, 10.0)
    assert (middle, centre) == ((left + right) / 2, (bottom + top) / 2)


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    count = 10 * MOST_POINTS + 7
    chart = ElementTree.fromstring(line_chart([Line("a", range(count), [float(i) for i in range(count)])], "x", "y"))
    points = re.findall(r"[ML]([\d.]+) ", next(chart.iter("path")).get("d") or "")
    assert len(points) <= MOST_POINTS + 1
    assert (float(points[0]), float(points[-1])) == (52.0, 700.0)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (-0.02, 0.03), (12.0, 98765.0), (1e-9, 2e-9)])
def test_ticks_are_round_and_cover(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert all(float(f"{value:.6g}") == pytest.approx(value, rel=1e-6, abs=1e-15) for value in found)


def test_every_line_looks_different() -> None:
    assert len({style(index) for index in range(32)}) == 32


def test_tasks_that_were_not_measured_are_gaps(tmp_path: Path) -> None:
    """Joint training may be measured after the last task alone."""
    for seed in (0, 1):
        write_run(tmp_path, "joint", seed, [math.nan, 60.0 + seed])
    write_run(tmp_path, "efc", 0, [80.0, 40.0])
    page = page_of(tmp_path)
    assert "60.50 ± 0.71" in text_of(page)
    curves = re.search(r"<svg viewBox[^>]*over task.*?</svg>", page, re.DOTALL)
    assert curves is not None
    fills = [circle.get("fill") for circle in ElementTree.fromstring(curves.group()).iter("circle")]
    assert fills == 2 * [COLOURS[0]] + [COLOURS[1]]


@pytest.mark.parametrize(
    "line",
    [
        {"kind": "epoch"},
        {"kind": "epoch", "losses": None},
        {"kind": "epoch", "losses": {"huge": 9e15}},
        {"kind": "epoch", "losses": {"huge": "text"}},
        {"kind": "epoch", "losses": {"tiny": 1e-323}},
    ],
)
def test_odd_records_do_not_spoil_the_page(tmp_path: Path, line: dict[str, Any]) -> None:
    odd = {"hardware": "none", "versions": [], "execution": 3}
    write_run(tmp_path, "efc", 0, [90.0, 50.0], **odd).append_metrics(line)
    assert "unknown hardware" in text_of(page_of(tmp_path))


def test_numbers_beyond_all_bounds_are_not_drawn() -> None:
    assert line_chart([Line("a", [1, 2], [1e308, -1e308])], "x", "y") == "<p>Nothing was measured.</p>"
