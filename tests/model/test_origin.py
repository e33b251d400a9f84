"""Models and unfinished tasks that are intact, but not of one another; and the models of experiments."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

import efcil
from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.engine import checkpoint
from efcil.engine.interrupt import Interrupted
from efcil.model import Model, ModelError
from efcil.model import folder as model_files
from efcil.settings import TrainingSettings

QUICK: dict[str, Any] = {"preset": "digits", "epochs": 1, "device": "cpu"}


def digest(folder: Path) -> str:
    return checkpoint.describe(folder, model_files.STEM).sha256


def dated(classifier: IncrementalClassifier, date: str) -> IncrementalClassifier:
    """Return the classifier with all visits at one moment: what is learned in the same second has the same date."""
    card = classifier.model_.card
    visits = tuple(dataclasses.replace(visit, date=date) for visit in card.visits)
    classifier.model_.card = dataclasses.replace(card, visits=visits)
    return classifier


def interrupted(classifier: IncrementalClassifier, images: Any, folder: Path) -> None:
    """Begin to learn in a folder, and stop after the first step."""

    def stop(keeper: checkpoint.TaskKeeper) -> bool:
        keeper.stop.requested = True
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.TaskKeeper, "due", stop)
        with pytest.raises(Interrupted):
            classifier.partial_fit(*images, folder=folder)
    assert checkpoint.exists(folder / "partial")


# -- the model of a folder and that of a classifier ------------------------------------------------------------------


def test_what_a_classifier_knew_already_is_there_when_its_task_is_interrupted(digits: Any, tmp_path: Path) -> None:
    first = IncrementalClassifier(**QUICK).fit(*digits.train(0, 1))
    whole = IncrementalClassifier(**QUICK).fit(*digits.train(0, 1)).partial_fit(*digits.train(2))
    interrupted(first, digits.train(2), tmp_path / "model")
    again = IncrementalClassifier(**QUICK).partial_fit(*digits.train(2), folder=tmp_path / "model")
    assert list(again.classes_) == [0, 1, 2]
    assert digest(tmp_path / "model") == checkpoint.digest(whole.model_.tensors())


def test_another_model_of_the_same_second_is_not_taken_for_this_one(digits: Any, tmp_path: Path) -> None:
    now = "2026-01-01T12:00:00+00:00"
    ours, other = (dated(IncrementalClassifier(**QUICK).fit(*digits.train(*d)), now) for d in ((0, 1), (3, 4)))
    other.save(tmp_path / "model")
    with pytest.raises(ModelError, match="holds another model, or another state of this one"):
        ours.partial_fit(*digits.train(2), folder=tmp_path / "model")
    seeded = dated(IncrementalClassifier(**QUICK, seed=1).fit(*digits.train(3, 4)), now)
    with pytest.raises(ModelError, match="holds another model, not an earlier state of this one"):
        seeded.save(tmp_path / "model")


# -- an unfinished task and the model it is found beside ---------------------------------------------------------------


@pytest.fixture
def unfinished(trained: Path, digits: Any, tmp_path: Path) -> Path:
    """A model that knows three digits, and is in the middle of learning a fourth."""
    folder = Path(shutil.copytree(trained, tmp_path / "unfinished"))
    interrupted(IncrementalClassifier(**QUICK), digits.train(3), folder)
    return folder


def test_an_unfinished_task_of_another_model_is_neither_used_nor_lost(
    unfinished: Path, digits: Any, tmp_path: Path
) -> None:
    """Neither one that began elsewhere, nor a first task, which could be taken for one that has been finished."""
    first = tmp_path / "first"
    interrupted(IncrementalClassifier(**QUICK), digits.train(5, 6), first)
    for number, partial in enumerate((unfinished / "partial", first / "partial")):
        model = tmp_path / f"model{number}"
        IncrementalClassifier(**QUICK).partial_fit(*digits.train(0, 1), folder=model)
        shutil.copytree(partial, model / "partial")
        before = digest(model)
        with pytest.raises(ModelError, match="was started from another model, or from another state of this one"):
            IncrementalClassifier(**QUICK).partial_fit(*digits.train(3), folder=model)
        assert digest(model) == before
        assert checkpoint.exists(model / "partial")


def test_a_task_that_was_finished_and_not_tidied_up_is_no_obstacle(unfinished: Path, digits: Any) -> None:
    partial = Path(shutil.copytree(unfinished / "partial", unfinished.parent / "partial"))
    IncrementalClassifier(**QUICK).partial_fit(*digits.train(3), folder=unfinished)
    shutil.copytree(partial, unfinished / "partial")
    IncrementalClassifier(**QUICK).partial_fit(*digits.train(4), folder=unfinished)
    assert Model.load(unfinished, "cpu").card.labels == [0, 1, 2, 3, 4]
    assert not (unfinished / "partial").exists()


def test_an_unfinished_task_of_an_earlier_version_says_that_it_starts_over(
    unfinished: Path, folders: Path, digits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    from efcil.model.images import gather_labelled
    from efcil.model.teaching import teach

    saved = checkpoint.read(unfinished / "partial")
    task = {name: value for name, value in saved.facts["task"].items() if name != "continues"}
    for visit in task["card"]["visits"]:
        del visit["made_with"]
    # A card of format 1 says the version once, and visits say nothing.
    described = checkpoint.read(unfinished, model_files.STEM)
    for visit in described.facts["visits"]:
        del visit["made_with"]
    facts = described.facts | {"format": 1}
    checkpoint.write(unfinished, described.tensors, facts, model_files.STEM)
    task["card"] |= {"format": 1}
    checkpoint.write(unfinished / "partial", saved.tensors, saved.facts | {"task": task})
    pictures, labels = gather_labelled(*digits.train(3))
    settings = IncrementalClassifier(**QUICK)._settings(TrainingSettings())
    teach(unfinished, pictures, labels, lambda _: settings, device="cpu", quiet=False)
    assert (
        "(it has no 'continues', so another version of efcil wrote it); the task starts over" in capsys.readouterr().out
    )


# -- how it was computed ---------------------------------------------------------------------------------------------


def test_a_visit_says_how_it_was_computed_and_where_it_began(model_folder: Path, digits: Any) -> None:
    for images, more in ((digits.test(0), True), (digits.train(3), False)):
        before = digest(model_folder)
        IncrementalClassifier(**QUICK).partial_fit(*images, more=more, folder=model_folder)
        card = Model.load(model_folder, "cpu").card
        assert card.visits[-1].made_with[0]["device"] == "cpu"
        assert card.continues == before


def test_the_next_visit_says_at_once_that_it_is_computed_in_another_way(
    model_folder: Path, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from efcil.model.images import gather_labelled
    from efcil.model.teaching import teach

    known = Model.load(model_folder, "cpu").card.visits[-1].made_with[-1]["threads"]
    pictures, labels = gather_labelled(folders / "first")
    monkeypatch.setattr("torch.get_num_threads", lambda: known + 1)
    settings = IncrementalClassifier(**QUICK)._settings(TrainingSettings())
    labels = [f"another {label}" for label in labels]
    teach(model_folder, pictures, labels, lambda _: settings, device="cpu", quiet=False)
    said = capsys.readouterr().out
    assert f"The model was last trained differently: threads {known} (now {known + 1})." in said
    assert main(["inspect", str(model_folder)]) == 0
    said = capsys.readouterr().out
    assert "computed in more than one way\n  visit 1 2: " in said
    assert f"  visit 3: efcil {efcil.__version__}" in said


# -- the model of an experiment --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["run", "run/model", "link"])
def test_nothing_is_written_to_an_experiment(place: str, trained: Path, digits: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run / "model")
    for name in ("settings.yaml", "log.txt"):
        (run / name).write_text("")
    (tmp_path / "link").symlink_to(run / "model")
    before = sorted(run.rglob("*"))
    classifier = IncrementalClassifier.load(run / "model", device="cpu").partial_fit(*digits.train(3))
    for overwrite in (False, True):
        with pytest.raises(ModelError, match="of an experiment, which must not change"):
            classifier.save(tmp_path / place, overwrite=overwrite)
    with pytest.raises(ModelError, match="of an experiment, which must not change"):
        IncrementalClassifier(**QUICK).partial_fit(*digits.train(4), folder=tmp_path / place)
    assert sorted(run.rglob("*")) == before


def test_more_images_make_a_model_that_is_no_state_of_its_experiment(model_folder: Path, digits: Any) -> None:
    classifier = IncrementalClassifier.load(model_folder, device="cpu")
    classifier.model_.card = dataclasses.replace(classifier.model_.card, experiment={"completed": 2})
    classifier.partial_fit(*digits.test(0), more=True)
    assert classifier.model_.card.experiment is None
