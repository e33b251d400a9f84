"""What a visit says while it learns, and what it logs elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from efcil.activity import Activity
from efcil.cli import main
from efcil.engine import trackers
from efcil.engine.trainer import EpochReport
from efcil.model import Model
from efcil.model.visit_log import VisitLog
from efcil.serve.teacher import _progress


def learn(folder: Path, data: Path, *flags: str) -> None:
    assert main(["learn", str(folder), "--data", str(data), "--device", "cpu", *flags]) == 0


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what is done, as it is done."""
    done: list[str] = []
    real = Activity.doing

    def doing(self: Activity, what: str, *rest: Any) -> Any:
        done.append(what)
        return real(self, what, *rest)

    monkeypatch.setattr(Activity, "doing", doing)
    return done


class TestPhases:
    def test_a_visit_says_all_that_it_does(self, folders: Path, tmp_path: Path, works: list[str]) -> None:
        learn(tmp_path / "m", folders / "first", "--method", "efc", "--preset", "digits", "--epochs", "1", "--quiet")
        assert {"opening the model", "decoding images", "estimating the time", "training", "statistics"} <= {*works}
        assert {"measuring", "saving the model"} <= {*works}

    def test_more_images_too(self, folders: Path, tmp_path: Path, works: list[str]) -> None:
        learn(tmp_path / "m", folders / "first", "--method", "efc", "--preset", "digits", "--epochs", "1", "--quiet")
        works.clear()
        learn(tmp_path / "m", folders / "first", "--more", "--quiet")
        assert "blending the images in" in works
        assert "training" not in works

    def test_a_task_that_trains_nothing_has_no_epochs(self, folders: Path, tmp_path: Path) -> None:
        """The second task of lda: its recipe has epochs, and none of them is trained."""
        events: list[dict[str, Any]] = []
        reporter = _progress(lambda **event: events.append(event))
        learn(tmp_path / "m", folders / "first", "--method", "lda", "--preset", "digits", "--epochs", "2", "--quiet")

        from efcil.model.images import gather_labelled
        from efcil.model.teaching import teach

        pictures, labels = gather_labelled(folders / "second")
        teach(tmp_path / "m", pictures, labels, lambda settings: settings, device="cpu", reporter=reporter)
        assert Model.load(tmp_path / "m", "cpu").card.resolved.later.epochs > 0
        (begun,) = [event for event in events if event.get("state") == "learning"]
        assert begun == {"state": "learning", "epoch": 0, "epochs": None}

    def test_epochs_are_reported_where_there_are_some(self) -> None:
        events: list[dict[str, Any]] = []
        reporter = _progress(lambda **event: events.append(event))
        with reporter(1, quiet=True) as progress:
            progress.begin_task(0, 10)
            progress.epoch(EpochReport(0, 10, {}, 0.1, 2.0))
        assert events[0] == {"state": "learning", "epoch": 0, "epochs": 10}
        assert events[1]["seconds_left"] == 18.0


class TestLog:
    @pytest.fixture(autouse=True)
    def patient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("OPEN_SECONDS", "CLOSE_SECONDS"):
            monkeypatch.setattr(trackers, name, 600.0)  # other tests run beside these

    @staticmethod
    def steps(folder: Path, name: str) -> list[int]:
        return [each.step for each in TestLog.events(folder, name)]

    @staticmethod
    def events(folder: Path, name: str) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder))
        events.Reload()
        return events.Scalars(name)

    def test_every_visit_is_a_run_beside_the_model(self, folders: Path, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        flags = ("--log", "tensorboard", "--quiet")
        model = tmp_path / "m"
        learn(model, folders / "first", *flags, "--method", "efc", "--preset", "digits", "--epochs", "3")
        learn(model, folders / "second", *flags)
        assert self.steps(tmp_path / "m-log" / "visit1", "loss/total") == [1, 2, 3]
        assert self.steps(tmp_path / "m-log" / "visit1", "accuracy/task_01") == [1]
        assert self.steps(tmp_path / "m-log" / "visit2", "accuracy/task_02") == [2]
        assert not [*model.rglob("events*"), *model.rglob("tracking*")], "a model folder holds nothing but the model"

    def test_the_accuracy_is_that_of_the_task_beside_more_images(self, folders: Path, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        model, both = tmp_path / "m", tmp_path / "both"
        learn(model, folders / "first", "--method", "efc", "--preset", "digits", "--epochs", "1", "--quiet")
        shutil.copytree(folders / "first", both)
        shutil.copytree(folders / "second", both, dirs_exist_ok=True)
        learn(model, both, "--more", "--log", "tensorboard", "--quiet")
        task, more = (each.measured for each in Model.load(model, "cpu").card.visits[1:])
        assert task is not None
        assert more is not None
        assert task.right * more.images != more.right * task.images, "else this test says nothing"
        (logged,) = self.events(tmp_path / "m-log" / "visit2", "accuracy/task_02")
        assert logged.value == pytest.approx(100 * task.right / task.images)

    def test_an_interrupted_visit_continues_without_repeated_steps(self, folders: Path, tmp_path: Path) -> None:
        pytest.importorskip("tensorboard")
        model = tmp_path / "m"
        learn(model, folders / "first", "--method", "efc", "--preset", "digits", "--epochs", "1", "--quiet")
        card = Model.load(model, "cpu").card
        for done, epochs in ((0, (0, 1)), (1, (1, 2))):
            log = VisitLog(["tensorboard"], model, print)
            log.begin(card, done)
            for epoch in epochs:
                log.epoch(EpochReport(epoch, 3, {"current": 1.0}, 0.1, 2.0))
            log.end(None)
        assert self.steps(tmp_path / "m-log" / "visit2", "loss/total") == [1, 2, 3]

    def test_without_trackers_nothing_is_written(self, folders: Path, tmp_path: Path) -> None:
        learn(tmp_path / "m", folders / "first", "--method", "lda", "--preset", "digits", "--epochs", "1", "--quiet")
        assert [path.name for path in tmp_path.iterdir()] == ["m"]

    def test_a_folder_that_cannot_be_created_is_said(self, folders: Path, tmp_path: Path) -> None:
        learn(tmp_path / "m", folders / "first", "--method", "lda", "--preset", "digits", "--epochs", "1", "--quiet")
        (tmp_path / "m-log").write_text("in the way")
        said: list[str] = []
        log = VisitLog(["tensorboard"], tmp_path / "m", said.append)
        log.begin(Model.load(tmp_path / "m", "cpu").card, 0)
        log.end(None)
        assert said[0].startswith("Nothing is logged: ")


def test_a_run_says_all_that_it_does(tmp_path: Path, works: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = "run --method efc --tasks 2 --epochs 1 --batch-size 256 --device cpu --quiet --output"
    assert main([*flags.split(), str(tmp_path)]) == 0
    assert {"loading the images of digits", "training", "statistics", "testing"} <= {*works}
    assert {"preparing the images of the task", "saving the last task"} <= {*works}
