"""`efcil learn`: visits, interruptions, and what it refuses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from efcil.classifier import IncrementalClassifier
from efcil.cli import main
from efcil.core import gaussians
from efcil.data.sources.listing import images_below
from efcil.engine import checkpoint, lifecycle
from efcil.engine.interrupt import StopRequest
from efcil.model import Model, ModelError, blending
from efcil.model.images import Pictures, class_folders
from efcil.model.measuring import Measuring
from efcil.network import backbones

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--preset", "digits", "--image-size", "8", "--device", "cpu", "--quiet"]


def learn(model: Path, data: Path, *flags: str) -> int:
    return main(["learn", str(model), "--data", str(data), *flags])


@pytest.fixture(scope="session")
def uninterrupted(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two visits, three epochs each, nothing in their way."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "model"
    assert learn(folder, folders / "first", *QUICK, "--epochs", "3") == 0
    assert learn(folder, folders / "second", "--device", "cpu", "--quiet") == 0
    return folder


class Impatient(StopRequest):
    """Asks to stop after so many looks of a keeper, which looks after every step."""

    patience = 0

    def __init__(self, *words: str) -> None:
        self.looks = 0
        super().__init__(*words)

    @property
    def requested(self) -> bool:
        self.looks += sys._getframe(1).f_code is checkpoint.TaskKeeper.due.__code__
        return self.looks > self.patience

    @requested.setter
    def requested(self, value: bool) -> None:
        pass


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> type[Impatient]:
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    return Impatient


@pytest.mark.parametrize("visit", [1, 2])
@pytest.mark.parametrize("patience", [0, 2])
def test_an_interrupted_visit_goes_on_bit_for_bit(
    visit: int, patience: int, folders: Path, uninterrupted: Path, tmp_path: Path, same: Any,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model = tmp_path / "model"
    visits = [
        (folders / "first", [*QUICK, "--epochs", "3"]),
        (folders / "second", ["--device", "cpu", "--quiet"]),
    ]
    for number, (data, arguments) in enumerate(visits, 1):
        if number == visit:
            before = sorted(path.name for path in model.glob("model*"))
            monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
            monkeypatch.setattr(Impatient, "patience", patience)
            assert learn(model, data, *arguments) == 130
            assert "To resume, run the same command again." in capsys.readouterr().err
            assert checkpoint.exists(model / "partial")
            assert sorted(path.name for path in model.glob("model*")) == before, "the model is what it was"
            monkeypatch.undo()
        assert learn(model, data, *arguments) == 0
    assert not (model / "partial").exists()
    assert same(Model.load(model, "cpu"), Model.load(uninterrupted, "cpu"))


def test_a_resumed_task_holds_out_the_same_images(
    folders: Path, tmp_path: Path, same: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*QUICK, "--epochs", "2", "--held-out", "0.25"]
    assert learn(tmp_path / "whole", folders / "first", *arguments) == 0
    model = tmp_path / "model"
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    assert learn(model, folders / "first", *arguments) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert learn(model, folders / "first", "--device", "cpu", "--held-out", "0.1") == 2
    assert "another share of held-out images (--held-out)" in capsys.readouterr().err
    assert learn(model, folders / "first", "--device", "cpu", "--quiet") == 0, "the share need not be repeated"
    resumed, whole = Model.load(model, "cpu"), Model.load(tmp_path / "whole", "cpu")
    assert same(resumed, whole)
    assert resumed.card.visits[0].measured == whole.card.visits[0].measured
    assert [each.images for each in resumed.card.classes] == [18, 18]


def request_at(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Send this process a request to stop when a function is called."""
    original = getattr(owner, name)

    def disturbed(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **named)

    patch.setattr(owner, name, disturbed)


UNCHANGED = "Stopped. The model is unchanged, without these images. To learn them, run the same command again."


@pytest.mark.parametrize(("owner", "name"), [(Pictures, "pixels"), (lifecycle, "end"), (Measuring, "outcome")])
def test_a_request_outside_training_is_obeyed_there(
    owner: Any,
    name: str,
    folders: Path,
    uninterrupted: Path,
    tmp_path: Path,
    same: Any,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "model"
    assert learn(model, folders / "first", *QUICK, "--epochs", "3") == 0
    with monkeypatch.context() as patch:
        request_at(patch, owner, name)
        assert learn(model, folders / "second", "--device", "cpu", "--quiet") == 130
    trained = f"Stopped after epoch 3; that state is saved in {model / 'partial'}."
    assert (UNCHANGED if owner is Pictures else trained) in capfd.readouterr().err
    assert len(Model.load(model, "cpu").card.visits) == 1
    assert learn(model, folders / "second", "--device", "cpu") == 0
    assert ("resuming task 2 after epoch 3" in capfd.readouterr().out) == (owner is not Pictures)
    assert same(Model.load(model, "cpu"), Model.load(uninterrupted, "cpu"))


@pytest.mark.parametrize(("owner", "name"), [(lifecycle, "end"), (Measuring, "outcome")])
def test_a_request_in_a_visit_that_trains_nothing_leaves_the_model_as_it_is(
    owner: Any, name: str, folders: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    assert learn(model, folders / "first", *QUICK, "--epochs", "1", "--method", "lda") == 0
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    request_at(monkeypatch, owner, name)
    assert learn(model, folders / "second", "--device", "cpu", "--quiet") == 130
    assert UNCHANGED in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_another_number_of_threads_costs_no_work(
    interrupted: Path, folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 7)
    assert learn(interrupted, folders / "second", "--device", "cpu") == 0
    assert "resuming task" in capsys.readouterr().out


def test_a_killed_process_goes_on_from_its_last_checkpoint(
    folders: Path, uninterrupted: Path, tmp_path: Path, same: Any
) -> None:
    model = tmp_path / "model"
    arguments = ["learn", str(model), "--data", str(folders / "first"), *QUICK, "--epochs", "3"]
    # Killed by itself, the hard way, right after the first checkpoint, which is after step 2 of the first epoch's two.
    program = (
        "import os, signal, torch\n"
        "torch.set_num_threads(1)\n"
        "from efcil.engine.checkpoint import TaskKeeper\n"
        "save = TaskKeeper.save\n"
        "def deadly(*a):\n"
        "    save(*a)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "TaskKeeper.save = deadly\n"
        "from efcil.cli import main\n"
        f"main({[*arguments, '--checkpoint-steps', '1']!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert checkpoint.read(model / "partial").facts["position"]["step"] == 1
    assert main(arguments) == 0
    assert learn(model, folders / "second", "--device", "cpu", "--quiet") == 0
    assert same(Model.load(model, "cpu"), Model.load(uninterrupted, "cpu"))


@pytest.fixture
def interrupted(folders: Path, uninterrupted: Path, tmp_path: Path, impatient: Any, monkeypatch: Any) -> Path:
    """A model in the middle of its second visit."""
    model = tmp_path / "model"
    monkeypatch.undo()
    assert learn(model, folders / "first", *QUICK, "--epochs", "3") == 0
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    monkeypatch.setattr(Impatient, "patience", 1)
    assert learn(model, folders / "second", "--device", "cpu", "--quiet") == 130
    monkeypatch.undo()
    return model


def test_a_model_among_other_files_is_told_of(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folders / "second", tmp_path / "model")
    arguments = [argument for argument in QUICK if argument != "--quiet"]
    assert learn(tmp_path / "model", folders / "first", *arguments) == 0
    names = sorted(path.name for path in (folders / "second").iterdir())
    said = capsys.readouterr()
    assert f"also holds {', '.join(names)}" in said.out + said.err
    assert learn(tmp_path / "fresh", folders / "first", *arguments) == 0
    said = capsys.readouterr()
    assert "also holds" not in said.out + said.err


def test_saving_does_not_lose_an_unfinished_task(interrupted: Path, folders: Path) -> None:
    other = IncrementalClassifier(preset="digits", epochs=1, device="cpu").partial_fit(folders / "first")
    with pytest.raises(ModelError, match="an interrupted task"):
        other.save(interrupted)
    other.save(interrupted, overwrite=True)
    assert not checkpoint.exists(interrupted / "partial"), "It was of the other model."


def test_an_unfinished_task_is_not_lost_by_mistake(
    interrupted: Path, folders: Path, tmp_path: Path, uninterrupted: Path, same: Any, capsys: Any
) -> None:
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "other" / "digit-3")
    shutil.copytree(folders / "held-out" / "digit-2", tmp_path / "changed" / "digit-2")
    capsys.readouterr()
    for arguments, message in (
        ((tmp_path / "other",), "has an unfinished task that learns digit-2, but this command has other classes"),
        ((tmp_path / "changed",), "this command has other images"),
        ((folders / "second", "--epochs", "2"), "this command has other settings (epochs is 2, was 3)"),
        ((folders / "second", "--set", "later.learning_rate=1"), "(later.learning_rate is 1.0, was not set)"),
        ((folders / "first", "--more"), "has an unfinished task of new classes"),
    ):
        data, *flags = arguments
        assert learn(interrupted, Path(data), *map(str, flags), "--quiet", "--device", "cpu") == 2
        assert message in capsys.readouterr().err
    assert main(["inspect", str(interrupted)]) == 0
    assert "A task is unfinished" in capsys.readouterr().out
    assert learn(interrupted, folders / "second", "--quiet", "--device", "cpu") == 0
    assert same(Model.load(interrupted, "cpu"), Model.load(uninterrupted, "cpu"))


def test_an_unfinished_task_of_a_version_that_read_images_otherwise_starts_over(
    interrupted: Path, folders: Path, uninterrupted: Path, same: Any, capsys: Any
) -> None:
    saved = checkpoint.read(interrupted / "partial")
    task = saved.facts["task"] | {"images": "0" * 64}
    ways = [way | {"efcil": "0.0.9"} for way in saved.facts["made_with"]]
    checkpoint.write(interrupted / "partial", saved.tensors, saved.facts | {"task": task, "made_with": ways})
    capsys.readouterr()
    assert learn(interrupted, folders / "second", "--device", "cpu") == 0
    assert "The task was started with efcil 0.0.9 (now " in capsys.readouterr().out
    assert same(Model.load(interrupted, "cpu"), Model.load(uninterrupted, "cpu"))


def test_settings_of_an_unfinished_first_task_need_not_be_repeated(
    folders: Path, uninterrupted: Path, tmp_path: Path, same: Any, capsys: Any, monkeypatch: Any
) -> None:
    model = tmp_path / "model"
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    monkeypatch.setattr(Impatient, "patience", 1)
    assert learn(model, folders / "first", *QUICK, "--epochs", "3") == 130
    monkeypatch.undo()
    capsys.readouterr()
    for flags, message in (
        (["--epochs", "2"], "epochs is 2, was 3"),
        (["--image-size", "16"], "image_size is 16, was 8"),
        (["--set", "efm_weight=3"], "efm_weight is 3.0, was not set"),
    ):
        assert learn(model, folders / "first", *flags, "--device", "cpu") == 2
        assert f"this command has other settings ({message})" in capsys.readouterr().err
    assert learn(model, folders / "first", "--device", "cpu") == 0
    assert "resuming task" in capsys.readouterr().out
    assert learn(model, folders / "second", "--device", "cpu", "--quiet") == 0
    assert same(Model.load(model, "cpu"), Model.load(uninterrupted, "cpu"))


def test_an_unfinished_first_task_cannot_run_a_function(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder may come from anywhere; only the user may name code to run."""
    made = []

    def make() -> nn.Module:
        made.append(1)
        return nn.Conv2d(3, 5, 3)

    module = types.ModuleType("somebodys_networks")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_networks", module)
    monkeypatch.setattr(backbones, "_named", set())
    named = ["--network", "somebodys_networks:make", "--method", "efc"]
    with monkeypatch.context() as patch:
        patch.setattr("efcil.model.teaching.StopRequest", Impatient)
        patch.setattr(Impatient, "patience", 1)
        assert learn(tmp_path / "model", folders / "first", *QUICK, *named, "--epochs", "3") == 130
    backbones._named.clear()
    made.clear()
    capsys.readouterr()
    assert learn(tmp_path / "model", folders / "first", "--device", "cpu") == 2
    assert "running it means running its code" in capsys.readouterr().err
    assert not made
    assert learn(tmp_path / "model", folders / "first", "--device", "cpu", *named) == 0, "the same command resumes it"
    assert "resuming task" in capsys.readouterr().out


def test_settings_of_an_unfinished_later_task_need_not_be_repeated(
    folders: Path, tmp_path: Path, same: Any, capsys: Any, monkeypatch: Any
) -> None:
    models = [tmp_path / name for name in ("whole", "interrupted")]
    flags = ("--epochs", "2", "--set", "later.learning_rate=0.002", "--device", "cpu")
    for model in models:
        assert learn(model, folders / "first", *QUICK, "--epochs", "1") == 0
    assert learn(models[0], folders / "second", *flags) == 0
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    assert learn(models[1], folders / "second", *flags) == 130
    monkeypatch.undo()
    capsys.readouterr()
    assert learn(models[1], folders / "second", "--device", "cpu") == 0
    assert "resuming task" in capsys.readouterr().out
    whole, interrupted = (Model.load(model, "cpu") for model in models)
    assert same(whole, interrupted)
    assert whole.card.settings == interrupted.card.settings
    assert whole.card.resolved == interrupted.card.resolved


@pytest.mark.parametrize("damaged", ["tensors", "description"])
def test_settings_of_a_damaged_first_task_are_not_forgotten(
    damaged: str, folders: Path, tmp_path: Path, impatient: Any, capsys: Any, monkeypatch: Any
) -> None:
    model = tmp_path / "model"
    flags = (*QUICK[2:], "--preset", "digits", "--epochs", "2", "--method", "lwf")
    assert learn(model, folders / "first", *flags) == 130
    monkeypatch.undo()
    capsys.readouterr()
    (tensors,) = (model / "partial").glob("*.safetensors")
    (tensors if damaged == "tensors" else model / "partial" / "state.json").write_bytes(b"{")
    if damaged == "tensors":
        assert learn(model, folders / "first", "--device", "cpu") == 0
        assert "starts over" in capsys.readouterr().out
    else:
        assert learn(model, folders / "first", "--device", "cpu") == 2
        message = capsys.readouterr().err
        assert "settings that it started with are lost" in message
        assert "Remove" not in message, "the advice is to discard it"
        assert tensors.exists()
        assert learn(model, folders / "first", *flags, "--discard") == 0
    card = Model.load(model, "cpu").card
    assert (card.settings.method, card.settings.epochs, card.image_size) == ("lwf", 2, 8)


@pytest.mark.parametrize(
    ("data", "flags"),
    [("second", ("--method", "nope")), ("second", ("--epochs", "0")), ("first", ()), ("second", ("--more",))],
)
def test_nothing_is_discarded_by_a_command_that_is_refused(
    data: str, flags: tuple[str, ...], interrupted: Path, folders: Path
) -> None:
    before = {path: path.read_bytes() for path in (interrupted / "partial").iterdir()}
    assert learn(interrupted, folders / data, "--device", "cpu", "--quiet", "--discard", *flags) == 2
    assert {path: path.read_bytes() for path in (interrupted / "partial").iterdir()} == before


def test_a_task_that_replaced_a_discarded_one_goes_on_without_the_flag(
    interrupted: Path, folders: Path, impatient: Any, monkeypatch: Any, capsys: Any
) -> None:
    flags = ("--device", "cpu", "--epochs", "2")
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    assert learn(interrupted, folders / "second", *flags, "--discard") == 130
    assert "To resume, run the same command again, without --discard." in capsys.readouterr().err
    monkeypatch.undo()
    assert learn(interrupted, folders / "second", *flags) == 0
    assert " in epoch 1, after step" in capsys.readouterr().out


def test_an_unfinished_task_can_be_discarded(interrupted: Path, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "other" / "digit-3")
    assert learn(interrupted, tmp_path / "other", "--quiet", "--device", "cpu", "--discard") == 0
    assert Model.load(interrupted, "cpu").card.labels == ["digit-0", "digit-1", "digit-3"]


def test_a_damaged_unfinished_task_begins_anew(
    interrupted: Path, folders: Path, uninterrupted: Path, same: Any, capsys: Any
) -> None:
    next((interrupted / "partial").glob("*.safetensors")).write_bytes(b"")
    assert learn(interrupted, folders / "second", "--device", "cpu") == 0
    assert "starts over" in capsys.readouterr().out
    assert same(Model.load(interrupted, "cpu"), Model.load(uninterrupted, "cpu"))


def test_an_unfinished_task_that_must_not_be_read_is_left_alone(
    interrupted: Path, folders: Path, capsys: Any, monkeypatch: Any
) -> None:
    before = {path: path.read_bytes() for path in (interrupted / "partial").iterdir()}
    monkeypatch.setattr("efcil.engine.checkpoint.os.access", lambda file, mode: not file.name.startswith("state"))
    assert learn(interrupted, folders / "second", "--device", "cpu") == 1
    assert "cannot be read (permission denied)" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (interrupted / "partial").iterdir()} == before


def test_an_unfinished_task_that_was_finished_after_all_is_forgotten(
    interrupted: Path, folders: Path, tmp_path: Path
) -> None:
    """As after a crash between saving the model and removing the unfinished task."""
    partial = Path(shutil.copytree(interrupted / "partial", tmp_path / "partial"))
    assert learn(interrupted, folders / "second", "--quiet", "--device", "cpu") == 0
    shutil.copytree(partial, interrupted / "partial")
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "third" / "digit-3")
    assert learn(interrupted, tmp_path / "third", "--quiet", "--device", "cpu") == 0
    assert len(Model.load(interrupted, "cpu").card.classes) == 4
    assert not (interrupted / "partial").exists()


@pytest.mark.parametrize("flags", [(), ("--more",), ("--discard",)])
def test_tensors_without_their_card_are_not_replaced(
    flags: tuple[str, ...], uninterrupted: Path, folders: Path, tmp_path: Path, capsys: Any
) -> None:
    """As in a folder that was restored by halves."""
    model = Path(shutil.copytree(uninterrupted, tmp_path / "model"))
    (model / "model.json").unlink()
    (tensors,) = model.glob("model-*.safetensors")
    content = tensors.read_bytes()
    assert learn(model, folders / "first", *QUICK, "--epochs", "1", *flags) == 2
    assert f"has parts of a model ({tensors.name}), but no model.json" in capsys.readouterr().err
    assert tensors.read_bytes() == content


def test_tensors_of_a_first_task_that_was_killed_while_it_was_saved(
    folders: Path, uninterrupted: Path, tmp_path: Path, impatient: Any, monkeypatch: Any
) -> None:
    """The task can be gone on with, and makes them again."""
    model = tmp_path / "model"
    assert learn(model, folders / "first", *QUICK, "--epochs", "1") == 130
    monkeypatch.undo()
    shutil.copy(next(uninterrupted.glob("model-*.safetensors")), model)
    assert learn(model, folders / "first", *QUICK, "--epochs", "1") == 0
    assert Model.load(model, "cpu").card.labels == ["digit-0", "digit-1"]


def test_known_classes_are_refused_unless_more_is_said(
    uninterrupted: Path, folders: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(uninterrupted, tmp_path / "model"))
    content = (model / "model.json").read_bytes()
    capsys.readouterr()
    with monkeypatch.context() as patch:  # thousands of photographs are not decoded for that
        patch.setattr("efcil.model.images.Pictures.pixels", lambda *_: pytest.fail("decoded"))
        assert learn(model, folders / "both", "--quiet") == 2
    assert "knows digit-0, digit-1, digit-2 already" in capsys.readouterr().err
    assert (model / "model.json").read_bytes() == content
    assert learn(model, folders / "held-out", "--more", "--device", "cpu") == 0
    assert "learned more of digit-0, digit-1, digit-2 from 72 images" in capsys.readouterr().out
    assert [each.images for each in Model.load(model, "cpu").card.classes] == [46, 46, 46], "two of each were held out"


def test_images_that_may_have_been_learned_already_are_remarked_on(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many as those of the last command, which may have made two visits."""
    model, words = tmp_path / "model", "had as many images and classes. If they are the same images, stop now"
    assert learn(model, folders / "first", *QUICK) == 0
    shutil.copytree(folders / "second", tmp_path / "both")
    shutil.copytree(folders / "held-out" / "digit-0", tmp_path / "both" / "digit-0")
    for data, again in ((folders / "first", True), (tmp_path / "both", False), (tmp_path / "both", True)):
        capsys.readouterr()
        assert learn(model, data, "--device", "cpu", "--more") == 0
        assert (words in capsys.readouterr().out) is again
    last = next((tmp_path / "both").rglob("*.png"))
    last.unlink()
    assert learn(model, tmp_path / "both", "--device", "cpu", "--more") == 0
    assert words not in capsys.readouterr().out


@pytest.mark.parametrize(("module", "name"), [(gaussians, "collect"), (blending, "fit_to_gaussians")])
@pytest.mark.parametrize("requests", [1, 2])
def test_more_images_that_are_interrupted_change_nothing(
    module: Any,
    name: str,
    requests: int,
    uninterrupted: Path,
    folders: Path,
    tmp_path: Path,
    capfd: Any,
    monkeypatch: Any,
) -> None:
    model = Path(shutil.copytree(uninterrupted, tmp_path / "model"))
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    original = getattr(module, name)

    def disturbed(*arguments: Any, **named: Any) -> Any:
        for _ in range(requests):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **named)

    monkeypatch.setattr(module, name, disturbed)
    assert learn(model, folders / "held-out", "--more", "--device", "cpu", "--quiet") == 130
    told = capfd.readouterr().err
    assert "Stopping; the model stays unchanged; a second request stops immediately." in told
    assert "The model is unchanged, without these images." in told
    assert "saved" not in told
    assert "checkpoint" not in told
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_progress_and_mistakes(folders: Path, tmp_path: Path, capsys: Any) -> None:
    model = tmp_path / "model"
    assert learn(model, folders / "first", *QUICK[:-1], "--epochs", "2", "--set", "efm_weight=5") == 0
    output = capsys.readouterr().out
    assert "task 1/1  epoch 2/2" in output
    assert "learned digit-0, digit-1 from 44 images; it knows 2 classes now." in output
    assert learn(model, folders / "second", "--set", "later.learning_rate=0.002", "--quiet", "--device", "cpu") == 0
    card = Model.load(model, "cpu").card
    assert card.resolved.method.efm_weight == 5.0, "what was set before stays"
    assert card.resolved.later.learning_rate == 0.002
    for arguments, message in (
        ((tmp_path / "nowhere",), "is not a folder"),
        ((folders / "second", "--method", "lwf"), "cannot change to lwf"),
        ((folders / "second", "--method", "efk"), "Did you mean 'efc'"),
        ((folders / "second", "--epoch", "1"), "no option '--epoch'"),
    ):
        data, *flags = arguments
        capsys.readouterr()
        assert learn(model, Path(data), *map(str, flags)) == 2
        assert message in capsys.readouterr().err


def test_what_is_learned_from_and_what_is_not(folders: Path, tmp_path: Path, capsys: Any) -> None:
    data = Path(shutil.copytree(folders / "second", tmp_path / "data"))
    for name in ("a.CR2", "b.cr2", "deeper/c.cr2", "notes.txt", ".DS_Store", "Thumbs.db", ".hidden/d.cr2"):
        (data / "digit-2" / name).parent.mkdir(exist_ok=True)
        (data / "digit-2" / name).touch()
    shutil.copy(next(data.rglob("*.png")), data / "stray.png")
    (data / "list.csv").touch()
    options = (*QUICK[:-1], "--epochs", "1")
    assert learn(tmp_path / "model", data, *options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "classes: digit-2 (24)",
        "4 files ignored: 3 .cr2 (raw photographs: convert to JPEG), 1 .txt (not images)",
        "1 image outside the class folders ignored; put images into the folder of their class",
    ]
    assert any(line.endswith("learned digit-2 from 22 images; it knows 1 class now.") for line in lines)
    assert learn(tmp_path / "quiet", data, *options, "--quiet") == 0
    assert learn(tmp_path / "clean", folders / "second", *options) == 0
    assert "ignored" not in capsys.readouterr().out


def test_a_class_called_train(folders: Path, tmp_path: Path, capsys: Any) -> None:
    """Where it has images of its own, it is a class like any other, with all that is below it."""
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "data" / "train")
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "data" / "train" / "sub")
    assert learn(tmp_path / "model", tmp_path / "data", *QUICK[:-1], "--epochs", "1") == 0
    assert capsys.readouterr().out.startswith("classes: train (48)\n")
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "pair" / "train")
    shutil.copytree(folders / "second" / "digit-2", tmp_path / "pair" / "test")
    assert class_folders(tmp_path / "pair")[1] == ["test"] * 24 + ["train"] * 24
    assert class_folders(tmp_path / "pair", held_out=True) == ([], [])


def test_what_is_beside_a_train_folder_is_named(folders: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "data"
    shutil.copytree(folders / "second", data / "train")
    for name in ("extra", "val"):
        shutil.copytree(folders / "second", data / name)
    for place in (data, data / "train"):
        shutil.copy(next(data.rglob("*.png")), place / "stray.png")
    assert learn(tmp_path / "model", data, *QUICK[:-1], "--epochs", "1") == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        f"class folders are taken from {data / 'train'}; left out: extra, val",
        "classes: digit-2 (24)",
        "2 images outside the class folders ignored; put images into the folder of their class",
    ]
    (tmp_path / "alone").mkdir()
    (data / "train").rename(tmp_path / "alone" / "train")
    assert learn(tmp_path / "other", tmp_path / "alone" / "train", *QUICK[:-1], "--epochs", "1") == 0
    assert "taken from" not in capsys.readouterr().out
    (tmp_path / "alone" / "train" / "stray.png").unlink()
    assert learn(tmp_path / "third", tmp_path / "alone", *QUICK[:-1], "--epochs", "1") == 0
    assert f"class folders are taken from {tmp_path / 'alone' / 'train'}\n" in capsys.readouterr().out


def test_links_that_lead_back_up_are_not_followed(folders: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(folders / "first", tmp_path / "data"))
    elsewhere = tmp_path / "elsewhere"
    (data / "digit-1").rename(elsewhere)
    (data / "digit-1").symlink_to(elsewhere)
    for place in (data / "digit-0", elsewhere):
        (place / "up").symlink_to(data)
    paths, labels = class_folders(data)
    assert labels == ["digit-0"] * 24 + ["digit-1"] * 24
    assert all(path.parent.name == label for path, label in zip(paths, labels, strict=True))
    for given in (data / "digit-0" / "..", elsewhere / "up"):
        assert len(class_folders(given)[0]) == 48, "the folder itself may be named by way of another"
    assert len(images_below(data / "digit-0" / "up" / "digit-0" / "..")) == 48


@pytest.fixture
def mixed(folders: Path, uninterrupted: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model that knows digit-2, and a folder with more images of it and with digit-3, which is new."""
    for name, source in (("digit-2", folders / "held-out" / "digit-2"), ("digit-3", folders / "first" / "digit-0")):
        shutil.copytree(source, tmp_path / "mixed" / name)
    return Path(shutil.copytree(uninterrupted, tmp_path / "model")), tmp_path / "mixed"


def test_known_and_new_classes_are_learned_together_if_more_is_said(
    mixed: tuple[Path, Path], uninterrupted: Path, tmp_path: Path, same: Any, capsys: Any
) -> None:
    model, data = mixed
    assert learn(model, data, "--device", "cpu", "--quiet") == 2
    assert "knows digit-2 already, but does not know digit-3. If these are more images of" in capsys.readouterr().err
    assert learn(model, data, "--device", "cpu", "--more") == 0
    said = capsys.readouterr().out
    assert "model: learned digit-3 and more of digit-2 from 46 images; it knows 4 classes now." in said
    assert "accuracy on held-out images of these classes" in said
    assert "accuracy on these images before they were learned from" in said
    # One after the other comes to the same.
    other = Path(shutil.copytree(uninterrupted, tmp_path / "other"))
    for name, flags in (("digit-3", ()), ("digit-2", ("--more",))):
        shutil.copytree(data / name, tmp_path / name / name)
        assert learn(other, tmp_path / name, "--device", "cpu", "--quiet", *flags) == 0
    together, apart = Model.load(model, "cpu"), Model.load(other, "cpu")
    assert same(together, apart)
    assert [each.kind for each in together.card.visits] == ["task", "task", "task", "more"]
    assert [each.images for each in together.card.classes] == [each.images for each in apart.card.classes]
    assert together.card.continues == checkpoint.digest(Model.load(uninterrupted, "cpu").tensors())


def test_a_visit_with_known_and_new_classes_is_resumed_whole(
    mixed: tuple[Path, Path], tmp_path: Path, same: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = mixed
    other = Path(shutil.copytree(model, tmp_path / "other"))
    arguments = ["--device", "cpu", "--quiet", "--more"]
    assert learn(other, data, *arguments) == 0
    monkeypatch.setattr("efcil.model.teaching.StopRequest", Impatient)
    assert learn(model, data, *arguments) == 130
    monkeypatch.undo()
    partial = shutil.copytree(model / "partial", tmp_path / "partial")
    assert learn(model, data, *arguments) == 0
    assert same(Model.load(model, "cpu"), Model.load(other, "cpu"))
    # The process was killed when the model was saved, and the checkpoint not yet removed.
    shutil.copytree(partial, model / "partial")
    capsys.readouterr()
    assert learn(model, data, *arguments) == 2
    assert "had learned all of its images already: the model knows digit-3 now" in capsys.readouterr().err
    assert not (model / "partial").exists()
    assert same(Model.load(model, "cpu"), Model.load(other, "cpu"))


def test_known_and_new_classes_are_learned_completely_or_not_at_all(
    mixed: tuple[Path, Path], same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = mixed
    classifier = IncrementalClassifier.load(model, device="cpu")
    monkeypatch.setattr(blending, "refit_heads", fails)
    with pytest.raises(RuntimeError, match="in the middle"):
        classifier.partial_fit(data, more=True)
    assert same(classifier.model_, Model.load(model, "cpu"))
    monkeypatch.undo()
    classifier.partial_fit(data, more=True)
    assert classifier.classes_.tolist() == ["digit-0", "digit-1", "digit-2", "digit-3"]


def fails(*arguments: Any) -> None:
    raise RuntimeError("in the middle")


def test_one_class_has_one_name(folders: Path, tmp_path: Path, capsys: Any) -> None:
    model, images = tmp_path / "model", folders / "second" / "digit-2"
    for data, name in (
        ("composed", "b\u00e4r"),
        ("decomposed", "ba\u0308r"),
        ("upper", "B\u00c4R"),
        ("outer", "b\u00e4r "),
    ):
        shutil.copytree(images, tmp_path / data / name)
    assert learn(model, tmp_path / "decomposed", *QUICK, "--epochs", "1") == 0
    assert Model.load(model, "cpu").card.labels == ["b\u00e4r"]
    for data, name in (("upper", "B\u00c4R"), ("outer", "b\u00e4r ")):
        for flags in ((), ("--more",)):
            assert learn(model, tmp_path / data, "--device", "cpu", *flags) == 2
            assert f"The class {name!r} is new, but differs from 'b\u00e4r'" in capsys.readouterr().err
    assert learn(model, tmp_path / "composed", "--device", "cpu", "--more") == 0
    assert Model.load(model, "cpu").card.labels == ["b\u00e4r"]


@pytest.mark.parametrize("size", [(), ("--image-size", "8")])
def test_all_broken_images_are_named_at_once(size: tuple[str, ...], folders: Path, tmp_path: Path, capsys: Any) -> None:
    data = Path(shutil.copytree(folders / "second", tmp_path / "data"))
    for number in range(23):
        (data / "digit-2" / f"broken-{number:02}.png").write_bytes(b"no image")
    assert learn(tmp_path / "model", data, "--preset", "digits", "--device", "cpu", "--quiet", *size) == 2
    message = capsys.readouterr().err
    assert "remove it. 23 images cannot be used" in message
    assert "broken-19.png and 3 more." in message
    assert "broken-20.png" not in message


def test_a_disk_without_room_for_the_model(folders: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Said before the training whose result could not be kept."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("efcil.files.shutil.disk_usage", lambda path: usage._replace(free=4_000_000))
    monkeypatch.setattr("efcil.model.learning._learn_task", pytest.fail)
    assert learn(tmp_path / "model", folders / "first", *QUICK) == 2
    assert "has 4 MB left, but about" in capsys.readouterr().err


def test_images_beside_the_model_are_left_alone(folders: Path, tmp_path: Path, capsys: Any) -> None:
    """Model and images in one folder, and a class of the name that unfinished tasks have."""
    for name, source in (("partial", "digit-0"), ("total", "digit-1")):
        shutil.copytree(folders / "first" / source, tmp_path / name)
    before = sorted(tmp_path.rglob("*.png"))
    assert learn(tmp_path, tmp_path, *QUICK, "--epochs", "1", "--discard") == 0
    assert Model.load(tmp_path, "cpu").card.labels == ["partial", "total"]
    assert sorted(tmp_path.rglob("*.png")) == before
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 0
    assert "unfinished" not in capsys.readouterr().out


@pytest.mark.parametrize("flags", [("--method", "nope"), ("--more",), ("--epochs", "0"), ("--image-size", "100000")])
def test_a_refused_first_visit_leaves_no_folder(flags: tuple[str, ...], folders: Path, tmp_path: Path) -> None:
    assert learn(tmp_path / "new" / "model", folders / "first", "--device", "cpu", *flags) == 2
    assert not (tmp_path / "new" / "model").exists()
    (tmp_path / "empty").mkdir()
    assert learn(tmp_path / "empty", folders / "first", "--device", "cpu", *flags) == 2
    assert (tmp_path / "empty").is_dir(), "one that was there stays"


def test_labels_that_are_no_text_are_taught_from_python(
    model_folder: Path, folders: Path, tmp_path: Path, capsys: Any
) -> None:
    shutil.copytree(folders / "first" / "digit-0", tmp_path / "zero" / "0")
    for flags in ((), ("--more",)):
        assert learn(model_folder, tmp_path / "zero", "--device", "cpu", *flags) == 2
        message = capsys.readouterr().err
        assert "The model's label 0 is not text but of type int, and names of folders are text." in message
        assert "Teach such a model from Python" in message


def test_two_at_a_time_are_kept_apart(uninterrupted: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    from efcil.files import locked

    model = Path(shutil.copytree(uninterrupted, tmp_path / "model"))
    with locked(model / ".lock"):
        assert learn(model, folders / "first", "--more") == 2
    assert "in use by another process" in capsys.readouterr().err


def test_places_that_are_no_model_folders(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "note.txt").write_text("")
    assert learn(tmp_path / "note.txt", folders / "first", *QUICK) == 2
    assert "(it is a file)" in capsys.readouterr().err
    quick = ["--method", "finetune", "--tasks", "2", "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main(["run", *quick, "--output", str(tmp_path / "runs")]) == 0
    (run,) = (path.parent for path in (tmp_path / "runs").rglob("summary.json"))
    capsys.readouterr()
    assert main(["inspect", str(run)]) == 2
    assert f"is the folder of a run. Its model is {run / 'model'}" in capsys.readouterr().err
