"""`--skip-broken`: images that cannot be read are named, counted and left out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efcil.cli import main
from efcil.model import Model
from efcil.model.broken import intact, report
from efcil.model.images import InputError, Pictures, gather_labelled, ignored_line

QUICK = ["--preset", "digits", "--image-size", "8", "--device", "cpu", "--epochs", "1", "--held-out", "0"]


@pytest.fixture
def damaged(folders: Path, tmp_path: Path) -> Path:
    """Two classes, one with two broken images among its own."""
    shutil.copytree(folders / "first", tmp_path / "data")
    (tmp_path / "data" / "digit-1" / "aaa.png").write_bytes(b"no image")
    (tmp_path / "data" / "digit-1" / "zzz.jpg").write_bytes(b"")
    return tmp_path / "data"


def test_learning_without_the_broken_ones(damaged: Path, folders: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["learn", str(tmp_path / "model"), "--data", str(damaged), *QUICK, "--skip-broken"]) == 0
    said = capsys.readouterr()
    printed = " ".join((said.out + said.err).split())
    assert "aaa.png cannot be decoded" in printed
    assert "zzz.jpg is empty. Replace it" in printed
    assert "2 of 50 images are broken and left out" in printed
    assert "learned digit-0, digit-1 from 48 images" in printed
    model = Model.load(tmp_path / "model", "cpu")
    assert [each.images for each in model.card.classes] == [24, 24]
    assert model.card.visits[-1].images == 48
    # The same model as from a folder that never had them.
    assert main(["learn", str(tmp_path / "clean"), "--data", str(folders / "first"), *QUICK]) == 0
    clean = Model.load(tmp_path / "clean", "cpu")
    assert all(np.array_equal(value, clean.tensors()[name]) for name, value in model.tensors().items())


def test_without_the_flag_the_answer_names_it(damaged: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["learn", str(tmp_path / "model"), "--data", str(damaged), *QUICK]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "2 images cannot be used" in said
    assert "add --skip-broken" in said
    assert not (tmp_path / "model").exists()


def test_a_class_must_keep_an_image(damaged: Path, tmp_path: Path, capsys: Any) -> None:
    (damaged / "digit-7").mkdir()
    for number in range(3):
        (damaged / "digit-7" / f"{number}.png").write_bytes(b"no image")
    assert main(["learn", str(tmp_path / "model"), "--data", str(damaged), *QUICK, "--skip-broken"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "All images are broken of digit-7 (3)." in said
    assert "0.png cannot be decoded" in said


def test_the_intact_images_keep_their_labels_and_places(damaged: Path) -> None:
    pictures, labels = gather_labelled(damaged)
    found, lines = intact(pictures, labels, 8), []
    report(found, lines.append)
    assert len(found.pixels) == len(found.labels) == len(found.places) == 48
    assert [labels[place] for place in found.places] == found.labels
    assert [each.index for each in found.broken] == [24, 49]
    assert lines[-1] == "2 of 50 images are broken and left out"
    whole = Pictures([pictures.items[place] for place in found.places]).pixels(8)
    assert np.array_equal(found.pixels, whole)


def test_images_in_memory() -> None:
    good = Image.new("RGB", (8, 8), (1, 2, 3))
    mixed = Pictures([good, np.zeros((8, 8, 7), np.uint8), good])
    found = intact(mixed, ["a", "a", "b"], 8)
    assert (found.labels, found.places) == (["a", "b"], [0, 2])
    with pytest.raises(InputError, match=r"All images are broken of b \(1\)"):
        intact(mixed, ["a", "b", "a"], 8)


def test_the_line_about_ignored_files_names_the_extra() -> None:
    line = ignored_line([Path("a.heic"), Path("b.pdf")])
    assert "efcil[heic]" in line
    assert "efcil[heic]" not in ignored_line([Path("b.pdf")])
