"""`efcil paper` from the command line: listed, planned, trained, written; nothing twice."""

from __future__ import annotations

import csv
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from efcil import methods, studies
from efcil.cli import main
from efcil.commands.parser import read_seeds
from efcil.data import sources
from efcil.errors import GridError, SettingsError
from efcil.experiment.summary import source_digest
from efcil.settings import Settings
from efcil.settings.engine import Engine

STUDY = """
title: Two ways to follow the drift
about: EFC with and without its update
datasets: [digits]
scenarios: [cs5]
seeds: [0, 1]
settings: {epochs: 2, device: cpu}
fast_epochs: 3
runs:
  - {name: frozen, method: frozen}
  - {name: fetril, method: fetril}
read:
  - {reader: table, metrics: [A_step, A_inc]}
  - {reader: curves}
  - {reader: timing}
published:
  - {dataset: digits, scenario: cs5, run: fetril, metric: A_step, mean: 99.9, std: 0.1}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("study") / "mine.yaml"
    file.write_text(STUDY.replace("frozen", "fecam"), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def made(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study with one of its two seeds."""
    output = tmp_path_factory.mktemp("output")
    assert main(["paper", str(study), "--seeds", "0", "--output", str(output), "--quiet"]) == 0
    return output


def cifar(folder: Path) -> str:
    """Return a place that has the names of CIFAR-100's files."""
    (folder / "cifar").mkdir()
    for name in ("train", "test", "meta"):
        (folder / "cifar" / name).touch()
    return str(folder / "cifar")


def rows(file: Path) -> list[dict[str, str]]:
    with open(file, newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_the_studies_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper"]) == 0
    text = capsys.readouterr().out
    for name in studies.names():
        assert f"\n{name} " in f"\n{text}"
        assert studies.load(name).about in text
    assert "table 1, 390 runs: cifar100, tiny-imagenet, imagenet-subset; ws10, ws20, cs10, cs20" in text
    assert "figure and table, 1 run: cifar100; ws5" in text
    assert "ws10: warm start" in text
    cell = next(line for line in text.splitlines() if line.startswith("One cell of it: "))
    assert main([*cell.partition("efcil ")[2].replace(" --data DIR", "").split(), "--dry-run"]) == 0
    assert "1 run: 0 done, 1 to train" in capsys.readouterr().out


def test_what_is_made_is_written_and_what_lacks_is_named(
    study: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made / "paper" / "mine"
    names = {file.name for file in folder.iterdir()}
    for reader in ("table", "curves", "timing"):
        assert {f"mine-{reader}-digits.{kind}" for kind in ("txt", "md", "csv", "tex")} <= names
    assert {"measured-accuracy.csv", "measured-timing.csv"} <= names
    table = rows(folder / "mine-table-digits.csv")
    by_name = {row["method"]: row for row in table if row["scenario"] == "cs5"}
    summary = json.loads((made / "digits/cs5/fetril+epochs=2/seed0/summary.json").read_text())
    assert by_name["fetril"]["A_step"] == f"{summary['A_step']:.2f}"
    assert (by_name["fetril"]["seeds"], by_name["fetril"]["agrees"]) == ("0", "no")
    assert main(["paper", str(study), "--output", str(made), "--no-training"]) == 0
    text = capsys.readouterr().out
    assert "to train" not in text
    assert "digits cs5: fecam (seed 1), fetril (seed 1)" in text
    assert not (made / "digits/cs5/fetril+epochs=2/seed1").exists()
    assert "differences from" not in text
    assert main(["paper", str(study), "--output", str(made), "--no-training", "--against", "fecam"]) == 0
    assert "Row less fecam, seed by seed" in capsys.readouterr().out
    assert main(["paper", str(study), "--output", str(made), "--no-training", "--against", "fecan"]) == 2
    assert "Unknown run of the study mine: 'fecan'. Did you mean 'fecam'" in capsys.readouterr().err


def test_a_table_of_forgetting(made: Path, study: Path, tmp_path: Path) -> None:
    text = study.read_text(encoding="utf-8").replace("A_inc]", "forgetting, task_aware_A_step]")
    (tmp_path / "more.yaml").write_text(text, encoding="utf-8")
    assert main(["paper", str(tmp_path / "more.yaml"), "--output", str(made), "--no-training"]) == 0
    by_name = {row["method"]: row for row in rows(made / "paper/more/more-table-digits.csv")}
    summary = json.loads((made / "digits/cs5/fetril+epochs=2/seed0/summary.json").read_text())
    for metric in ("forgetting", "task_aware_A_step"):
        assert by_name["fetril"][metric] == f"{summary[metric]:.2f}"
    # Kept results give the same.
    kept = ["--results", str(made / "paper/more"), "--output", str(tmp_path / "runs")]
    assert main(["paper", str(tmp_path / "more.yaml"), "--no-training", *kept]) == 0
    again = rows(tmp_path / "runs/paper/more/more-table-digits.csv")
    assert {row["method"]: row["forgetting"] for row in again} == {n: row["forgetting"] for n, row in by_name.items()}


def test_figures_are_written(made: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = made / "paper" / "mine"
    for kind in ("svg", "pdf", "png"):
        assert (folder / f"mine-curves-digits-cs5.{kind}").stat().st_size > 1000


def test_without_matplotlib_the_rest_is_written(
    study: Path, made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["paper", str(study), "--output", str(made), "--no-training"]) == 0
    text = capsys.readouterr().out
    assert "Figure files need matplotlib" in text
    assert "Written: 14 files" in text


def test_several_studies_are_one_grid_and_train_what_they_share_once(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(STUDY.replace("frozen", "lda"), encoding="utf-8")
    grids: list[list[str]] = []

    def run_grid(settings: list[Settings], *_: Any, **__: Any) -> list[Path]:
        grids.append(sorted(each.method for each in settings))
        return []

    monkeypatch.setattr("efcil.experiment.run_grid", run_grid)
    command = ["paper", str(study), str(other), "--seeds", "0", "--output", str(tmp_path / "runs")]
    assert main([*command, "--dry-run"]) == 0
    assert "3 runs: 0 done, 3 to train." in capsys.readouterr().out
    assert main(command) == 0
    assert grids == [["fecam", "fetril", "lda"]]
    assert {file.name for file in (tmp_path / "runs" / "paper").iterdir()} == {"mine", "other"}


def test_of_several_studies_those_that_fit_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["paper", "all", "--dataset", "cifar100", "--data", cifar(tmp_path), "--dry-run", "--seeds", "0"]
    assert main([*command, "--scenario", "ws5"]) == 0
    text = capsys.readouterr().out
    assert "table1 is left out. Unknown scenario of the study table1: 'ws5'." in text
    assert "imagenet-1k is left out." in text
    assert "Table A1" in text
    assert "Spectrum" in text
    named = [text.count(f"cifar100 ws5: {name}, seed 0") for name in ("EFC", "full (EFC)")]
    assert named == [2, 1], "each study names its runs"
    assert " 10 to train." in text, "and they are counted once"
    assert main([*command, "--scenario", "ws6"]) == 2
    assert "left out" not in capsys.readouterr().out


def test_of_several_studies_each_is_asked_for_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["paper", "losses", "spectrum", "--dataset", "cifar100", "--data", cifar(tmp_path), "--dry-run"]
    assert main([*command, "--scenario", "cs10", "ws5", "--seeds", "0"]) == 0
    text = capsys.readouterr().out
    assert "left out" not in text
    assert "cifar100 cs10: EFM + symmetric, seed 0" in text
    assert "cifar100 ws5: EFC, seed 0" in text
    assert "ws5: EFM + symmetric" not in text, "the losses are compared with other scenarios"
    assert main([*command, "--scenario", "cs10", "ws6"]) == 2
    assert "Unknown scenario 'ws6'" in capsys.readouterr().err


def test_tasks_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = STUDY.replace("cs5", "custom").replace("epochs: 2", "epochs: 2, tasks: 2").replace("frozen", "fecam")
    (tmp_path / "two.yaml").write_text(text, encoding="utf-8")
    command = ["paper", str(tmp_path / "two.yaml"), "--output", str(tmp_path / "runs"), "--seeds", "0", "--quiet"]
    assert main([*command, "--method", "fetril"]) == 0
    assert "digits custom: fecam (all seeds), fetril (seed 1)" in capsys.readouterr().out


def test_a_dry_run_trains_and_writes_nothing(study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", str(study), "--output", str(tmp_path / "runs"), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "\ndigits cs5: fecam, seeds 0 1   to do  time unknown\n" in text, "a line for the seeds of a row"
    assert "\ndigits cs5: fetril, seeds 0 1  to do  time unknown\n" in text
    assert "epochs=2" not in text, "rows have names; folders have labels, which may be cut short"
    assert "4 runs: 0 done, 4 to train." in text
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_grid_says_what_is_finished(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"run --method fetril --epochs 2 --device cpu --seed 0 1 --output {made} --dry-run"
    assert main(command.split()) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("seed0  finished")
    assert "seed1  to do  about" in second, "the epochs of seed 0 say how long seed 1 takes"
    assert not (made / "digits/cs5/fetril+epochs=2/seed1").exists()


CLASSIFIERS = """
title: Three classifiers
about: of one run
datasets: [digits]
scenarios: [cs5]
settings: {epochs: 2, device: cpu, classifier: all}
reference: own
runs:
  - {name: own, method: efc}
  - {name: lda, method: efc, classifier: lda}
  - {name: both, method: efc, classifier: both}
read:
  - {reader: table, metrics: [A_step, A_inc]}
  - {reader: curves}
  - {reader: timing}
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three classifiers of one run, and that run beside it."""
    file = tmp_path_factory.mktemp("classifiers") / "three.yaml"
    file.write_text(CLASSIFIERS, encoding="utf-8")
    assert main(["paper", str(file), "--output", str(file.parent / "runs"), "--quiet"]) == 0
    return file


class TestClassifiers:
    """Rows that read other classifiers of one run."""

    def test_one_run_is_trained_and_read_by_every_row(self, three: Path) -> None:
        trained = three.parent / "runs"
        assert [folder.name for folder in (trained / "digits/cs5").iterdir()] == ["efc+classifier=all+epochs=2"]
        summary = json.loads(next(trained.glob("digits/cs5/*/seed0/summary.json")).read_text())
        folder = trained / "paper" / "three"
        table = [row for row in rows(folder / "three-table-digits.csv") if row["scenario"] == "cs5"]
        for name, row in zip(("own", "lda", "both"), table, strict=False):
            found = summary if name == "own" else summary["classifiers"][name]
            assert (row["method"], row["A_step"], row["A_inc"]) == (
                name, f"{found['A_step']:.2f}", f"{found['A_inc']:.2f}",
            )  # fmt: skip
        difference = f"{summary['classifiers']['lda']['A_step'] - summary['A_step']:+.2f}"
        assert f"lda,0,{difference}," in (folder / "three-table-digits.csv").read_text(encoding="utf-8")
        last = [row["last task"] for row in rows(folder / "three-curves-digits.csv") if row["method"] == "lda"]
        assert last == [f"{summary['classifiers']['lda']['A_step']:.2f} (5)"]
        timed = [row["method"] for row in rows(folder / "three-timing-digits.csv") if row["scenario"] == "cs5"]
        assert timed == ["own"], "what is no accuracy is the same for all of them"

    def test_results_files_hold_them(self, three: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trained = three.parent / "runs"
        command = ["paper", str(three), "--output", str(tmp_path / "new"), "--results", str(tmp_path)]
        for name in ("accuracy", "timing"):
            shutil.copy(trained / f"paper/three/measured-{name}.csv", tmp_path)
        assert main([*command, "--dry-run"]) == 0
        text = capsys.readouterr().out
        assert "\ndigits cs5: own, lda, both, seed 0  to do" in text
        assert "1 run: 0 done, 1 to train." in text, "the rows of other classifiers need it"
        shutil.copy(trained / "paper/three/measured-classifiers.csv", tmp_path)
        assert main(command) == 0
        text = capsys.readouterr().out
        assert "1 run: 1 done, 0 to train." in text
        assert "Missing" not in text

    def test_one_that_the_method_does_not_support(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "three.yaml"
        file.write_text(CLASSIFIERS.replace("method: efc", "method: finetune"), encoding="utf-8")
        assert main(["paper", str(file), "--output", str(tmp_path / "runs"), "--dry-run"]) == 2
        assert "Classifier 'lda' needs class covariances, which method 'finetune' does not" in capsys.readouterr().err


def test_results_files_count_as_done(
    study: Path, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = tmp_path / "results"
    known.mkdir()
    header = "dataset,scenario,method,seed,A_step,A_inc,A_step_per_task,first_epoch,later_epoch,end_of_task,"
    lines = [
        f"digits,cs5,{method}+epochs=2,{seed},60.0,70.0,80 60,1,,,1,a card,abc"
        for method in ("fecam", "fetril")
        for seed in (0, 1)
    ]
    (known / "digits.csv").write_text("\n".join([header + "at_a_time,hardware,commit", *lines]) + "\n")
    # Seed 0 is in the folder too, which counts more.
    assert main(["paper", str(study), "--output", str(made), "--results", str(known)]) == 0
    text = capsys.readouterr().out
    assert "4 runs: 4 done, 0 to train." in text
    assert "Missing" not in text
    (row,) = (row for row in rows(made / "paper/mine/mine-table-digits.csv") if row["method"] == "fetril")
    own = json.loads((made / "digits/cs5/fetril+epochs=2/seed0/summary.json").read_text())["A_step"]
    assert row["seeds"] == "0 1"
    assert row["A_step"].startswith(f"{(own + 60) / 2:.2f} ± ")


def test_a_short_schedule_has_one_seed_and_folders_of_its_own(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["paper", str(study), "--fast", "--method", "fetril", "--output", str(tmp_path)]
    assert main([*command, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("FAST SCHEDULE (3 epochs a task, not the paper's): ")
    assert text.count("to do") == 1
    assert "\ndigits cs5: fetril, seed 0  to do" in text
    assert main([*command, "--no-training"]) == 0
    assert "FAST SCHEDULE" in capsys.readouterr().out
    assert (tmp_path / "paper/mine-fast/mine-table-digits-fast.tex").exists()
    assert not (tmp_path / "paper/mine").exists()


OWN_METHOD = """
from efcil.methods.finetune import FineTune

class Mine(FineTune):
    name = "mine"
    summary = "a method"
"""


def test_methods_without_a_feature_matrix_lack_nothing_and_edited_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STUDY.replace("frozen", "mine").replace("fetril", "efc").replace("[0, 1]", "[0]")
    text = text.replace("{reader: curves}", "{reader: spectrum}").replace("{reader: timing}", "{reader: perturbation}")
    (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
    file = tmp_path / "mine.py"
    file.write_text(OWN_METHOD)
    monkeypatch.setenv(methods.VARIABLE, str(file))
    command = ["paper", str(tmp_path / "study.yaml"), "--output", str(tmp_path / "runs"), "--quiet"]
    caches = (methods.available, source_digest)
    try:
        for known in caches:
            known.cache_clear()
        assert main(command) == 0
        printed = capsys.readouterr()
        assert "Missing" not in printed.out
        assert "Not counted" not in printed.out
        assert printed.err == ""
        file.write_text(OWN_METHOD + "# edited")
        for known in caches:
            known.cache_clear()
        assert main(command) == 0
        folder = tmp_path / "runs/digits/cs5/mine+epochs=2/seed0"
        said = f"It was trained with another version of {file}; delete {folder} to train it again."
        assert capsys.readouterr().err == f"{folder}: finished before. {said}\n"
    finally:
        monkeypatch.undo()
        for known in caches:
            known.cache_clear()


def test_spectrum_noise_and_components_are_read_from_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = STUDY.replace("frozen, method: frozen", "low rank, method: efc, overrides: {covariance: low-rank}")
    text = text.replace("[0, 1]", "[0]").replace("fetril", "efc").replace("A_inc]", "components]")
    text = text.replace("{reader: curves}", "{reader: spectrum}").replace("{reader: timing}", "{reader: perturbation}")
    (tmp_path / "deep.yaml").write_text(text, encoding="utf-8")
    command = ["paper", str(tmp_path / "deep.yaml"), "--output", str(tmp_path / "runs")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert printed.count("noise in its features") == 2
    assert "Missing" not in printed
    folder = tmp_path / "runs" / "paper" / "deep"
    low, full = (row for row in rows(folder / "deep-table-digits.csv") if row["scenario"] == "cs5")
    assert (float(low["components"].split()[0]) > 0, full["components"]) == (True, "")
    spectra = rows(folder / "measured-spectrum.csv")
    assert [(row["task"], row["classes"]) for row in spectra[:5]] == [(str(n), str(2 * n)) for n in range(1, 6)]
    noise = [row for row in rows(folder / "deep-perturbation-digits.csv") if row["method"] == "efc"]
    assert {row["directions"] for row in noise} == {"principal", "non-principal"}
    unmoved = {row["accuracy"] for row in noise if row["directions"] == "non-principal"}
    assert len(unmoved) == 1, "noise in directions that do not matter changes no prediction"
    assert len({row["accuracy"] for row in noise}) > 1
    assert main(command) == 0
    assert "noise in its features" not in capsys.readouterr().out, "nothing is measured twice"


def test_what_there_is_is_written_before_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {name: source for name, source in sources.sources().items() if name != "imagenet-1k"}
    monkeypatch.setattr(sources, "sources", lambda: known)
    command = ["paper", "imagenet-1k", "--output", str(tmp_path), "--seeds", "0"]
    assert main(command) == 2
    text = capsys.readouterr()
    assert "no source that reads the files of imagenet-1k" in text.err
    assert "59.49 ± 0.07" in (tmp_path / "paper/imagenet-1k/imagenet-1k-imagenet-1k.md").read_text(encoding="utf-8")
    absent = tmp_path / "absent"
    assert main(["paper", "spectrum", "--data", str(absent), "--output", str(tmp_path)]) == 2
    assert f"{absent} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "paper/spectrum").exists()


def test_mistakes_are_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    for command, words in (
        ("paper tabel1", "Did you mean 'table1'"),
        ("paper table1 --dataset imagenet-1k", "dataset of the study table1"),
        ("paper table1 --seeds 4-0", "--seeds takes numbers and ranges"),
        ("paper table1 --dataset cifar100 tiny-imagenet --data x", "--data names one place"),
        ("paper table1 imagenet-1k --data x", "several datasets (cifar100, imagenet-1k)"),
        ("paper table1 --results nowhere --dry-run", "nowhere is not a folder"),
        ("paper table1 --no-training --dry-run", "Leave out one of them"),
    ):
        assert main(command.split()) == 2
        assert words in capsys.readouterr().err


def test_seeds_are_numbers_and_ranges() -> None:
    assert read_seeds(["0-2", "7", "1"]) == [0, 1, 2, 7]
    assert read_seeds(["0,3"]) == [0, 3]
    for wrong in (["a"], ["-1"], ["3-1"], ["0-99999999"], [","], ["1.5"]):
        with pytest.raises(SettingsError, match="--seeds"):
            read_seeds(wrong)


class Recorder:
    """Stands in for the training."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.settings: list[Settings] = []
        self.options: dict[str, Any] = {}

    def run_grid(self, settings: list[Settings], output: Path, **options: Any) -> list[Path]:
        self.settings, self.options = settings, options
        if self.error is not None:
            raise self.error
        return []


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    module = types.ModuleType("efcil.experiment")
    module.run_grid = recorder.run_grid  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "efcil.experiment", module)
    return recorder


def test_what_is_missing_is_trained_longest_first(trained: Recorder, tmp_path: Path) -> None:
    choice = ["--scenario", "cs10", "--seeds", "3-4", "--method", "EFC", "fetril", "pass"]
    where = ["--data", cifar(tmp_path), "--output", str(tmp_path / "runs")]
    assert main(["paper", "table1", *choice, *where, "--jobs-per-gpu", "5", "--checkpoint-steps", "7"]) == 0
    order = [(each.method, each.seed) for each in trained.settings]
    assert order == [("pass", 3), ("pass", 4), ("efc", 3), ("efc", 4), ("fetril", 3), ("fetril", 4)]
    assert {each.data for each in trained.settings} == {str(tmp_path / "cifar")}
    expected = {"jobs_per_gpu": 5, "quiet": False, "checkpoint_steps": 7, "debug": False, "log": (), "engine": None}
    assert trained.options == expected


def test_clusters_train_studies_too(
    trained: Recorder, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["paper", str(study), "--output", str(tmp_path / "runs"), "--quiet"]
    assert main([*command, "--engine", "slurm", "--engine-option", "partition=gpu", "time=60"]) == 0
    assert trained.options["engine"] == Engine("slurm", None, {"partition": "gpu", "time": "60"})
    assert main([*command, "--engine", "slurm", "--address", "head:1"]) == 2
    assert "--address is that of a Ray cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt("Stopped."), 130), (GridError("2 of 3 runs failed.", []), 1)]
)
def test_the_result_is_written_when_training_ends_early(
    trained: Recorder, tmp_path: Path, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    trained.error = error
    command = ["paper", "spectrum", "--data", cifar(tmp_path), "--output", str(tmp_path / "runs")]
    assert main(command) == code
    printed = capsys.readouterr()
    assert str(error) in printed.err
    assert "CIFAR-100 ws5: EFC (all seeds)" in printed.out
    assert (tmp_path / "runs/paper/spectrum/spectrum-cifar100.txt").exists()


class TestNothingCanBeTrained:
    """A mistake ends the command before a plan or a table hides it."""

    @pytest.mark.parametrize("more", [[], ["--dry-run"]])
    def test_data_that_does_not_exist(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
    ) -> None:
        where = ["--data", str(tmp_path / "nowhere"), "--output", str(tmp_path / "runs")]
        assert main(["paper", "table1", *where, *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("nowhere does not exist") == 1

    @pytest.mark.parametrize("more", [[], ["--dry-run"]])
    @pytest.mark.parametrize(
        ("dataset", "files", "said"),
        [
            ("cifar100", ["train/n01443537/images/a.JPEG", "val/images/b.JPEG"], "holds no CIFAR-100 files"),
            ("cifar100", ["train-00000-of-00001.parquet", "valid-00000-of-00001.parquet"], "holds no test*.parquet"),
            (
                "tiny-imagenet",
                ["train-00000-of-00001.parquet", "test-00000-of-00001.parquet"],
                "no validation*.parquet",
            ),
            ("tiny-imagenet", ["cifar-100-python/train"], "holds no Tiny-ImageNet"),
            ("imagenet-subset", ["cifar-100-python/train"], "holds no ImageNet"),
        ],
    )
    def test_data_of_another_dataset(
        self,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        dataset: str,
        files: list[str],
        said: str,
        more: list[str],
    ) -> None:
        for name in files:
            (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "data" / name).touch()
        where = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "runs")]
        assert main(["paper", "table1", "--dataset", dataset, *where, *more]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count(said) == 1

    def test_shards_of_other_columns(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        for split in ("train", "test"):
            parquet.write_table(pyarrow.table({"img": [b""], "label": [0]}), tmp_path / f"{split}.parquet")
        assert main(["paper", "table1", "--data", str(tmp_path), "--dry-run"]) == 2
        assert "has no column 'fine_label'" in capsys.readouterr().err

    def test_a_mistake_of_all_runs_is_named_once(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        text = STUDY.replace("frozen", "fecam").replace("device: cpu", "network: nonsense")
        (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
        assert main(["paper", str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("nonsense") == 1
        assert captured.out == ""

    def test_a_row_whose_setting_has_no_effect(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        """It would be trained, and shown, as something that it is not."""
        run = "{name: two copies, method: cedar, overrides: {pseudo_old: false, pseudo_old_copies: 2}}"
        shared = "title: T\nabout: a\ndatasets: [digits]\nscenarios: [cs5]\nread: [{reader: table}]\n"
        (tmp_path / "mine.yaml").write_text(f"{shared}runs: [{run}]\n", encoding="utf-8")
        assert main(["paper", str(tmp_path / "mine.yaml"), "--dry-run"]) == 2
        captured = capsys.readouterr()
        assert "Setting 'pseudo_old_copies' has no effect: it is for pseudo_old=true" in captured.err
        assert captured.out == ""

    def test_images_that_cannot_be_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        where = ["--data", cifar(tmp_path), "--output", str(tmp_path / "runs")]
        assert main(["paper", "table1", "--seeds", "0-1", "--quiet", *where]) == 2
        captured = capsys.readouterr()
        assert "A_step" not in captured.out
        assert "None of the 52 runs was possible" in captured.err
        assert not (tmp_path / "runs" / "paper").exists()
