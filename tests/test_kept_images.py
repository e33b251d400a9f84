"""Runs whose images are kept in different places: the same bits, one line that says where, and nothing left."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efcil.data import tiers
from efcil.data.ahead import Ahead
from efcil.data.deferred import DeferredImages, FileSupply, Shapes
from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.store import TaskImages, View
from efcil.engine import checkpoint, feed
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.experiment import run_one
from efcil.experiment.plan import Plan
from efcil.methods.base import Task
from efcil.model.folder import STEM
from efcil.resolution import identity, label
from efcil.runfolder import RunFolder
from efcil.settings import Settings

SHORT: dict[str, Any] = {
    "method": "efc", "scenario": "custom", "tasks": 3, "first_task_epochs": 1, "epochs": 1, "batch_size": 16,
    "device": "cpu", "augmentation": "resized-crop",
}  # fmt: skip


@pytest.fixture(scope="module", params=["squares", "whole"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A tenth of the digits, as an array or as files that are decoded when a task needs them."""
    digits = load_dataset("digits", None, SourceOptions())
    sets = [ImageSet(each.images[::8], each.labels[::8]) for each in (digits.train, digits.test)]
    if request.param == "whole":
        folder = tmp_path_factory.mktemp("photographs")
        sets = [as_files(each, folder / str(number)) for number, each in enumerate(sets)]
    return dataclasses.replace(digits, train=sets[0], test=sets[1])


def as_files(images: ImageSet, folder: Path) -> ImageSet:
    folder.mkdir()
    paths = [folder / f"{number}.png" for number in range(len(images.labels))]
    for number, path in enumerate(paths):
        picture = Image.fromarray(np.asarray(images.images[number]))
        picture.resize((10 + number % 4, 12), Image.Resampling.BILINEAR).save(path)
    return ImageSet(DeferredImages.of(FileSupply(paths), Shapes(8, 60)), images.labels)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return checkpoint.read(RunFolder(folder).model, STEM).tensors


def same(left: Path, right: Path) -> bool:
    one, other = state(left), state(right)
    tables = [{file.name: file.read_bytes() for file in folder.glob("*.csv")} for folder in (left, right)]
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one) and tables[0] == tables[1]


@pytest.fixture(scope="module")
def usual(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_one(Settings(**SHORT), tmp_path_factory.mktemp("usual"), dataset, quiet=True)


@pytest.mark.parametrize(("choice", "sent"), [("host", False), ("host", True), ("disk", False), ("disk", True)])
def test_results_do_not_depend_on_the_tier(
    choice: str, sent: bool, dataset: Dataset, usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tiers, "apart", lambda *_: sent)  # as on a GPU: rows are gathered and sent
    found = run_one(Settings(**SHORT, keep_images=choice), tmp_path / "runs", dataset, quiet=True)
    assert same(found, usual)
    where = "a file that is mapped into memory" if choice == "disk" else "memory"
    said = [line for line in (found / "log.txt").read_text().splitlines() if "are kept in" in line]
    assert len(said) == 1
    assert said[0].startswith("task 1: ")
    assert f"are kept in {where} (" in said[0]
    assert "Expected peak" in said[0]
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


@pytest.mark.parametrize("choice", ["auto", "disk"])
def test_nothing_of_an_earlier_task_is_left(
    choice: str, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("EFCIL_CACHE", str(cache))
    tasks: list[weakref.ref[TaskImages]] = []
    maps: list[int] = []
    images = Plan.images

    def watched(self: Plan, task: Task, *ahead: Any) -> TaskImages:
        gc.collect()
        assert [each() for each in tasks] == [None] * len(tasks)
        maps.append(mapped(cache))
        found = images(self, task, *ahead)
        tasks.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Plan, "images", watched)
    run_one(Settings(**SHORT, keep_images=choice), tmp_path / "runs", dataset, quiet=True)
    gc.collect()
    assert len(tasks) == 3
    assert [each() for each in tasks] == [None] * 3
    # The test images are mapped during the whole run, those of tasks never before the next one.
    assert maps == [int(choice == "disk")] * 3
    assert mapped(cache) == 0


def test_every_block_is_read_ahead_once(dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "apart", lambda *_: True)
    monkeypatch.setattr(feed, "BLOCK", 2)
    fetched: list[tuple[int, int, int]] = []
    used = 0
    fetch, gathering = TaskImages.fetch, TaskImages._gathering
    views: list[View] = []  # kept, so that no two have the same id

    def watched(self: TaskImages, view: View, start: int, stop: int) -> None:
        views.append(view)
        fetched.append((id(view), start, stop))
        fetch(self, view, start, stop)

    def counted(self: TaskImages, view: View, start: int, stop: int) -> Any:
        nonlocal used
        used += (start, stop) in self._fetched and self._fetched[start, stop][0] is view
        return gathering(self, view, start, stop)

    monkeypatch.setattr(TaskImages, "fetch", watched)
    monkeypatch.setattr(TaskImages, "_gathering", counted)
    settings = Settings(**{**SHORT, "epochs": 2, "first_task_epochs": 2}, keep_images="host")
    run_one(settings, tmp_path / "runs", dataset, quiet=True, checkpoint_steps=1)
    assert len(fetched) == len(set(fetched)) == used > 6


def mapped(folder: Path) -> int:
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux says which files are mapped")
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


# -- the next task, decoded while a task trains ----------------------------------------------------------------------


def ahead_lines(folder: Path) -> list[str]:
    return [line for line in (folder / "log.txt").read_text().splitlines() if "the next one are decoded" in line]


def decoded_in(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The files that are decoded, whole, from now on: by training, and beside it."""
    found: dict[str, list[str]] = {"ahead": [], "else": []}
    decode = DeferredImages.decoded

    def watched(self: DeferredImages, encoded: Any, whole: bool) -> Any:
        place = found["ahead" if threading.current_thread().name == "efcil-ahead" else "else"]
        place += [each.where for each in encoded if whole]
        return decode(self, encoded, whole)

    monkeypatch.setattr(DeferredImages, "decoded", watched)
    return found


def in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all images of the next task be decoded before it begins: what is tested must not depend on the clock."""
    begin = Ahead.start
    monkeypatch.setattr(Ahead, "start", lambda self: (begin(self), self.wait())[0])


def test_results_do_not_depend_on_decoding_ahead(
    dataset: Dataset, usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_time(monkeypatch)
    decoded = decoded_in(monkeypatch)
    off = run_one(Settings(**SHORT, prefetch="off"), tmp_path / "off", dataset, quiet=True)
    assert same(off, usual)
    assert ahead_lines(off) == []
    assert decoded["ahead"] == []
    everything = sorted(decoded["else"])
    decoded["else"].clear()
    ready = run_one(Settings(**SHORT), tmp_path / "ready", dataset, quiet=True)
    assert same(ready, usual)
    assert sorted(decoded["ahead"] + decoded["else"]) == everything
    if isinstance(dataset.train.images, DeferredImages):
        # All but the first of three tasks, and one line that says what it takes.
        assert len(decoded["ahead"]) > len(decoded["else"]) > 0
        assert len(ahead_lines(ready)) == 1
        assert "MiB of host memory on top" in ahead_lines(ready)[0]
    else:
        assert ahead_lines(ready) == []


def test_a_stop_ends_decoding_ahead_and_the_run_resumes(
    dataset: Dataset, usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class After(StopRequest):
        """Asks to stop at the so-manieth place where that is possible."""

        def __init__(self, looks: int) -> None:
            super().__init__()
            self.left = looks

        def agreed(self) -> bool:
            self.left -= 1
            return self.left < 0

    stops = 0
    for looks in itertools.count(1, 4):
        try:
            folder = run_one(Settings(**SHORT), tmp_path, dataset, quiet=True, stop=After(looks))
            break
        except Interrupted:
            stops += 1
            assert "efcil-ahead" not in [thread.name for thread in threading.enumerate()]
    assert stops > 2
    assert same(folder, usual)


def test_nothing_is_decoded_ahead_where_memory_is_short(
    dataset: Dataset, usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(dataset.train.images, DeferredImages):
        pytest.skip("these images are decoded already")
    monkeypatch.setattr(tiers, "_free_host", lambda *_: 60_000)  # enough for a task, not for two more
    decoded = decoded_in(monkeypatch)
    found = run_one(Settings(**SHORT), tmp_path, dataset, quiet=True)
    assert same(found, usual)
    assert decoded["ahead"] == []
    assert ahead_lines(found) == []


def test_neither_the_tier_nor_decoding_ahead_is_part_of_what_a_run_is() -> None:
    plain, chosen = Settings(**SHORT), Settings(**SHORT, keep_images="disk", prefetch="off")
    assert identity(plain) == identity(chosen)
    assert label(plain) == label(chosen)
