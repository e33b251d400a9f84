from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from efcil.data import cache, checksum
from efcil.data.cache import Allocate, Built, Request, load_or_build, verify
from efcil.data.checksum import checksum_contents, checksum_listing
from efcil.errors import DataError


class Builder:
    """Fills arrays with known numbers and counts how often it is asked to."""

    def __init__(self, value: int = 0) -> None:
        self.calls = 0
        self.value = value

    def __call__(self, allocate: Allocate) -> Built:
        self.calls += 1
        allocate("train", 6, 4)[:] = np.arange(6 * 48).reshape(6, 4, 4, 3) % 251 + self.value
        allocate("test", 2, 4)[:] = self.value
        return Built({"train": np.arange(6), "test": np.array([5, 1])}, ("a", "b", "c", "d", "e", "f"))


@pytest.fixture
def request_(tmp_path: Path) -> Request:
    data = tmp_path / "data"
    data.mkdir()
    return Request("thing", data, "inputs-1", {"size": 4}, data)


def entries(root: Path) -> list[Path]:
    return [entry for entry in root.iterdir() if not entry.name.startswith(".")]


def test_images_are_built_once_and_mapped_read_only(tmp_path: Path, request_: Request) -> None:
    build = Builder()
    first = load_or_build(request_, tmp_path / "cache", build)
    second = load_or_build(request_, tmp_path / "cache", build)
    assert build.calls == 1
    for decoded in (first, second):
        assert isinstance(decoded.train.images, np.memmap)
        assert not decoded.train.images.flags.writeable
        assert decoded.train.images.shape == (6, 4, 4, 3)
        assert decoded.train.images.reshape(-1).tolist() == [i % 251 for i in range(288)]
        assert decoded.test.labels.tolist() == [5, 1]
        assert decoded.test.labels.dtype == np.int64
        assert decoded.class_names == ("a", "b", "c", "d", "e", "f")
    (entry,) = entries(tmp_path / "cache")
    manifest = json.loads((entry / "manifest.json").read_text())
    assert manifest["format"] == cache.FORMAT
    assert manifest["inputs"] == "inputs-1"
    assert manifest["files"]["train/images.npy"]["shape"] == [6, 4, 4, 3]
    verify(entry)


def test_changed_inputs_are_decoded_again_and_replace_the_entry(tmp_path: Path, request_: Request) -> None:
    old = load_or_build(request_, tmp_path / "cache", Builder(0))
    changed = replace(request_, inputs="inputs-2")
    new = load_or_build(changed, tmp_path / "cache", Builder(3))
    assert new.test.images.max() == 3
    assert old.test.images.max() == 0  # a map that is in use outlives the entry
    assert len(entries(tmp_path / "cache")) == 1
    again = Builder(9)
    assert load_or_build(changed, tmp_path / "cache", again).test.images.max() == 3
    assert again.calls == 0


def test_other_settings_and_other_data_have_entries_of_their_own(tmp_path: Path, request_: Request) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for wanted in (request_, replace(request_, settings={"size": 5}), replace(request_, data=other)):
        build = Builder()
        load_or_build(wanted, tmp_path / "cache", build)
        assert build.calls == 1
    assert len(entries(tmp_path / "cache")) == 3


def test_an_entry_of_another_format_is_not_used(
    tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_build(request_, tmp_path / "cache", Builder())
    (entry,) = entries(tmp_path / "cache")
    manifest = json.loads((entry / "manifest.json").read_text())
    del manifest["checksum"]
    (entry / "manifest.json").write_text(cache._manifest_text(manifest | {"format": 0}))
    build = Builder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is no damage
        load_or_build(request_, tmp_path / "cache", build)
    assert build.calls == 1


def flip_byte(file: Path, position: int) -> None:
    with open(file, "r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train/images.npy", cut),
        ("train/images.npy", lambda file: flip_byte(file, 200)),
        ("test/labels.npy", lambda file: flip_byte(file, 130)),
        ("test/images.npy", os.remove),
        ("manifest.json", cut),
        ("manifest.json", os.remove),
        ("manifest.json", lambda file: file.write_text("[]")),
    ],
)
def test_damage_is_noticed_and_repaired(tmp_path: Path, request_: Request, name: str, damage: object) -> None:
    load_or_build(request_, tmp_path / "cache", Builder())
    (entry,) = entries(tmp_path / "cache")
    if name == "manifest.json" and damage is cut:  # without its last line break it is still whole
        cut(entry / name)
    damage(entry / name)  # type: ignore[operator]
    with pytest.raises(DataError, match="Delete"):
        verify(entry)
    build = Builder()
    with pytest.warns(UserWarning, match="decoded again") as warned:
        decoded = load_or_build(request_, tmp_path / "cache", build)
    assert len(warned) == 1
    assert build.calls == 1
    assert decoded.train.images.reshape(-1).tolist() == [i % 251 for i in range(288)]
    verify(entry)
    load_or_build(request_, tmp_path / "cache", build)
    assert build.calls == 1


def test_large_files_are_checked_by_blocks_on_load_and_fully_by_verify(
    tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "FULL_CHECK_BYTES", 0)
    monkeypatch.setattr(checksum, "SAMPLED_BLOCKS", 3)
    monkeypatch.setattr(checksum, "BLOCK_BYTES", 16)
    load_or_build(request_, tmp_path / "cache", Builder())
    (entry,) = entries(tmp_path / "cache")
    file = entry / "train" / "images.npy"
    flip_byte(file, 150)  # between the blocks at 0, 200 and 400
    build = Builder()
    load_or_build(request_, tmp_path / "cache", build)
    assert build.calls == 0
    with pytest.raises(DataError, match=r"images\.npy is not what was written"):
        verify(entry)
    flip_byte(file, file.stat().st_size - 1)
    with pytest.warns(UserWarning, match="checksum differs"):
        load_or_build(request_, tmp_path / "cache", build)
    assert build.calls == 1


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path, request_: Request) -> None:
    def build(allocate: Allocate) -> Built:
        allocate("train", 6, 4)
        raise DataError("broken image")

    with pytest.raises(DataError, match="broken image"):
        load_or_build(request_, tmp_path / "cache", build)
    assert entries(tmp_path / "cache") == []
    assert list((tmp_path / "cache").glob(".*.building*")) == []
    assert load_or_build(request_, tmp_path / "cache", Builder()).test.labels.tolist() == [5, 1]


def test_what_a_killed_process_left_is_removed(tmp_path: Path, request_: Request) -> None:
    load_or_build(request_, tmp_path / "cache", Builder())
    (entry,) = entries(tmp_path / "cache")
    shutil.rmtree(entry)
    leftover = tmp_path / "cache" / f".{entry.name}.killed.building"
    (leftover / "train").mkdir(parents=True)
    load_or_build(request_, tmp_path / "cache", Builder())
    assert not leftover.exists()


def test_where_entries_are_kept(tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EFCIL_CACHE", raising=False)
    load_or_build(request_, None, Builder())
    assert len(entries(request_.data / ".efcil-cache")) == 1
    load_or_build(replace(request_, beside=None), None, Builder())
    assert len(entries(tmp_path / "home" / ".cache" / "efcil")) == 1
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "environment"))
    load_or_build(request_, None, Builder())
    assert len(entries(tmp_path / "environment")) == 1
    load_or_build(request_, tmp_path / "asked", Builder())
    assert len(entries(tmp_path / "asked")) == 1


def test_an_entry_beside_the_data_moves_with_it(
    tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EFCIL_CACHE", raising=False)
    load_or_build(request_, None, Builder())
    moved = request_.data.rename(tmp_path / "moved")
    build = Builder()
    load_or_build(replace(request_, data=moved, beside=moved), None, build)
    assert build.calls == 0


def test_read_only_data_is_left_alone_and_the_home_cache_used(
    tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("EFCIL_CACHE", raising=False)
    request_.data.chmod(0o555)
    try:
        load_or_build(request_, None, Builder())
        assert list(request_.data.iterdir()) == []
        assert len(entries(tmp_path / "home" / ".cache" / "efcil")) == 1
    finally:
        request_.data.chmod(0o755)


def test_without_a_writable_folder_images_stay_in_memory_with_a_warning(tmp_path: Path, request_: Request) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="kept in memory only.*EFCIL_CACHE"):
        decoded = load_or_build(request_, tmp_path / "file" / "cache", Builder())
    assert decoded.train.images.reshape(-1).tolist() == [i % 251 for i in range(288)]
    assert not decoded.train.images.flags.writeable


def test_a_full_disk_falls_back_to_memory(tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.warns(UserWarning, match="No space left on device"):
        decoded = load_or_build(request_, tmp_path / "cache", Builder())
    assert len(decoded.train) == 6
    assert entries(tmp_path / "cache") == []
    assert list((tmp_path / "cache").glob(".*.building*")) == []


PROCESSES = 3


def _load_in_process(request: Request, root: Path, locks: bool) -> tuple[int, int]:
    if not locks:
        cache.fcntl = None  # type: ignore[assignment]
    build = Builder()
    (request.data / f"ready-{os.getpid()}").touch()
    for _ in range(2000):  # so that all begin together, however long each took to start
        if len(list(request.data.glob("ready-*"))) == PROCESSES:
            break
        time.sleep(0.005)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decoded = load_or_build(request, root, build)
    return build.calls, int(decoded.train.images.astype(np.int64).sum())


@pytest.mark.parametrize("locks", [True, False])
def test_processes_that_want_the_same_entry_at_once(tmp_path: Path, request_: Request, locks: bool) -> None:
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(_load_in_process, request_, tmp_path / "cache", locks) for _ in range(PROCESSES)]
        found = [future.result(timeout=600) for future in waiting]
    assert {total for _, total in found} == {sum(i % 251 for i in range(288))}
    if locks:
        assert sum(calls for calls, _ in found) == 1
    (entry,) = entries(tmp_path / "cache")
    verify(entry)
    assert list((tmp_path / "cache").glob(".*.building*")) == []


def test_an_equal_entry_of_another_process_is_kept(
    tmp_path: Path, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "fcntl", None)
    root = tmp_path / "cache"
    made_meanwhile = []

    def build(allocate: Allocate) -> Built:
        load_or_build(request_, root, Builder())
        made_meanwhile.extend((entry, entry.stat().st_ino) for entry in entries(root))
        return Builder()(allocate)

    decoded = load_or_build(request_, root, build)
    ((entry, inode),) = made_meanwhile
    assert entry.stat().st_ino == inode
    assert entries(root) == [entry]
    assert decoded.train.images.reshape(-1).tolist() == [i % 251 for i in range(288)]


def test_checksum_of_contents_sees_contents_and_names_only(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one")
    before = checksum_contents([file], tmp_path)
    os.utime(file, ns=(1, 1))
    assert checksum_contents([file], tmp_path) == before
    file.write_bytes(b"two")
    assert checksum_contents([file], tmp_path) != before
    file.write_bytes(b"one")
    assert checksum_contents([file.rename(tmp_path / "b")], tmp_path) != before
    with pytest.raises(DataError, match="gone"):
        checksum_contents([tmp_path / "gone"], tmp_path)


def test_checksum_of_a_listing_sees_names_sizes_and_times(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(b"one")
    other.write_bytes(b"")
    os.utime(file, ns=(1, 1))
    before = checksum_listing([file, other], tmp_path)
    assert checksum_listing([other, file], tmp_path) == before
    assert checksum_listing([file], tmp_path) != before
    os.utime(file, ns=(1, 2))
    assert checksum_listing([file, other], tmp_path) != before
    file.write_bytes(b"longer")
    os.utime(file, ns=(1, 1))
    assert checksum_listing([file, other], tmp_path) != before
    with pytest.raises(DataError, match="gone"):
        checksum_listing([tmp_path / "gone"], tmp_path)
