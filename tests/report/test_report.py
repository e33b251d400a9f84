from __future__ import annotations

import csv
import io
import math
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efcil.errors import EfcilError
from efcil.report import FORMATS, METRICS, Table, against, matrix_text, paper_value, render, table
from efcil.report.groups import best_and_second, changes_of
from efcil.report.latex import escape_latex
from efcil.report.paired import Comparison, comparisons, find
from efcil.report.paper import published
from efcil.resolution import identity, label, to_yaml
from efcil.runfolder import RunFolder, find_runs
from efcil.settings import Settings

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "paper" / "tables.csv"


def write_run(root: Path, dataset: str, scenario: str, label: str, seed: int, **changes: Any) -> RunFolder:
    run = RunFolder(root / dataset / scenario / label / f"seed{seed}")
    summary = {
        "method": label.split("+")[0],
        "label": label,
        "dataset": dataset,
        "scenario": scenario,
        "seed": seed,
        "A_step": 40.0 + seed,
        "A_inc": 55.5,
        "task_mean": 41.0,
        "forgetting": 12.0,
        "task_aware_A_step": 80.0,
        "seconds": {"total": 100.0 * (seed + 1), "train": 90.0},
        "stored": {"numbers": 500_000, "bytes": 2_000_000},
        "finished": "2024-01-01T00:00:00",
    }
    run.write_summary({**summary, **changes})
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for seed in (0, 1, 5):
        write_run(tmp_path, "cifar100", "cs10", "efc", seed)
    write_run(tmp_path, "cifar100", "cs10", "efc+prototype_update=none", 0)
    write_run(tmp_path, "cifar100", "cs10", "finetune", 0, forgetting=None)
    write_run(tmp_path, "cifar100", "ws5", "efc", 0)
    write_run(tmp_path, "digits", "cs5", "efc+epochs=5", 0)
    return tmp_path


def test_rows_group_seeds(runs: Path) -> None:
    rows = table(find_runs([runs])).rows
    assert [(row.dataset, row.scenario, row.label) for row in rows] == [
        ("cifar100", "cs10", "efc"),
        ("cifar100", "cs10", "efc+prototype_update=none"),
        ("cifar100", "cs10", "finetune"),
        ("cifar100", "ws5", "efc"),
        ("digits", "cs5", "efc+epochs=5"),
    ]
    efc = rows[0]
    assert efc.seeds == (0, 1, 5)
    assert efc.ours["A_step"].mean == pytest.approx(42.0)
    assert efc.ours["A_step"].std == pytest.approx(statistics.stdev([40, 41, 45])) == pytest.approx(math.sqrt(7))
    assert efc.ours["seconds"].mean == pytest.approx(300.0)
    assert efc.ours["stored"].mean == pytest.approx(2.0), "megabytes"
    assert rows[1].ours["A_step"].std is None
    assert "forgetting" not in rows[2].ours


def test_scenarios_are_in_order_of_length(tmp_path: Path) -> None:
    for scenario in ("ws10", "cs20", "ws5", "cs10", "cs5"):
        write_run(tmp_path, "digits", scenario, "efc", 0)
    scenarios = [row.scenario for row in table(find_runs([tmp_path])).rows]
    assert scenarios == ["cs5", "cs10", "cs20", "ws5", "ws10"]


def test_paper_stands_beside_ours_only_where_it_fits(runs: Path) -> None:
    rows = {(row.scenario, row.label): row.paper for row in table(find_runs([runs])).rows}
    assert rows["cs10", "efc"]["A_step"].mean == 43.62
    assert rows["cs10", "efc"]["A_inc"].std == 0.91
    assert rows["cs10", "efc+prototype_update=none"]["A_step"].mean == 39.28
    assert "A_inc" not in rows["cs10", "efc+prototype_update=none"]
    assert rows["cs10", "finetune"] == {}
    assert rows["cs5", "efc+epochs=5"] == {}


def test_unfinished_damaged_and_repeated_runs_are_listed(runs: Path, tmp_path: Path) -> None:
    unfinished = RunFolder(runs / "cifar100" / "cs10" / "efc" / "seed7")
    unfinished.path.mkdir()
    unfinished.settings_file.write_text("seed: 7\n")
    damaged = write_run(runs, "cifar100", "cs10", "efc", 8)
    damaged.summary_file.write_text("{")
    again = write_run(runs / "copy", "cifar100", "cs10", "efc", 0, A_step=99.0, finished="2025-01-01T00:00:00")
    result = table(find_runs([runs]))
    assert result.rows[0].seeds == (0, 1, 5)
    assert result.rows[0].ours["A_step"].mean == pytest.approx((99 + 41 + 45) / 3)
    reasons = {problem.path: problem.reason for problem in result.problems}
    assert reasons.keys() == {unfinished.path, damaged.path, runs / "cifar100" / "cs10" / "efc" / "seed0"}
    assert reasons[unfinished.path] == "not finished"
    assert "summary.json is damaged" in reasons[damaged.path]
    assert str(again.path) in reasons[runs / "cifar100" / "cs10" / "efc" / "seed0"]
    for format in FORMATS:
        text = render(result, format)
        assert all(str(path) in text for path in reasons)


def test_a_newer_run_of_the_same_name_need_not_be_the_same(tmp_path: Path) -> None:
    """Two people's runs of a method of their own, whose default one of them has changed."""
    facts = {"method": "anchor", "data": "1" * 64}
    mine = {**facts, "method_source": "a" * 64, "identity": {"method_settings": {"weight": 0.1}}}
    yours = {**facts, "method_source": "b" * 64, "identity": {"method_settings": {"weight": 0.2}}}
    write_run(tmp_path / "mine", "digits", "cs5", "anchor", 0, **mine)
    write_run(tmp_path / "mine", "digits", "cs5", "anchor", 1, **yours)
    for seed in (0, 1):
        write_run(tmp_path / "yours", "digits", "cs5", "anchor", seed, **yours, finished="2025-01-01T00:00:00")
    first, second = (problem.reason for problem in table(find_runs([tmp_path])).problems)
    place = tmp_path / "yours/digits/cs5/anchor"
    assert first == (
        f"{place / 'seed0'} has the same name and seed, but other settings (method_settings.weight) and another "
        "version of the method; the newer one is counted"
    )
    assert second == f"the same run as {place / 'seed1'}, which is counted instead"


def test_text_fits_eighty_columns_and_aligns(runs: Path) -> None:
    text = render(table(find_runs([runs])), "text", width=80)
    assert text.splitlines()[:7] == [
        "cifar100 cs10",
        "method      seeds        A_step  paper         A_inc  paper  forgetting  seconds",
        "-" * 80,
        "efc             3  42.00 ± 2.65  43.62  55.50 ± 0.00  58.58       12.00    300.0",
        "efc, prototype_update=none",
        "                1         40.00  39.28         55.50              12.00    100.0",
        "finetune        1         40.00                55.50                       100.0",
    ]
    assert max(map(len, text.splitlines())) <= 80
    wide = render(table(find_runs([runs])), "text", width=200).splitlines()
    assert wide[1].startswith("method    prototype_update  seeds  ")
    assert wide[4].startswith("efc       none                  1  ")


def test_text_without_runs_says_so() -> None:
    assert render(Table(())) == "No finished runs.\n"


def test_markdown_has_equal_columns(runs: Path) -> None:
    text, notes = render(table(find_runs([runs])), "markdown").split("\n\nNotes:\n\n")
    lines = text.splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert (
        "| cifar100 | cs10 | efc |  |  | 3 | **42.00 ± 2.65** | 43.62 ± 0.70 | 55.50 ± 0.00 | 58.58 ± 0.91 |"
        in lines[2]
    )
    assert "| efc | none |  | 1 | <u>40.00</u> | 39.28 ± 0.97 |" in lines[3]
    assert lines[6].startswith("| digits | cs5 | efc |  | 5 | 1 |")
    assert len(lines) == 2 + 5
    assert notes == (
        "- cifar100 cs10: rows are means over different seeds: efc (0 1 5), efc, prototype_update=none; finetune (0)\n"
        "- digits cs5: all rows have epochs=5\n"
    )


def test_latex_is_escaped_and_ruled(runs: Path) -> None:
    text = render(table(find_runs([runs])), "latex")
    assert r"efc & none & \underline{40.00} & 39.28 {\scriptsize $\pm$ 0.97} & 55.50 &  &  &  &  &  \\" in text
    assert r"efc &  & \textbf{42.00} {\scriptsize $\pm$ 2.65} & 43.62 {\scriptsize $\pm$ 0.70} &" in text
    assert r"cifar100 &  & \multicolumn{4}{c}{cs10} & \multicolumn{4}{c}{ws5} \\" in text
    assert text.count(r"\toprule") == text.count(r"\midrule") == text.count(r"\bottomrule") == 2
    tables = text.split(r"\begin{tabular}{")[1:]
    for tabular in tables:
        lines = [line for line in tabular.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert {line.count("&") for line in lines} == {len(tabular.partition("}")[0]) - 1}
    assert (
        "over different seeds: efc (0 1 5), efc, prototype_update=none; finetune (0)\n% cifar100 ws5: seeds 0" in text
    )
    assert escape_latex("a_b&50%~{x}\\") == r"a\_b\&50\%\textasciitilde{}\{x\}\textbackslash{}"


def test_a_setting_of_one_scenario_alone_is_a_column_where_scenarios_share_a_table(tmp_path: Path) -> None:
    write_run(tmp_path, "digits", "cs5", "efc+epochs=2", 0)
    write_run(tmp_path, "digits", "ws5", "efc", 0)
    found = table(find_runs([tmp_path]))
    text = render(found, "latex", ["A_step"])
    assert r"efc &  &  & 40.00 \\" in text
    assert r"efc & 2 & 40.00 &  \\" in text, "results of two schedules stand in one row"
    assert "| digits | cs5 | efc | 2 | 1 | 40.00 |" in render(found, "markdown", ["A_step"])
    assert render(found, "csv", ["A_step"]).splitlines()[0].endswith("tested_on,set epochs,notes,problem")


@pytest.mark.parametrize("format", ["text", "markdown", "latex"])
def test_rows_that_are_not_made_alike_are_named(tmp_path: Path, format: str) -> None:
    """Means over other seeds have other class orders, and a method may have been given other images."""
    for seed in (0, 1):
        write_run(tmp_path, "folder", "cs5", "efc", seed, data="a" * 16)
    write_run(tmp_path, "folder", "cs5", "lwf", 2, data="b" * 16)
    words = " ".join(render(table(find_runs([tmp_path])), format, width=200).split())
    assert "folder cs5: rows are means over different seeds: efc (0 1), lwf (2)" in words
    assert "folder cs5: rows of different images: efc (aaaaaaaa), lwf (bbbbbbbb)" in words
    assert "rows of different images: efc (aaaaaaaa), lwf (bbbbbbbb)" in render(table(find_runs([tmp_path])), "html")
    write_run(tmp_path, "folder", "cs5", "lwf", 0, data="a" * 16)
    shutil.rmtree(tmp_path / "folder" / "cs5" / "lwf" / "seed2")
    shutil.rmtree(tmp_path / "folder" / "cs5" / "efc" / "seed1")
    words = render(table(find_runs([tmp_path])), format, width=200)
    assert "different" not in words


def test_methods_with_recipes_of_their_own_are_named(tmp_path: Path) -> None:
    def begun(epochs: int, augmentation: str) -> dict[str, Any]:
        recipe = {"epochs": epochs, "optimiser": "sgd", "learning_rate": 0.1}
        return {"first_task": recipe, "augmentation": augmentation}

    write_run(tmp_path, "cifar100", "cs10", "efc", 0, identity=begun(100, "crop-flip"))
    write_run(tmp_path, "cifar100", "cs10", "lwf", 0, identity=begun(100, "crop-flip"))
    assert "first tasks" not in render(table(find_runs([tmp_path])))
    write_run(tmp_path, "cifar100", "cs10", "apr", 0, identity=begun(200, "crop-flip-auto"))
    said = "different first tasks: apr (200 epochs, sgd 0.1, crop-flip-auto), efc; lwf (100 epochs, sgd 0.1, crop-flip)"
    for format in ("text", "markdown", "latex", "html"):
        assert said in " ".join(render(table(find_runs([tmp_path])), format, width=300).split()), format
    write_run(tmp_path, "cifar100", "cs10", "efc+epochs=5", 0, identity=begun(5, "crop-flip"))
    assert "first tasks" not in render(table(find_runs([tmp_path]))), "a column says so"


def test_rows_that_ask_for_other_images_have_other_images(tmp_path: Path) -> None:
    write_run(tmp_path, "folder", "cs5", "efc", 0, data="a" * 16)
    write_run(tmp_path, "folder", "cs5", "efc+images_per_class=5", 0, data="b" * 16)
    write_run(tmp_path, "folder", "cs5", "efc+data=elsewhere", 0, data="c" * 16)
    assert "different images" not in render(table(find_runs([tmp_path])))


def test_rows_of_all_images_say_so_beside_rows_of_some(tmp_path: Path) -> None:
    for values in ({}, {"images_per_class": "5"}):
        settings = Settings(method="efc", **values)  # type: ignore[arg-type]
        write_run(tmp_path, "digits", "cs5", label(settings), 0, identity=identity(settings))
    lines = render(table(find_runs([tmp_path])), "csv", ["A_step"]).splitlines()
    assert [line["set images_per_class"] for line in csv.DictReader(lines)] == ["5", "all"]


def test_class_orders_of_each_seed_are_not_called_those_of_the_first(tmp_path: Path) -> None:
    for values in ({"seed": 0}, {"seed": 1}, {"seed": 0, "class_seed": 0}, {"seed": 0, "class_order": "natural"}):
        settings = Settings(method="efc", dataset="digits", scenario="cs5", **values)  # type: ignore[arg-type]
        write_run(tmp_path, "digits", "cs5", label(settings), settings.seed, identity=identity(settings))
    lines = render(table(find_runs([tmp_path])), "csv", ["A_step"]).splitlines()
    found = {line["method"]: line["set class_seed"] for line in csv.DictReader(lines)}
    assert found == {"efc": "the seed", "efc+class_seed=0": "0", "efc+class_order=natural": ""}


def test_names_of_any_kind_stay_in_their_cells(tmp_path: Path) -> None:
    """Labels and folders may be called anything, and a table is still a table."""
    write_run(tmp_path, "cifar100", "cs10", "a\\|b<i>", 0)
    unfinished = RunFolder(tmp_path / "line\n\\input{x}" / "seed0")
    unfinished.path.mkdir(parents=True)
    unfinished.settings_file.write_text("")
    result = table(find_runs([tmp_path]))
    lines = render(result, "markdown").splitlines()
    assert r"| a\\\|b&lt;i> |" in lines[2]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", lines[2])) == lines[0].count("|")
    assert len(lines) == 3 + 4, "one line for the run that is not finished"
    assert not any(line.startswith(r"\input") for line in render(result, "latex").splitlines())


def test_csv_can_be_read_back(runs: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(render(table(find_runs([runs])), "csv"))))
    assert rows[0]["seeds"] == "0 1 5"
    assert float(rows[0]["A_step_mean"]) == pytest.approx(42.0)
    assert rows[0]["A_step_paper_mean"] == "43.62"
    assert rows[1]["A_step_std"] == ""  # not a dash: the column is one of numbers
    assert rows[2]["forgetting_mean"] == ""


def execution(precision: str, path: str, deterministic: bool = False) -> dict[str, Any]:
    return {"device": "cpu", "precision": precision, "path": path, "deterministic": deterministic}


def notes(root: Path, changes: list[dict[str, Any]]) -> tuple[str, ...]:
    runs = [write_run(root, "cifar100", "cs10", "efc", seed, **each) for seed, each in enumerate(changes)]
    return table(runs).rows[0].notes


class TestNotes:
    def test_seeds_that_are_alike_or_do_not_know_have_none(self, tmp_path: Path) -> None:
        known = {"method_source": "a" * 64, "execution": execution("fp32", "plain")}
        other_device = {"execution": execution("fp32", "plain") | {"device": "cuda"}}
        older = [{}, {"execution": {"device": "cuda"}}, {"execution": "gpu", "method_source": None}]
        assert notes(tmp_path, [known, known, other_device, *older]) == ()

    def test_seeds_made_with_other_code(self, tmp_path: Path) -> None:
        sources = [{"method_source": letter * 64} for letter in "aba"]
        (note,) = notes(tmp_path, [*sources, {}])
        assert note == "seeds of different versions of the method: aaaaaaaa (seed 0 2), bbbbbbbb (seed 1)"

    def test_seeds_computed_in_another_way(self, tmp_path: Path) -> None:
        ways = [("bf16", "fused"), ("fp32", "plain"), ("fp32", "plain", True)]
        (note,) = notes(tmp_path, [{"execution": execution(*way)} for way in ways])
        assert note == (
            "seeds of different ways of computing: bf16 fused (seed 0), fp32 plain (seed 1), "
            "fp32 plain deterministic (seed 2)"
        )

    def test_seeds_of_other_images_or_numbers_of_threads(self, tmp_path: Path) -> None:
        images = [{"data": letter * 16} for letter in "ab"]
        assert notes(tmp_path / "one", images) == ("seeds of different images: aaaaaaaa (seed 0), bbbbbbbb (seed 1)",)
        (note,) = notes(
            tmp_path / "two", [{"execution": execution("fp32", "plain") | {"threads": threads}} for threads in (1, 8)]
        )
        assert note == (
            "seeds of different ways of computing: fp32 plain with 1 threads (seed 0), "
            "fp32 plain with 8 threads (seed 1)"
        )

    def test_names_cut_short_for_folders_are_spelled_out(self, tmp_path: Path) -> None:
        overrides = {"damping": 0.2, "drift_sigma": 0.3, "efm_weight": 5.0, "first_task.learning_rate": 0.0021}
        overrides |= {"jitter": 1e-4}
        settings = Settings(method="efc", dataset="cifar100", scenario="cs10", overrides=overrides)
        short, whole = label(settings), label(settings, whole=True)
        assert short != whole
        run = write_run(tmp_path, "cifar100", "cs10", short, 0)
        run.write_settings(settings)
        assert table([run]).rows[0].notes == (f"in full: {whole}",)

    def test_means_of_fewer_seeds_than_there_are(self, tmp_path: Path) -> None:
        beside = {"heads": {"A_step": 1.0, "A_inc": None}}
        changes = [{"A_step": None, "classifiers": beside}, {"A_inc": None, "classifiers": beside}, {"A_inc": None}]
        found = notes(tmp_path, changes)
        assert found == (
            "not measured for all seeds: A_step, A_step of heads (2 of 3)",
            "not measured for all seeds: A_inc (1 of 3)",
        )

    def test_every_format_shows_them(self, tmp_path: Path) -> None:
        write_run(tmp_path, "cifar100", "cs10", "a<i>", 0, A_step=None)
        write_run(tmp_path, "cifar100", "cs10", "a<i>", 1)
        result = table(find_runs([tmp_path]))
        note = "not measured for all seeds: A_step (1 of 2)"
        assert f"\n\na<i>: {note}\n" in render(result, "text")
        assert max(map(len, render(result, "text", width=40).splitlines()[-2:])) <= 40
        assert f"\nNotes:\n\n- a&lt;i>: {note}\n" in render(result, "markdown")
        assert f"\n% a<i>: {note}\n" in render(result, "latex")
        (row,) = csv.DictReader(io.StringIO(render(result, "csv")))
        assert (row["notes"], row["problem"]) == (note, "")
        assert (row["n"], row["A_step_n"], row["A_inc_n"], row["A_step_mean"]) == ("2", "1", "2", "41.0000")


class TestClassifiers:
    @pytest.fixture
    def result(self, tmp_path: Path) -> Table:
        for seed in (0, 1):
            beside = {"heads": {"A_step": 30.0 + seed, "A_inc": 50.0}, "bayes": {"A_step": 20.0, "A_inc": 45.0 + seed}}
            write_run(tmp_path, "cifar100", "cs10", "efc+classifier=all", seed, classifiers=beside)
        write_run(tmp_path, "cifar100", "ws5", "efc", 0)
        return table(find_runs([tmp_path]))

    def test_the_paper_stands_beside_the_methods_own_way(self, result: Table) -> None:
        assert result.rows[0].paper["A_step"].mean == 43.62
        assert paper_value("cifar100", "cs10", "efc+classifier=bayes", "A_step") is None

    def test_text(self, result: Table) -> None:
        blocks = render(result, "text").split("\n\n")
        assert len(blocks) == 3
        assert blocks[1].splitlines() == [
            "cifar100 cs10 efc",
            "classifier        A_step         A_inc",
            "--------------------------------------",
            "own         40.50 ± 0.71  55.50 ± 0.00",
            "heads       30.50 ± 0.71  50.00 ± 0.00",
            "bayes       20.00 ± 0.00  45.50 ± 0.71",
        ]

    def test_markdown_and_latex_have_a_second_table(self, result: Table) -> None:
        tables = render(result, "markdown").split("\n\n")
        assert tables[1].splitlines()[0] == "| dataset | scenario | method | classifier | A_step | A_inc |"
        row = "| cifar100 | cs10 | efc | bayes | 20.00 ± 0.00 | 45.50 ± 0.71 |"
        assert row in tables[1].splitlines()
        assert len({line.count("|") for line in tables[1].splitlines()}) == 1
        latex = render(result, "latex")
        assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 2
        assert r"\begin{tabular}{lllcc}" in latex
        row = r"cs10 & efc & bayes & 20.00 {\scriptsize $\pm$ 0.00} & 45.50 {\scriptsize $\pm$ 0.71} \\"
        assert row in latex

    def test_csv_has_columns_of_them(self, result: Table) -> None:
        with_them, without = csv.DictReader(io.StringIO(render(result, "csv")))
        assert (with_them["bayes_A_inc_mean"], with_them["bayes_A_inc_n"]) == ("45.5000", "2")
        assert with_them["heads_A_step_std"] == "0.7071"
        assert (without["bayes_A_inc_mean"], without["bayes_A_inc_n"]) == ("", "0")

    @pytest.mark.parametrize("format", FORMATS)
    def test_columns_that_were_not_chosen_are_not_shown(self, result: Table, format: str) -> None:
        assert "bayes" not in render(result, format, metrics=["task_mean"])
        chosen = render(result, format, metrics=["A_inc"])
        assert "bayes" in chosen
        assert "A_step" not in chosen.replace(r"\_", "_")


class TestDifferences:
    """Rows less another one, seed by seed."""

    @staticmethod
    def write(root: Path, label: str, seed: int, step: float, **changes: Any) -> None:
        facts = {"A_step": step, "data": "a" * 16, "class_order": [seed, 1 - seed]}
        write_run(root, "digits", "cs5", label, seed, **{**facts, **changes})

    @pytest.fixture
    def written(self, tmp_path: Path) -> Path:
        """Seeds differ by 20 points, methods by one to three in every seed."""
        for seed, base in ((0, 30.0), (1, 50.0), (2, 70.0)):
            self.write(tmp_path, "efc", seed, base + seed + 1)
            self.write(tmp_path, "finetune", seed, base)
        self.write(tmp_path, "lwf", 2, 69.5)
        self.write(tmp_path, "lwf", 3, 90.0)
        return tmp_path

    @staticmethod
    def compare(root: Path, name: str) -> Comparison:
        (found,) = comparisons(against(table(find_runs([root])), name), ["A_step", "seconds"])
        return found

    def test_the_mean_and_its_standard_error_are_those_of_the_differences(self, written: Path) -> None:
        found = self.compare(written, "finetune")
        assert found.metrics == ("A_step",), "seconds depend on the machine"
        efc, lwf = found.paired
        assert (efc.row.label, efc.seeds) == ("efc", (0, 1, 2))
        assert efc.differences["A_step"].mean == pytest.approx(2.0)
        assert efc.differences["A_step"].error == pytest.approx(1 / math.sqrt(3))  # of the means: 12
        assert (lwf.differences["A_step"].text(), lwf.seeds) == ("-0.50", (2,)), "one seed has no error"
        assert found.notes == [
            "lwf: not paired: seeds 0 1 (no run of lwf)",
            "lwf: not paired: seed 3 (no run of finetune)",
        ]

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"data": "b" * 16}, "other images"),
            ({"class_order": [0, 1, 2]}, "another class order"),
            ({"answers": ["dog", "dog"]}, "other answers"),
        ],
    )
    def test_seeds_that_are_not_alike_are_not_paired(
        self, tmp_path: Path, changes: dict[str, Any], reason: str
    ) -> None:
        self.write(tmp_path, "efc", 0, 31.0)
        self.write(tmp_path, "efc", 1, 59.0, **changes)
        for seed, base in ((0, 30.0), (1, 50.0)):
            self.write(tmp_path, "finetune", seed, base)
        found = self.compare(tmp_path, "finetune")
        assert found.paired[0].differences["A_step"].text() == "+1.00"
        assert found.notes == [f"efc: not paired: seed 1 ({reason})"]

    def test_what_was_not_recorded_is_paired(self, tmp_path: Path) -> None:
        write_run(tmp_path, "digits", "cs5", "efc", 0)
        self.write(tmp_path, "finetune", 0, 30.0)
        assert self.compare(tmp_path, "finetune").paired[0].differences["A_step"].text() == "+10.00"

    def test_held_out_results_are_compared_among_themselves(self, written: Path) -> None:
        self.write(written, "finetune+held_out=0.1", 0, 10.0)
        self.write(written, "efc+held_out=0.1", 0, 15.0)
        found = comparisons(against(table(find_runs([written])), "finetune"), ["A_step"])
        assert [one.group.held_out for one in found] == [None, "0.1"]
        assert [each.differences["A_step"].text() for each in found[1].paired] == ["+5.00"]
        alone = comparisons(against(table(find_runs([written])), "lwf"), ["A_step"])[1]
        assert alone.paired == []
        assert alone.notes == [f"{alone.group.title}: no row is called lwf, so there are no differences"]

    def test_a_row_is_named_by_method_name_or_label(self, tmp_path: Path) -> None:
        for each in ("efc+epochs=2+weight=1", "efc+epochs=2+weight=2", "lwf+epochs=2"):
            self.write(tmp_path, each, 0, 30.0)
        for name in ("efc, weight=2", "efc+epochs=2+weight=2"):
            reference = self.compare(tmp_path, name).reference
            assert reference is not None
            assert reference.label == "efc+epochs=2+weight=2"
        assert self.compare(tmp_path, "efc+epochs=2+weight=2").name == "efc, weight=2"
        assert self.compare(tmp_path, "lwf").name == "lwf"
        with pytest.raises(EfcilError, match="Name one of them: 'efc, weight=1', 'efc, weight=2'"):
            self.compare(tmp_path, "efc")
        with pytest.raises(EfcilError, match=r"Unknown row 'fd'. Valid: efc, weight=1; efc, weight=2; lwf"):
            self.compare(tmp_path, "fd")

    def test_a_metric_without_differences_is_refused(self, written: Path) -> None:
        with pytest.raises(EfcilError, match="There are no differences of seconds"):
            render(against(table(find_runs([written])), "efc"), "text", ["seconds"])

    @pytest.mark.parametrize("format", ["text", "markdown", "latex", "html"])
    def test_every_format_has_a_table_of_them(self, written: Path, format: str) -> None:
        found = table(find_runs([written]))
        text, plain = render(against(found, "finetune"), format), render(found, format)
        assert re.search(r"\+2\.00\D+0\.58", re.sub("<[^>]*>", " ", text))
        assert "standard error over the seeds that both have" in " ".join(text.split())
        assert "not paired: seed 3 (no run of finetune)" in text
        assert "standard error" not in plain

    def test_latex_has_a_line_for_every_row_that_is_paired(self, written: Path) -> None:
        self.write(written, "pass", 7, 20.0)
        text = render(against(table(find_runs([written])), "finetune"), "latex", ["A_step"])
        lines = text[text.index("% Differences") :].splitlines()
        assert lines[1:10] == [
            r"\begin{tabular}{llllc}",
            r"\toprule",
            r"Scenario & Method & Difference from & Seeds & $A_{\mathrm{step}}$ \\",
            r"\midrule",
            r"cs5 & efc & finetune & 0 1 2 & $+2.00$ {\scriptsize $\pm$ 0.58} \\",
            r"cs5 & lwf & finetune & 2 & $-0.50$ \\",
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]

    def test_csv_has_columns_of_them(self, written: Path) -> None:
        found = against(table(find_runs([written])), "finetune")
        rows = {row["method"]: row for row in csv.DictReader(io.StringIO(render(found, "csv")))}
        efc = rows["efc"]
        assert [efc[f"A_step_difference_{part}"] for part in ("mean", "error", "n")] == ["2.0000", "0.5774", "3"]
        assert (efc["against"], efc["paired_seeds"], rows["finetune"]["against"]) == ("finetune", "0 1 2", "")
        assert rows["lwf"]["notes"].endswith("not paired: seed 3 (no run of finetune)")


def test_rows_that_count_other_answers_as_right_are_not_ranked(tmp_path: Path) -> None:
    def places(*labels: str) -> dict[str, str]:
        runs = [
            write_run(tmp_path / "-".join(labels), "digits", "cs5", each, 0, A_step=50.0 - n)
            for n, each in enumerate(labels)
        ]
        return best_and_second(table(runs).rows, "A_step")

    merged = ("efc+answers=merged", "lwf+answers=merged")
    assert places(*merged) == {merged[0]: "best", merged[1]: "second"}
    assert places("efc", "lwf") == {"efc": "best", "lwf": "second"}
    assert places("efc", merged[1]) == places(merged[0], "lwf") == {}


def test_held_out_images_come_after_test_images(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, "digits", "cs5", each, 0) for each in ("efc+held_out=0.1", "lwf")]
    assert [group.held_out for group in table(runs).groups] == [None, "0.1"]


def test_metrics_choose_columns(runs: Path) -> None:
    rows = table(find_runs([runs]))
    text = render(rows, "text", metrics=["task_mean"])
    assert "task mean" in text
    assert "A_step" not in text
    wrongs: list[dict[str, Any]] = [{"format": "pdf"}, {"metrics": ["A_stp"]}, {"metrics": []}]
    for wrong in wrongs:
        with pytest.raises(EfcilError):
            render(rows, **wrong)


class TestPaper:
    def test_lookup(self) -> None:
        value = paper_value("tiny-imagenet", "ws10", "fusion", "A_step")
        assert value is not None
        assert (value.mean, value.std) == (46.92, None)
        assert paper_value("cifar100", "cs10", "efc+epochs=5", "A_step") is None

    def test_labels_are_those_of_runs(self) -> None:
        for dataset, scenario, name, _ in published():
            method, *changes = name.split("+")
            overrides = dict(change.split("=") for change in changes)
            settings = Settings(method=method, dataset=dataset, scenario=scenario, overrides=overrides)
            assert label(settings) == name

    @pytest.mark.skipif(
        not SHARED.exists(), reason="the shared table of the paper's numbers is not beside the repository"
    )
    def test_every_published_number_is_there(self) -> None:
        datasets = {
            "CIFAR-100": "cifar100",
            "Tiny-ImageNet": "tiny-imagenet",
            "ImageNet-Subset": "imagenet-subset",
            "ImageNet-1K": "imagenet-1k",
        }
        expected = []
        with open(SHARED, newline="") as file:
            for row in csv.DictReader(file):
                scenario = ("ws" if row["start"] == "warm" else "cs") + row["steps"]
                place = (datasets[row["dataset"]], scenario, row["metric"], row["table"].split()[-1])
                expected.append((*place, float(row["mean"]), float(row["std"]) if row["std"] else -1.0))
        ours = [
            (dataset, scenario, metric, value.table, value.mean, -1.0 if value.std is None else value.std)
            for (dataset, scenario, _, metric), value in published().items()
        ]
        assert sorted(ours) == sorted(expected)


class TestMatrix:
    nan = math.nan
    matrix = ((90.0, nan, nan), (80.0, 85.5, nan), (70.0, 75.0, 100.0))

    def test_rows_columns_and_step_accuracy(self) -> None:
        assert matrix_text(self.matrix, [2, 2, 3]).splitlines() == [
            "after task      1      2      3 |  A_step",
            "classes         2      2      3 |",
            "-----------------------------------------",
            "         1   90.0               |   90.00",
            "         2   80.0   85.5        |   82.75",
            "         3   70.0   75.0  100.0 |   84.29",
        ]

    def test_rows_to_come_are_left_out(self) -> None:
        partial = np.full((3, 3), math.nan)
        partial[0, 0] = 50.0
        assert len(matrix_text(partial, [1, 1, 1]).splitlines()) == 4


def test_metric_names_are_those_of_the_summary(runs: Path) -> None:
    summary = RunFolder(runs / "digits" / "cs5" / "efc+epochs=5" / "seed0").read_summary()
    assert set(METRICS) <= set(summary)


def test_seeds_with_other_settings_than_their_label_shows_are_noted(tmp_path: Path) -> None:
    """A default that has changed since the first seed was run is in no label."""
    for seed, changes in ((0, {"shrink_rest": 1.0}), (1, {}), (2, {})):
        run = write_run(tmp_path, "cifar100", "cs10", "fecam", seed)
        run.write_settings(Settings(method="fecam", dataset="cifar100", scenario="cs10", seed=seed, overrides=changes))
    (row,) = table(find_runs([tmp_path])).rows
    assert row.notes == (
        "with today's presets and defaults its label is fecam+shrink_rest=1",
        "seeds with different settings: method_settings.shrink_rest",
    )
    (row,) = table(find_runs([tmp_path / "cifar100" / "cs10" / "fecam" / f"seed{seed}" for seed in (1, 2)])).rows
    assert row.notes == ()


def test_runs_of_another_preset_are_not_set_beside_the_paper(tmp_path: Path) -> None:
    settings = Settings(method="fetril", dataset="cifar100", scenario="cs10")
    run = write_run(tmp_path, "cifar100", "cs10", "fetril", 0)
    run.write_settings(settings)
    (row,) = table(find_runs([tmp_path])).rows
    assert row.paper
    assert not row.notes
    before = identity(settings)
    before["method_settings"]["views"] = "plain"
    run.settings_file.write_text(to_yaml(settings, resolved=before))
    (row,) = table(find_runs([tmp_path])).rows
    assert not row.paper
    assert row.notes == ("with today's presets and defaults its label is fetril+views=plain",)


class TestGroups:
    """What tells rows apart, and what may stand in one table."""

    def sweep(self, root: Path) -> Table:
        for weight in (1.0, 10.0, 100.0):
            settings = Settings(method="efc", scenario="cs5", epochs=2, overrides={"efm_weight": weight})
            run = write_run(root, "digits", "cs5", label(settings), 0, method="efc", A_step=50.0 + weight)
            run.write_settings(settings)
        other = Settings(method="lwf", scenario="cs5", epochs=2)
        write_run(root, "digits", "cs5", label(other), 0, method="lwf").write_settings(other)
        return table(find_runs([root]))

    def test_every_row_says_its_recipe_if_one_does(self, tmp_path: Path) -> None:
        for method, recipe in (("cedar", None), ("efc", "modern"), ("lwf", None)):
            settings = Settings(method=method, dataset="cifar100", scenario="cs10", recipe=recipe)
            write_run(tmp_path, "cifar100", "cs10", label(settings), 0, method=method).write_settings(settings)
        (group,) = table(find_runs([tmp_path])).groups
        assert group.settings == ("recipe",)
        found = {row.method: group.values(row) for row in group.rows}
        assert found == {"cedar": ["modern"], "efc": ["modern"], "lwf": ["paper"]}

    def test_rows_are_named_by_what_differs_and_the_default_is_shown(self, tmp_path: Path) -> None:
        (group,) = self.sweep(tmp_path).groups
        assert (group.settings, group.shared) == (("efm_weight",), ("epochs=2",))
        assert [(row.method, *group.values(row)) for row in group.rows] == [
            ("efc", "1"),
            ("efc", "10"),  # the default, which its label does not name
            ("efc", "100"),
            ("lwf", ""),
        ]
        assert [group.name(row) for row in group.rows] == [
            "efc, efm_weight=1",
            "efc, efm_weight=10",
            "efc, efm_weight=100",
            "lwf",
        ]

    def test_names_of_a_narrow_table_say_what_the_columns_would(self, tmp_path: Path) -> None:
        other = Settings(method="lwf", scenario="cs5", epochs=2, overrides={"first_task.learning_rate": 0.5})
        write_run(tmp_path, "digits", "cs5", label(other), 0, method="lwf").write_settings(other)
        one = Settings(method="efc", scenario="cs5", epochs=2)
        write_run(tmp_path, "digits", "cs5", label(one), 0, method="efc").write_settings(one)
        text = render(table(find_runs([tmp_path])), "text", width=40)
        assert "lwf, first_task.learning_rate=0.5\n" in text
        assert "efc, first_task.learning_rate=0.001\n" in text

    def test_with_many_settings_rows_are_named_by_what_they_changed(self, tmp_path: Path) -> None:
        for changed in ({}, {"loss": "symmetric"}, {"regulariser": "features"}, {"covariance": "task"}):
            settings = Settings(method="efc", scenario="cs5", overrides=changed)
            write_run(tmp_path, "digits", "cs5", label(settings), 0, method="efc").write_settings(settings)
        found = table(find_runs([tmp_path]))
        (group,) = found.groups
        names = {"efc", "efc, loss=symmetric", "efc, regulariser=features", "efc, covariance=task"}
        assert {group.name(row) for row in group.rows} == names
        assert names <= {line.split("  ")[0] for line in render(found, "text", width=60).splitlines()}
        assert find(group, "efc, loss=symmetric") is not None
        write_run(tmp_path, "digits", "cs5", "efc+covariance=task", 1, method="efc")
        shutil.rmtree(tmp_path / "digits" / "cs5" / "efc+covariance=task" / "seed0")
        assert "different seeds: efc; efc, regulariser=features; efc, loss=symmetric (0), " in render(
            table(find_runs([tmp_path])), "text", width=200
        )
        write_run(tmp_path, "digits", "cs5", "lwf", 0)
        assert "different seeds: efc, covariance=task (1), all others (0)" in render(
            table(find_runs([tmp_path])), "text", width=200
        )

    def test_every_format_has_the_column(self, tmp_path: Path) -> None:
        found = self.sweep(tmp_path)
        assert "method  efm_weight  seeds" in render(found, "text", width=100)
        assert "| digits | cs5 | efc | 10 | 1 |" in render(found, "markdown")
        assert r"efc & 10 & " in render(found, "latex")
        rows = list(csv.DictReader(io.StringIO(render(found, "csv"))))
        assert [row["set efm_weight"] for row in rows] == ["1", "10", "100", ""]

    def test_epochs_of_the_preset_are_shown_beside_others(self, tmp_path: Path) -> None:
        for epochs in (None, 3):
            settings = Settings(method="efc", scenario="cs5", epochs=epochs)
            write_run(tmp_path, "digits", "cs5", label(settings), 0, method="efc").write_settings(settings)
        (group,) = table(find_runs([tmp_path])).groups
        resolved = identity(Settings(method="efc", scenario="cs5"))
        first, later = resolved["first_task"]["epochs"], resolved["later"]["epochs"]
        wanted = str(later) if first == later else f"{later} (first task {first})"
        assert [group.values(row) for row in group.rows] == [["3"], [wanted]]

    @pytest.mark.parametrize("format", ["text", "markdown", "latex"])
    def test_held_out_images_have_a_table_of_their_own(self, tmp_path: Path, format: str) -> None:
        write_run(tmp_path, "digits", "cs5", "efc", 0, A_step=40.0)
        write_run(tmp_path, "digits", "cs5", "lwf", 0, A_step=30.0)
        write_run(tmp_path, "digits", "cs5", "efc+held_out=0.2", 0, method="efc", A_step=99.0)
        found = table(find_runs([tmp_path]))
        assert [(group.held_out, len(group.rows)) for group in found.groups] == [(None, 2), ("0.2", 1)]
        tests, held_out = re.split("held.out", render(found, format), maxsplit=1)
        assert "99.00" not in tests
        assert "40.00" not in held_out
        assert "30.00" not in held_out

    def test_the_best_and_the_second_of_those_that_compete(self, tmp_path: Path) -> None:
        for name, value in {"efc": 40.0, "lwf": 39.999, "ewc": 30.0, "finetune": 20.0, "joint": 90.0}.items():
            write_run(tmp_path, "digits", "cs5", name, 0, A_step=value, forgetting=value)
        rows = table(find_runs([tmp_path])).rows
        assert best_and_second(rows, "A_step") == {"efc": "best", "lwf": "best", "ewc": "second"}
        assert best_and_second(rows, "forgetting") == {"finetune": "best", "ewc": "second"}
        assert best_and_second(rows, "seconds") == {}
        assert best_and_second(rows[:1], "A_step") == {}

    def test_a_method_with_a_plus_in_its_name(self) -> None:
        assert changes_of("efc++", "efc+++epochs=6+damping=0.2") == {"epochs": "6", "damping": "0.2"}
        assert changes_of("efc", "something else") == {}


def test_one_seed_and_what_was_not_measured(tmp_path: Path) -> None:
    write_run(tmp_path, "digits", "cs5", "joint", 0, A_inc=None)
    found = table(find_runs([tmp_path]))
    for format in FORMATS:
        text = render(found, format)
        assert "± -" not in text
        assert "40.00" in text
        assert not re.search(r"\bnan\b", text)


LATEX = next((found for name in ("tectonic", "pdflatex", "lualatex") if (found := shutil.which(name))), None)


@pytest.mark.skipif(LATEX is None, reason="no LaTeX compiler is installed")
def test_latex_compiles(runs: Path, tmp_path: Path) -> None:
    write_run(runs, "cifar100", "cs10", 'a_b&50%~{x}\\#$^<>|"', 0, classifiers={"heads": {"A_step": 1.0, "A_inc": 2.0}})
    write_run(runs, "cifar100", "cs10", "efc+held_out=0.2", 0, method="efc")
    found = against(table(find_runs([runs])), "finetune")
    preamble = "\\documentclass{article}\n\\usepackage{booktabs}\n\\begin{document}\n"
    place = tmp_path / "latex"
    place.mkdir()
    for metrics in (None, list(METRICS)):
        (place / "table.tex").write_text(preamble + render(found, "latex", metrics) + "\\end{document}\n")
        quiet = [] if LATEX and LATEX.endswith("tectonic") else ["-interaction=nonstopmode", "-halt-on-error"]
        done = subprocess.run([str(LATEX), *quiet, "table.tex"], cwd=place, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:]
        assert (place / "table.pdf").stat().st_size > 1000
