"""Tiny-ImageNet as Parquet shards in the Hub's layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from shards import plain, write_shard

from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, sources
from efcil.errors import DataError

IDS = [f"n{number:08d}" for number in range(200)]


def write(file: Path, labels: list[int], names: list[str] | None = None) -> None:
    """Write a shard of images whose colour is the label."""
    write_shard(file, [plain(label, 64, 64) for label in labels], labels, names=names)


def load(folder: Path) -> Dataset:
    return sources()["tiny-imagenet"].load(folder, SourceOptions(cache=folder.parent / "cache"))


def test_images_labels_and_names_from_the_lists_beside_the_shards(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write(folder / "train-00000-of-00002.parquet", [0, 1, 199])
    write(folder / "train-00001-of-00002.parquet", [7])
    write(folder / "valid-00000-of-00001.parquet", [7, 0])
    (folder / "wnids.txt").write_text("\n".join(reversed(IDS)), encoding="utf-8")
    (folder / "words.txt").write_text("n00000000\tgoldfish, Carassius\nn00000007\tcrane\n", encoding="utf-8")
    found = load(folder)
    assert found.train.labels.tolist() == [0, 1, 199, 7]
    assert found.train.images[:, 5, 5, 0].tolist() == [0, 1, 199, 7]
    assert found.test.labels.tolist() == [7, 0]
    assert (found.image_size, len(found.class_names)) == (64, 200)
    assert (found.class_names[0], found.class_names[7], found.class_names[8]) == ("goldfish", "crane", "n00000008")


def test_names_of_the_schema_are_used_where_no_list_lies_beside(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write(folder / "train-0.parquet", [0, 1], IDS)
    write(folder / "validation-0.parquet", [1])
    assert load(folder).class_names == tuple(IDS)


def test_a_label_that_does_not_exist_and_a_missing_split_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train-0.parquet", [0, 200])
    write(tmp_path / "a" / "valid-0.parquet", [1])
    with pytest.raises(DataError, match=r"Label 200 of image 1 in .* is not in 0 .. 199.*Tiny-ImageNet"):
        load(tmp_path / "a")
    write(tmp_path / "b" / "train-0.parquet", [0])
    with pytest.raises(DataError, match=r"no val\*\.parquet"):
        load(tmp_path / "b")
