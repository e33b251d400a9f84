"""States and results that are intact, but not what they are taken for: of another run, computed otherwise, edited."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine import checkpoint
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.trainer import Trainer
from efcil.errors import EfcilError, RunFolderError
from efcil.experiment import run_one
from efcil.experiment.run import Run
from efcil.experiment.shared_tasks import FOLDER
from efcil.model import Model
from efcil.model import folder as model_files
from efcil.report import table
from efcil.runfolder import RunFolder, find_runs, locate
from efcil.settings import Settings

BASE = Settings(
    method="finetune", scenario="custom", tasks=3, first_task_epochs=1, epochs=1, batch_size=64, device="cpu"
)
OTHERS = {
    "another seed": {"seed": 1, "class_seed": 0},
    "another weight": {"method": "efc", "overrides": {"efm_weight": 3.0}},
    "another learning rate": {"overrides": {"later.learning_rate": 0.01}},
}


@pytest.fixture(scope="module")
def few() -> Dataset:
    digits = load_dataset("digits", None, SourceOptions())
    return dataclasses.replace(digits, train=ImageSet(digits.train.images[::8], digits.train.labels[::8]))


def stopped(settings: Settings, output: Path, data: Dataset, steps: int, task: int = 1) -> RunFolder:
    """Return the folder of a run that was stopped after some steps of its second task, or of another one."""
    stop, taken = StopRequest(), 0
    compute = Trainer._compute

    def counted(trainer: Trainer, *arguments: Any) -> None:
        nonlocal taken
        compute(trainer, *arguments)
        taken += trainer.task.index == task
        stop.requested = taken >= steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_compute", counted)
        with pytest.raises(Interrupted):
            run_one(settings, output, data, quiet=True, stop=stop)
    return locate(output, settings)


def put_in_place(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


# -- of another run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_a_model_of_another_run_is_refused(change: dict[str, Any], few: Dataset, tmp_path: Path) -> None:
    settings = dataclasses.replace(BASE, method=change.get("method", "finetune"))
    here = stopped(settings, tmp_path / "here", few, 1)
    there = stopped(dataclasses.replace(settings, **change), tmp_path / "there", few, 1)
    put_in_place(there.model, here.model)
    name = next(iter(change.get("overrides", change)))
    with pytest.raises(EfcilError, match=rf"belongs to another run: .*{name} is .* there and .* here"):
        run_one(settings, tmp_path / "here", few, quiet=True)


def test_a_refused_model_costs_no_tensors(few: Dataset, tmp_path: Path) -> None:
    """A state of another run put over ours: what is still there of ours stays, so that it can be put right."""
    here = stopped(BASE, tmp_path / "here", few, 1)
    there = stopped(dataclasses.replace(BASE, seed=1, class_seed=0), tmp_path / "there", few, 1)
    shutil.copytree(there.model, here.model, dirs_exist_ok=True)
    before = sorted(here.model.iterdir())
    assert len(before) == 3, "one description, and the tensors of both"
    with pytest.raises(EfcilError, match="belongs to another run"):
        run_one(BASE, tmp_path / "here", few, quiet=True)
    assert sorted(here.model.iterdir()) == before


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_the_middle_of_another_run_is_not_resumed(change: dict[str, Any], few: Dataset, tmp_path: Path) -> None:
    settings = dataclasses.replace(BASE, method=change.get("method", "finetune"))
    here = stopped(settings, tmp_path / "here", few, 1)
    there = stopped(dataclasses.replace(settings, **change), tmp_path / "there", few, 1)
    put_in_place(there.partial, here.partial)
    run_one(settings, tmp_path / "here", few, quiet=True)
    name = next(iter(change.get("overrides", change)))
    log = here.log_file.read_text()
    assert f"{here.partial} is of another run (" in log
    assert f"{name} is" in log
    assert "task 2 starts over" in log
    run_one(settings, tmp_path / "whole", few, quiet=True)
    assert here.accuracy_file.read_bytes() == locate(tmp_path / "whole", settings).accuracy_file.read_bytes()


def test_a_middle_that_continues_from_another_state_is_not_resumed(few: Dataset, tmp_path: Path) -> None:
    """All settings are the same, but the task before was learned with other bits."""
    here, there = (stopped(BASE, tmp_path / name, few, 1) for name in ("here", "there"))
    facts = checkpoint.read(there.model, model_files.STEM)
    changed = {name: value + 1e-3 if value.is_floating_point() else value for name, value in facts.tensors.items()}
    checkpoint.write(here.model, changed, facts.facts, model_files.STEM)
    run_one(BASE, tmp_path / "here", few, quiet=True)
    assert "of a run that had learned other tasks before; task 2 starts over" in here.log_file.read_text()


def test_a_first_task_of_another_run_is_trained_again(few: Dataset, tmp_path: Path) -> None:
    for seed in (0, 1):
        run_one(dataclasses.replace(BASE, seed=seed, class_seed=0), tmp_path / f"seed{seed}", few, quiet=True)
    ours, theirs = (next((tmp_path / f"seed{seed}" / FOLDER).iterdir()) for seed in (0, 1))
    put_in_place(theirs, tmp_path / "again" / FOLDER / ours.name)
    settings = dataclasses.replace(BASE, class_seed=0)
    with pytest.warns(UserWarning, match="it is another first task: seed is 1 there and 0 here"):
        run_one(settings, tmp_path / "again", few, quiet=True)
    again, first = (locate(tmp_path / name, settings) for name in ("again", "seed0"))
    assert again.accuracy_file.read_bytes() == first.accuracy_file.read_bytes()


def test_results_of_another_run_are_not_taken_for_this_one(few: Dataset, tmp_path: Path) -> None:
    """All three files fit together, and the run they are put into would be called finished."""
    other = dataclasses.replace(BASE, seed=1, class_seed=0)
    here = stopped(dataclasses.replace(BASE, class_seed=0), tmp_path, few, 1)
    run_one(other, tmp_path, few, quiet=True)
    there = locate(tmp_path, other)
    for file in (there.summary_file, there.accuracy_file, there.metrics_file):
        shutil.copy(file, here.path)
    said = r"summary\.json is of another run: seed is 1 there and 0 here"
    with pytest.raises(RunFolderError, match=said):
        run_one(dataclasses.replace(BASE, class_seed=0), tmp_path, few, quiet=True)
    found = table(find_runs([tmp_path]))
    assert [row.seeds for row in found.rows] == [(1,)]
    assert "is of another run" in found.problems[0].reason


# -- computed otherwise ----------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[int]:
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_a_run_says_which_tasks_were_computed_otherwise(few: Dataset, tmp_path: Path, threads: int) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    torch.set_num_threads(threads + 1)
    run_one(BASE, tmp_path, few, quiet=True)
    assert f"computed differently: threads {threads} (now {threads + 1})" in run.log_file.read_text()
    made_with = run.read_summary()["made_with"]
    assert [[way["threads"] for way in task] for task in made_with] == [[threads], [threads + 1], [threads + 1]]
    card = Model.load(run.model, "cpu").card
    assert [visit.made_with[0]["threads"] for visit in card.visits] == [threads, threads + 1, threads + 1]
    (row,) = table([run]).rows
    (note,) = (note for note in row.notes if "more than one way" in note)
    assert "tasks 1: " in note
    assert f"threads {threads}; tasks 2 to 3: " in note


def test_joint_training_says_which_tasks_were_computed_otherwise(few: Dataset, tmp_path: Path, threads: int) -> None:
    """Its card has one visit: every training begins anew, and replaces the one before."""
    settings = dataclasses.replace(BASE, method="joint", overrides={"when": "every"}, batch_size=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efcil.experiment.run.Run.stop_if_asked", _stop_after_the_first_task)
        with pytest.raises(Interrupted):
            run_one(settings, tmp_path, few, quiet=True)
    torch.set_num_threads(threads + 1)
    run = RunFolder(run_one(settings, tmp_path, few, quiet=True))
    made_with = run.read_summary()["made_with"]
    assert [[way["threads"] for way in task] for task in made_with] == [[threads], [threads + 1], [threads + 1]]
    (row,) = table([run]).rows
    assert any("was computed in more than one way (tasks 1: " in note for note in row.notes)


def _stop_after_the_first_task(run: Run) -> None:
    if run.state.completed:
        run.saving.wait()
        raise run.interrupted("Stopped.")


def test_joint_training_resumes_the_task_it_says(few: Dataset, tmp_path: Path) -> None:
    settings = dataclasses.replace(BASE, method="joint", batch_size=16)
    stop = StopRequest()
    stop.requested = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("efcil.experiment.run.Run.stop_if_asked", lambda run: None)
        with pytest.raises(Interrupted):
            run_one(settings, tmp_path, few, quiet=True, stop=stop)
    run = RunFolder(run_one(settings, str(tmp_path), few, quiet=True))  # type: ignore[arg-type]
    assert "resuming task 3 before the first step" in run.log_file.read_text(), (
        "the only training is for the third task"
    )
    assert [len(ways) for ways in run.read_summary()["made_with"]] == [0, 0, 1]


def test_another_version_is_said(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    monkeypatch.setattr("efcil.__version__", "99.1")
    with pytest.warns(UserWarning, match=r"was last trained with efcil .* \(this is 99\.1\)"):
        Model.load(run.model, "cpu")
    run_one(BASE, tmp_path, few, quiet=True)
    log = run.log_file.read_text()
    assert "The first 1 tasks were computed differently: efcil" in log
    assert "Task 2 was started with efcil" in log


# -- edited results --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(few: Dataset, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    output = tmp_path_factory.mktemp("finished")
    run_one(BASE, output, few, quiet=True)
    return locate(output, BASE)


def copied(run: RunFolder, place: Path) -> RunFolder:
    shutil.copytree(run.path, place / "run")
    return RunFolder(place / "run")


@pytest.mark.parametrize("name", ["summary.json", "accuracy.csv", "metrics.jsonl", "classes.csv", "confusion.csv"])
def test_no_changed_byte_is_believed(name: str, finished: RunFolder, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    file = run.path / name
    content = file.read_bytes()
    believed = []
    for place in range(0, len(content), 7):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        try:
            summary = run.verified_summary()
        except RunFolderError:
            continue
        # White space between fields says nothing.
        if name != "summary.json" or summary != finished.read_summary():
            believed.append(place)
    assert believed == []


def test_an_edited_summary_without_a_checksum_is_held_against_the_matrices(finished: RunFolder, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    summary = json.loads(run.summary_file.read_text())
    del summary["checksum"], summary["files"]
    run.summary_file.write_text(json.dumps(summary))
    assert run.verified_summary()["A_step"] == summary["A_step"], "summaries of earlier versions have no checksum"
    summary["A_inc"] += 5.0
    run.summary_file.write_text(json.dumps(summary))
    found = table(find_runs([tmp_path]))
    assert not found.rows
    assert "its A_inc is not what accuracy.csv gives" in found.problems[0].reason


def test_a_resumed_run_notices_lost_lines(few: Dataset, tmp_path: Path) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[1:]))
    run_one(BASE, tmp_path, few, quiet=True)
    assert "has lost or changed lines of the first 1 tasks" in run.log_file.read_text()
    assert run.read_summary()["metrics_lost"] is True
    assert {row.task for row in run.classes() or []} == {2, 3}, "what was said of the first task may not be measured"
    (row,) = table([run]).rows
    assert any("has lost lines of metrics.jsonl" in note for note in row.notes)


def test_lost_lines_are_not_forgotten_when_the_run_is_stopped_again(few: Dataset, tmp_path: Path) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("".join(lines[1:]))
    stopped(BASE, tmp_path, few, 1, task=2)
    run_one(BASE, tmp_path, few, quiet=True)
    assert run.read_summary()["metrics_lost"] is True


def test_a_damaged_line_does_not_end_a_run_that_has_trained_all_its_tasks(few: Dataset, tmp_path: Path) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    lines = run.metrics_file.read_text().splitlines(keepends=True)
    run.metrics_file.write_text("{not JSON\n" + "".join(lines[1:]))
    run_one(BASE, tmp_path, few, quiet=True)
    assert "has lost or changed lines of the first 1 tasks" in run.log_file.read_text()
    assert run.read_summary()["metrics_lost"] is True
    assert [line["task"] for line in run.read_metrics() if line["kind"] == "task"] == [1, 2, 3]


def test_changed_lines_of_other_classifiers_are_not_believed(few: Dataset, tmp_path: Path) -> None:
    """They stand in metrics.jsonl alone, so there is nothing that they could be held against."""
    settings = dataclasses.replace(BASE, classifier="all")
    run = stopped(settings, tmp_path, few, 1)
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    for line in lines:
        line.update({"classifiers": dict.fromkeys(line["classifiers"], 99.0)} if "classifiers" in line else {})
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_one(settings, tmp_path, few, quiet=True)
    found = run.read_summary()["classifiers"]
    assert found
    assert all(values["A_inc"] is None and values["A_step"] is not None for values in found.values())


def test_a_run_that_has_lost_its_state_says_that_it_starts_over(few: Dataset, tmp_path: Path) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    (run.model / "model.json").unlink()
    run_one(BASE, tmp_path, few, quiet=True)
    assert f"{run.model} has lost model.json" in run.log_file.read_text()


def test_missing_matrices_of_a_finished_run_are_named(finished: RunFolder, tmp_path: Path) -> None:
    run = copied(finished, tmp_path)
    run.accuracy_file.unlink()
    (problem,) = table([run]).problems
    assert "accuracy.csv is damaged (it is missing)" in problem.reason


# -- written by an earlier version -----------------------------------------------------------------------------------


def test_the_middle_of_an_earlier_version_is_named_as_such(few: Dataset, tmp_path: Path) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    saved = checkpoint.read(run.partial)
    facts = {name: value for name, value in saved.facts.items() if name != "identity"}
    checkpoint.write(run.partial, saved.tensors, facts)
    run_one(BASE, tmp_path, few, quiet=True)
    said = "(it has no 'identity', so another version of efcil wrote it); the task starts over"
    assert said in run.log_file.read_text()


def test_a_run_that_efcil_0_2_began_is_resumed(few: Dataset, finished: RunFolder, tmp_path: Path) -> None:
    run = stopped(BASE, tmp_path, few, 1)
    saved = checkpoint.read(run.model, model_files.STEM)
    # Its cards said how tasks were computed in the visits alone.
    experiment = {name: value for name, value in saved.facts["experiment"].items() if name != "made_with"}
    facts = saved.facts | {"format": 2, "experiment": experiment}
    checkpoint.write(run.model, saved.tensors, facts, model_files.STEM)
    assert Model.load(run.model, "cpu").card.experiment == saved.facts["experiment"]
    run_one(BASE, tmp_path, few, quiet=True)
    assert run.verified_summary()["made_with"] == finished.verified_summary()["made_with"]
    assert run.verified_summary()["A_step_per_task"] == finished.verified_summary()["A_step_per_task"]


def test_the_version_of_a_model_of_format_1_is_said(finished: RunFolder, tmp_path: Path) -> None:
    saved = checkpoint.read(finished.model, model_files.STEM)
    visits = [{name: value for name, value in v.items() if name != "made_with"} for v in saved.facts["visits"]]
    facts = saved.facts | {"format": 1, "efcil": "0.0.7", "visits": visits, "experiment": None, "continues": None}
    checkpoint.write(tmp_path, saved.tensors, facts, model_files.STEM)
    with pytest.warns(UserWarning, match=r"was last trained with efcil 0\.0\.7 \(this is "):
        Model.load(tmp_path, "cpu")
