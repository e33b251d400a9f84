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


def test_the_files_of_the_hub_have_a_checksum_in_their_names(tmp_path: Path) -> None:
    write(tmp_path / "data" / "train-00000-of-00001-1359597a978bc4fa.parquet", [0, 1], IDS)
    write(tmp_path / "data" / "valid-00000-of-00001-70d52db3c749a935.parquet", [1], IDS)
    assert load(tmp_path).test.labels.tolist() == [1]
    write(tmp_path / "gap" / "train-00000-of-00002-1359597a978bc4fa.parquet", [0, 1], IDS)
    write(tmp_path / "gap" / "valid-00000-of-00001-70d52db3c749a935.parquet", [1], IDS)
    with pytest.raises(DataError, match=r"lacks train-00001-of-00002\.parquet"):
        load(tmp_path / "gap")


@pytest.mark.parametrize("other", ["train-00000-of-00001-70d52db3c749a935", "train-00000-of-00002", "train"])
def test_parts_of_two_copies_are_not_read_together(tmp_path: Path, other: str) -> None:
    write(tmp_path / "train-00000-of-00001-1359597a978bc4fa.parquet", [0, 1])
    write(tmp_path / f"{other}.parquet", [0, 1])
    write(tmp_path / "valid-00000-of-00001.parquet", [1])
    with pytest.raises(DataError, match=r"several copies of a split: train.*, train.*\. Keep those of one copy"):
        load(tmp_path)


def test_the_hubs_converted_copy_has_a_folder_for_each_split(tmp_path: Path) -> None:
    write(tmp_path / "default" / "train" / "0000.parquet", [0, 1], IDS)
    write(tmp_path / "default" / "valid" / "0000.parquet", [1], IDS)
    assert (load(tmp_path).train.labels.tolist(), load(tmp_path).test.labels.tolist()) == ([0, 1], [1])
    (tmp_path / "default" / "train").rename(tmp_path / "default" / "partial-train")
    with pytest.raises(DataError, match="partial-train holds only the first gigabytes of a split"):
        load(tmp_path)


def test_another_order_of_the_classes_is_refused(tmp_path: Path) -> None:
    other = [IDS[1], IDS[0], *IDS[2:]]
    write(tmp_path / "a" / "train-0.parquet", [0, 1], other)
    write(tmp_path / "a" / "valid-0.parquet", [1], other)
    (tmp_path / "a" / "wnids.txt").write_text("\n".join(IDS), encoding="utf-8")
    with pytest.raises(DataError, match=r"another order than Tiny-ImageNet .*class 0 is 'n00000000' and 'n00000001'"):
        load(tmp_path / "a")
    write(tmp_path / "b" / "train-0.parquet", [0, 1], IDS)
    write(tmp_path / "b" / "valid-0.parquet", [1], other)
    with pytest.raises(DataError, match=r"train-0.* and .*valid-0.* number the classes differently"):
        load(tmp_path / "b")


def test_names_that_are_no_ids_belong_to_the_labels_as_they_are(tmp_path: Path) -> None:
    words = [f"thing {999 - number}" for number in range(200)]
    write(tmp_path / "train-0.parquet", [0, 1], words)
    write(tmp_path / "valid-0.parquet", [1])
    assert load(tmp_path).class_names == tuple(words)


def test_a_label_that_does_not_exist_and_a_missing_split_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a" / "train-0.parquet", [0, 200])
    write(tmp_path / "a" / "valid-0.parquet", [1])
    with pytest.raises(DataError, match=r"Label 200 of image 1 in .* is not in 0 .. 199.*Tiny-ImageNet"):
        load(tmp_path / "a")
    write(tmp_path / "b" / "train-0.parquet", [0])
    with pytest.raises(DataError, match=r"no validation\*\.parquet file.*there are train"):
        load(tmp_path / "b")
