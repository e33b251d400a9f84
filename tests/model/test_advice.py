"""What is said of folders whose images are at the wrong level, too few, or of other types, and of unfinished visits."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from efcil.cli import main
from efcil.data.sources import SourceOptions, load_dataset
from efcil.engine import checkpoint
from efcil.errors import DataError
from efcil.model import Model, ModelError, copies
from efcil.model.images import InputError, advice, class_folders, ignored_line

QUICK = ["--preset", "digits", "--image-size", "8", "--device", "cpu", "--epochs", "1"]


def images(folders: Path, place: Path, count: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(sorted((folders / "both" / "digit-0").iterdir())[:count]):
        shutil.copy(file, place / f"{number}.png")


def test_images_directly_in_the_folder(folders: Path, tmp_path: Path) -> None:
    images(folders, tmp_path, 4)
    with pytest.raises(
        InputError,
        match=rf"4 images are directly in .*, and it has no sub-folder .* give a folder that has {tmp_path.name}",
    ):
        class_folders(tmp_path)
    images(folders, tmp_path / "cat", 3)
    with pytest.raises(InputError, match=r"4 images are directly in .*, and 3 are in sub-folders.*cat/1.jpg"):
        class_folders(tmp_path)
    images(folders, tmp_path / "dog", 1)
    assert class_folders(tmp_path)[1] == ["cat"] * 3 + ["dog"], "as many inside: these are ignored, which is said"


def test_images_one_level_too_deep(folders: Path, tmp_path: Path, capsys: Any) -> None:
    for place in ("january/cat", "january/dog", "february/bird", "february/fish"):
        images(folders, tmp_path / "visits" / place, 2)
    visits = tmp_path / "visits"
    with pytest.raises(InputError, match="one level too deep") as refused:
        class_folders(visits)
    assert f"{visits}/february has no image of its own, but folders with images: bird, fish." in str(refused.value)
    assert f"give {visits}/february instead of {visits}. 2 folders are like that" in str(refused.value)
    assert f"Expected: {visits}/cat/1.jpg" in str(refused.value)
    assert main(["learn", str(tmp_path / "model"), "--data", str(visits)]) == 2
    assert "one level too deep" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    with pytest.raises(DataError, match="one level too deep"):
        load_dataset("folder", visits, SourceOptions(held_out=0.5, cache=tmp_path / "cache"))
    assert class_folders(visits / "january")[1] == ["cat", "cat", "dog", "dog"]


def test_a_name_of_a_class_folder_that_is_no_text(folders: Path, tmp_path: Path, capsys: Any) -> None:
    for name in (b"dog", b"caf\xe9"):
        images(folders, Path(os.fsdecode(os.fsencode(tmp_path / "data") + b"/" + name)), 4)
    assert main(["learn", str(tmp_path / "model"), "--data", str(tmp_path / "data"), *QUICK]) == 2
    assert r"data/caf\udce9: a name that is not valid UTF-8 cannot name a class" in capsys.readouterr().err
    with pytest.raises(DataError, match="cannot name a class"):
        load_dataset("folder", tmp_path / "data", SourceOptions(held_out=0.5))


def test_what_is_below_a_class_folder_belongs_to_it(folders: Path, tmp_path: Path) -> None:
    """One folder inside, or images of its own beside folders: the class has them all, as ever."""
    images(folders, tmp_path / "cat" / "images", 3)
    images(folders, tmp_path / "dog", 1)
    images(folders, tmp_path / "dog" / "puppies", 2)
    images(folders, tmp_path / "dog" / "old", 2)
    assert class_folders(tmp_path)[1] == ["cat"] * 3 + ["dog"] * 5
    images(folders, tmp_path / "cow" / "a", 2)
    images(folders, tmp_path / "cow" / "b", 2)
    assert class_folders(tmp_path)[1].count("cow") == 4, "fewer than half of the images"


def test_one_image_and_one_class(folders: Path, tmp_path: Path, capsys: Any) -> None:
    assert list(advice(["a", "a", "b"], first=True)) == [
        "b has only one image, from which its spread, how much images of a class differ, cannot be known. Give at "
        "least 5 images of each class"
    ]
    assert "a, b have only one image each" in next(advice(["a", "b"], first=False))
    assert list(advice(["a", "a"], first=False)) == []
    (line,) = advice(["Unknown", "Unknown"], first=False)
    assert line.startswith("unknown becomes a class like any other")
    (line,) = advice(["a", "a"], first=True)
    assert line.startswith("a is the only class so far: until the model learns a second one, it answers every image")
    model, data = tmp_path / "model", tmp_path / "data"
    images(folders, data / "zero", 4)
    assert main(["learn", str(model), "--data", str(data), *QUICK]) == 0
    assert "zero is the only class so far" in capsys.readouterr().out
    assert main(["learn", str(model), "--data", str(data), "--more"]) == 0
    images(folders, tmp_path / "next" / "one", 1)
    images(folders, tmp_path / "next" / "two", 2)
    assert "only" not in capsys.readouterr().out
    assert main(["learn", str(model), "--data", str(tmp_path / "next")]) == 0
    assert "one has only one image" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.HEIC", "1 .heic (to read them: pip install 'efcil[heic]')"),
        ("a.CR2", "1 .cr2 (raw photographs: convert to JPEG)"),
        ("a.nef", "1 .nef (raw photographs: convert to JPEG)"),
        ("a.pdf", "1 .pdf (not images)"),
        ("a.mp4", "1 .mp4 (videos: save single frames as JPEG)"),
        ("a.svg", "1 .svg (drawings: export as PNG)"),
        ("a.avif", "1 .avif (to read them: pip install 'pillow>=11.3')"),
        ("a.jxl", "1 .jxl (convert to JPEG or PNG)"),
        ("a.xyz", "1 .xyz (if they are images, convert to JPEG or PNG)"),
        ("a", "1 without suffix (if they are images, convert to JPEG or PNG)"),
    ],
)
def test_advice_fits_the_type_of_a_file(name: str, words: str) -> None:
    assert ignored_line([Path(name)]) == f"1 file ignored: {words}"


def test_ignored_files_are_listed_in_one_order_and_those_that_are_no_images_last() -> None:
    names = "a.txt", "b.txt", "a.log", "a.csv", "a.pdf", "a.md", "a.mp4", "b.mp4", "a.cr2"
    orders = [ignored_line([Path(name) for name in given]) for given in (names, names[::-1])]
    assert orders[0] == orders[1]
    assert orders[0].startswith("9 files ignored: 2 .mp4 (videos: save single frames as JPEG), 1 .cr2 (raw photographs")


def test_a_first_visit_that_is_unfinished(folders: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    model = tmp_path / "model"
    learn = ["learn", str(model), "--data", str(folders / "first"), *QUICK, "--quiet", "--checkpoint-steps", "1"]
    save = checkpoint.TaskKeeper.save

    def stop(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.TaskKeeper, "save", stop)
        assert main(learn) == 130
    image = str(next(folders.rglob("*.png")))
    for command in (["predict", str(model), image], ["inspect", str(model)], ["forget", str(model), "digit-0"]):
        capsys.readouterr()
        assert main(command) == 2
        assert (
            f"{model} has not finished its first task (digit-0, digit-1; stopped in epoch 1, after step 1), so it "
            "cannot be used yet. To resume it, repeat the `efcil learn` command that started it."
            in capsys.readouterr().err
        )
    assert main(learn) == 0
    assert main(["predict", str(model), image]) == 0


def test_a_first_visit_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1234 somewhere\n")
    with pytest.raises(ModelError, match="has not finished its first task, and has no checkpoint of it"):
        Model.load(tmp_path)
    (tmp_path / ".lock").unlink()
    with pytest.raises(ModelError, match="is not a model folder"):
        Model.load(tmp_path)
    checkpoint.write(tmp_path / "partial", {"x": torch.zeros(1)}, {"nothing": 1})
    with pytest.raises(ModelError, match=re.escape("has not finished its first task, so it cannot be used yet")):
        Model.load(tmp_path)


def test_images_that_are_there_twice(folders: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "data"
    shutil.copytree(folders / "first", data)
    first = sorted((data / "digit-0").iterdir())[0]
    assert main(["learn", str(tmp_path / "a"), "--data", str(data), *QUICK]) == 0
    assert " same. " not in capsys.readouterr().out
    shutil.copy(first, data / "digit-0" / "copy.png")
    (data / "digit-0" / "broken.png").touch()  # those that are left out do not shift the names
    assert main(["learn", str(tmp_path / "b"), "--data", str(data), *QUICK, "--skip-broken"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 image is a copy of another of the same class: {data}/digit-0/copy.png and {first} are the same." in said
    shutil.copy(first, data / "digit-1" / "wrong.png")
    (data / "digit-0" / "broken.png").unlink()
    assert main(["learn", str(tmp_path / "c"), "--data", str(data), *QUICK]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 image is in more than one class: {data}/digit-0/copy.png and {data}/digit-1/wrong.png are the" in said
    assert "is a copy" not in said


def test_copies_without_names_are_numbered() -> None:
    pixels = np.arange(5, dtype=np.uint8)[:, None, None, None].repeat(3, axis=3)[[0, 1, 0, 1, 1]]
    (said,) = copies.remarks(pixels, ["a", "b", "a", "b", "b"], pixels)
    assert said.startswith("3 images are copies of another of the same class: for example, image 1 and image 3 are the")
    (said,) = copies.remarks(pixels, ["a", "b", "b", "b", "c"], pixels)
    assert said.startswith("2 images are in more than one class: for example, image 1 and image 3 are the same.")
