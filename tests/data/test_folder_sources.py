from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.errors import DataError, SettingsError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "tiny-imagenet-slice"


def picture(file: Path, value: int, size: tuple[int, int] = (64, 64)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(file)


def load(name: str, path: Path, tmp_path: Path, **options: Any) -> Dataset:
    return load_dataset(name, path, SourceOptions(cache=tmp_path / "cache", **options))


def values(images: np.ndarray) -> list[int]:
    return [int(round(float(image.mean()), -1)) for image in images]  # JPEG may be off by one


# --- Tiny-ImageNet -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "tiny-imagenet-200"
    for number, identifier in enumerate(["n03", "n01", "n02"]):
        for image in range(2):
            picture(root / "train" / identifier / "images" / f"{identifier}_{image}.JPEG", 100 * image + 10 * number)
        (root / "train" / identifier / f"{identifier}_boxes.txt").write_text("boxes")
    lines = []
    for number, identifier in enumerate(["n02", "n03", "n01"]):
        picture(root / "val" / "images" / f"val_{number}.JPEG", 40 * (number + 1))
        lines.append(f"val_{number}.JPEG\t{identifier}\t0\t0\t63\t63\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn03\tcrane\nn99\tunused\n")
    return root


def sort_validation(root: Path, below: str) -> None:
    for number, identifier in enumerate(["n02", "n03", "n01"]):
        target = root / "val" / identifier / below / f"val_{number}.JPEG"
        target.parent.mkdir(parents=True)
        (root / "val" / "images" / f"val_{number}.JPEG").rename(target)


def check_tiny(dataset: Dataset) -> None:
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert values(dataset.train.images) == [10, 110, 20, 120, 0, 100]
    assert dict(zip(dataset.test.labels.tolist(), values(dataset.test.images), strict=True)) == {1: 40, 2: 80, 0: 120}
    assert dataset.class_names == ("goldfish", "n02", "crane")
    assert (dataset.name, dataset.image_size) == ("tiny-imagenet", 64)
    assert (dataset.mean, dataset.std) == (IMAGENET_MEAN, IMAGENET_STD)


def test_tiny_imagenet_as_it_is_published(tiny: Path, tmp_path: Path) -> None:
    check_tiny(load("tiny-imagenet", tiny, tmp_path))
    check_tiny(load("tiny-imagenet", tiny.parent, tmp_path))


@pytest.mark.parametrize("below", ["", "images"])
def test_tiny_imagenet_with_validation_sorted_into_classes(tiny: Path, tmp_path: Path, below: str) -> None:
    sort_validation(tiny, below)
    check_tiny(load("tiny-imagenet", tiny, tmp_path))
    (tiny / "val" / "images").rmdir()
    (tiny / "val" / "val_annotations.txt").unlink()
    check_tiny(load("tiny-imagenet", tiny, tmp_path))


def test_tiny_imagenet_with_training_images_directly_in_class_folders(tiny: Path, tmp_path: Path) -> None:
    for folder in (tiny / "train").iterdir():
        for image in (folder / "images").iterdir():
            image.rename(folder / image.name)
        (folder / "images").rmdir()
    check_tiny(load("tiny-imagenet", tiny, tmp_path))


def test_tiny_imagenet_class_names_without_words_and_with_shared_ones(tiny: Path, tmp_path: Path) -> None:
    (tiny / "words.txt").write_text("n01\tcrane, bird\nn02\tox\nn03\tcrane, machine\n")
    assert load("tiny-imagenet", tiny, tmp_path).class_names == ("crane (n01)", "ox", "crane (n03)")
    (tiny / "words.txt").unlink()
    assert load("tiny-imagenet", tiny, tmp_path).class_names == ("n01", "n02", "n03")


def test_tiny_imagenet_faults_are_named(tiny: Path, tmp_path: Path) -> None:
    annotations = tiny / "val" / "val_annotations.txt"
    good = annotations.read_text()

    def refused(message: str) -> None:
        with pytest.raises(DataError, match=message):
            load("tiny-imagenet", tiny, tmp_path)

    annotations.write_text(good + "val_9.JPEG\tn01\n")
    refused(r"Line 4 of .*val_annotations\.txt names val_9\.JPEG")
    annotations.write_text(good + "val_0.JPEG\tn77\n")
    refused(r"Line 4 of .*val_annotations\.txt names class 'n77'")
    annotations.write_text(good.splitlines()[0])
    refused("names no validation image of class n01")
    annotations.unlink()
    refused(r"val_annotations\.txt cannot be read")
    annotations.write_text(good)
    picture(tiny / "train" / "n01" / "images" / "n01_0.JPEG", 5, (64, 32))
    refused(r"n01_0\.JPEG is 64 x 32 pixels, but 64 x 64 is expected")
    picture(tiny / "train" / "n01" / "images" / "n01_0.JPEG", 10)
    (tiny / "train" / "n00").mkdir()
    refused(r"class folder .*n00 holds no image")
    (tiny / "train" / "n00").rmdir()
    sort_validation(tiny, "images")
    (tiny / "val" / "n02" / "images" / "val_0.JPEG").rename(tiny / "val" / "n01" / "val_0.JPEG")
    refused(r"class folder .*n02 holds no image")
    (tiny / "val" / "n02" / "images").rmdir()
    (tiny / "val" / "n02").rmdir()
    refused(r"val/n02 is missing")


def test_tiny_imagenet_elsewhere_says_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needs a path.* Expected: .*tiny-imagenet-200"):
        load_dataset("tiny-imagenet")
    with pytest.raises(DataError, match=r"no folder train.* Expected: "):
        load("tiny-imagenet", tmp_path, tmp_path)
    (tmp_path / "train" / "n01").mkdir(parents=True)
    with pytest.raises(DataError, match=r"val is missing"):
        load("tiny-imagenet", tmp_path, tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the slice of the real Tiny-ImageNet is not beside this repository")
def test_the_real_slice(tmp_path: Path) -> None:
    dataset = load("tiny-imagenet", SHARED, tmp_path)
    assert dataset.train.class_counts(10).tolist() == [20] * 10
    assert dataset.test.class_counts(10).tolist() == [10] * 10
    assert dataset.class_names[0] == "goldfish"
    assert 60 < dataset.train.images.mean() < 180


# --- Folders of one's own images -----------------------------------------------------------------------------------


def make_classes(root: Path, counts: dict[str, int], size: tuple[int, int] = (20, 16)) -> None:
    for number, (name, count) in enumerate(counts.items()):
        for image in range(count):
            picture(root / name / f"{image:02d}.png", 50 * number + image, size)


def test_folder_with_given_splits(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root / "train", {"b": 3, "a": 2})
    make_classes(root / "test", {"a": 1, "b": 2})
    dataset = load("folder", root, tmp_path)
    assert dataset.class_names == ("a", "b")
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert dataset.train.images[:, 3, 3, 1].tolist() == [50, 51, 0, 1, 2]
    assert dataset.test.images[:, 3, 3, 1].tolist() == [0, 50, 51]
    assert dataset.image_size == 16
    assert (dataset.mean, dataset.std) == (IMAGENET_MEAN, IMAGENET_STD)


@pytest.mark.parametrize("name", ["val", "valid", "validation"])
def test_folder_with_validation_instead_of_test(tmp_path: Path, name: str) -> None:
    make_classes(tmp_path / "mine" / "train", {"a": 1, "b": 1})
    make_classes(tmp_path / "mine" / name, {"a": 2, "b": 2})
    assert len(load("folder", tmp_path / "mine", tmp_path).test) == 4
    picture(tmp_path / "mine" / "test" / "images" / "1.png", 0, (20, 16))  # test images without labels
    assert len(load("folder", tmp_path / "mine", tmp_path).test) == 4


def test_held_out_share_is_deterministic_and_disjoint(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root, {"a": 10, "b": 3, "c": 2})
    first = load("folder", root, tmp_path, held_out=0.2)
    assert first.test.class_counts(3).tolist() == [2, 1, 1]
    assert first.train.class_counts(3).tolist() == [8, 2, 1]
    together = sorted([*first.train.images[:, 0, 0, 0].tolist(), *first.test.images[:, 0, 0, 0].tolist()])
    assert together == [*range(10), 50, 51, 52, 100, 101]
    again = load_dataset("folder", root, SourceOptions(cache=tmp_path / "another", held_out=0.2))
    assert np.array_equal(first.test.images, again.test.images)
    chosen = [
        load("folder", root, tmp_path, held_out=0.2, seed=seed).test.images[:2, 0, 0, 0].tolist() for seed in range(4)
    ]
    assert len({tuple(pair) for pair in chosen}) > 1


def test_a_new_class_leaves_the_held_out_images_of_others(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root, {"b": 10, "c": 10})
    before = load("folder", root, tmp_path, held_out=0.3).test.images[:, 0, 0, 0].tolist()
    for image in range(4):
        picture(root / "a" / f"{image}.png", 200 + image, (20, 16))
    after = load("folder", root, tmp_path, held_out=0.3).test
    assert after.images[after.labels > 0][:, 0, 0, 0].tolist() == before


def test_held_out_from_a_lone_train_folder(tmp_path: Path) -> None:
    make_classes(tmp_path / "mine" / "train", {"a": 4, "b": 4})
    assert load("folder", tmp_path / "mine", tmp_path, held_out=0.5).class_names == ("a", "b")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    make_classes(tmp_path / "mine", {"bus": 4, "train": 4})
    assert load("folder", tmp_path / "mine", tmp_path, held_out=0.5).class_names == ("bus", "train")


def test_nested_hidden_linked_and_other_files(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root, {"a": 2, "b": 2})
    picture(root / "a" / "deeper" / "still" / "x.JPG", 90)
    picture(root / "a" / ".hidden.png", 90)
    picture(root / ".thumbnails" / "x.png", 90)
    picture(root / "a" / ".cache" / "x.png", 90)
    (root / "a" / "notes.txt").write_text("not an image")
    (root / "readme.md").write_text("not a class")
    (root / "b" / "circle").symlink_to(root / "b")
    dataset = load("folder", root, tmp_path, held_out=0.5)
    assert dataset.class_names == ("a", "b")
    assert len(dataset.train) + len(dataset.test) == 5


def test_default_image_size(tmp_path: Path) -> None:
    for name, size, expected in (("small", (5, 6), 8), ("middle", (45, 70), 48), ("large", (500, 400), 224)):
        make_classes(tmp_path / name, {"a": 2, "b": 2}, size)
        assert load("folder", tmp_path / name, tmp_path, held_out=0.5).image_size == expected
    dataset = load("folder", tmp_path / "middle", tmp_path, held_out=0.5, image_size=10)
    assert dataset.image_size == 10
    assert dataset.train.images.shape[1:] == (10, 10, 3)


def test_exif_orientation_and_transparency_in_folders(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root / "test", {"a": 1, "b": 1})
    make_classes(root / "train", {"b": 1})
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 200  # bright above; shown turned clockwise, bright on the right
    exif = Image.Exif()
    exif[0x0112] = 6
    (root / "train" / "a").mkdir()
    Image.fromarray(pixels).save(root / "train" / "a" / "0.png", exif=exif)
    Image.new("RGBA", (16, 16), (0, 0, 0, 0)).save(root / "train" / "a" / "1.png")
    images = load("folder", root, tmp_path, image_size=16).train.images
    assert (images[0, :, 12:] == 200).all()
    assert (images[0, :, :4] == 0).all()
    assert (images[1] == 255).all()


def test_changed_folders_are_decoded_again(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root, {"a": 4, "b": 4})
    before = load("folder", root, tmp_path, held_out=0.5)
    picture(root / "b" / "99.png", 222, (20, 16))
    after = load("folder", root, tmp_path, held_out=0.5)
    assert len(after.train) + len(after.test) == len(before.train) + len(before.test) + 1
    file = root / "a" / "00.png"
    picture(file, 233, (20, 16))
    os.utime(file, ns=(1, 1))
    last = load("folder", root, tmp_path, held_out=0.5)
    assert 233 in [*last.train.images[:, 0, 0, 0], *last.test.images[:, 0, 0, 0]]


def test_the_cache_beside_the_data_is_not_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EFCIL_CACHE", raising=False)
    root = tmp_path / "mine"
    make_classes(root, {"a": 2, "b": 2})
    for _ in range(2):
        assert load_dataset("folder", root, SourceOptions(held_out=0.5)).class_names == ("a", "b")
    assert (root / ".efcil-cache").is_dir()


def test_folder_faults_are_named(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root, {"a": 2, "b": 2})
    with pytest.raises(DataError, match=r"no train/ .* no held-out share .* either train/<class>/ and test/.*held_out"):
        load("folder", root, tmp_path)
    for share in (0.0, 1.0, -0.5, 20.0):
        with pytest.raises(SettingsError, match="share between 0 and 1"):
            load("folder", root, tmp_path, held_out=share)
    (root / "c").mkdir()
    (root / "c" / "notes.txt").write_text("")
    with pytest.raises(DataError, match=r"class folder .*mine/c holds no image \(recognised: \.bmp"):
        load("folder", root, tmp_path, held_out=0.5)
    (root / "d").mkdir()
    with pytest.raises(DataError, match=r"class folders .*mine/c, .*mine/d hold no image .* remove them"):
        load("folder", root, tmp_path, held_out=0.5)
    (root / "d").rmdir()
    picture(root / "c" / "0.png", 0)
    with pytest.raises(DataError, match=r"mine/c holds a single image"):
        load("folder", root, tmp_path, held_out=0.5)
    (root / "c" / "1.jpg").write_bytes((root / "c" / "0.png").read_bytes()[:60])
    with pytest.raises(DataError, match=r"mine/c/1\.jpg cannot be"):
        load("folder", root, tmp_path, held_out=0.5)
    with pytest.raises(DataError, match=r"1\.jpg is not a folder"):
        load("folder", root / "c" / "1.jpg", tmp_path, held_out=0.5)
    with pytest.raises(DataError, match="at least two classes; it has none"):
        load("folder", root / "a", tmp_path, held_out=0.5)
    with pytest.raises(SettingsError, match="image_size must be at least 1"):
        load("folder", root, tmp_path, held_out=0.5, image_size=0)


def test_faults_of_given_splits_are_named(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    make_classes(root / "train", {"a": 2, "b": 2})
    make_classes(root / "test", {"a": 2})
    with pytest.raises(DataError, match=r"test/b is missing: class 'b' has training images but no test images"):
        load("folder", root, tmp_path)
    make_classes(root / "test", {"b": 1, "c": 1})
    with pytest.raises(DataError, match=r"test/c is a class without training images"):
        load("folder", root, tmp_path)
    with pytest.raises(SettingsError, match="own test images in test/"):
        load("folder", root, tmp_path, held_out=0.5)
