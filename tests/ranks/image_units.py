"""What is checked of the images of a task inside every process of a run; run by forks.py."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from efcil import ranks
from efcil.activity import between_pieces
from efcil.data import ahead, decode, tiers
from efcil.data.ahead import Ahead
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.deferred import DeferredImages, FileSupply, Shapes
from efcil.data.store import TaskImages
from efcil.data.tiers import Keeping, Room
from efcil.data.whole import WholeTaskImages, task_images
from efcil.errors import DataError

CPU = torch.device("cpu")
KINDS = {"whole": "resized-crop", "views": "shift", "squares": "shift"}
ahead.CHUNK_IMAGES = 2  # so that there are several rounds


def photographs(folder: str) -> DeferredImages:
    """Return the images of a folder, in the order of their numbers."""
    paths = sorted(Path(folder).glob("*.png"), key=lambda path: int(path.stem))
    return DeferredImages.of(FileSupply(paths), Shapes(8, 60))


def make(images: Any, kind: str, keeping: Keeping | None = None, rows: np.ndarray | None = None) -> TaskImages:
    if kind == "squares":
        images = np.random.default_rng(0).integers(0, 256, (len(images), 8, 8, 3), dtype=np.uint8)
    return task_images(
        images, np.arange(len(images)) % 3, augmentation=make_augmentation(KINDS[kind]), device=CPU, seed=1, name="t",
        normalisation=Normalisation((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)), keeping=keeping, rows=rows,
    )  # fmt: skip


@contextmanager
def alone() -> Iterator[None]:
    """Be a single process."""
    world = ranks._world
    before, world.place, world.mates = (world.place, world.mates), ranks.Place(), range(0)
    try:
        yield
    finally:
        world.place, world.mates = before


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note the images that this process decodes."""
    names: list[str] = []
    original = decode.decode_image

    def watched(encoded: Any, fit: Any) -> np.ndarray:
        names.append(Path(encoded.where).stem)
        return original(encoded, fit)

    decode.decode_image = watched
    try:
        yield names
    finally:
        decode.decode_image = original


def decodes(names: list[str], images: int) -> list[int]:
    """Return how often the processes have decoded every image."""
    own = np.bincount(np.array(names, np.int64), minlength=images)
    return ranks.gather(torch.from_numpy(own)).sum(0).tolist()


def seen(data: TaskImages) -> list[Tensor]:
    """Return everything that training and statistics read."""
    view = data.view("epoch", 2, training=True)
    pieces = [data.render(view, 0, len(data)), *data.plain(), *data.augmented("prototypes")]
    if isinstance(data, WholeTaskImages):
        pieces += [(data.images.picture(row), data.images.heights) for row in range(len(data))]
    return [tensor for piece in pieces for tensor in piece]


def assert_equal(found: TaskImages, wanted: TaskImages) -> None:
    pairs = zip(seen(found), seen(wanted), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def file_behind(tensor: Tensor) -> str:
    """Return device, inode and name of the file whose map a tensor is in."""
    place = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(edge, 16) for edge in line.split()[0].split("-"))
        if low <= place < high:
            return " ".join(line.split()[3:])
    raise AssertionError


def brought_together(folder: str) -> None:
    """All processes have the images of a single one, decoded once on a machine, in one place on it."""
    images, here = photographs(folder), ranks.place()
    assert len(ranks.mates()) == here.local_size > 1
    rows = np.array([7, 1, 2, 10, 3, 4, 5, 0, 9])
    for kind in KINDS:
        for choice, which in (("device", None), ("host", rows), ("disk", rows[:1])):
            with counted() as names:
                data = make(images, kind, Keeping(choice, Path(folder) / "cache"), which)
            used = np.arange(len(images)) if which is None else which
            wanted = np.zeros(len(images))
            wanted[used] = 0 if kind == "squares" else here.size // here.local_size
            assert decodes(names, len(images)) == wanted.tolist()
            assert len(names) <= -(-len(used) // here.local_size)
            with alone():
                assert_equal(data, make(images, kind, rows=which))
            assert data.kept.tier == choice
            files = ranks.gather(torch.frombuffer(file_behind(data._pixels)[:64].ljust(64).encode(), dtype=torch.uint8))
            assert all(torch.equal(files[mate], files[here.rank]) for mate in ranks.mates())
            assert len(files.unique(dim=0)) == here.size // here.local_size
            del data
            ranks.anyone(False)
    assert not list((Path(folder) / "cache").iterdir()), "the file has no name"


def decoded_ahead(folder: str) -> None:
    """Every process decodes its part of the next task ahead, all of it or as much as there is room for."""
    images = photographs(folder)
    for whole, kind in ((True, "whole"), (False, "views")):
        for most in (0, 1200 * (1 + ranks.place().rank), 10**9):
            with counted() as names:
                early = Ahead(images.share()[1], whole, most).start()
                early.wait()
                held = early.held
                data = make(replace(images, ahead=early), kind)
            assert held <= most
            if most == 10**9:
                assert decodes(names, len(images)) == [1] * len(images)
                assert int(ranks.gather(torch.tensor(held)).sum()) == data.kept.bytes
            with alone():
                assert_equal(data, make(images, kind))


def moved_to_the_file(folder: str) -> None:
    """Images that turn out too large for memory are in one file, with all that was decoded before."""
    images = photographs(folder)
    with alone():
        wanted = make(images, "whole")
    # What fits differs from process to process: all of them take the least.
    free = wanted.kept.bytes + ranks.place().rank
    Keeping.measure = lambda *_: Room(free, free, lambda: 10**9)  # type: ignore[method-assign]
    data = make(images, "whole", Keeping(folder=Path(folder) / "cache", spare=0.2))
    assert data.kept.tier == tiers.DISK
    assert data.kept.room.host == wanted.kept.bytes
    assert "cache" in file_behind(data._pixels)
    with alone():
        assert_equal(data, wanted)


def nowhere_to_put_them(folder: str) -> None:
    """Images that fit nowhere are refused by all, and a folder that cannot be written; the first process says it."""
    images = photographs(folder)
    (Path(folder) / "file").write_bytes(b"")
    for kind in KINDS:
        with fails("no file for them can be written in .*file"):
            make(images, kind, Keeping("disk", Path(folder) / "file"))
    Keeping.measure = lambda *_: Room(9, 9, lambda: 9)  # type: ignore[method-assign]
    for kind in KINDS:
        with fails("13 images need .* but free are"):
            make(images, kind)


@contextmanager
def fails(pattern: str) -> Iterator[None]:
    with pytest.raises(DataError if ranks.first() else ranks.Followed, match=pattern if ranks.first() else None):
        yield


def broken_images(folder: str) -> None:
    """An image that one process cannot decode ends all, with the words of a single process."""
    images = photographs(folder)
    ranks.anyone(False)
    Path(images.supply.paths[12]).write_bytes(b"not an image")  # type: ignore[attr-defined]
    assert images.share()[0].tolist().count(12) == (ranks.place().rank == ranks.count() - 1)
    for kind in ("whole", "views"):
        with alone(), pytest.raises(DataError) as single:
            make(images, kind)
        with fails(re.escape(str(single.value))):
            make(images, kind)
        early = Ahead(images.share()[1], kind == "whole", 10**9).start()
        early.wait()
        with fails(re.escape(str(single.value))):
            make(replace(images, ahead=early), kind)


def stopped_together(folder: str) -> None:
    """A request to one process ends all of them after the same round."""
    images = photographs(folder)

    class Stopped(Exception):
        pass

    for kind in ("whole", "views"):
        with counted() as names:

            def check(names: list[str] = names) -> None:
                if ranks.anyone(ranks.place().rank == 1 and len(names) >= 2):
                    raise Stopped

            with pytest.raises(Stopped), between_pieces(check):
                make(images, kind)
            assert len(names) == 2


def killed(folder: str, rank: str, choice: str) -> None:
    """A process that is killed while it decodes ends all others; what they had put together is gone."""
    images, original = photographs(folder), DeferredImages.decoded
    pieces = 0

    def watched(self: DeferredImages, *given: Any) -> Any:
        nonlocal pieces
        pieces += 1
        if pieces == 2 and ranks.place().rank == int(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *given)

    DeferredImages.decoded = watched  # type: ignore[method-assign]
    with pytest.raises(ranks.Lost):
        make(images, "whole", Keeping(choice, Path(folder) / "cache"))
    os._exit(0)


def without_shared_files(folder: str) -> None:
    """Where processes cannot open each other's files, each has its own copy, and they still end together."""
    images = photographs(folder)
    assert len(ranks.mates()) > 1
    original = ranks.in_memory
    for rank, name, failure in ((1, "open", PermissionError), (0, "in_memory", DataError)):

        def refuse(*_: object, failure: type[Exception] = failure, **__: object) -> None:
            raise failure

        if ranks.place().rank == rank:
            vars(ranks)[name] = refuse
        assert ranks._found_mates() == range(0)
    ranks.in_memory = original
    ranks._world.mates = range(0)
    for kind in KINDS:
        with counted() as names:
            data = make(images, kind)
        assert len(names) == (0 if kind == "squares" else len(images))
        with alone():
            assert_equal(data, make(images, kind))
    ranks.anyone(False)
    Path(images.supply.paths[3]).write_bytes(b"not an image")  # type: ignore[attr-defined]
    ranks.anyone(False)
    with fails("3.png cannot be decoded"):
        make(images, "whole")


def threads_are_divided(folder: str) -> None:
    """The processes of a machine have its cores, and its memory, together."""
    size = ranks.place().local_size
    tiers.os.cpu_count = lambda: 16 * size  # type: ignore[attr-defined]
    assert photographs(folder).share()[1].workers == 16
    assert ahead.fewer(None) == 2
    tiers._free_host = lambda: 1000  # type: ignore[attr-defined, assignment]
    assert Keeping().measure(CPU).host == 1000
    room = Room(10**9, 10**9, lambda: 10**9)
    gib = 2**30
    said = tiers.Kept(5, 10 * gib, "host", room, torch.device("cuda")).sentence(gib, gib)
    assert f"host memory, once for {size} processes" in said
    assert f"1.0 GiB on each device and {10 + size}.0 GiB on the host" in said
    assert f"device memory, for each of {size} processes" in tiers.Kept(
        5, gib, "device", room, torch.device("cuda")
    ).sentence(0)
    assert f"peak: {10 + size}.0 GiB for images" in tiers.Kept(5, 10 * gib, "device", room, CPU).sentence(gib)
    assert f"{float(size):.1f} GiB of host memory" in ahead.sentence(gib)
