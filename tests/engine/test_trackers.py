"""Logging to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import importlib.util
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from efcil.cli import main
from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine import trackers
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.engine.trackers import NOTE, Opened, Record, Records, TrackedRun, Tracking, checked
from efcil.engine.trackers import wandb as wandb_tracker
from efcil.errors import SettingsError
from efcil.experiment import run_one, workers
from efcil.experiment.plan import Plan
from efcil.experiment.run import tracked
from efcil.runfolder import RunFolder
from efcil.settings import Settings

SETTINGS = Settings(
    method="finetune",
    scenario="custom",
    tasks=2,
    first_task_epochs=2,
    epochs=2,
    batch_size=64,
    device="cpu",
)


@pytest.fixture(scope="module")
def few() -> Dataset:
    digits = load_dataset("digits", None, SourceOptions())
    train = ImageSet(digits.train.images[::8], digits.train.labels[::8])
    return Dataset(**{**vars(digits), "train": train})


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings of the machine, no home, and no waiting."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(trackers, "DELIVERY_SECONDS", 0.0)
    for name in ("OPEN_SECONDS", "CLOSE_SECONDS"):
        monkeypatch.setattr(trackers, name, 600.0)  # other tests run beside these


def epoch(task: int, number: int) -> dict[str, Any]:
    losses = {"current": 1.0 / number, "drift": 0.5}
    return {"kind": "epoch", "task": task, "epoch": number, "losses": losses, "learning_rate": 0.1, "seconds": 2.0}


def end(task: int, accuracy: list[float | None]) -> dict[str, Any]:
    return {"kind": "task", "task": task, "accuracy": accuracy, "task_aware": accuracy, "A_step": 50.0 + task}


LINES = [epoch(1, 1), epoch(1, 2), end(1, [80.0]), epoch(2, 1), end(2, [60.0, 90.0]), end(3, [70.0, None, 50.0])]


class Fake:
    """A tracker that remembers what it was asked for; `earlier` is what its logged run has."""

    def __init__(self, fails: str = "", has: int = 0) -> None:
        self.fails, self.has = fails, has
        self.records: list[Record] = []
        self.ended: list[str] = []
        self.given: Opened | None = None

    def open(self, run: TrackedRun, earlier: Opened | None) -> Opened:
        self.given = earlier
        if self.fails == "open":
            raise ConnectionError("no\nserver")
        return Opened("id-1", self.has, "over there")

    def scalars(self, records: Sequence[Record]) -> None:
        if self.fails == "scalars":
            raise ValueError("too many")
        self.records += records

    def close(self, state: str) -> None:
        self.ended.append(state)


@pytest.fixture
def logged(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that logs LINES with some trackers, and returns what was said."""

    def log(made: Mapping[str, Any], lines: Sequence[dict[str, Any]] = LINES, before: int = 0) -> list[str]:
        said: list[str] = []
        run = TrackedRun("efc/cs5/seed0", "runs", tmp_path, tmp_path, {"seed": 0})
        tracking = Tracking(list(made), run, said.append, lambda name: made[name])
        tracking.begin(lines[:before])
        for line in lines[before:]:
            tracking.line(line)
        tracking.end("finished")
        return said

    return log


# -- the interface ---------------------------------------------------------------------------------------------------


class TestRecords:
    def test_lines_become_numbers(self) -> None:
        records = Records()
        made = [records.add(line) for line in LINES]
        assert [(each.kind, each.step, each.number) for each in made if each] == [
            ("epoch", 1, 1), ("epoch", 2, 2), ("task", 1, 3), ("epoch", 3, 4), ("task", 2, 5), ("task", 3, 6),
        ]  # fmt: skip
        first, task = made[0], made[4]
        assert first is not None
        assert task is not None
        assert first.values == {
            "loss/current": 1.0, "loss/drift": 0.5, "loss/total": 1.5, "learning_rate": 0.1, "seconds/epoch": 2.0,
        }  # fmt: skip
        assert task.values["A_step"] == 52.0
        assert task.values["A_inc"] == 51.5
        assert task.values["accuracy/task_02"] == 90.0
        assert task.values["forgetting/task_01"] == 20.0
        assert task.values["forgetting/mean"] == 20.0

    def test_forgetting_counts_from_the_best_and_leaves_out_what_was_not_measured(self) -> None:
        records = Records()
        made = [records.add(line) for line in LINES]
        assert made[5] is not None
        assert made[5].values["forgetting/task_01"] == 10.0
        assert "forgetting/task_02" not in made[5].values
        assert "accuracy/task_02" not in made[5].values

    def test_other_lines_are_left_out(self) -> None:
        assert Records().add({"kind": "note", "task": 1}) is None


class TestTracking:
    @pytest.mark.parametrize("before", [0, 3, 6])
    def test_everything_is_delivered_in_order(self, logged: Callable[..., list[str]], before: int) -> None:
        fake = Fake()
        assert logged({"fake": fake}, before=before) == ["fake: over there"]
        assert [record.number for record in fake.records] == [1, 2, 3, 4, 5, 6]
        assert fake.ended == ["finished"]

    def test_a_resumed_run_repeats_nothing(self, logged: Callable[..., list[str]], tmp_path: Path) -> None:
        logged({"fake": Fake()}, lines=LINES[:4])
        again = Fake(has=4)
        logged({"fake": again}, before=3)
        assert again.given == Opened("id-1", 4)
        assert [record.number for record in again.records] == [5, 6]
        assert (tmp_path / NOTE).read_text() == '{"fake": {"id": "id-1", "records": 6}}\n'

    @pytest.mark.parametrize("fails", ["open", "scalars"])
    def test_a_tracker_that_raises_is_said_once_and_left_out(
        self, logged: Callable[..., list[str]], fails: str
    ) -> None:
        broken, fine = Fake(fails), Fake()
        said = logged({"broken": broken, "fine": fine})
        complaints = [text for text in said if "logging has stopped" in text]
        reason = "ConnectionError: no server" if fails == "open" else "ValueError: too many"
        assert complaints == [f"broken: logging has stopped ({reason}); training continues"]
        assert len(fine.records) == 6
        assert broken.ended == []

    def test_a_package_that_cannot_be_imported_is_said_and_left_out(self, tmp_path: Path) -> None:
        said: list[str] = []

        def make(name: str) -> Any:
            raise ImportError("broken package")

        tracking = Tracking(["x"], TrackedRun("a", "b", tmp_path, tmp_path, {}), said.append, make)
        tracking.begin()
        tracking.line(LINES[0])
        tracking.end("finished")
        assert said == ["x: logging has stopped (ImportError: broken package); training continues"]

    @pytest.mark.parametrize("stuck", ["open", "close"])
    def test_a_server_that_does_not_answer_holds_nothing_up(
        self, logged: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, stuck: str
    ) -> None:
        monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.01)
        monkeypatch.setattr(trackers, "OPEN_SECONDS", 0.01)
        answer = threading.Event()

        class Stuck(Fake):
            def open(self, run: TrackedRun, earlier: Opened | None) -> Opened:
                if stuck == "open":
                    answer.wait(60)
                return super().open(run, earlier)

            def close(self, state: str) -> None:
                answer.wait(60)

        said = logged({"slow": Stuck()})
        answer.set()
        assert "slow: not everything could be logged in time; the run is not affected" in said
        for thread in threading.enumerate():
            if thread.name == "efcil-slow":
                thread.join()

    def test_without_trackers_nothing_is_started(self, logged: Callable[..., list[str]], tmp_path: Path) -> None:
        threads = set(threading.enumerate())  # some of which, of other tests, may be about to end
        assert logged({}) == []
        assert set(threading.enumerate()) <= threads
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("note", ["nonsense", "[]", '{"fake": 3}', '{"fake": {"id": 1}}'])
    def test_a_damaged_note_starts_a_new_logged_run(
        self, logged: Callable[..., list[str]], tmp_path: Path, note: str
    ) -> None:
        (tmp_path / NOTE).write_text(note)
        fake = Fake()
        logged({"fake": fake})
        assert fake.given is None


class TestNames:
    def test_an_unknown_tracker(self) -> None:
        with pytest.raises(SettingsError, match=r"Unknown tracker 'tensorbord'. Did you mean 'tensorboard'"):
            checked(["tensorbord"])

    def test_a_missing_package_is_one_sentence_before_anything_is_trained(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else found(name, *rest)
        )
        assert main(["run", "--method", "lda", "--log", "wandb", "--output", str(tmp_path / "runs")]) == 2
        message = "efcil: --log wandb needs a package that is not installed: pip install 'efcil[wandb]'.\n"
        assert capsys.readouterr().err == message
        assert not (tmp_path / "runs").exists()

    def test_processes_of_a_grid_log_too(self, tmp_path: Path) -> None:
        job = workers.Job(0, Settings(), tmp_path, ("", tmp_path))
        command = workers.worker_command(job, tmp_path, tmp_path, None, log=("wandb", "mlflow"))
        assert command[-3:] == ["--log", "wandb", "mlflow"]


# -- whole runs ------------------------------------------------------------------------------------------------------


class StopAfter(StopRequest):
    """Asks to stop once so many epochs are in metrics.jsonl."""

    def __init__(self, run: RunFolder, lines: int) -> None:
        super().__init__()
        self._run, self._count = run, lines

    @property
    def requested(self) -> bool:
        return self._count is not None and len(self._run.read_metrics()) >= self._count

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


def train(dataset: Dataset, output: Path, log: Sequence[str], interrupted_after: int | None = None) -> RunFolder:
    """Train a run, interrupted and resumed if so asked."""
    folder = Plan.make(SETTINGS, output, dataset).folder
    if interrupted_after is not None:
        stop = StopAfter(folder, interrupted_after)
        with pytest.raises(Interrupted):
            run_one(SETTINGS, output, dataset, quiet=True, stop=stop, log=log)
    return RunFolder(run_one(SETTINGS, output, dataset, quiet=True, log=log))


def tensor_files(run: RunFolder) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in run.model.glob("*.safetensors")}


def test_a_logged_run_is_the_same_run(few: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake()
    monkeypatch.setattr("efcil.experiment.run.Tracking.__init__.__defaults__", (lambda name: fake,))
    plain, with_log = train(few, tmp_path / "a", ()), train(few, tmp_path / "b", ("tensorboard",))
    assert len(fake.records) == 6
    assert fake.ended == ["finished"]
    assert tensor_files(plain) == tensor_files(with_log)
    assert plain.accuracy_file.read_bytes() == with_log.accuracy_file.read_bytes()
    assert plain.settings_file.read_bytes() == with_log.settings_file.read_bytes()
    ignored = {"seconds", "finished", "files", "command", "checksum"}
    first, second = (
        {name: value for name, value in run.read_summary().items() if name not in ignored} for run in (plain, with_log)
    )
    assert first == second


def test_how_a_run_is_named(few: Dataset, tmp_path: Path) -> None:
    run = tracked(Plan.make(SETTINGS, tmp_path / "ablation", few))
    assert run.name.startswith("finetune")
    assert run.name.endswith("/custom-2/seed0")
    assert run.group == "ablation"
    assert run.parameters["first_task.epochs"] == 2
    assert run.parameters["dataset"] == "digits"


@pytest.mark.parametrize("interrupted_after", [None, 1, 4])
def test_tensorboard(few: Dataset, tmp_path: Path, interrupted_after: int | None) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(few, tmp_path, ["tensorboard"], interrupted_after)
    events = EventAccumulator(str(run.path))
    events.Reload()
    assert len(list(run.path.glob("events.out.tfevents.*"))) == 1
    assert [each.step for each in events.Scalars("loss/total")] == [1, 2, 3, 4]
    assert [each.step for each in events.Scalars("A_step")] == [1, 2]
    lines = run.read_metrics()
    rates = [line["learning_rate"] for line in lines if line["kind"] == "epoch"]
    assert [each.value for each in events.Scalars("learning_rate")] == pytest.approx(rates)
    steps = [line["A_step"] for line in lines if line["kind"] == "task"]
    assert [each.value for each in events.Scalars("A_step")] == pytest.approx(steps)
    assert [each.step for each in events.Scalars("forgetting/task_01")] == [2]
    assert "settings/text_summary" in events.Tags()["tensors"]


@pytest.mark.parametrize("interrupted_after", [None, 4])
def test_mlflow(few: Dataset, tmp_path: Path, interrupted_after: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = train(few, tmp_path / "grid", ["mlflow"], interrupted_after)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "grid" / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("grid")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name.endswith("/custom-2/seed0")
    assert found.info.status == "FINISHED"
    assert found.data.params["method"] == "finetune"
    history = client.get_metric_history(found.info.run_id, "loss/total")
    assert [each.step for each in history] == [1, 2, 3, 4]
    assert found.data.metrics["A_step"] == pytest.approx(run.read_summary()["A_step"])
    assert found.data.metrics["forgetting/task_01"] == pytest.approx(run.read_summary()["forgetting_per_task"][0])


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of an offline run: a log in blocks of 32 KiB, a header of 7 bytes in front of every piece."""
    from wandb.proto import wandb_internal_pb2

    content, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@pytest.mark.parametrize("interrupted_after", [None, 4])
def test_wandb_offline(few: Dataset, tmp_path: Path, interrupted_after: int | None) -> None:
    pytest.importorskip("wandb")
    train(few, tmp_path / "grid", ["wandb"], interrupted_after)
    files = sorted((tmp_path / "grid" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == (1 if interrupted_after is None else 2)
    assert len({file.name for file in files}) == 1, "both attempts are one run"
    records = [record for file in files for record in wandb_records(file)]
    begun = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert begun.display_name.endswith("/custom-2/seed0")
    assert (begun.run_group, begun.project) == ("grid", "efcil")
    steps = [record.history.step.num for record in records if record.WhichOneof("record_type") == "history"]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(None, None, False), ("WANDB_API_KEY", "x", True), ("NETRC", "file", True), ("WANDB_BASE_URL", "http://h", False)],
)
def test_whether_one_is_logged_in_is_known_without_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, value: str | None, expected: bool
) -> None:
    (tmp_path / "file").write_text("machine api.wandb.ai login user password key\n")
    if name is not None and value is not None:
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
    assert wandb_tracker.logged_in() is expected
