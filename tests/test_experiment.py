"""Runs and grids on the bundled digits: what they leave behind, what they share, and how they fail."""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import json
import os
import shlex
import shutil
import signal
import sys
import threading
import time
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from efcil import files, methods
from efcil.cli import main
from efcil.commands.run import plan
from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine import background, checkpoint, hardware, lifecycle
from efcil.engine.checkpoint import CheckpointError
from efcil.engine.evaluate import TestImages, evaluate
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.trainer import Trainer
from efcil.errors import DataError, GridError, SettingsError, TrainingError
from efcil.evaluation.metrics import results
from efcil.experiment import run as run_module
from efcil.experiment import run_grid, run_one, workers
from efcil.experiment.plan import Plan, make_run_scenario
from efcil.experiment.shared_tasks import FOLDER, STEM, data_digest, describe, digest, fingerprint
from efcil.experiment.summary import source_digest
from efcil.model import Model
from efcil.model.contents import Extras, extras
from efcil.model.folder import STEM as MODEL
from efcil.network import backbones
from efcil.network.resnet import ResNet
from efcil.report import table
from efcil.resolution import load_config
from efcil.runfolder import RunFolder, RunFolderError, locate
from efcil.settings import Recipe, Settings

SHORT: dict[str, Any] = {"first_task_epochs": 1, "epochs": 1, "batch_size": 64, "device": "cpu"}
TWO_TASKS: dict[str, Any] = {"scenario": "custom", "tasks": 2, **SHORT}
TIMES = ("seconds", "finished")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits", None, SourceOptions())


@pytest.fixture(scope="module")
def few(digits: Dataset) -> Dataset:
    """Every eighth training image: enough where only the way of a run matters."""
    train = ImageSet(digits.train.images[::8], digits.train.labels[::8])
    return dataclasses.replace(digits, train=train)


def tensors(run: RunFolder) -> dict[str, torch.Tensor]:
    return checkpoint.read(run.model, MODEL).tensors


def same(left: RunFolder, right: RunFolder) -> bool:
    """Whether two runs ended in the same state, bit for bit, on the same way."""
    one, other = tensors(left), tensors(right)
    bits = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    tables = [{file.name: file.read_bytes() for file in run.path.glob("*.csv")} for run in (left, right)]
    return bits and lines(left) == lines(right) and tables[0] == tables[1]


def lines(run: RunFolder) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in TIMES} for line in run.read_metrics()]


def trained_first_tasks(output: Path) -> list[Path]:
    return sorted(path for path in (output / FOLDER).iterdir() if path.is_dir())


@dataclasses.dataclass
class Grid:
    output: Path
    settings: list[Settings]

    def run(self, method: str) -> RunFolder:
        return next(locate(self.output, each) for each in self.settings if each.method == method)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    output = tmp_path_factory.mktemp("grid")
    settings = [Settings(method=method, **SHORT) for method in ("finetune", "efc", "joint")]
    assert run_grid(settings, output, quiet=True) == [locate(output, each).path for each in settings]
    return Grid(output, settings)


# -- what a run leaves behind ----------------------------------------------------------------------------------------


class TestRunFolder:
    def test_everything_is_there_and_nothing_else(self, grid: Grid) -> None:
        for settings in grid.settings:
            run = grid.run(settings.method)
            names = {str(file.relative_to(run.path)) for file in run.path.rglob("*") if file.is_file()}
            (tensor_file,) = {name for name in names if name.startswith("model/model-")}
            expected = {"settings.yaml", "metrics.jsonl", "accuracy.csv", "summary.json", "log.txt", "model/model.json"}
            expected |= {"classes.csv", "confusion.csv"} | ({"spectrum.csv"} if settings.method == "efc" else set())
            assert names == expected | {tensor_file}
            named = run.verified_summary()["files"]
            assert set(named) == {name for name in names if name.endswith((".csv", ".jsonl"))}

    def test_settings_run_again(self, grid: Grid) -> None:
        for settings in grid.settings:
            assert load_config(grid.run(settings.method).settings_file) == [settings]

    def test_metrics_have_a_line_per_epoch_and_per_task(self, grid: Grid) -> None:
        found = grid.run("efc").read_metrics()
        assert [(line["kind"], line["task"]) for line in found] == [
            (kind, task) for task in range(1, 6) for kind in ("epoch", "task")
        ]
        first, done = found[0], found[1]
        assert first["epoch"] == 1
        assert first["losses"].keys() == {"current"}
        assert found[2]["losses"].keys() == {"drift", "current", "replay"}
        assert first["learning_rate"] == pytest.approx(1e-3)
        assert all(line["seconds"] for line in found)
        assert done["A_step"] == pytest.approx(done["accuracy"][0])

    def test_summary_is_what_the_matrices_say(self, grid: Grid) -> None:
        for method in ("efc", "finetune"):
            run = grid.run(method)
            summary = run.read_summary()
            agnostic, aware, sizes = run.read_accuracy()
            assert sizes == summary["task_sizes"] == [2] * 5
            assert (aware >= agnostic)[np.tril_indices(5)].all()
            for name, value in results(agnostic, sizes, aware).items():
                assert summary[name] == (list(value) if isinstance(value, tuple) else value), name
            rows = [line["accuracy"] for line in run.read_metrics() if line["kind"] == "task"]
            for k, row in enumerate(rows):
                assert row == agnostic[k, : k + 1].tolist()

    def test_classes_and_confusion_are_what_the_matrices_say(self, grid: Grid, digits: Dataset) -> None:
        for method in ("efc", "finetune"):
            run = grid.run(method)
            agnostic, _, sizes = run.read_accuracy()
            rows, confusion = run.classes(), run.confusion()
            assert rows is not None
            assert confusion is not None
            names, order = run.read_summary()["class_names"], run.read_summary()["class_order"]
            assert [(row.task, row.position) for row in rows] == [
                (task + 1, place) for task in range(5) for place in range(sum(sizes[: task + 1]))
            ]
            assert all(row.name == names[row.position] for row in rows)
            images = np.bincount(digits.test.labels, minlength=10)[order]
            assert all(row.images == images[row.position] for row in rows)
            for after in range(5):
                for task in range(after + 1):
                    own = [row for row in rows if row.task == after + 1 and row.position // 2 == task]
                    share = 100 * sum(row.right for row in own) / sum(row.images for row in own)
                    assert share == pytest.approx(agnostic[after, task])
            assert confusion.sum(axis=1).tolist() == images.tolist()
            assert confusion.diagonal().tolist() == [row.right for row in rows if row.task == 5]

    def test_the_spectrum_is_that_of_the_stored_matrix(self, grid: Grid) -> None:
        run = grid.run("efc")
        spectrum = run.spectrum()
        assert spectrum is not None
        assert {task: len(values) for task, values in spectrum.items()} == dict.fromkeys(range(1, 6), 64)
        matrix = tensors(run)["feature_matrix"].double().numpy()
        np.testing.assert_allclose(spectrum[5], np.linalg.eigvalsh(matrix)[::-1], rtol=1e-9, atol=1e-12)
        for task, values in spectrum.items():
            # W^T (diag(p) - p p^T) W has a rank below the number of classes.
            assert (values[2 * task - 1 :] < 1e-5 * values[0]).all()
            assert values[2 * task - 2] > 1e-5 * values[0]
        assert grid.run("finetune").spectrum() is None

    def test_only_the_last_task_of_joint_training_is_recorded(self, grid: Grid) -> None:
        rows = grid.run("joint").classes()
        assert rows is not None
        assert [row.task for row in rows] == [5] * 10

    def test_summary_says_what_it_was_made_with(self, grid: Grid, digits: Dataset) -> None:
        summary = grid.run("efc").read_summary()
        order = summary["class_order"]
        assert sorted(order) == list(range(10))
        assert summary["class_names"] == [digits.class_names[original] for original in order]
        way = {"device": "cpu", "precision": "fp32", "path": "plain", "deterministic": False}
        assert summary["execution"] == way | {"threads": torch.get_num_threads()}
        assert summary["data"] == data_digest(digits)
        assert {"torch", "efcil", "python"} <= summary["versions"].keys()
        assert summary["seconds"].keys() == {"start_up", "train", "statistics", "evaluation", "total"}
        parts = [seconds for name, seconds in summary["seconds"].items() if name != "total"]
        assert 0 < sum(parts) <= summary["seconds"]["total"]
        stored = summary["stored"]
        # Means, covariances and which belongs to whom, for ten classes of 64 features, and the feature matrix.
        assert stored["numbers"] == 10 * (64 + 64 * 64 + 1) + 64 * 64
        assert stored["by_name"]["memory.means"] == {"numbers": 640, "bytes": 2560}
        network = {name: value for name, value in tensors(grid.run("efc")).items() if name.startswith("network.")}
        statistics = ("running_mean", "running_var", "num_batches_tracked")
        weights = [value.numel() for name, value in network.items() if not name.endswith(statistics)]
        assert summary["parameters"] == sum(weights)

    def test_the_model_alone_repeats_the_last_accuracies(self, grid: Grid, digits: Dataset) -> None:
        run = grid.run("efc")
        model = Model.load(run.model, "cpu")
        scenario = make_run_scenario(grid.settings[1], digits)
        names = [digits.class_names[original] for original in scenario.order]
        assert model.card.labels == names
        assert model.card.task_sizes == [2] * 5
        images = TestImages(
            digits.test.images,
            scenario.relabel(digits.test.labels),
            normalisation=model.card.normalisation,
            device=torch.device("cpu"),
        )
        method = model.ready
        answers = evaluate(method, images, scenario, 4)
        accuracy = run.read_accuracy()
        assert answers.agnostic == accuracy[0][4].tolist()
        assert answers.aware == accuracy[1][4].tolist()
        confusion = run.confusion()
        assert confusion is not None
        assert answers.confusion == [[int(i), int(j), int(confusion[i, j])] for i, j in np.argwhere(confusion)]

    def test_the_audit_knows_all_that_a_state_says(self, grid: Grid) -> None:
        folder = grid.run("efc").model
        assert extras(folder, Model.load(folder, "cpu").card) == Extras([], [], False)

    def test_the_log_tells_the_story(self, grid: Grid) -> None:
        log = grid.run("efc").log_file.read_text()
        for part in ("5 tasks on cpu", "task 2/5  epoch 1/1  drift", "task 5/5 done: A_step", "after task"):
            assert part in log

    def test_finished_runs_are_left_as_they_are(
        self, grid: Grid, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = {file: file.read_bytes() for file in grid.output.rglob("*") if file.is_file()}
        monkeypatch.setattr(run_module, "Run", None)  # nothing may even begin
        run_grid(grid.settings, grid.output)
        assert capsys.readouterr().out.count("finished before, skipped.") == 3
        assert {file: file.read_bytes() for file in grid.output.rglob("*") if file.is_file()} == before

    def test_a_folder_of_another_run_is_refused(self, few: Dataset, tmp_path: Path) -> None:
        settings = Settings(method="finetune", **TWO_TASKS)
        run_one(settings, tmp_path, few, quiet=True)
        other = locate(tmp_path, settings).path
        moved = locate(tmp_path, dataclasses.replace(settings, seed=1)).path
        other.rename(moved)
        with pytest.raises(RunFolderError, match="seed is 0 there and 1 now"):
            run_one(dataclasses.replace(settings, seed=1), tmp_path, few, quiet=True)


class Inline(threading.Thread):
    """A thread that does its work at once."""

    def start(self) -> None:
        self.run()

    def join(self, timeout: float | None = None) -> None:
        """Nothing is under way."""


@pytest.mark.parametrize("at_once", [True, False])
def test_a_state_that_cannot_be_written_ends_the_run(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    if at_once:
        monkeypatch.setattr(background, "Thread", Inline)
    write = checkpoint.write

    def full(folder: Path, *arguments: Any) -> None:
        if folder.name == "model":
            raise checkpoint.CheckpointError("The disk is full.")
        write(folder, *arguments)

    monkeypatch.setattr(checkpoint, "write", full)
    settings = Settings(method="finetune", scenario="custom", tasks=2, **(SHORT | {"epochs": 5}))
    with pytest.raises(checkpoint.CheckpointError, match=r"The disk is full\."):
        run_one(settings, tmp_path, few, quiet=True)
    folder = locate(tmp_path, settings)
    assert "Failed: The disk is full." in folder.log_file.read_text()
    assert not folder.summary_file.exists()
    if at_once:  # told after the first epoch, not after the task
        assert '"task": 2' not in folder.metrics_file.read_text()


# -- the same again, and not the same --------------------------------------------------------------------------------


def test_one_seed_one_result_and_another_seed_another(few: Dataset, tmp_path: Path) -> None:
    settings = Settings(method="efc", **TWO_TASKS)
    runs = []
    for number, each in enumerate((settings, settings, dataclasses.replace(settings, seed=1, class_seed=0))):
        torch.manual_seed(number)  # the state of the global generator must not matter
        run_one(each, tmp_path / str(number), few, quiet=True)
        runs.append(locate(tmp_path / str(number), each))
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_flags_reach_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = []
    create = Trainer.__init__

    def watched(self: Trainer, *arguments: Any) -> None:
        create(self, *arguments)
        recipes.append((self.recipe, self.feed.steps_per_epoch, self.learner))

    monkeypatch.setattr(Trainer, "__init__", watched)
    command = (
        "run --method efc --tasks 2 --epochs 2 --first-task-epochs 3 --batch-size 256 --device cpu --quiet --set "
        "later.learning_rate=5e-4 first_task.rotations=false first_task.weight_decay=0 efm_weight=3 --output"
    )
    assert main([*command.split(), str(tmp_path)]) == 0
    (first, first_steps, _), (later, _, learner) = recipes
    assert (first.epochs, first.batch_size, first.rotations, first.weight_decay) == (3, 256, False, 0.0)
    assert (later.epochs, later.batch_size, later.learning_rate) == (2, 256, 5e-4)
    assert first.milestones == (1, 2), "scaled from [6, 10] of 12 epochs"
    assert first_steps == 3
    assert learner.settings.efm_weight == 3.0


@pytest.mark.parametrize("method", ["efc", "finetune"])
@pytest.mark.parametrize(("tasks", "sizes"), [(1, [10]), (3, [4, 3, 3]), (10, [1] * 10)])
def test_tasks_of_any_size(few: Dataset, tmp_path: Path, method: str, tasks: int, sizes: list[int]) -> None:
    settings = Settings(method=method, **TWO_TASKS | {"tasks": tasks})
    run = RunFolder(run_one(settings, tmp_path, few, quiet=True))
    summary = run.read_summary()
    assert summary["task_sizes"] == sizes
    agnostic, aware, _ = run.read_accuracy()
    assert np.isfinite(agnostic[np.tril_indices(tasks)]).all()
    assert (aware[np.tril_indices(tasks)] == 100).all() == (tasks == 10), "one class per task leaves no choice"


def test_a_task_without_test_images_is_not_measured(few: Dataset, tmp_path: Path) -> None:
    settings = Settings(method="finetune", **TWO_TASKS, class_order="natural")
    test = few.test
    without = dataclasses.replace(few, test=ImageSet(test.images[test.labels >= 5], test.labels[test.labels >= 5]))
    run = RunFolder(run_one(settings, tmp_path, without, quiet=True))
    agnostic, _, _ = run.read_accuracy()
    assert np.isnan(agnostic[:, 0]).all()
    assert np.isfinite(agnostic[1, 1])
    assert run.read_summary()["A_step"] is None
    beside = RunFolder(run_one(dataclasses.replace(settings, classifier="all"), tmp_path, without, quiet=True))
    assert beside.read_summary()["classifiers"]["heads"] == {"A_step": None, "A_inc": None}


def test_a_class_without_training_images_is_an_error_before_anything_trains(few: Dataset, tmp_path: Path) -> None:
    """Otherwise most methods fail at the end of its task, perhaps after hours, and some measure nonsense."""
    train = few.train
    without = dataclasses.replace(few, train=ImageSet(train.images[train.labels != 9], train.labels[train.labels != 9]))
    with pytest.raises(DataError, match="digits has classes without training images: 9"):
        run_one(Settings(method="efc", **TWO_TASKS), tmp_path, without, quiet=True)
    assert not list(tmp_path.rglob("metrics.jsonl"))


# -- a method of one's own -------------------------------------------------------------------------------------------

OWN_METHOD = """
from efcil.methods.finetune import FineTune

class Mine(FineTune):
    name = "mine"
    summary = "a method"
"""


def test_runs_of_another_version_of_an_own_method_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "mine.py", tmp_path / "runs"
    monkeypatch.setenv(methods.VARIABLE, str(file))

    def run(text: str, *seeds: int, quiet: bool = False) -> str:
        """Run as a new process would, which finds the file as it is now."""
        file.write_text(text)
        for known in (methods.available, source_digest):
            known.cache_clear()
        run_grid([Settings(method="mine", seed=seed, **TWO_TASKS) for seed in seeds], output, quiet=quiet)
        printed = capsys.readouterr()
        assert not (printed.out if quiet else printed.err)
        return printed.err if quiet else printed.out

    try:
        run(OWN_METHOD, 0, 1)
        assert "another version" not in run(OWN_METHOD, 0, 1)
        told = run(OWN_METHOD + "# edited", 0, 2)
        places = [locate(output, Settings(method="mine", seed=seed, **TWO_TASKS)) for seed in range(3)]
        said = f"It was trained with another version of {file}; delete {places[0].path} to train it again."
        assert f"{places[0].path}: finished before, skipped. {said}" in told
        assert told.count("another version") == 1
        quietly = run(OWN_METHOD + "# edited", 0, 2, quiet=True)
        assert quietly == f"{places[0].path}: finished before, skipped. {said}\n"
        versions = [place.read_summary()["method_source"][:8] for place in places]
        note = f"seeds of different versions of the method: {versions[0]} (seed 0 1), {versions[2]} (seed 2)"
        assert table(places).rows[0].notes == (note,)
        assert table(places[:2]).rows[0].notes == ()
    finally:
        monkeypatch.undo()
        for known in (methods.available, source_digest):
            known.cache_clear()


def test_a_task_that_was_under_way_with_another_version_of_an_own_method_begins_anew(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(method="mine", **TWO_TASKS)
    file = tmp_path / "mine.py"
    monkeypatch.setenv(methods.VARIABLE, str(file))

    def run(text: str, output: str, stop: StopRequest | None = None) -> RunFolder:
        file.write_text(text)
        for known in (methods.available, source_digest):
            known.cache_clear()
        return RunFolder(run_one(settings, tmp_path / output, few, stop=stop))

    try:
        edited = (
            OWN_METHOD
            + "    def parameter_groups(self, recipe):\n        return super().parameter_groups(recipe)[1:]\n"
        )
        whole = run(edited, "whole")
        for output, text, told in (("same", OWN_METHOD, "resuming task 2"), ("edited", edited, "task 2 starts over")):
            with monkeypatch.context() as patch, pytest.raises(Interrupted):
                run(OWN_METHOD, output, stop_after(3, patch))
            capsys.readouterr()
            ended = run(text, output)
            said = capsys.readouterr().out
            assert told in said
            assert ("The first 1 tasks were learned with another version of mine." in said) == (output == "edited")
            assert same(ended, whole) == (output == "edited")
            versions = {ways[0]["method"] for ways in ended.read_summary()["made_with"]}
            assert len(versions) == (2 if output == "edited" else 1)
            assert bool(table([ended]).rows[0].notes) == (output == "edited")
    finally:
        monkeypatch.undo()
        for known in (methods.available, source_digest):
            known.cache_clear()


# -- images that change ----------------------------------------------------------------------------------------------


def test_a_run_does_not_go_on_with_other_images(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(method="finetune", **TWO_TASKS)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        run_one(settings, tmp_path, few, quiet=True, stop=stop_after(3, patch))
    other = dataclasses.replace(few, test=ImageSet(few.test.images[1:], few.test.labels[1:]))
    with pytest.raises(CheckpointError, match=r"The images have changed since the run in .* started"):
        run_one(settings, tmp_path, other, quiet=True)
    run_one(settings, tmp_path, few, quiet=True)


def test_a_finished_run_of_a_folder_says_that_its_images_have_changed(
    digits: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in range(4):
        place = tmp_path / "mine" / f"c{label}"
        place.mkdir(parents=True)
        for number, row in enumerate(np.flatnonzero(digits.train.labels == label)[:6]):
            Image.fromarray(digits.train.images[row]).save(place / f"{number}.png")
    settings = Settings(
        method="finetune", dataset="folder", data=str(tmp_path / "mine"), held_out=0.3, network="slim", **TWO_TASKS
    )

    def told() -> str:
        (path,) = run_grid([settings], tmp_path / "runs")
        said = capsys.readouterr().out
        return said.split(f"{path}: finished before, skipped.")[-1].strip()

    told()
    assert told() == ""
    Image.fromarray(digits.train.images[0]).save(tmp_path / "mine" / "c0" / "new.png")
    assert told().startswith("The images have changed since; delete ")
    shutil.rmtree(tmp_path / "mine")
    assert told() == ""  # a finished run can do without its images


def test_a_finished_run_says_that_data_of_another_place_are_other_images(
    digits: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shards(name: str, first: int) -> str:
        (tmp_path / name).mkdir()
        rows = [row for label in range(4) for row in np.flatnonzero(digits.train.labels == label)[first : first + 6]]
        files = []
        for row in rows:
            Image.fromarray(digits.train.images[row]).save(file := io.BytesIO(), "PNG")
            files.append({"bytes": file.getvalue(), "path": None})
        for split in ("train", "test"):
            labels = digits.train.labels[rows]
            pq.write_table(pa.table({"image": files, "label": labels}), tmp_path / name / f"{split}.parquet")
        return str(tmp_path / name)

    settings = Settings(method="finetune", dataset="hub:me/mine", data=shards("one", 0), network="slim", **TWO_TASKS)
    run_grid([settings], tmp_path / "runs")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    for place, word in ((settings.data, False), (str(tmp_path / "copy"), False), (shards("two", 6), True)):
        capsys.readouterr()
        run_grid([dataclasses.replace(settings, data=place)], tmp_path / "runs")
        said = capsys.readouterr().out
        assert "finished before, skipped." in said
        assert ("The images have changed since" in said) == word


def test_a_finished_run_is_not_taken_for_one_on_other_images(few: Dataset, tmp_path: Path) -> None:
    settings = Settings(method="finetune", **TWO_TASKS)
    run = run_one(settings, tmp_path, few, quiet=True)
    assert run_one(settings, tmp_path, few, quiet=True) == run
    test = ImageSet(few.test.images // 2, few.test.labels)
    with pytest.raises(DataError, match="was trained on other images than these"):
        run_one(settings, tmp_path, dataclasses.replace(few, test=test), quiet=True)


# -- the first task --------------------------------------------------------------------------------------------------


class TestFirstTask:
    def test_it_is_trained_once_and_the_same_as_alone(self, grid: Grid, digits: Dataset, tmp_path: Path) -> None:
        # One for fine-tuning and EFC, one for joint training on everything.
        assert len(trained_first_tasks(grid.output)) == 2
        efc, finetune = grid.run("efc"), grid.run("finetune")
        assert efc.read_summary()["first_task"] == finetune.read_summary()["first_task"]
        plans = [Plan.make(each, grid.output, digits) for each in grid.settings[:2]]
        assert {plan.first_training() for plan in plans} == {efc.read_summary()["first_task"]}
        assert "trained before, taken from" in efc.log_file.read_text()
        assert "trained before" not in finetune.log_file.read_text()
        alone = RunFolder(run_one(grid.settings[1], tmp_path, digits, quiet=True))
        assert "trained before" not in alone.log_file.read_text()
        assert same(alone, efc)

    def test_scenarios_with_the_same_first_task_share_it(
        self, grid: Grid, digits: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(grid.output / FOLDER, tmp_path / FOLDER)
        monkeypatch.setattr(lifecycle, "FirstTask", None)  # which trains first tasks
        settings = Settings(method="finetune", scenario="custom", tasks=2, first_task_classes=2, **SHORT)
        run = RunFolder(run_one(settings, tmp_path, digits, quiet=True))
        assert run.read_accuracy()[0][0, 0] == grid.run("finetune").read_accuracy()[0][0, 0]
        assert run.read_summary()["first_task"] == grid.run("finetune").read_summary()["first_task"]

    def test_the_seconds_count_for_every_run_that_uses_it(self, grid: Grid) -> None:
        place = grid.output / FOLDER / grid.run("efc").read_summary()["first_task"]
        trained = checkpoint.read(place, STEM).facts["seconds"]
        for method in ("efc", "finetune"):
            line = next(line for line in grid.run(method).read_metrics() if line["kind"] == "task")
            assert line["seconds"]["train"] >= 0.99 * trained > 0

    @pytest.mark.parametrize(
        ("change", "shared"),
        [
            ({"method": "efc"}, True),
            ({"scenario": "custom", "tasks": 4, "first_task_classes": 2}, True),
            ({"scenario": "custom", "task_sizes": "2,1,3,4"}, True),
            ({"scenario": "custom", "task_sizes": "3,3,4"}, False),
            ({"epochs": 7}, True),
            ({"overrides": {"later.learning_rate": 0.5}}, True),
            ({"seed": 1, "class_seed": 0}, False),
            ({"class_seed": 3}, False),
            ({"scenario": "ws5"}, False),
            ({"first_task_epochs": 2}, False),
            ({"batch_size": 32}, False),
            ({"network": "resnet18-small"}, False),
            ({"augmentation": "none"}, False),
            ({"path": "fused"}, False),
            ({"overrides": {"first_task.rotations": False}}, False),
        ],
        ids=str,
    )
    def test_what_decides_it(self, few: Dataset, tmp_path: Path, change: dict[str, Any], shared: bool) -> None:
        settings = Settings(method="finetune", **SHORT)
        keys = set()
        for each in (settings, dataclasses.replace(settings, **change)):
            keys.add(digest(Plan.make(each, tmp_path, few, "0").scratch_description(0)))
        assert len(keys) == (1 if shared else 2)

    def test_the_fingerprint_sees_pixels_labels_and_classes(self, few: Dataset) -> None:
        images, labels = few.train.images.copy(), few.train.labels.copy()
        images[0, 4, 4, 0] ^= 1
        labels[-1] = (labels[-1] + 1) % 10
        variants = [
            few,
            dataclasses.replace(few, train=ImageSet(images, few.train.labels)),
            dataclasses.replace(few, train=ImageSet(few.train.images, labels)),
            dataclasses.replace(few, class_names=tuple("abcdefghij")),
            dataclasses.replace(few, mean=(0.5, 0.5, 0.5)),
        ]
        assert len({fingerprint(variant) for variant in variants}) == len(variants)
        assert fingerprint(few) == fingerprint(dataclasses.replace(few))
        tested = dataclasses.replace(few, test=ImageSet(few.test.images[1:], few.test.labels[1:]))
        assert fingerprint(tested) == fingerprint(few)
        assert len({data_digest(variant) for variant in [*variants, tested]}) == len(variants) + 1

    def test_a_damaged_one_is_trained_again(self, few: Dataset, tmp_path: Path) -> None:
        settings = Settings(method="finetune", **TWO_TASKS)
        first = RunFolder(run_one(settings, tmp_path / "a", few, quiet=True))
        (place,) = trained_first_tasks(tmp_path / "a")
        (tensor_file,) = place.glob("*.safetensors")
        tensor_file.write_bytes(tensor_file.read_bytes()[:-3])
        shutil.copytree(tmp_path / "a" / FOLDER, tmp_path / "b" / FOLDER)
        with pytest.warns(UserWarning, match="is damaged"):
            second = RunFolder(run_one(settings, tmp_path / "b", few, quiet=True))
        assert same(first, second)

    def test_it_is_waited_for_while_another_process_trains_it(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = Settings(method="finetune", **TWO_TASKS)
        plan = Plan.make(settings, tmp_path, few, "0")
        lock = files.locked(plan.store.lock(plan.first_training()))
        lock.__enter__()
        naps = []
        sleep = files.time.sleep

        count = time.perf_counter
        monkeypatch.setattr(time, "perf_counter", lambda: count() + 3600.0 * len(naps))

        def wake(seconds: float) -> None:
            if seconds != files.POLL_SECONDS:  # somebody else's nap
                return sleep(seconds)
            naps.append(seconds)
            if len(naps) == 2:
                lock.__exit__(None, None, None)
            return None

        monkeypatch.setattr(files.time, "sleep", wake)
        run_one(settings, tmp_path, few, quiet=True, fingerprint="0")
        assert len(naps) == 2
        seconds = plan.folder.read_summary()["seconds"]
        assert seconds["total"] < 3600, "waiting is not work"
        log = plan.folder.log_file.read_text()
        assert log.count(f"waiting for the first task, which another process (number {os.getpid()}) is training") == 1


# -- joint training --------------------------------------------------------------------------------------------------


def test_joint_training_after_the_last_task_and_after_every_task(few: Dataset, tmp_path: Path) -> None:
    settings = {
        when: Settings(method="joint", overrides={"when": when}, **TWO_TASKS | {"tasks": 3})
        for when in ("last", "every")
    }
    # In folders of their own, so that nothing is shared.
    runs = {when: RunFolder(run_one(settings[when], tmp_path / when, few, quiet=True)) for when in settings}
    last, every = (runs[when].read_accuracy()[0] for when in ("last", "every"))
    assert np.isnan(last[:2]).all()
    assert np.isfinite(every[np.tril_indices(3)]).all()
    assert last[2].tolist() == every[2].tolist()
    summary = runs["last"].read_summary()
    assert summary["A_step"] == runs["every"].read_summary()["A_step"]
    assert summary["A_inc"] is None
    assert [line["task"] for line in lines(runs["last"])] == [3, 3]
    assert [line["task"] for line in lines(runs["every"])] == [1, 1, 2, 2, 3, 3]
    assert len(trained_first_tasks(tmp_path / "every")) == 3
    assert Model.load(runs["every"].model, "cpu").card.task_sizes == [10]


def test_joint_training_is_shared_by_scenarios(few: Dataset, tmp_path: Path) -> None:
    settings = [Settings(method="joint", **TWO_TASKS | {"tasks": tasks}) for tasks in (2, 5)]
    plans = [Plan.make(each, tmp_path, few) for each in settings]
    (key,) = {plan.first_training() for plan in plans}  # what waits for what, where several train at a time
    folders = [RunFolder(run_one(each, tmp_path, few, quiet=True)) for each in settings]
    assert [path.name for path in trained_first_tasks(tmp_path)] == [key]
    assert "trained before, taken from" in folders[1].log_file.read_text()
    every = dataclasses.replace(settings[0], overrides={"when": "every"})
    assert Plan.make(every, tmp_path, few).first_training() != key


# -- failures --------------------------------------------------------------------------------------------------------

DIVERGING = {"later.learning_rate": 1e30}


class TestFailures:
    def test_a_loss_that_is_not_finite_ends_the_run(self, few: Dataset, tmp_path: Path) -> None:
        settings = Settings(method="finetune", overrides=DIVERGING, **TWO_TASKS)
        with pytest.raises(TrainingError) as error:
            run_one(settings, tmp_path, few, quiet=True, checkpoint_steps=1)
        assert "is not finite in task 2, epoch 1, step " in str(error.value)
        assert "--set later.learning_rate" in str(error.value)
        run = locate(tmp_path, settings)
        assert not run.is_finished(settings)
        kept = checkpoint.read(run.model, MODEL)
        assert kept.facts["experiment"]["completed"] == 1
        assert all(torch.isfinite(value).all() for value in kept.tensors.values())
        for partial in run.path.glob("partial/*.safetensors"):
            middle = checkpoint.read(partial.parent)
            assert all(torch.isfinite(value).all() for value in middle.tensors.values())
        assert f"Failed: {error.value}" in run.log_file.read_text()

    def test_the_first_task_has_a_learning_rate_of_its_own(self, few: Dataset, tmp_path: Path) -> None:
        settings = Settings(method="finetune", overrides={"first_task.learning_rate": 1e30}, **TWO_TASKS)
        with pytest.raises(TrainingError, match=r"task 1, epoch 1, step \d.*--set first_task\.learning_rate"):
            run_one(settings, tmp_path, few, quiet=True)
        assert trained_first_tasks(tmp_path) == []

    def test_one_failing_run_does_not_stop_the_others(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        settings = [
            Settings(method="finetune", **TWO_TASKS, overrides=DIVERGING),
            Settings(method="finetune", **TWO_TASKS),
        ]
        with pytest.raises(GridError, match="1 of 2 runs failed") as error:
            run_grid(settings, tmp_path)
        failed, finished = (locate(tmp_path, each) for each in settings)
        assert error.value.paths == [failed.path, finished.path]
        assert str(failed.path) in str(error.value)
        assert not failed.is_finished()
        assert finished.is_finished()
        assert f"{failed.path}: failed. " in capsys.readouterr().out

    def test_the_command_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command = "run --method finetune efc --tasks 2 --epochs 1 --batch-size 64 --device cpu --quiet --set "
        arguments = [*command.split(), "regulariser=features", "feature_weight=1e38", "--output", str(tmp_path)]
        assert main(arguments) == 1
        captured = capsys.readouterr()
        assert "1 of 2 runs failed" in captured.err
        assert "The loss is not finite in task 2" in captured.err
        assert "\nfinetune" in captured.out, "the run that finished is in the table"
        assert "not finished" in captured.out

    def test_one_run_alone_fails_with_its_own_error(self, tmp_path: Path) -> None:
        with pytest.raises(TrainingError) as error:
            run_grid([Settings(method="finetune", **TWO_TASKS, overrides=DIVERGING)], tmp_path, quiet=True)
        assert not isinstance(error.value, GridError)

    def test_an_unexpected_error_is_in_the_log(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*arguments: object) -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(run_module, "evaluate", broken)
        settings = Settings(method="finetune", **TWO_TASKS)
        with pytest.raises(ZeroDivisionError):
            run_one(settings, tmp_path, few, quiet=True)
        log = locate(tmp_path, settings).log_file.read_text()
        assert "Failed: ZeroDivisionError: oops\nTraceback" in log
        assert "in broken" in log

    @pytest.mark.parametrize("flags", [[], ["--debug"]])
    def test_an_unexpected_error_in_a_grid_keeps_its_name_and_its_traceback(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
    ) -> None:
        def broken(*arguments: object) -> None:
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(run_module, "evaluate", broken)
        command = "run --method finetune efc --tasks 2 --epochs 1 --batch-size 256 --device cpu --quiet --output"
        assert main([*command.split(), str(tmp_path), *flags]) == 1
        told = capsys.readouterr().err
        assert told.splitlines()[-1] == "efcil: ZeroDivisionError: oops (None of the 2 runs was possible.)"
        assert told.count("in broken") == (2 if flags else 0)

    def test_a_failed_run_is_gone_before_the_next_one_trains(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        execute = run_module.Run.execute
        seen: list[weakref.ref[run_module.Run]] = []
        alive: list[int] = []

        def watched(self: run_module.Run, *arguments: Any) -> None:
            alive.append(sum(run() is not None for run in seen))
            seen.append(weakref.ref(self))
            vars(self)["itself"] = self  # such cycles are found by the garbage collector alone
            execute(self, *arguments)
            raise ZeroDivisionError("oops")

        monkeypatch.setattr(run_module.Run, "execute", watched)
        settings = [Settings(method="finetune", seed=seed, **TWO_TASKS) for seed in range(2)]
        with pytest.raises(GridError, match="ZeroDivisionError: oops"):
            run_grid(settings, tmp_path, quiet=True)
        assert alive == [0, 0]

    def test_no_such_gpu(self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(SettingsError, match="PyTorch finds no GPU here"):
            run_one(Settings(method="finetune", **TWO_TASKS | {"device": "cuda:1"}), tmp_path, few, quiet=True)

    def test_two_processes_do_not_work_on_one_run(self, few: Dataset, tmp_path: Path) -> None:
        settings = Settings(method="finetune", **TWO_TASKS)
        run = locate(tmp_path, settings)
        with files.locked(run.path / ".lock"), pytest.raises(RunFolderError, match="another process") as error:
            run_one(settings, tmp_path, few, quiet=True)
        assert str(os.getpid()) in str(error.value)
        assert not run.settings_file.exists()
        run_one(settings, tmp_path, few, quiet=True)
        assert not (run.path / ".lock").exists()


# -- files that cannot be written ------------------------------------------------------------------------------------


@pytest.fixture
def nothing_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(Trainer, "__init__", refuse)


class TestDisk:
    settings = Settings(method="efc", **TWO_TASKS)

    @pytest.mark.usefixtures("nothing_trains")
    def test_a_read_only_folder(self, few: Dataset, tmp_path: Path) -> None:
        output = tmp_path / "runs"
        output.mkdir(mode=0o555)
        with pytest.raises(RunFolderError, match="Nothing has been changed; choose another folder, or make"):
            run_one(self.settings, output, few, quiet=True)
        assert list(output.iterdir()) == []

    @pytest.mark.usefixtures("nothing_trains")
    def test_a_file_in_the_place_of_a_folder(self, few: Dataset, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("")
        with pytest.raises(RunFolderError, match="Nothing can be written to"):
            run_one(self.settings, tmp_path / "runs", few, quiet=True)

    @pytest.mark.usefixtures("nothing_trains")
    def test_a_full_disk(self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=3_000_000))
        with pytest.raises(RunFolderError, match=r"has 3 MB left, but about \d+ MB are needed"):
            run_one(self.settings, tmp_path, few, quiet=True)
        assert not (tmp_path / FOLDER).exists()

    def test_a_disk_too_small_for_what_the_method_will_store(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plan = Plan.make(self.settings, tmp_path, few, "0")
        usage = shutil.disk_usage(tmp_path)
        answers = iter([plan.needed_bytes() + 1, 300_000])
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=next(answers)))
        with pytest.raises(RunFolderError, match="has 0 MB left"):
            run_one(self.settings, tmp_path, few, quiet=True)
        assert not checkpoint.exists(plan.folder.model, MODEL)
        assert len(trained_first_tasks(tmp_path)) == 1, "what was trained is not lost"

    @pytest.mark.parametrize("call", ["replace", "fsync"])
    def test_a_disk_that_fills_up_in_the_middle_of_a_checkpoint(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        whole = RunFolder(run_one(self.settings, tmp_path / "whole", few, quiet=True))
        run = locate(tmp_path / "cut", self.settings)
        original = getattr(os, call)

        def full(*arguments: Any) -> None:
            # The second checkpoint in the middle of the second task: its tensors fit, its description does not.
            partial = run.path / "partial"
            if checkpoint.exists(partial) and len(list(partial.glob("*.safetensors"))) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            original(*arguments)

        monkeypatch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match="No space left on device") as error:
            run_one(self.settings, tmp_path / "cut", few, quiet=True, checkpoint_steps=1)
        monkeypatch.undo()
        assert str(run.path) in str(error.value)
        kept = checkpoint.read(run.path / "partial")
        assert kept.facts["position"]["step"] == 1
        assert "No space left on device" in run.log_file.read_text()
        assert same(RunFolder(run_one(self.settings, tmp_path / "cut", few, quiet=True)), whole)

    def test_a_disk_too_full_for_a_line_of_metrics(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: RunFolder, values: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(RunFolder, "append_metrics", full)
        with pytest.raises(CheckpointError, match=r"stopped by a file error .*run the same command again"):
            run_one(self.settings, tmp_path, few, quiet=True)

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full to stand for a full disk")
    def test_a_log_that_does_not_fit_hides_no_error(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = Settings(method="finetune", overrides=DIVERGING, **TWO_TASKS)
        full = functools.partial(open, "/dev/full", "a")
        monkeypatch.setattr("efcil.engine.progress.open_regular", lambda *_, **__: full())
        with pytest.raises(TrainingError, match="is not finite in task 2"):
            run_one(settings, tmp_path, few, quiet=True)
        assert capsys.readouterr().err.count("cannot be written (No space left on device)") == 1
        finished = run_one(dataclasses.replace(settings, overrides={}), tmp_path, few, quiet=True)
        assert RunFolder(finished).is_finished()
        assert capsys.readouterr().err.count("cannot be written (No space left on device)") == 1

    def test_what_a_killed_process_left_is_removed(self, few: Dataset, tmp_path: Path) -> None:
        run = locate(tmp_path, self.settings)
        run.path.mkdir(parents=True)
        for name in (".summary.json.abc.tmp", ".lock"):
            (run.path / name).write_text("{")
        run_one(self.settings, tmp_path, few, quiet=True)
        assert not [file for file in run.path.iterdir() if file.name.startswith(".")]


# -- stopping and going on, from Python ------------------------------------------------------------------------------


def stop_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> StopRequest:
    """A request to stop that comes with that step, counted over all tasks."""
    stop, taken = StopRequest(), []
    compute = Trainer._compute

    def step(self: Trainer, place: int, length: int) -> None:
        compute(self, place, length)
        taken.append(place)
        stop.requested = len(taken) == steps

    monkeypatch.setattr(Trainer, "_compute", step)
    return stop


def test_a_stop_from_python_names_a_command_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(method="finetune", **TWO_TASKS)
    digits = load_dataset("digits", None, SourceOptions())
    whole = RunFolder(run_one(settings, tmp_path / "whole", digits, quiet=True))
    before = signal.getsignal(signal.SIGTERM)
    stop = stop_after(15, monkeypatch)
    with pytest.raises(Interrupted) as interruption:
        run_one(settings, tmp_path / "cut", digits, quiet=True, stop=stop)
    words = shlex.split(str(interruption.value).partition("To resume: ")[2])
    assert words[:2] == ["efcil", "run"]
    assert main([*words[1:], "--quiet"]) == 0
    assert same(locate(tmp_path / "cut", settings), whole)
    assert signal.getsignal(signal.SIGTERM) == before, "the handlers are gone again"


class TestCommits:
    """A result says which code made it, also where that is not the code of one commit."""

    settings = Settings(method="finetune", **TWO_TASKS)

    @staticmethod
    def commit(name: str | None, dirty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("efcil.environment._own_commit", lambda: (name, dirty))

    @pytest.mark.parametrize("steps", [1, 3], ids=["in the first task", "in a later task"])
    def test_of_a_run_that_was_interrupted(
        self, steps: int, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stop = stop_after(steps, monkeypatch)
        self.commit("one", True, monkeypatch)
        with pytest.raises(Interrupted):
            run_one(self.settings, tmp_path, few, quiet=True, stop=stop)
        self.commit("two", False, monkeypatch)
        summary = RunFolder(run_one(self.settings, tmp_path, few, quiet=True)).read_summary()
        assert (summary["commit"], summary["earlier_commits"]) == ("two", ["one+changes"])

    def test_of_a_first_task_that_was_there(
        self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.commit("one", False, monkeypatch)
        first = RunFolder(run_one(self.settings, tmp_path, few, quiet=True)).read_summary()
        assert (first["commit"], first["earlier_commits"]) == ("one", [])
        other = dataclasses.replace(self.settings, method="lwf")
        self.commit("two", False, monkeypatch)
        summary = RunFolder(run_one(other, tmp_path, few, quiet=True)).read_summary()
        assert (summary["commit"], summary["earlier_commits"]) == ("two", ["one"])

    def test_where_none_is_known(self, few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commit(None, False, monkeypatch)
        summary = RunFolder(run_one(self.settings, tmp_path, few, quiet=True)).read_summary()
        assert (summary["commit"], summary["earlier_commits"]) == (None, [])


# -- several runs on one GPU -----------------------------------------------------------------------------------------


class TestWorkers:
    def test_on_a_cpu_the_runs_take_turns(self, grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
        run_grid(grid.settings[:1], grid.output, jobs_per_gpu=2)
        assert "--jobs-per-gpu is for GPUs; on this device the runs take turns." in capsys.readouterr().out

    def test_a_worker_is_given_the_same_run(self, tmp_path: Path) -> None:
        settings = Settings(method="efc", seed=3, overrides={"efm_weight": 2.0}, **TWO_TASKS)
        job = workers.Job(0, settings, tmp_path, ("key", tmp_path / "key"))
        command = workers.worker_command(job, tmp_path / "out", tmp_path, 7)
        assert command[:3] == [sys.executable, "-m", "efcil"]
        from efcil.cli import build_parser

        arguments = build_parser()[0].parse_args(command[3:])
        assert plan(arguments) == [settings]
        assert (arguments.output, arguments.checkpoint_steps, arguments.quiet) == (tmp_path / "out", 7, True)
        again = workers.worker_command(job, tmp_path / "out", tmp_path, None)
        assert build_parser()[0].parse_args(again[3:]).checkpoint_steps is None
        assert "--debug" not in again
        assert "--debug" in workers.worker_command(job, tmp_path / "out", tmp_path, None, debug=True)

    def jobs(self, tmp_path: Path, scripts: list[str], monkeypatch: pytest.MonkeyPatch) -> list[workers.Job]:
        """Jobs that run small shell scripts in the place of trainings; all share one first task."""
        monkeypatch.setattr(workers, "POLL_SECONDS", 0.01)
        monkeypatch.setattr(workers.shutil, "which", lambda program: None)
        monkeypatch.setattr(workers, "worker_command", lambda job, *_: ["sh", "-c", scripts[job.number]])
        settings = Settings(method="finetune", **TWO_TASKS)
        return [workers.Job(n, settings, tmp_path / f"run{n}", ("key", tmp_path / "key")) for n in range(len(scripts))]

    def test_failures_are_told_and_the_others_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        scripts = ["true", "echo 'efcil: The loss is not finite.' >&2; exit 1", "exit 3"]
        said: list[str] = []
        jobs = self.jobs(tmp_path, scripts, monkeypatch)
        failures = workers.run_jobs(jobs, tmp_path, 2, None, said.append)
        assert failures.keys() == {1, 2}
        assert str(failures[1]) == "The loss is not finite."
        assert "ended with code 3" in str(failures[2])
        assert any(line.startswith(f"{tmp_path / 'run0'}: done") for line in said)

    @pytest.mark.parametrize("debug", [False, True])
    def test_tracebacks_are_printed_where_they_are_asked_for(
        self, debug: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        jobs = self.jobs(tmp_path, ["echo 'line 7, in loss' >&2; echo 'efcil: It failed.' >&2; exit 1"], monkeypatch)
        failures = workers.run_jobs(jobs, tmp_path, 1, None, lambda text: None, debug=debug)
        assert str(failures[0]) == "It failed."
        assert ("line 7, in loss" in capsys.readouterr().err) == debug

    def test_runs_that_share_a_first_task_wait_for_the_one_that_trains_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "key").mkdir()
        trained, started = tmp_path / "key" / f"{STEM}.json", tmp_path / "started"
        # The first one trains, and then works on until another one has started; that one fails if it came too early.
        scripts = [
            f"sleep .1; touch {trained}; "
            f"for i in $(seq 30000); do test -e {started} && exit 0; sleep 0.02; done; exit 1",
            f"test -e {trained} && touch {started}",
        ]
        jobs = self.jobs(tmp_path, scripts, monkeypatch)
        assert workers.run_jobs(jobs, tmp_path, 2, None, lambda text: None) == {}

    def test_a_request_to_stop_is_passed_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        note = tmp_path / "note"
        script = f"trap 'echo saved > {note}; exit 130' TERM; kill -INT {os.getpid()}; while true; do sleep 0.05; done"
        jobs = self.jobs(tmp_path, [script, "true"], monkeypatch)
        with pytest.raises(Interrupted, match="Run the same command again"):
            workers.run_jobs(jobs, tmp_path, 1, None, lambda text: None)
        assert note.read_text() == "saved\n"


def test_first_tasks_are_described(grid: Grid) -> None:
    """What lies in the folder of a first task says what it is."""
    place = grid.output / FOLDER / grid.run("efc").read_summary()["first_task"]
    facts = json.loads((place / f"{STEM}.json").read_text())["facts"]
    assert facts["key"] == place.name == digest(facts["description"])


class TestMistakesWhileRunning:
    """Images that cannot be used are found when they are loaded: one message, exit code 2 as for a single run."""

    @pytest.fixture
    def empty(self, tmp_path: Path) -> Path:
        (tmp_path / "images").mkdir()
        return tmp_path / "images"

    def command(self, empty: Path, methods: str) -> list[str]:
        flags = f"run --method {methods} --dataset folder --held-out 0.2 --tasks 2 --device cpu --data".split()
        return [*flags, str(empty), "--output", str(empty.parent / "runs")]

    @pytest.mark.parametrize("methods", ["lda", "lda efc finetune"])
    def test_images_that_cannot_be_loaded(self, empty: Path, capsys: pytest.CaptureFixture[str], methods: str) -> None:
        assert main(self.command(empty, methods)) == 2
        captured = capsys.readouterr()
        count = len(methods.split())
        assert captured.err.count("efcil: ") == 1
        reason = captured.err.removeprefix("efcil: ").split(" (None of")[0].strip()
        assert captured.out.count(reason) == (count > 1)
        assert captured.out.count("failed") == (count > 1)

    def test_images_are_not_looked_for_again(self, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from efcil.experiment import grid

        tried: list[str] = []
        load = grid.load_images
        monkeypatch.setattr(grid, "load_images", lambda *given: tried.append("once") or load(*given))
        assert main(self.command(empty, "lda efc finetune")) == 2
        assert tried == ["once"]

    def test_training_that_fails_is_no_mistake(self, tmp_path: Path) -> None:
        settings = [Settings(method="finetune", seed=seed, **TWO_TASKS, overrides=DIVERGING) for seed in range(2)]
        with pytest.raises(GridError) as error:
            run_grid(settings, tmp_path, quiet=True)
        assert not error.value.mistake


class TestWorkLeft:
    """What later tasks need, in epochs of the present one: the time left is estimated from it."""

    def test_later_tasks_count_by_their_images(self, digits: Dataset, tmp_path: Path) -> None:
        settings = Settings(method="efc", scenario="custom", tasks=3, first_task_classes=6, **SHORT | {"epochs": 4})
        plan = Plan.make(settings, tmp_path, digits)
        sizes = [np.isin(plan.labels, plan.scenario.tasks[task]).sum() for task in range(3)]
        assert plan.later_epochs(0) == pytest.approx(4 * (sizes[1] + sizes[2]) / sizes[0])
        assert plan.later_tasks(0) == [1, 2]
        assert plan.later_epochs(2) == 0

    def test_a_frozen_network_has_nothing_more_to_train(self, digits: Dataset, tmp_path: Path) -> None:
        assert Plan.make(Settings(method="lda", **SHORT), tmp_path, digits).later_epochs(0) == 0


def test_first_tasks_keep_their_keys_where_newer_values_of_recipes_are_off() -> None:
    def key(**values: object) -> str:
        recipe = Recipe(**values)  # type: ignore[arg-type]
        return digest(describe("data", [3, 1], "slim", "shift", recipe, 0, {"version": "1"}))

    description = describe("data", [3, 1], "slim", "shift", Recipe(), 0, {"version": "1"})
    newer = {"label_smoothing", "ema", "mixing", "mixing_weight", "contrast", "contrast_temperature"}
    assert not newer & description["recipe"].keys()
    changed = ({"label_smoothing": 0.1}, {"ema": 0.9}, {"ema": 0.99}, {"mixing": 1}, {"contrast": 0.5})
    assert len({key(), *(key(**each) for each in changed)}) == 6


def test_a_run_says_that_it_enlarges_images(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_size, self.layer = 12, torch.nn.Conv2d(3, 5, 12)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.layer(images)[:, :, 0, 0]

    monkeypatch.setitem(sys.modules, "somebodys_network", types.SimpleNamespace(make=Own))
    said = "images of 8 pixels are enlarged to 12 for somebodys_network:make"
    settings = Settings(method="lda", network="somebodys_network:make", **TWO_TASKS)
    for chosen, times in ((None, 1), (12, 0)):
        run = run_one(dataclasses.replace(settings, input_size=chosen), tmp_path, dataset=few, quiet=True)
        log = RunFolder(run).log_file.read_text()
        assert (log.count(said), log.count("--weights none trains it from scratch")) == (times, times)


def test_a_run_says_that_bf16_is_faster_on_this_processor(
    few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(units: bool, **values: object) -> int:
        monkeypatch.setattr(hardware, "processor_multiplies_bf16", lambda: units)
        settings = Settings(method="lda", **TWO_TASKS | values)  # type: ignore[arg-type]
        run = run_one(settings, tmp_path / f"{units}{values}", dataset=few, quiet=True)
        return RunFolder(run).log_file.read_text().count("--precision bf16")

    monkeypatch.setitem(backbones.NETWORKS, "resnet18", ("", functools.partial(ResNet, (4, 4), (1, 1))))
    assert said(True, network="resnet18") == 1
    assert said(False, network="resnet18") == 0
    assert said(True, network="slim") == 0
    assert said(True, network="resnet18", precision="bf16") == 0
    assert said(True, network="resnet18", precision="fp32") == 0
