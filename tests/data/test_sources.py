from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from sklearn.datasets import load_digits

from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import Source, SourceOptions, held_out_of, load_dataset, sources
from efcil.errors import DataError, SettingsError


def test_sources_are_found_by_existing() -> None:
    found = sources()
    assert {"cifar100", "digits", "folder", "tiny-imagenet"} <= set(found)
    for name, source in found.items():
        assert isinstance(source, Source)
        assert source.name == name
        assert "\n" not in source.description
        assert source.title
        assert source.expected.endswith(".")
        assert isinstance(source.needs_path, bool)


def test_unknown_dataset_suggests() -> None:
    with pytest.raises(SettingsError, match=r"Unknown dataset 'cifar1000'\. Did you mean 'cifar100'"):
        load_dataset("cifar1000")


def test_digits_are_the_bundled_ones() -> None:
    dataset = load_dataset("digits")
    bundled = load_digits()
    assert dataset.image_size == 8
    assert dataset.class_names == tuple("0123456789")
    assert (len(dataset.train), len(dataset.test)) == (1442, 355)
    for label in range(10):
        members = np.rint(bundled.images[bundled.target == label] * 255 / 16).astype(np.uint8)
        cut = len(members) - len(members) // 5
        for images, expected in ((dataset.train, members[:cut]), (dataset.test, members[cut:])):
            of_class = images.images[images.labels == label]
            for channel in range(3):
                assert np.array_equal(of_class[..., channel], expected)
    assert dataset.train.images.min() == 0
    assert dataset.train.images.max() == 255


def test_digits_normalisation_is_that_of_its_training_images() -> None:
    dataset = load_dataset("digits")
    pixels = dataset.train.images / 255
    assert dataset.mean == pytest.approx(pixels.mean(axis=(0, 1, 2)), abs=1e-4)
    assert dataset.std == pytest.approx(pixels.std(axis=(0, 1, 2)), abs=1e-4)


def described(images: ImageSet) -> Counter[str]:
    return Counter(
        f"{label} {image.tobytes().hex()}" for image, label in zip(images.images, images.labels, strict=True)
    )


def test_training_images_can_be_held_out_of_any_dataset() -> None:
    whole = load_dataset("digits")
    share = load_dataset("digits", None, SourceOptions(held_out=0.25))
    again = load_dataset("digits", None, SourceOptions(held_out=0.25))
    other = load_dataset("digits", None, SourceOptions(held_out=0.25, seed=1))
    counts = whole.train.class_counts(10)
    assert share.test.class_counts(10).tolist() == [round(0.25 * count) for count in counts]
    assert described(share.train) + described(share.test) == described(whole.train)
    assert np.array_equal(share.test.images, again.test.images)
    assert not np.array_equal(share.test.images, other.test.images)
    for wrong in (0.0, 1.0):
        with pytest.raises(SettingsError, match="share between 0 and 1"):
            load_dataset("digits", None, SourceOptions(held_out=wrong))


def test_a_class_of_one_image_cannot_be_held_out() -> None:
    images = ImageSet(np.zeros((3, 4, 4, 3), np.uint8), np.array([0, 0, 1]))
    dataset = Dataset("two", images, images, ("a", "b"), 4, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    with pytest.raises(DataError, match="Class 'b' has only one training image"):
        held_out_of(dataset, 0.5, 0)


def test_digits_take_no_path(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(SettingsError, match="takes no path"):
        load_dataset("digits", tmp_path_factory.mktemp("d"))


def image_set(count: int, size: int = 4, label: int = 0) -> ImageSet:
    return ImageSet(np.zeros((count, size, size, 3), np.uint8), np.full(count, label, np.int64))


def test_image_sets_count_and_check() -> None:
    images = ImageSet(np.zeros((3, 2, 2, 3), np.uint8), np.array([2, 0, 2]))
    assert len(images) == 3
    assert images.class_counts(4).tolist() == [1, 0, 2, 0]
    with pytest.raises(DataError, match="uint8 array of shape N x H x W x 3"):
        ImageSet(np.zeros((3, 2, 2, 3), np.float32), np.arange(3))
    with pytest.raises(DataError, match="one per image"):
        ImageSet(np.zeros((3, 2, 2, 3), np.uint8), np.arange(2))
    for labels in (np.arange(3, dtype=np.float32), [0.5, 1, 2]):
        with pytest.raises(DataError, match="these are float"):
            ImageSet(np.zeros((3, 2, 2, 3), np.uint8), labels)  # type: ignore[arg-type]
    for labels in (np.arange(3, dtype=np.int32), [0, 1, 2]):
        found = ImageSet(np.zeros((3, 2, 2, 3), np.uint8), labels).labels  # type: ignore[arg-type]
        assert (found.dtype, found.tolist()) == (np.dtype(np.int64), [0, 1, 2])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        (image_set(0), image_set(1), "training set of thing holds no image"),
        (image_set(1), image_set(1, size=5), "test images of thing are 5 x 5 pixels, not 4 x 4"),
        (image_set(1, label=2), image_set(1), "training labels of thing run from 2 to 2, but it has 2 classes"),
        (image_set(1), image_set(1, label=-1), "test labels of thing run from -1"),
    ],
)
def test_datasets_check_themselves(train: ImageSet, test: ImageSet, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Dataset("thing", train, test, ("a", "b"), 4, (0.0,) * 3, (1.0,) * 3)


def test_dataset_number_of_classes() -> None:
    assert Dataset("t", image_set(1), image_set(1), ("a", "b"), 4, (0.0,) * 3, (1.0,) * 3).number_of_classes == 2
