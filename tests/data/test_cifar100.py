from __future__ import annotations

import io
import os
import pickle
import sys
import tarfile
import types
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shards as shard_files
from shards import png

from efcil.data import cache
from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, cifar, load_dataset
from efcil.data.sources.cifar100 import CLASS_NAMES
from efcil.errors import DataError, SettingsError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar100"
RANDOM = np.random.default_rng(0)
TRAIN = RANDOM.integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
TEST = RANDOM.integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
TRAIN_LABELS = [3, 99, 0, 42, 42, 7, 1]
TEST_LABELS = [99, 0, 5]


def load(path: Path | None, tmp_path: Path, **options: Any) -> Dataset:
    return load_dataset("cifar100", path, SourceOptions(cache=tmp_path / "cache", **options))


def check(dataset: Dataset) -> None:
    assert np.array_equal(dataset.train.images, TRAIN)
    assert np.array_equal(dataset.test.images, TEST)
    assert dataset.train.labels.tolist() == TRAIN_LABELS
    assert dataset.test.labels.tolist() == TEST_LABELS
    assert dataset.class_names == CLASS_NAMES
    assert (dataset.name, dataset.image_size) == ("cifar100", 32)
    assert dataset.mean == (0.5071, 0.4867, 0.4408)
    assert dataset.std == (0.2675, 0.2565, 0.2761)


write_shard = partial(shard_files.write_shard, image="img", label="fine_label")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "shards"
    images = [png(image) for image in TRAIN]
    write_shard(folder / "train-00000-of-00002.parquet", images[:3], TRAIN_LABELS[:3])
    write_shard(folder / "train-00001-of-00002.parquet", images[3:], TRAIN_LABELS[3:])
    write_shard(folder / "test-00000-of-00001.parquet", [png(image) for image in TEST], TEST_LABELS)
    return folder


def test_shards(shards: Path, tmp_path: Path) -> None:
    check(load(shards, tmp_path))
    check(load(shards, tmp_path))


def test_shards_in_a_sub_folder_with_plain_binary_images_and_names(shards: Path, tmp_path: Path) -> None:
    names = [f"class {index}" for index in range(100)]
    folder = tmp_path / "hub"
    write_shard(folder / "data" / "train-0.parquet", [png(i) for i in TRAIN], TRAIN_LABELS, struct=False, names=names)
    write_shard(folder / "data" / "test-0.parquet", [png(i) for i in TEST], TEST_LABELS, struct=False)
    dataset = load(folder, tmp_path)
    assert np.array_equal(dataset.train.images, TRAIN)
    assert dataset.class_names == tuple(names)


def test_the_hubs_names_are_spelt_as_published_and_another_order_is_refused(tmp_path: Path) -> None:
    def write(names: list[str]) -> Path:
        for split, images, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
            file = tmp_path / "cifar100" / f"{split}-00000-of-00001.parquet"
            more = {"coarse_label": pa.array([0] * len(labels))}
            write_shard(file, [png(image) for image in images], labels, names=names, more=more)
        return tmp_path

    on_the_hub = ["cra" if name == "crab" else name for name in CLASS_NAMES]
    check(load(write(on_the_hub), tmp_path))
    moved = [*CLASS_NAMES[1:], CLASS_NAMES[0]]
    with pytest.raises(DataError, match=r"another order than CIFAR-100: class 0 is 'apple' and 'aquarium_fish'"):
        load(write(moved), tmp_path)


def test_a_cache_from_before_orders_were_compared_does_not_hide_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, images, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        file = tmp_path / "cifar100" / f"{split}-00000-of-00001.parquet"
        write_shard(file, [png(image) for image in images], labels, names=[*CLASS_NAMES[1:], CLASS_NAMES[0]])
    with monkeypatch.context() as earlier:
        earlier.setattr(cache, "FORMAT", 2)
        earlier.setattr(cifar, "published_names", lambda found, *_: found)
        assert load(tmp_path, tmp_path).class_names[0] == "aquarium_fish"
    with pytest.raises(DataError, match="another order than CIFAR-100"):
        load(tmp_path, tmp_path)


def test_changed_shards_are_decoded_again(shards: Path, tmp_path: Path) -> None:
    load(shards, tmp_path)
    write_shard(shards / "test-00000-of-00001.parquet", [png(image) for image in 255 - TEST], TEST_LABELS)
    assert np.array_equal(load(shards, tmp_path).test.images, 255 - TEST)


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.9])
def test_truncated_shards_are_named(shards: Path, tmp_path: Path, keep: float) -> None:
    file = shards / "train-00001-of-00002.parquet"
    os.truncate(file, int(file.stat().st_size * keep))
    with pytest.raises(DataError, match=r"train-00001-of-00002\.parquet is not a readable Parquet file"):
        load(shards, tmp_path)


def test_shards_with_a_damaged_page_are_named(shards: Path, tmp_path: Path) -> None:
    file = shards / "train-00000-of-00002.parquet"
    content = bytearray(file.read_bytes())
    content[4:60] = b"\xff" * 56  # the first page's header; the footer stays whole
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"train-00000-of-00002\.parquet"):
        load(shards, tmp_path)


def test_corrupt_images_are_named_by_shard_and_row(shards: Path, tmp_path: Path) -> None:
    images = [png(image) for image in TRAIN[3:]]
    images[3] = images[3][:200]
    write_shard(shards / "train-00001-of-00002.parquet", images, TRAIN_LABELS[3:])
    with pytest.raises(DataError, match=r"row 3 of .*train-00001-of-00002\.parquet cannot be decoded"):
        load(shards, tmp_path)


def test_other_faults_of_shards_are_named(shards: Path, tmp_path: Path) -> None:
    file = shards / "test-00000-of-00001.parquet"
    good = [png(image) for image in TEST]
    write_shard(file, [*good[:2], None], TEST_LABELS)
    with pytest.raises(DataError, match=r"row 2 of .*test-00000.* is missing"):
        load(shards, tmp_path)
    write_shard(file, good, [1, 2, None])
    with pytest.raises(DataError, match=r"label in row 2 of .*test-00000"):
        load(shards, tmp_path)
    write_shard(file, good, [1, 2, 100])
    with pytest.raises(DataError, match=r"Label 100 of image 2 in .*test-00000"):
        load(shards, tmp_path)
    write_shard(file, [*good[:2], png(TEST[0, :16, :16].copy())], TEST_LABELS)
    with pytest.raises(DataError, match=r"row 2 of .*test-00000.* is 16 x 16 pixels"):
        load(shards, tmp_path)
    pq.write_table(pa.table({"image": [b""], "fine_label": [1]}), file)
    with pytest.raises(DataError, match=r"no column 'img' \(it has image, fine_label\)"):
        load(shards, tmp_path)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(DataError, match="Git LFS pointer"):
        load(shards, tmp_path)


def test_missing_and_doubled_shards_are_named(shards: Path, tmp_path: Path) -> None:
    write_shard(shards / "copy" / "test-00000-of-00001.parquet", [png(TEST[0])], [0])
    with pytest.raises(DataError, match="several folders"):
        load(shards, tmp_path)
    (shards / "copy" / "test-00000-of-00001.parquet").unlink()
    (shards / "train-00000-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"lacks train-00000-of-00002\.parquet"):
        load(shards, tmp_path)
    (shards / "train-00001-of-00002.parquet").unlink()
    with pytest.raises(DataError, match=r"holds no train\*\.parquet"):
        load(shards, tmp_path)


class PythonTwoPickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes text, bytes and module names as Python 2 did, which is how the original files were made."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_text(self, value: str | bytes) -> None:
        raw = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + len(raw).to_bytes(4, "little") + raw)
        self.memoize(value)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = "numpy.core.multiarray" if obj.__name__ == "_reconstruct" else obj.__module__
        self.write(pickle.GLOBAL + f"{module}\n{obj.__name__}\n".encode())
        self.memoize(obj)

    dispatch[str] = save_text
    dispatch[bytes] = save_text
    dispatch[type] = save_global
    dispatch[types.BuiltinFunctionType] = save_global
    dispatch[types.FunctionType] = save_global


def dump_like_python_two(value: object) -> bytes:
    stream = io.BytesIO()
    PythonTwoPickler(stream, 2).dump(value)
    return stream.getvalue()


def batch(images: np.ndarray, labels: list[int]) -> dict[str, Any]:
    flat = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).reshape(len(images), -1)
    return {
        "filenames": ["x.png"] * len(images),
        "fine_labels": labels,
        "coarse_labels": [0] * len(images),
        "data": flat,
    }


def write_pickles(folder: Path, dump: Any) -> None:
    folder.mkdir(parents=True)
    (folder / "train").write_bytes(dump(batch(TRAIN, TRAIN_LABELS)))
    (folder / "test").write_bytes(dump(batch(TEST, TEST_LABELS)))
    (folder / "meta").write_bytes(dump({"fine_label_names": list(CLASS_NAMES), "coarse_label_names": ["x"]}))


DUMPS = {f"protocol {n}": lambda value, n=n: pickle.dumps(value, protocol=n) for n in range(6)}
DUMPS["python 2"] = dump_like_python_two


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS.keys())
def test_pickled_folder(tmp_path: Path, dump: Any) -> None:
    write_pickles(tmp_path / "here" / "cifar-100-python", dump)
    check(load(tmp_path / "here", tmp_path))
    check(load(tmp_path / "here" / "cifar-100-python", tmp_path))


def test_byte_keys_are_understood(tmp_path: Path) -> None:
    write_pickles(tmp_path / "p", lambda value: pickle.dumps({key.encode(): item for key, item in value.items()}))
    check(load(tmp_path / "p", tmp_path))


def test_a_truncated_pickle_is_called_truncated(tmp_path: Path) -> None:
    write_pickles(tmp_path / "p", dump_like_python_two)
    content = (tmp_path / "p" / "train").read_bytes()
    (tmp_path / "p" / "train").write_bytes(content[: len(content) // 3])
    with pytest.raises(DataError, match=r"train is refused: .* \(it is truncated\)"):
        load(tmp_path / "p", tmp_path)


def make_archive(tmp_path: Path) -> Path:
    write_pickles(tmp_path / "made" / "cifar-100-python", dump_like_python_two)
    archive = tmp_path / "data" / "cifar-100-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(tmp_path / "made" / "cifar-100-python", "cifar-100-python")
    return archive


def test_archive(tmp_path: Path) -> None:
    archive = make_archive(tmp_path)
    check(load(archive, tmp_path))
    check(load(archive.parent, tmp_path))


def test_truncated_and_incomplete_archives_are_named(tmp_path: Path) -> None:
    archive = make_archive(tmp_path)
    os.truncate(archive, archive.stat().st_size // 2)
    with pytest.raises(DataError, match=r"cifar-100-python\.tar\.gz is damaged or truncated"):
        load(archive, tmp_path)
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(tmp_path / "made" / "cifar-100-python" / "train", "cifar-100-python/train")
    with pytest.raises(DataError, match=r"cifar-100-python\.tar\.gz holds no file 'test'"):
        load(archive, tmp_path)


class Malicious:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


@pytest.mark.parametrize("where", ["train", "meta"])
@pytest.mark.parametrize("function", [os.system, eval, exec, getattr, np.load])
def test_malicious_pickles_are_refused_and_not_run(tmp_path: Path, where: str, function: Any) -> None:
    write_pickles(tmp_path / "p", pickle.dumps)
    marker = tmp_path / "ran"
    command = f"touch {marker}" if function is os.system else f"open({str(marker)!r}, 'w')"
    (tmp_path / "p" / where).write_bytes(pickle.dumps({"data": Malicious(function, command)}))
    with pytest.raises(DataError, match=rf"{where} is refused: .*which image data does not need"):
        load(tmp_path / "p", tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "train is refused"),
        (pickle.dumps([1, 2]), "is not a dictionary"),
        (pickle.dumps(batch(TRAIN, TRAIN_LABELS))[:500], "train is refused"),
        (pickle.dumps(batch(TRAIN, TRAIN_LABELS) | {"data": TRAIN.astype(float)}), "not one of unsigned bytes"),
        (pickle.dumps(batch(TRAIN, TRAIN_LABELS) | {"data": TRAIN[:, 0]}), "no array 'data'"),
        (pickle.dumps(batch(TRAIN, TRAIN_LABELS[:-1])), "no list 'fine_labels'"),
        (pickle.dumps(batch(TRAIN, [*TRAIN_LABELS[:-1], -1])), "Label -1 of image 6"),
        (pickle.dumps({"data": batch(TRAIN, [])["data"], "labels": TRAIN_LABELS}), "Is it CIFAR-10"),
        (pickle.dumps({"data": Malicious(np.dtype, "u1")}), "no array 'data'"),
    ],
)
def test_other_pickles_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    write_pickles(tmp_path / "p", pickle.dumps)
    (tmp_path / "p" / "train").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        load(tmp_path / "p", tmp_path)
    assert str(tmp_path / "p" / "train") in str(raised.value)


def test_missing_files_say_what_is_expected(tmp_path: Path) -> None:
    write_pickles(tmp_path / "p", pickle.dumps)
    (tmp_path / "p" / "meta").unlink()
    with pytest.raises(DataError, match=r"meta is missing\. Expected: "):
        load(tmp_path / "p", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty holds no CIFAR-100 files\. Expected: .*train\*\.parquet"):
        load(tmp_path / "empty", tmp_path)
    with pytest.raises(DataError, match=r"nowhere does not exist\. Expected: "):
        load(tmp_path / "nowhere", tmp_path)
    (tmp_path / "file.zip").write_bytes(b"")
    with pytest.raises(DataError, match=r"file\.zip is neither a folder nor the archive"):
        load(tmp_path / "file.zip", tmp_path)


def test_options_that_do_not_apply_are_refused(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="32 x 32 pixels, so image_size cannot be 64"):
        load(shards, tmp_path, image_size=64)
    with pytest.raises(SettingsError, match="share between 0 and 1"):
        load(shards, tmp_path, held_out=1.5)
    with pytest.raises(SettingsError, match="workers"):
        load(shards, tmp_path, workers=0)
    check(load(shards, tmp_path, image_size=32, workers=1))


def fake_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)


def test_without_a_path_the_shards_come_from_the_hub(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, **extra: Any) -> str:
        asked.append((repository, extra["repo_type"]))
        return str(shards)

    fake_hub(monkeypatch, download)
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    check(load_dataset("cifar100"))
    assert asked == [("uoft-cs/cifar100", "dataset")]
    assert not (shards / ".efcil-cache").exists()


def test_without_the_hub_or_a_network_the_error_says_how_to_get_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise ConnectionError("Name or service not known\nmore lines")

    fake_hub(monkeypatch, download)
    with pytest.raises(DataError, match=r"\(Name or service not known\).* Expected: .*cifar-100-python\.tar\.gz"):
        load(None, tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"needs the package huggingface_hub.* Expected: "):
        load(None, tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real CIFAR-100 shards are not beside this repository")
def test_the_first_rows_of_the_real_shards(tmp_path: Path) -> None:
    folder = tmp_path / "real"
    folder.mkdir()
    for split in ("train", "test"):
        source = sorted(SHARED.glob(f"{split}*.parquet"))[0]
        table = next(pq.ParquetFile(source).iter_batches(50))
        pq.write_table(pa.Table.from_batches([table]), folder / f"{split}-00000-of-00001.parquet")
    dataset = load(folder, tmp_path)
    assert len(dataset.train) == len(dataset.test) == 50
    assert dataset.class_names == CLASS_NAMES
    assert 60 < dataset.train.images.mean() < 180
    assert dataset.train.images.std() > 40
