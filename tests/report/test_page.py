"""The page and the command: well formed, complete, honest about what is missing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from efcil.cli import main
from efcil.evaluation.classification import Confusion
from efcil.report import render, table, write_page
from efcil.runfolder import RunFolder, find_runs

CONFUSION = Confusion(2, np.array([[0, 0, 3], [0, 1, 7], [1, 0, 2], [1, 1, 8]]))
VOID = {"meta", "br", "input"}


class Balance(HTMLParser):
    """Raises where a tag is closed that is not open, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)


def text_of(page: str) -> str:
    parser = Balance()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(" ".join(parser.text).split())


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
    assert "0123456789ab (started with fedcba987654, two+changes)" in text_of(page_of(tmp_path))


def charts(page: str) -> dict[str, ElementTree.Element]:
    """Return the charts of a page by what they show."""
    found = [ElementTree.fromstring(each) for each in re.findall(r'<svg class="chart.*?</svg>', page, re.DOTALL)]
    return {chart.get("aria-label", ""): chart for chart in found}


def data_of(page: str) -> dict[str, Any]:
    """Return what the page's script reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found.group(1))
    return content


def test_a_page_shows_means_curves_matrices_losses_and_commands(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    write_run(tmp_path, "efc", 1, [80.0, 40.0])
    write_run(tmp_path, "finetune", 0, [70.0, 10.0])
    page = page_of(tmp_path)
    text = text_of(page)
    assert "45.00 ± 7.07" in text  # A_step of efc
    assert "43.62 ± 0.70" in text  # the paper's
    assert "efcil run --seed 0" in text
    assert "commit 0123456789ab hardware abacus versions torch 2.0" in text
    drawn = charts(page)
    curves = drawn["A_step after every task: accuracy over all classes seen (%) over task"]
    assert [group.get("data-key") for group in curves.iter("g") if group.get("class", "").startswith("series")] == [
        "g0r0",
        "g0r1",
    ]
    (paper,) = [group for group in curves.iter("g") if group.get("class", "").startswith("reference")]
    assert (paper.get("data-key"), paper.findtext("line/title")) == ("g0r0", "paper, efc: 43.62")
    assert [cell.findtext("text") for cell in drawn["efc"].iter("g")] == ["85", "45", "45"]
    losses = [figure for figure in data_of(page)["figures"].values() if figure["titles"][1] == "loss"]
    assert [[each["name"] for each in figure["series"]] for figure in losses] == 2 * [["seed 0", "seed 1"]] + 2 * [
        ["seed 0"]
    ]


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    page = page_of(tmp_path)
    without_namespace = page.replace('"http://www.w3.org/2000/svg"', "")
    for outside in ("http:", "https:", " src=", "url(", "@import", "<link"):
        assert outside not in without_namespace, "The page needs nothing from elsewhere."
    assert {target[0] for target in re.findall(r'href="([^"]*)"', page)} == {"#"}
    # The one script is allowed by its digest, and so is none that a name might bring along.
    script = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in page
    assert len(script) == 1


def test_metrics_are_chosen(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    page = page_of(tmp_path, metrics=["A_inc"])
    assert ">A_inc</th>" in page
    assert ">A_step</th>" not in page


def test_every_metric_has_charts_and_the_first_is_chosen(tmp_path: Path) -> None:
    for name in ("efc", "lwf"):
        write_run(tmp_path, name, 0, [90.0, 60.0, 50.0], forgetting=40.0, seconds={"total": 10.0 * len(name)})
        write_run(tmp_path, name, 1, [90.0, 50.0, 40.0], forgetting=40.0, seconds={"total": 10.0 * len(name + "x")})
    page = page_of(tmp_path)
    assert set(re.findall(r'<figure [^>]*data-metric="(\w+)"', page)) == {"A_step", "A_inc", "forgetting"}
    assert re.findall(r'value="(\w+)"( checked)?><span>', page)[0] == ("A_step", " checked")
    titles = set(charts(page))
    assert "A_inc after every task: accuracy, mean over tasks so far (%) over task" in titles


def test_names_are_text_and_not_markup(tmp_path: Path) -> None:
    write_run(tmp_path, "<script>&", 0, [90.0, 50.0], command="efcil <b>\x1b")
    write_run(tmp_path, "</script><script>alert(1)</script>", 0, [90.0, 50.0])
    page = page_of(tmp_path)
    assert page.count("<script") == 2, "the data and the code of the page itself"
    assert "&lt;script&gt;&amp;" in page
    assert "efcil &lt;b&gt;\\x1b" in page
    names = {each["name"] for figure in data_of(page)["figures"].values() for each in figure.get("series", ())}
    assert "</script><script>alert(1)</script>" in names


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


def test_tasks_that_were_not_measured_are_gaps(tmp_path: Path) -> None:
    """Joint training may be measured after the last task alone."""
    for seed in (0, 1):
        write_run(tmp_path, "joint", seed, [math.nan, 60.0 + seed], A_inc=None)
    write_run(tmp_path, "efc", 0, [80.0, 40.0])
    page = page_of(tmp_path)
    assert "60.50 ± 0.71" in text_of(page)
    curves = charts(page)["A_step after every task: accuracy over all classes seen (%) over task"]
    series = {group.get("data-key"): group for group in curves.iter("g") if "series" in group.get("class", "")}
    assert len(list(series["g0r0"].iter("circle"))) == 2
    assert len(list(series["g0r1"].iter("rect"))) == 1
    row = re.search(r'<tr data-row="g0r1" data-bound>.*?</tr>', page, re.DOTALL)
    assert row is not None
    assert '<td data-value="" data-column="A_inc" class="ours"><span class="mean"></span></td>' in row.group()


def test_held_out_results_have_a_section_that_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    write_run(tmp_path, "efc+held_out=0.2", 0, [90.0, 60.0], method="efc")
    first, second = re.findall(r"<h2 id=.*?</h2>", page_of(tmp_path))
    assert "held" not in first
    assert "cifar100 cs10: held-out training images (20 % of each class), no test images" in second


def test_classes_confusion_and_spectrum_are_shown_where_they_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["<cat>", "dog"]
    counts = [
        SimpleNamespace(task=task, position=position, name=name, images=10, right=right)
        for task, position, name, right in ((1, 0, "<cat>", 9), (2, 0, "<cat>", 3), (2, 1, "dog", 8))
    ]
    monkeypatch.setattr(RunFolder, "classes", lambda run: counts, raising=False)
    monkeypatch.setattr(RunFolder, "confusion_pairs", lambda run: CONFUSION)
    spectra = {1: np.array([1.0, 0.1, 1e-14]), 2: np.array([2.0, 0.5, 0.01])}
    monkeypatch.setattr(RunFolder, "spectrum", lambda run: spectra, raising=False)
    settings = {"identity": {"method_settings": {"damping": 0.1, "efm_weight": 10.0}}}
    write_run(tmp_path / "damped", "efc", 0, [90.0, 55.0], class_names=names, **settings)
    page = page_of(tmp_path / "damped")
    text, drawn = text_of(page), charts(page)
    assert "Below the level line, damping outweighs." in text
    assert "Weakest classes <cat> 30.0 %" in text
    assert "Strongest classes dog 80.0 %" in text
    assert "<cat> taken for dog 7 dog taken for <cat> 2" in text
    assert [cell.findtext("text") for cell in drawn["Accuracy of every class (%)"].iter("g")] == ["90", "30", "80"]
    confusion = drawn["Confusion after the last task (% of the true class)"]
    assert [cell.findtext("text") for cell in confusion.iter("g")] == ["30", "70", "20", "80"]
    spectrum = drawn["Spectrum of the feature matrix: eigenvalue over eigenvalue, largest first"]
    said = [line.findtext("text") for line in spectrum.iter("g") if "reference" in line.get("class", "")]
    assert said == ["damping / efm_weight = 0.01", "2 classes"]
    settings["identity"]["method_settings"]["damping"] = 0.0
    write_run(tmp_path / "undamped", "efc", 0, [90.0, 55.0], class_names=names, **settings)
    text = text_of(page_of(tmp_path / "undamped"))
    assert "level line" not in text
    assert "There is no damping: the feature matrix alone weighs the drift." in text


def test_of_very_many_classes_confusions_are_listed_and_not_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efcil.report.details.MOST_IN_FULL", 1)
    monkeypatch.delattr(Confusion, "matrix")
    monkeypatch.setattr(RunFolder, "confusion_pairs", lambda run: CONFUSION)
    write_run(tmp_path, "efc", 0, [90.0, 55.0], class_names=["cat", "dog"])
    page = page_of(tmp_path)
    assert "cat taken for dog 7 dog taken for cat 2" in text_of(page)
    assert not [title for title in charts(page) if "Confusion" in title]


def test_without_them_there_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("classes", "confusion_pairs", "spectrum"):
        monkeypatch.setattr(RunFolder, name, lambda run: None, raising=False)
    write_run(tmp_path, "efc", 0, [90.0, 50.0])
    text = text_of(page_of(tmp_path))
    assert "Weakest" not in text
    assert "Spectrum" not in text


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
    odd = {"hardware": "none", "versions": [], "execution": 3, "stored": "much", "class_names": 7}
    write_run(tmp_path, "efc", 0, [90.0, 50.0], **odd).append_metrics(line)
    assert "unknown hardware" in text_of(page_of(tmp_path))


def test_a_page_is_written_with_one_call(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", "efc", 0, [90.0, 50.0])
    found = write_page(find_runs([tmp_path / "runs"]), tmp_path / "report.html")
    assert [row.label for row in found.rows] == ["efc"]
    assert "50.00" in text_of((tmp_path / "report.html").read_text(encoding="utf-8"))


class TestCommand:
    """`efcil report`: what it prints, where it writes, and what it refuses."""

    def run(self, *arguments: object) -> int:
        return main(["report", *map(str, arguments)])

    def test_the_table_is_printed_and_the_page_lies_beside_the_runs(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_run(tmp_path, "efc", 0, [90.0, 50.0])
        for _ in range(2):
            assert self.run(tmp_path) == 0
            output = capsys.readouterr()
            assert output.out.startswith("cifar100 cs10\n")
            assert output.err == f"The page with charts: {tmp_path / 'report.html'}\n"
        (tmp_path / "report.html").write_text("mine")
        assert self.run(tmp_path) == 0
        assert "stays as it is" in capsys.readouterr().err
        assert (tmp_path / "report.html").read_text() == "mine"

    def test_a_folder_without_runs_is_a_mistake(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path) == 2
        error = capsys.readouterr().err
        assert error == f"efcil: There are no runs in {tmp_path}. Give a folder that `efcil run --output` wrote to.\n"

    @pytest.mark.parametrize(
        ("name", "begins"),
        [
            ("a.html", "<!doctype html>"),
            ("a.md", "| dataset"),
            ("a.tex", "% In"),
            ("a.csv", "dataset,"),
            ("a", "cifar"),
        ],
    )
    def test_the_name_of_the_file_says_the_format(self, tmp_path: Path, name: str, begins: str) -> None:
        write_run(tmp_path / "runs", "efc", 0, [90.0, 50.0])
        assert self.run(tmp_path / "runs", "--output", tmp_path / name) == 0
        assert (tmp_path / name).read_text(encoding="utf-8").lstrip().startswith(begins)
        assert not (tmp_path / "runs" / "report.html").exists()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["--format", "docx"], "Unknown format 'docx'."),
            (["--format", "pdf"], "pdf is a format of figures. Add --figures DIR"),
            (["--output", "table.pdf"], "table.pdf is the name of a figure. Figures are written by --figures DIR"),
            (["--format", "csv", "text"], "A table has one format"),
            (["--metric", "A_stp"], "Unknown metric 'A_stp'."),
        ],
    )
    def test_mistakes(self, tmp_path: Path, given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.run(tmp_path, *given) == 2
        assert said in capsys.readouterr().err

    def test_rows_are_compared_with_one_of_them(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for seed in (0, 1):
            write_run(tmp_path, "efc", seed, [90.0, 52.0 + 2 * seed])
            write_run(tmp_path, "lwf", seed, [90.0, 50.0])
        assert self.run(tmp_path, "--against", "lwf") == 0
        assert "+3.00 ± 1.00" in capsys.readouterr().out
        page = text_of((tmp_path / "report.html").read_text(encoding="utf-8"))
        assert "Differences from lwf" in page
        assert "efc 0 1 +3.00 ± 1.00" in page
        assert self.run(tmp_path, "--against", "lfw") == 2
        assert "Unknown row 'lfw'. Did you mean 'lwf'" in capsys.readouterr().err

    def test_figures(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("matplotlib", reason="the extra `figures` is not installed")
        write_run(tmp_path / "runs", "efc", 0, [90.0, 50.0])
        write_run(tmp_path / "runs", "<lwf>", 0, [90.0, 30.0])
        assert self.run(tmp_path / "runs", "--figures", tmp_path / "figures", "--format", "svg") == 0
        output = capsys.readouterr()
        assert output.out == ""
        names = {file.name for file in (tmp_path / "figures").iterdir()}
        assert f"{len(names)} files written" in output.err
        assert {"cifar100-cs10-A_step-after-every-task.svg", "cifar100-cs10-efc-accuracy.svg"} <= names
        assert all(re.fullmatch(r"[\w.+=-]+\.svg", name) for name in names)
