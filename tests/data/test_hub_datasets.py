"""Datasets of the Hub as Parquet files: columns, splits, names and what is ambiguous."""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shards import plain, write_shard

from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.errors import DataError, SettingsError
from efcil.resolution import resolve, validate
from efcil.runfolder import locate
from efcil.settings import Settings

NAME = "hub:somebody/flowers"
NAMES = ["daisy", "rose", "tulip"]


def write(file: Path, labels: list[int], *, size: tuple[int, int] = (12, 12), **options: Any) -> None:
    """Write a shard whose images have the colour 10 * label + the number of the row."""
    write_shard(file, [plain(10 * max(each, 0) + row, *size) for row, each in enumerate(labels)], labels, **options)


def load(path: Path | None, tmp_path: Path, name: str = NAME, **options: Any) -> Dataset:
    return load_dataset(name, path, SourceOptions(cache=tmp_path / "cache", **options))


@pytest.fixture
def flowers(tmp_path: Path) -> Path:
    folder = tmp_path / "flowers"
    write(folder / "data" / "train-00000-of-00002.parquet", [0, 1, 2, 0, 1], names=NAMES)
    write(folder / "data" / "train-00001-of-00002.parquet", [2], names=NAMES)
    write(folder / "data" / "test-00000-of-00001.parquet", [2, 0, 1], names=NAMES)
    return folder


def check(found: Dataset) -> None:
    assert found.class_names == tuple(NAMES)
    assert found.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.train.images[:, 3, 3, 0].tolist() == [0, 11, 22, 3, 14, 20]
    assert found.test.labels.tolist() == [2, 0, 1]
    assert found.test.images[:, 3, 3, 1].tolist() == [20, 1, 12]
    assert (found.name, found.image_size) == (NAME, 12)


def test_a_folder_of_parquet_files(flowers: Path, tmp_path: Path) -> None:
    check(load(flowers, tmp_path))
    check(load(flowers, tmp_path))  # from the cache
    assert load(flowers, tmp_path, image_size=8).train.images.shape == (6, 8, 8, 3)


def test_splits_named_by_folders_and_images_without_a_struct(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write(folder / "default" / "train" / "0000.parquet", [0, 1], struct=False, image="picture")
    write(folder / "default" / "validation" / "0000.parquet", [1], struct=False, image="picture")
    found = load(folder, tmp_path)
    assert found.class_names == ("0", "1")
    assert (len(found.train), len(found.test)) == (2, 1)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("flowers-train-00000-of-00001.parquet", "flowers-test-00000-of-00001.parquet"),
        ("flowers_train.parquet", "flowers_eval.parquet"),
        ("default/training/part-0.parquet", "default/val/part-0.parquet"),
    ],
)
def test_splits_are_named_as_the_hub_allows(tmp_path: Path, train: str, test: str) -> None:
    write(tmp_path / "data" / train, [0, 1, 2], names=NAMES)
    write(tmp_path / "data" / test, [2, 0], names=NAMES)
    found = load(tmp_path / "data", tmp_path)
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([0, 1, 2], [2, 0])


def test_labels_that_are_words_are_sorted(tmp_path: Path) -> None:
    contents = [plain(10 * row, 12, 12) for row in range(4)]
    more = {"caption": pa.array(["a", "b", "c", "d"])}
    write_shard(tmp_path / "a" / "train.parquet", contents, ["tulip", "rose", "iris", "rose"], more=more)
    more = {"caption": pa.array(["a", "b"])}
    write_shard(tmp_path / "a" / "test.parquet", contents[:2], ["rose", "iris"], more=more)
    found = load(tmp_path / "a", tmp_path)
    assert found.class_names == ("iris", "rose", "tulip")
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([2, 1, 0, 1], [1, 0])
    write_shard(tmp_path / "a" / "test.parquet", contents[:2], ["rose", "lily"], more=more)
    with pytest.raises(DataError, match="The split test has labels that train does not have: lily"):
        load(tmp_path / "a", tmp_path)


def test_names_that_do_not_fit_the_labels_are_refused(flowers: Path, tmp_path: Path) -> None:
    write(flowers / "data" / "test-00000-of-00001.parquet", [2, 0, 1], names=NAMES[::-1])
    with pytest.raises(DataError, match="number the classes differently: class 0 is"):
        load(flowers, tmp_path)
    write(flowers / "data" / "test-00000-of-00001.parquet", [3], names=NAMES)
    with pytest.raises(DataError, match="has the label 3, but names of only 3 classes"):
        load(flowers, tmp_path)


def test_datasets_in_another_form_are_named(tmp_path: Path) -> None:
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "a" / "data" / "train.zip").touch()
    with pytest.raises(DataError, match=r"holds no Parquet file\. It holds archives \(train\.zip\): extract them"):
        load(tmp_path / "a", tmp_path)
    (tmp_path / "a" / "data" / "1.jpg").touch()
    with pytest.raises(DataError, match=r"It holds images: .* are the dataset `folder`"):
        load(tmp_path / "a", tmp_path)
    (tmp_path / "a" / "train.arrow").touch()
    with pytest.raises(DataError, match=r"It holds Arrow files .*to_parquet"):
        load(tmp_path / "a", tmp_path)


def test_images_of_several_shapes_become_squares(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write(folder / "train-0.parquet", [0, 1], size=(40, 25))
    write(folder / "test-0.parquet", [1], size=(20, 30))
    assert load(folder, tmp_path).image_size == 24


def test_held_out_images_and_a_list_of_classes(flowers: Path, tmp_path: Path) -> None:
    found = load(flowers, tmp_path, held_out=0.5)
    assert found.train.class_counts(3).tolist() == found.test.class_counts(3).tolist() == [1, 1, 1]
    both = found.train.images[:, 0, 0, 0].tolist() + found.test.images[:, 0, 0, 0].tolist()
    assert sorted(both) == [0, 3, 11, 14, 20, 22]
    (tmp_path / "list.txt").write_text("tulip\ndaisy\n")
    two = load(flowers, tmp_path, class_list=str(tmp_path / "list.txt"))
    assert (two.class_names, two.train.labels.tolist()) == (("daisy", "tulip"), [0, 1, 0, 1])
    assert two.test.images[:, 0, 0, 0].tolist() == [20, 1]


def test_a_test_split_without_labels_gives_way_to_validation(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    write(folder / "train-0.parquet", [0, 1])
    write(folder / "test-0.parquet", [-1, -1])
    with pytest.raises(DataError, match=r"split test in .* have no label \(-1\)"):
        load(folder, tmp_path)
    write(folder / "validation-0.parquet", [1])
    assert load(folder, tmp_path).test.labels.tolist() == [1]


def test_splits_can_be_chosen(flowers: Path, tmp_path: Path) -> None:
    found = load(flowers, tmp_path, splits="test,train")
    assert (len(found.train), len(found.test)) == (3, 6)
    with pytest.raises(SettingsError, match=r"no split 'valid'; there are test, train"):
        load(flowers, tmp_path, splits="train,valid")
    with pytest.raises(SettingsError, match="cannot be both"):
        load(flowers, tmp_path, splits="train,train")
    with pytest.raises(SettingsError, match="two names with a comma"):
        load(flowers, tmp_path, splits="train")
    (flowers / "data" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataError, match=r"no split for testing; there are train\. Choose .* or set held_out"):
        load(flowers, tmp_path)
    assert len(load(flowers, tmp_path, held_out=0.5).test) == 3
    (flowers / "data" / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"lacks train-00001-of-00002\.parquet"):
        load(flowers, tmp_path, held_out=0.5)


def test_ambiguous_columns_are_named_and_can_be_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    more = {"coarse": pa.array([1, 0], pa.int64())}
    write(folder / "train-0.parquet", [0, 1], label="fine", more=more)
    write(folder / "test-0.parquet", [1, 0], label="fine", more=more)
    with pytest.raises(DataError, match=r"several columns of labels .*: fine, coarse\. .* Choose two with columns"):
        load(folder, tmp_path)
    assert load(folder, tmp_path, columns="image,coarse").train.labels.tolist() == [1, 0]
    assert load(folder, tmp_path, columns="image, fine").train.labels.tolist() == [0, 1]
    with pytest.raises(SettingsError, match=r"no column 'class'; there are image, fine, coarse"):
        load(folder, tmp_path, columns="image,class")


def test_a_column_called_label_or_said_to_be_one_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "f"
    for split in ("train", "test"):
        write(folder / f"{split}-0.parquet", [0, 1], more={"id": pa.array([8, 9], pa.int64())})
    assert load(folder, tmp_path).train.labels.tolist() == [0, 1]
    other = tmp_path / "g"
    for split in ("train", "test"):
        more = {"label": pa.array([8, 9], pa.int64())}
        write(other / f"{split}-0.parquet", [0, 1], label="flower", names=["a", "b"], more=more)
    assert load(other, tmp_path).class_names == ("a", "b")
    several = tmp_path / "h"
    for split in ("train", "test"):
        file = several / f"{split}-0.parquet"
        write(file, [0, 1], names=["a", "b"], more={"domain": pa.array([0, 0])})
        said = {"image": "Image", "domain": "ClassLabel", "label": "ClassLabel"}
        features = {name: {"_type": kind, "names": ["a", "b"]} for name, kind in said.items()}
        table = pq.read_table(file).replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )
        pq.write_table(table, file)
    assert load(several, tmp_path).train.labels.tolist() == [0, 1]


def test_numbers_of_images_are_no_labels_where_words_are(tmp_path: Path) -> None:
    for split in ("train", "test"):
        contents = [plain(row, 12, 12) for row in range(2)]
        more = {"id": pa.array([8, 9])}
        write_shard(tmp_path / "a" / f"{split}.parquet", contents, ["rose", "iris"], label="class", more=more)
    found = load(tmp_path / "a", tmp_path)
    assert (found.class_names, found.train.labels.tolist()) == (("iris", "rose"), [1, 0])


def test_a_column_that_numbers_the_images_has_no_classes(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_shard(tmp_path / "a" / f"{split}.parquet", [plain(9, 12, 12)] * 101, list(range(101)), label="id")
    with pytest.raises(DataError, match="'id' has 101 values up to 100 for 101 images; these are no classes"):
        load(tmp_path / "a", tmp_path)


def test_no_images_at_all(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    with pytest.raises(DataError, match="holds no Parquet file"):
        load(tmp_path / "f", tmp_path)
    table = pa.table({"text": ["a"], "label": pa.array([0], pa.int64())})
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / "f" / f"{split}-0.parquet")
    with pytest.raises(DataError, match=r"no column of images\. Its columns are text, label"):
        load(tmp_path / "f", tmp_path)


def test_configurations_are_chosen_by_name(flowers: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(flowers / "small" / f"{split}-0.parquet", [0, 1])
    with pytest.raises(DataError, match=r"several configurations.*: data, small\. Name one .* hub:somebody/flowers/"):
        load(flowers, tmp_path)
    small = load(flowers, tmp_path, f"{NAME}/small")
    assert (small.name, len(small.train)) == (f"{NAME}/small", 2)


def declare(folder: Path, configurations: str) -> None:
    (folder / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{configurations}---\n\n# Flowers\n")


def test_readme_declares_which_files_are_of_which_split(flowers: Path, tmp_path: Path) -> None:
    """As of many datasets of the Hub, whose files may have any names."""
    check(load(flowers, tmp_path))
    declare(flowers, "- data_files:\n    train: data/test-*\n    test: data/train-*\n")
    assert len(load(flowers, tmp_path).train) == 3  # the cached entry has the same files, but other splits
    shutil.copytree(flowers / "data", flowers / "other" / "deep")
    for name in ("train-00000-of-00002", "train-00001-of-00002"):
        (flowers / "other" / "deep" / f"{name}.parquet").unlink()
    test = "  - split: test\n    path:\n    - data/train-00001*\n"
    declare(
        flowers,
        f"- config_name: plain\n  default: true\n  data_files:\n  - split: train\n    path: data/test-*\n{test}"
        "- config_name: other\n  data_files:\n    Train: ./data/train-0000?-of-*\n    test: [other/**/t*.parquet]\n",
    )
    with pytest.raises(DataError, match=r"lacks train-00000-of-00002\.parquet"):
        load(flowers, tmp_path)
    (flowers / "data" / "train-00001-of-00002.parquet").rename(flowers / "data" / "train-00001.parquet")
    found = load(flowers, tmp_path)
    assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([2, 0, 1], [2])
    (flowers / "data" / "train-00001.parquet").rename(flowers / "data" / "train-00001-of-00002.parquet")
    other = load(flowers, tmp_path, f"{NAME}/other")
    assert (len(other.train), other.test.labels.tolist()) == (6, [2, 0, 1])


def test_a_folder_can_be_declared_and_a_readme_without_files_changes_nothing(flowers: Path, tmp_path: Path) -> None:
    write(flowers / "small" / "train-0.parquet", [0, 1])
    write(flowers / "small" / "test-0.parquet", [0, 1])
    declare(flowers, "- config_name: default\n  data_dir: data\n- config_name: small\n  data_dir: small\n")
    check(load(flowers, tmp_path))
    assert len(load(flowers, tmp_path, f"{NAME}/small").train) == 2
    declare(flowers, "- config_name: small\n")
    assert len(load(flowers, tmp_path, f"{NAME}/small").train) == 2
    (flowers / "README.md").write_text("# Flowers\n\n---\nconfigs: are explained below\n---\n")
    assert len(load(flowers, tmp_path, f"{NAME}/small").train) == 2


_SPLIT = "- data_files:\n  - split: {}\n    path: {}\n"


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        (
            _SPLIT.format("train", "images/*.parquet"),
            r"files of the split train are images/\*\.parquet, but .* holds no",
        ),
        (
            "- data_files:\n    train: data/*\n    test: data/test*\n",
            r"data/test-0\S+ to be of two splits, train and t",
        ),
        ("- config_name: a\n  data_dir: a\n- config_name: b\n  data_dir: b\n", "none of them the default: a, b"),
        ("- data_dir: a\n- config_name: default\n  data_dir: b\n", "declares a configuration twice"),
        ("- data_dir: none\n", r"the files are none/\*\*, but"),
        (_SPLIT.format("train", "../secret/*"), r"not in the folder: '\.\./secret/\*'"),
        (_SPLIT.format("train", "hf://datasets/a/b/c.parquet"), "not in the folder"),
        (_SPLIT.format("train", 3), "is not understood"),
        (_SPLIT.format(3, "data/*"), "is not understood"),
        ("- data_files: []\n", "is not understood"),
        ("- 3\n", "is not understood"),
        ("- [\n", "cannot be read"),
    ],
)
def test_what_contradicts_the_declaration_is_refused(flowers: Path, tmp_path: Path, declared: str, words: str) -> None:
    declare(flowers, declared)
    with pytest.raises(DataError, match=words):
        load(flowers, tmp_path)


@pytest.mark.parametrize("converted", [False, True])
def test_it_is_downloaded_where_there_is_no_path(
    flowers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: bool
) -> None:
    asked = []
    empty = tmp_path / "empty"
    empty.mkdir()

    def snapshot_download(repository: str, **options: Any) -> str:
        asked.append((repository, options.get("revision"), options["repo_type"], options["allow_patterns"]))
        return str(empty if converted and "revision" not in options else flowers)

    hub: Any = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    check(load(None, tmp_path))
    revisions = [None, "refs/convert/parquet"] if converted else [None]
    assert asked == [("somebody/flowers", revision, "dataset", ["*.parquet", "README.md"]) for revision in revisions]
    assert not (flowers / ".efcil-cache").exists()


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="Name the dataset of the Hub, too: hub:OWNER/NAME"):
        load_dataset("hub", tmp_path)
    for name in ("hub:", "hub:../x", "hub:a/b/c/d", "hub:a b"):
        with pytest.raises(SettingsError, match="hub:OWNER/NAME or"):
            load_dataset(name, tmp_path)
    with pytest.raises(SettingsError, match="Digits is one dataset; leave out ':x'"):
        load_dataset("digits:x")


def test_a_run_has_a_preset_and_a_folder(flowers: Path, tmp_path: Path) -> None:
    settings = validate(Settings(dataset=NAME, data=str(flowers)))
    assert locate(tmp_path, settings).path.relative_to(tmp_path).parts[0] == "hub-somebody-flowers"
    assert resolve(settings, 12).network == "resnet18-small"
    assert resolve(settings, 224).network == "resnet18"


def test_a_run(flowers: Path, tmp_path: Path) -> None:
    from efcil.cli import main

    command = f"run --dataset {NAME} --data {flowers} --network slim --epochs 1 --tasks 3 --batch-size 2 --device cpu"
    assert main([*command.split(), "--method", "finetune", "--output", str(tmp_path / "runs")]) == 0
    facts = json.loads(next((tmp_path / "runs" / "hub-somebody-flowers").rglob("summary.json")).read_text())
    assert facts["dataset"] == NAME
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert np.isfinite(facts["A_step"])
