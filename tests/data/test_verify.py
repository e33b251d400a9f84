"""`efcil data verify`: what is wrong with the files of a dataset, in words."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shards import plain, write_shard

from efcil.cli import main
from efcil.data import cache, checksum
from efcil.data.sources import Known, SourceOptions, find_source
from efcil.data.verify import verify_dataset

IDS = ["n01", "n02", "n03"]


def photograph(file: Path, seed: int, size: tuple[int, int] = (40, 30)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "JPEG")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three classes with four training and two validation images each, which is what the subset is known to have."""
    for number, identifier in enumerate(IDS):
        for image in range(4):
            photograph(tmp_path / "data" / "train" / identifier / f"{image}.JPEG", 10 * number + image)
        for image in range(2):
            photograph(tmp_path / "data" / "val" / identifier / f"{image}.JPEG", 100 + 10 * number + image)
    known = Known(3, None, 6, (3, 4), (2, 2), in_both=0)
    monkeypatch.setattr(type(find_source("imagenet-subset")), "known", known)
    return tmp_path / "data"


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    code = main(["data", "verify", "imagenet-subset", "--data", str(folder), "--image-size", "28", *more])
    return code, " ".join(capsys.readouterr().out.split())


def test_nothing_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = verify(folder, capsys)
    assert code == 0, text
    assert "training 12 images, 4 of a class" in text
    assert "test 6 images, 2 of a class" in text
    assert "shorter side 30 to 30 pixels" in text
    assert "in both 0 test images" in text
    assert text.endswith("Nothing is wrong.")


def test_swapped_splits_are_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "train").rename(folder / "kept")
    (folder / "val").rename(folder / "train")
    (folder / "kept").rename(folder / "val")
    code, text = verify(folder, capsys)
    assert code == 1
    assert "wrong: The splits are swapped: the training images are the published test images." in text
    assert text.endswith("1 thing is wrong.")


def test_everything_that_is_wrong_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = folder / "train" / "n01" / "1.JPEG"
    broken.write_bytes(broken.read_bytes()[:400])
    (folder / "train" / "n02" / "0.JPEG").write_bytes(b"")
    for image in (1, 2):
        (folder / "train" / "n03" / f"{image}.JPEG").unlink()
    (folder / "val" / "n02" / "1.JPEG").unlink()
    shutil.copy(folder / "train" / "n01" / "2.JPEG", folder / "val" / "n01" / "0.JPEG")
    photograph(folder / "val" / "n03" / "1.JPEG", 7, (30, 5))
    code, text = verify(folder, capsys)
    assert code == 1
    for sentence in (
        "1 class with another number of training images than 3 to 4: n03 (2).",
        "2 training images cannot be used.",
        f"{broken} cannot be decoded as an image",
        "There are 5 test images instead of 6: 1 fewer.",
        "1 class with another number of test images than 2: n02 (1).",
        "1 test image with a shorter side of less than 8 pixels.",
        "1 test image among the training images: accuracy would be too high. Classes: n01.",
        "6 things are wrong.",
    ):
        assert sentence in text


def test_copies_among_training_images_are_only_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(folder / "train" / "n01" / "2.JPEG", folder / "train" / "n01" / "3.JPEG")
    shutil.copy(folder / "train" / "n01" / "2.JPEG", folder / "train" / "n02" / "3.JPEG")
    code, text = verify(folder, capsys)
    assert (code, "repeated 2 training images are copies of others, 1 of them in another class" in text) == (0, True)


def test_what_is_published_in_both_splits_is_not_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / "train" / "n01" / "2.JPEG", folder / "val" / "n01" / "0.JPEG")
    monkeypatch.setattr(type(find_source("imagenet-subset")), "known", Known(in_both=1))
    code, text = verify(folder, capsys)
    assert (code, "as in the published dataset" in text) == (0, True)
    monkeypatch.setattr(type(find_source("imagenet-subset")), "known", Known())
    assert verify(folder, capsys)[0] == 1, "one of six is not few"


def test_a_small_copy_and_too_few_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, file in enumerate(sorted(folder.rglob("*.JPEG"))):
        photograph(file, seed, (12, 12))
    for split in ("train", "val"):
        shutil.rmtree(folder / split / "n03")
    code, text = verify(folder, capsys)
    assert code == 1
    assert "Half of the training images have a shorter side of at most 12 pixels, but the network sees 28" in text
    assert "It has 2 classes instead of 3." in text


def test_the_users_own_choice_of_classes_has_its_own_numbers(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two.txt").write_text("n01\nn02\n")
    assert verify(folder, capsys, "--class-list", str(tmp_path / "two.txt"))[0] == 0


def test_files_that_cannot_be_listed_are_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(folder / "val")
    code, text = verify(folder, capsys)
    assert (code, "val is missing, and with it the test images" in text) == (1, True)
    assert text.endswith("1 thing is wrong.")


def test_shards_that_cannot_be_read_on_are_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = folder.parent / "shards"
    for split, values in (("train", [1, 2, None, 4]), ("validation", [5, 6, 7, 8])):
        contents = [None if value is None else plain(value, 40, 30) for value in values]
        write_shard(shards / f"{split}-00000-of-00001.parquet", contents, [0, 1, 0, 1], names=["a", "b"])
    code, text = verify(shards, capsys)
    assert code == 1
    assert "wrong: The image in row 2 of" in text


def test_decoded_datasets_are_compared_pixel_by_pixel(tmp_path: Path) -> None:
    for split, seeds in (("train", (1, 2, 3, 4)), ("test", (1, 6))):
        for place, seed in enumerate(seeds):
            photograph(tmp_path / "own" / split / "ab"[place % 2] / f"{place}.png", seed, (8, 8))
    options = SourceOptions(cache=tmp_path / "cache")
    found = verify_dataset(find_source("folder"), tmp_path / "own", options)
    assert found.wrong == ["1 test image among the training images: accuracy would be too high. Classes: a."]


def test_every_byte_of_the_cache_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large files loading checks a few blocks, between which damage is not seen."""
    monkeypatch.setattr(cache, "FULL_CHECK_BYTES", 0)
    monkeypatch.setattr(checksum, "SAMPLED_BLOCKS", 3)
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 16)
    for number in range(8):
        photograph(tmp_path / "own" / ("train", "test")[number // 4] / "ab"[number % 2] / f"{number}.png", number)
    options = SourceOptions(cache=tmp_path / "cache", image_size=8)
    assert verify_dataset(find_source("folder"), tmp_path / "own", options).wrong == []
    (file,) = (tmp_path / "cache").glob("*/train/images.npy")
    content = bytearray(file.read_bytes())
    content[150] ^= 1
    file.write_bytes(content)
    (sentence,) = verify_dataset(find_source("folder"), tmp_path / "own", options).wrong
    assert f"{file} is not what was written" in sentence
    assert "Delete" in sentence


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("data verify", "Name the dataset to verify: efcil data verify DATASET"),
        ("data verify digits cifar100", "One dataset at a time: digits or cifar100"),
        ("data digits cifar100", "One dataset at a time"),
        ("data verify digit", "Unknown dataset 'digit'. Did you mean 'digits'"),
        ("data --data x", "Name the dataset that x holds"),
    ],
)
def test_mistakes_in_the_command(words: str, message: str, capsys: Any) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_the_bundled_digits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "verify", "digits"]) == 0
    assert main(["data", "digits"]) == 0


def test_reading_photographs_says_when_they_are_decoded(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "imagenet-subset", "--data", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "3 classes, 224 x 224 pixels" in text
    assert "the images of a task are decoded when it begins" in text
