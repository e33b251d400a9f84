from __future__ import annotations

import dataclasses
import json
import math
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efcil import files, runfolder
from efcil.environment import command, environment, source_commit
from efcil.evaluation.probes import ClassCount, Probes
from efcil.resolution import label, load_config
from efcil.runfolder import RunFolder, RunFolderError, find_runs, locate, write_atomically
from efcil.settings import Settings

SUMMARY = {
    "method": "efc",
    "label": "efc",
    "dataset": "digits",
    "scenario": "cs5",
    "seed": 0,
    "A_step": 80.0,
    "A_inc": 90.0,
}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_location_has_dataset_scenario_label_and_seed(tmp_path: Path) -> None:
    settings = Settings(seed=3, epochs=2)
    assert locate(tmp_path, settings).path == tmp_path / "digits" / "cs5" / "efc+epochs=2" / "seed3"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"overrides": {"efm_weight": 1e6}}, {"overrides": {"efm_weight": 1e-6}}),
        ({"overrides": {"efm_weight": 1.5e300}}, {"overrides": {"efm_weight": 1.5e-300}}),
        ({"dataset": "folder", "data": "/x/\u6843"}, {"dataset": "folder", "data": "/x/\u68a8"}),
        ({"dataset": "folder", "data": "/x/a+b"}, {"dataset": "folder", "data": "/x/a-b"}),
    ],
)
def test_other_values_have_other_places(one: dict[str, Any], other: dict[str, Any]) -> None:
    places = [locate("runs", Settings(**values)).path for values in (one, other)]
    assert places[0] != places[1]
    assert all(re.fullmatch(r"[\w.=,+-]+", place.parts[-2], re.ASCII) for place in places)


def test_exponents_have_no_plus_and_small_ones_stay_as_they_were() -> None:
    labels = [label(Settings(overrides={"efm_weight": value})) for value in (1e6, 1e-6, 1e5)]
    assert labels == ["efc+efm_weight=1e06", "efc+efm_weight=1e-06", "efc+efm_weight=100000"]


def test_settings_run_again(run: RunFolder) -> None:
    settings = Settings(seed=1, overrides={"efm_weight": 3.0}, epochs=2)
    run.write_settings(settings)
    assert load_config(run.settings_file) == [settings]


def test_what_was_recorded_and_never_used_is_not_read_back(run: RunFolder) -> None:
    """EWC once recorded how its Fisher pass would have treated BatchNorm where that was frozen; the preset differs."""
    settings = Settings(method="ewc", dataset="cifar100", scenario="cs10", overrides={"train_normalisation": False})
    unused = dataclasses.replace(settings, overrides={**settings.overrides, "fisher_trains_statistics": True})
    run.write_settings(unused)
    assert run.read_settings() == settings
    used = dataclasses.replace(settings, overrides={"fisher_trains_statistics": True})
    other = RunFolder(run.path / "other")
    other.write_settings(used)
    assert other.read_settings() == used


def test_same_run_may_be_written_twice_and_on_another_device(run: RunFolder) -> None:
    run.write_settings(Settings())
    run.write_settings(Settings(device="cpu"))


def test_folder_of_another_run_is_refused(run: RunFolder) -> None:
    run.write_settings(Settings(epochs=3))
    before = run.settings_file.read_text()
    with pytest.raises(RunFolderError) as error:
        run.write_settings(Settings(epochs=4, overrides={"damping": 0.5}))
    for part in (
        str(run.path),
        "later.epochs is 3 there and 4 now",
        "method_settings.damping is 0.1 there and 0.5 now",
    ):
        assert part in str(error.value)
    assert "seed" not in str(error.value)
    assert run.settings_file.read_text() == before
    run.write_summary(SUMMARY)
    assert run.is_finished(Settings(epochs=3))
    with pytest.raises(RunFolderError, match="other settings"):
        run.is_finished(Settings(epochs=4))


@pytest.mark.parametrize("content", ["a: [", "seed: 0\n", "resolved: 3\n", "- 1\n"])
def test_damaged_settings_are_named(run: RunFolder, content: str) -> None:
    run.path.mkdir()
    run.settings_file.write_text(content)
    with pytest.raises(RunFolderError, match=r"settings\.yaml is damaged"):
        run.write_settings(Settings())


def test_metrics_grow_line_by_line(run: RunFolder) -> None:
    run.append_metrics({"task": 0, "loss": np.float32(0.5), "rates": (1, 2)})
    run.append_metrics({"task": 1, "loss": math.nan})
    assert run.read_metrics() == [{"task": 0, "loss": 0.5, "rates": [1, 2]}, {"task": 1, "loss": None}]


@pytest.mark.parametrize("torn", ['{"task": 2, "lo', "x"])
def test_torn_line_is_dropped(run: RunFolder, torn: str) -> None:
    run.append_metrics({"task": 1})
    with open(run.metrics_file, "a") as file:
        file.write(torn)
    assert run.read_metrics() == [{"task": 1}]
    run.append_metrics({"task": 2})
    assert run.read_metrics() == [{"task": 1}, {"task": 2}]


def test_torn_first_line_is_dropped(run: RunFolder) -> None:
    run.path.mkdir()
    run.metrics_file.write_text('{"ta')
    run.append_metrics({"task": 0})
    assert run.read_metrics() == [{"task": 0}]


def test_truncated_metrics_hold_no_line_of_an_unfinished_task(run: RunFolder) -> None:
    for task in (0, 0, 1, 1):
        run.append_metrics({"task": task})
    run.truncate_metrics(lambda line: line["task"] < 1)
    run.append_metrics({"task": 1, "again": True})
    assert run.read_metrics() == [{"task": 0}, {"task": 0}, {"task": 1, "again": True}]


def test_truncating_nothing_creates_nothing(run: RunFolder) -> None:
    run.truncate_metrics(lambda line: True)
    assert not run.metrics_file.exists()
    assert run.read_metrics() == []


def test_damaged_metrics_line_is_named(run: RunFolder) -> None:
    run.path.mkdir()
    run.metrics_file.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl is damaged in line 2"):
        run.read_metrics()


def test_accuracy_round_trip(run: RunFolder) -> None:
    agnostic = np.array([[90.0, math.nan], [100 / 3, 80.5]])
    aware = np.array([[95.0, math.nan], [70.0, 99.5]])
    run.write_accuracy(agnostic, aware, [3, 2])
    read_agnostic, read_aware, sizes = run.read_accuracy()
    np.testing.assert_array_equal(read_agnostic, agnostic)
    np.testing.assert_array_equal(read_aware, aware)
    assert sizes == [3, 2]
    assert run.accuracy_file.read_text().splitlines() == [
        "accuracy,after_task,task_1,task_2",
        "classes,,3,2",
        "task-agnostic,1,90.0,",
        "task-agnostic,2,33.333333333333336,80.5",
        "task-aware,1,95.0,",
        "task-aware,2,70.0,99.5",
    ]


@pytest.mark.parametrize("content", ["", "accuracy,after_task,task_1\nclasses,,2\n", "a,b,c\nclasses,,x\n"])
def test_damaged_accuracy_is_named(run: RunFolder, content: str) -> None:
    run.path.mkdir()
    run.accuracy_file.write_text(content)
    with pytest.raises(RunFolderError, match=r"accuracy\.csv is damaged"):
        run.read_accuracy()


MEASURED = Probes(
    classes={2: ([3, 0], [1, 0]), 1: ([3], [2])}, spectrum={1: [2.5, 0.1], 2: [1 / 3, 1e-20]}, confusion=[(0, 1, 2)]
)
NAMES = ["=1+1", 'a,\n"b"']


def test_probes_round_trip(run: RunFolder) -> None:
    assert (run.classes(), run.confusion(), run.spectrum()) == (None, None, None)
    run.write_accuracy(np.full((2, 2), math.nan), np.full((2, 2), math.nan), [1, 1])
    run.write_probes(MEASURED, NAMES)
    assert (run.path / "classes.csv").read_text().splitlines() == [
        "task,class,name,images,right",
        "1,0,'=1+1,3,2",
        "2,0,'=1+1,3,1",
        '2,1,"a,\\n""b""",0,0',
    ]
    assert (run.path / "confusion.csv").read_text() == "true,predicted,count\n0,1,2\n"
    rows, confusion, spectrum = run.classes(), run.confusion(), run.spectrum()
    assert rows is not None
    assert rows[0] == ClassCount(1, 0, "=1+1", 3, 2)
    assert rows[0].accuracy == pytest.approx(200 / 3)
    assert math.isnan(rows[2].accuracy)
    assert confusion is not None
    assert confusion.tolist() == [[0, 2], [0, 0]]
    assert spectrum is not None
    assert {task: values.tolist() for task, values in spectrum.items()} == MEASURED.spectrum


def test_what_is_not_measured_has_no_file(run: RunFolder) -> None:
    run.write_probes(MEASURED, NAMES)
    run.write_probes(Probes(), NAMES)
    assert list(run.path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classes.csv", ""),
        ("classes.csv", "task,class,images,right\n1,0,3,2\n"),
        ("classes.csv", "task,class,name,images,right\n1,0,a,3,4\n"),
        ("classes.csv", "task,class,name,images,right\n1,0,a,3\n"),
        ("confusion.csv", "true,predicted,count\n0,2,1\n"),
        ("confusion.csv", "true,predicted,count\n0,x,1\n"),
        ("spectrum.csv", "task,index,value\n1,2,0.5\n"),
        ("spectrum.csv", "task,index,value\n1,1,nan\n"),
        ("spectrum.csv", "\udcff"),
    ],
)
def test_damaged_probes_are_named(run: RunFolder, name: str, content: str) -> None:
    run.write_accuracy(np.full((2, 2), math.nan), np.full((2, 2), math.nan), [1, 1])
    (run.path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    read = {"classes.csv": run.classes, "confusion.csv": run.confusion, "spectrum.csv": run.spectrum}[name]
    with pytest.raises(RunFolderError, match=f"{name} is damaged"):
        read()


def test_probes_that_were_changed_removed_or_added_are_noticed(run: RunFolder) -> None:
    matrix = np.array([[90.0]])
    run.write_accuracy(matrix, matrix, [1])
    run.write_probes(Probes(classes={1: ([3], [2])}), NAMES)
    summary = {**SUMMARY, "A_step": 90.0, "A_inc": 90.0}
    run.write_summary(summary)
    assert set(run.verified_summary()["files"]) == {"accuracy.csv", "metrics.jsonl", "classes.csv"}
    file, added = run.path / "classes.csv", run.path / "spectrum.csv"
    before = file.read_text()
    file.write_text(before.replace("3,2", "3,3"))
    with pytest.raises(RunFolderError, match=r"classes\.csv is damaged \(it was changed after the run ended\)"):
        run.verified_summary()
    file.unlink()
    with pytest.raises(RunFolderError, match=r"classes\.csv is damaged \(it was removed after the run ended\)"):
        run.verified_summary()
    file.write_text(before)
    run.verified_summary()
    added.write_text("task,index,value\n")
    with pytest.raises(RunFolderError, match=r"spectrum\.csv is damaged \(it was added"):
        run.verified_summary()


def test_summary_marks_the_run_as_finished(run: RunFolder) -> None:
    assert not run.is_finished()
    run.write_summary(
        {**SUMMARY, "forgetting": math.nan, "A_step_per_task": np.array([90.0, 80.0]), "place": Path("a")}
    )
    assert run.is_finished()
    read = run.read_summary()
    assert set(read.pop("files")) == {"accuracy.csv", "metrics.jsonl"}
    assert read == {**SUMMARY, "forgetting": None, "A_step_per_task": [90.0, 80.0], "place": "a"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"method": "efc"}', "\ud800"])
def test_damaged_summary_is_named(run: RunFolder, content: str) -> None:
    run.path.mkdir()
    run.summary_file.write_bytes(content.encode("utf-8", "surrogatepass"))
    for read in (run.read_summary, run.is_finished):
        with pytest.raises(RunFolderError, match=r"summary\.json is damaged"):
            read()


@pytest.mark.parametrize(
    "change",
    [
        {"label": ["efc"]},
        {"label": "two\nlines"},
        {"dataset": 3},
        {"scenario": None},
        {"seed": "1"},
        {"seed": None},
        {"A_step": "high"},
        {"A_inc": [1.0]},
    ],
)
def test_summaries_with_values_of_another_kind_are_damaged(run: RunFolder, change: dict[str, Any]) -> None:
    run.write_summary({**SUMMARY, **change})
    with pytest.raises(RunFolderError, match=r"summary\.json is damaged"):
        run.read_summary()


def test_incomplete_summary_is_not_written(run: RunFolder) -> None:
    with pytest.raises(RunFolderError, match="lacks A_inc"):
        run.write_summary({name: value for name, value in SUMMARY.items() if name != "A_inc"})
    assert not run.summary_file.exists()


def test_failed_write_keeps_the_old_file_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def broken(*arguments: object) -> None:
        raise OSError("disk full")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(runfolder.os, step, broken)
            with pytest.raises(OSError, match="disk full"):
                write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_files_can_be_read_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(files, "_UMASK", 0o022)
    write_atomically(path, b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_runs_are_found_once_and_in_natural_order(tmp_path: Path) -> None:
    for seed in (10, 2, 1):
        RunFolder(tmp_path / "d" / f"seed{seed}").write_summary({**SUMMARY, "seed": seed})
    unfinished = RunFolder(tmp_path / "d" / "seed3")
    unfinished.write_settings(Settings(seed=3))
    RunFolder(tmp_path / ".first" / "x").write_summary(SUMMARY)
    found = find_runs([tmp_path, tmp_path / "d", tmp_path / "d" / "seed1" / "summary.json"])
    assert [run.path.name for run in found] == ["seed1", "seed2", "seed3", "seed10"]
    assert find_runs([tmp_path / "d" / "seed2"]) == [RunFolder(tmp_path / "d" / "seed2")]


def test_a_file_that_is_no_part_of_a_run_stands_for_none(tmp_path: Path) -> None:
    RunFolder(tmp_path / "seed1").write_summary(SUMMARY)
    (tmp_path / "notes.yaml").write_text("")
    with pytest.raises(RunFolderError, match=r"notes\.yaml is not a file of a run"):
        find_runs([tmp_path / "notes.yaml"])


def test_missing_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="nowhere"):
        find_runs([tmp_path / "nowhere"])


def test_environment_says_what_made_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/efcil/__main__.py", "run", "--data", "a b"])
    found = environment()
    assert json.loads(json.dumps(found)) == found
    assert {"python", "torch", "numpy", "efcil"} <= set(found["versions"])
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["cpu"]
    assert command() == found["command"] == "efcil run --data 'a b'"
    monkeypatch.setattr("sys.argv", ["/x/another/__main__.py", "go"])
    assert command() == "another go"


def test_commit_is_that_of_the_tracked_source(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    assert source_commit(source) == (None, None)
    git("init")
    assert source_commit(source) == (None, None), "a file that git does not track says nothing about the commit"
    git("add", "module.py")
    git("commit", "-m", "one")
    commit, dirty = source_commit(source)
    assert commit is not None
    assert len(commit) == 40
    assert dirty is False
    source.write_text("x = 2\n")
    assert source_commit(source) == (commit, True)
