"""What stands in the place of a model's own files is neither read, written nor removed, whatever the command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from efcil.cli import main
from efcil.engine import checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no such pipes")
LEARN = ("--preset", "digits", "--epochs", "1", "--device", "cpu", "--quiet")


@pytest.fixture
def impatience() -> Iterator[None]:
    """End what waits for a pipe, which would wait for ever."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def learn(model: Path, data: Path, *more: str) -> int:
    return main(["learn", str(model), "--data", str(data), *LEARN, *more])


def test_discard_does_not_remove_the_unfinished_task_of_another_model(
    model_folder: Path, folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    other = tmp_path / "other" / "partial"
    checkpoint.write(other, {"weight": torch.zeros(3)}, {"n": 1})
    before = sorted(other.iterdir())
    (model_folder / "partial").symlink_to(other)
    for more in (("--discard",), ()):
        assert learn(model_folder, folders / "second", *more) == 2
        assert "partial is a symbolic link" in capsys.readouterr().err
    assert sorted(other.iterdir()) == before


def test_a_lock_that_is_a_link_leaves_its_target_alone(model_folder: Path, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    (model_folder / ".lock").symlink_to(tmp_path / "precious")
    assert learn(model_folder, folders / "second") == 2
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.mark.parametrize("name", [".lock", "model.json", "partial/state.json", "tensors"])
@pytest.mark.parametrize("command", ["learn", "predict", "inspect", "audit"])
@pytest.mark.usefixtures("impatience")
def test_a_pipe_holds_up_no_command(
    name: str, command: str, model_folder: Path, folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = next(model_folder.glob("*.safetensors")) if name == "tensors" else model_folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    arguments = {
        "learn": [str(model_folder), "--data", str(folders / "both"), *LEARN],
        "predict": [str(model_folder), str(folders / "held-out" / "digit-0")],
        "inspect": [str(model_folder)],
        "audit": [str(model_folder)],
    }[command]
    code = main([command, *arguments])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "Unexpected" not in said
    reading_only = command in ("predict", "inspect", "audit") and name in (".lock", "partial/state.json")
    assert code in ((0, 1, 2) if reading_only else (2,))


def test_a_model_folder_that_is_a_link_learns(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    assert learn(tmp_path / "link", folders / "first") == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "disk" / "model.json").exists()
