"""Where images are kept: which tier has room, what is said about it, and that reading from any gives the same bits."""

from __future__ import annotations

import dataclasses
import gc
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efcil.data import tiers
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.deferred import DeferredImages, FileSupply, Shapes
from efcil.data.store import TaskImages
from efcil.data.tiers import DISK, Keeping, Kept, Room, Spool
from efcil.data.whole import WholeTaskImages, task_images
from efcil.engine import feed
from efcil.errors import DataError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
COUNT = 23


@pytest.fixture
def photographs(tmp_path: Path) -> DeferredImages:
    """Images of different shapes, the later ones larger."""
    random, paths = np.random.default_rng(0), []
    for number in range(COUNT):
        paths.append(tmp_path / f"{number}.png")
        shape = (9 + number % 5, 10 + number, 3)
        Image.fromarray(random.integers(0, 256, shape, dtype=np.uint8)).save(paths[-1])
    return DeferredImages.of(FileSupply(paths), Shapes(8, 60))


def squares() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), dtype=np.uint8)


def make(images: Any, augmentation: str, keeping: Keeping | None = None) -> TaskImages:
    return task_images(
        images,
        np.arange(COUNT) % 3,
        augmentation=make_augmentation(augmentation),
        normalisation=Normalisation((0.4, 0.5, 0.6), (0.2, 0.3, 0.4)),
        device=CPU,
        seed=1,
        name="t",
        keeping=keeping,
    )


def seen(data: TaskImages) -> list[torch.Tensor]:
    """Everything that training and statistics read."""
    view = data.view("epoch", 2, training=True)
    pieces = [data.render(view, 3, 17), data.render(view, 17, COUNT), *data.plain(), *data.augmented("prototypes")]
    return [tensor for piece in pieces for tensor in piece]


def maps_of(folder: Path) -> list[str]:
    """The files of a folder that this process has mapped."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux says which files are mapped")
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def known_room(monkeypatch: pytest.MonkeyPatch, device: int | None, host: int | None, disk: int | None) -> None:
    monkeypatch.setattr(Keeping, "measure", lambda *_: room_of(device, host, disk))


def room_of(device: int | None, host: int | None, disk: int | None) -> Room:
    return Room(device, host, lambda: disk)


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("choice", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", ["shift", "padded-resized-crop", "whole", "whole-trivial", "views"])
def test_all_tiers_give_the_same_bits(
    kind: str, choice: str, sent: bool, photographs: DeferredImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = {"whole": "resized-crop", "whole-trivial": "resized-crop-trivial", "views": "shift"}
    augmentation = changed.get(kind, kind)
    images = photographs if kind in changed else squares()
    expected = make(images, augmentation)
    assert isinstance(expected, WholeTaskImages) == kind.startswith("whole")
    wanted = seen(expected)
    data = make(images, augmentation, Keeping(choice, tmp_path / "cache"))
    assert data.kept.tier == choice
    assert data.kept.bytes == expected.kept.bytes > 0
    # As on a GPU, whose images are sent to it piece by piece.
    monkeypatch.setattr(tiers, "apart", lambda *_: sent)
    found = seen(data)
    assert len(found) == len(wanted) > 6
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("whole", [False, True])
def test_what_was_fetched_is_not_read_again(
    whole: bool, photographs: DeferredImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(photographs if whole else squares(), "resized-crop")
    views = [data.view("epoch", number) for number in range(2)]
    wanted = [data.render(view, 2, 9)[0] for view in views]
    monkeypatch.setattr(tiers, "apart", lambda *_: True)
    read: list[list[int]] = []
    gather = data._gather

    def watched(rows: torch.Tensor) -> tiers.Gathering:
        read.append(rows.tolist())
        return gather(rows)

    monkeypatch.setattr(data, "_gather", watched)
    data.fetch(views[0], 2, 9)
    assert torch.equal(data.render(views[0], 2, 9)[0], wanted[0])
    assert read == [views[0].order[2:9].tolist()]
    data.fetch(views[0], 2, 9)  # of another view than the one that is asked for then
    assert torch.equal(data.render(views[1], 2, 9)[0], wanted[1])
    assert read[1:] == [views[0].order[2:9].tolist(), views[1].order[2:9].tolist()]
    assert not data._fetched


def test_rows_are_read_from_the_host_where_images_are_apart() -> None:
    host = torch.empty(1)
    assert tiers.apart(host, CUDA)
    assert not tiers.apart(host, CPU)
    assert not tiers.apart(torch.empty(1, device="meta"), torch.device("meta"))


# -- choosing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "tier"),
    [
        (room_of(1334, 0, 0), "device"),
        (room_of(1333, 1334, 0), "host"),
        (room_of(1333, 1333, 1334), "disk"),
        (room_of(None, 0, 0), "device"),
        (room_of(0, None, 0), "host"),
    ],
)
def test_the_first_tier_with_room_is_used_and_a_quarter_stays_free(room: Room, tier: str) -> None:
    assert Keeping().choose(1, 1000, CUDA, room).tier == tier


def test_a_tier_that_is_asked_for_may_be_filled() -> None:
    room = room_of(2000, 1000, 900)
    assert Keeping("host").choose(1, 1000, CUDA, room).tier == "host"
    with pytest.raises(DataError, match=r"leave out --keep-images"):
        Keeping("disk").choose(1, 1000, CUDA, room)


def test_images_that_fit_nowhere_are_refused_with_all_numbers() -> None:
    gib = 2**30
    with pytest.raises(DataError, match=r"7 images need 9\.0 GiB .*device 1\.0 GiB, host 2\.0 GiB, disk 3\.0 GiB"):
        Keeping().choose(7, 9 * gib, CUDA, room_of(gib, 2 * gib, 3 * gib))


def test_the_disk_is_asked_once_and_only_if_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def free(folder: Path) -> int:
        asked.append(folder)
        return 1000 // len(asked)

    monkeypatch.setattr(tiers, "_free_disk", free)
    monkeypatch.setattr(tiers, "_free_host", lambda: 100)
    room = Keeping(folder=tmp_path).measure(CPU)
    Keeping().choose(1, 70, CPU, room)
    assert not asked
    assert [Keeping().choose(1, 700, CPU, room).tier for _ in range(2)] == ["disk", "disk"]
    assert asked == [tmp_path]


def test_memory_that_pytorch_holds_unused_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 1000))
    assert Keeping().measure(CUDA).device == 120


def test_host_memory_is_bounded_by_the_groups_of_the_process(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    job = groups / "jobs" / "7"
    for folder in (proc / "self", job):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/jobs/7\n")
    assert tiers._free_host(proc, groups) == 4000 * 1024
    (job / "memory.max").write_text("max\n")
    assert tiers._free_host(proc, groups) == 4000 * 1024
    for group, most in ((job, 9000), (job.parent, 7000)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("5000\n")
        (group / "memory.stat").write_text("anon 1\ninactive_file 300\n")
    assert tiers._free_host(proc, groups) == 2300
    assert tiers._free_host(tmp_path / "nothing", groups) is None


def test_without_memory_the_images_are_in_a_file(
    photographs: DeferredImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_room(monkeypatch, 10, 10, 10**9)
    monkeypatch.setenv("EFCIL_CACHE", str(tmp_path / "cache"))
    for images, augmentation in ((squares(), "shift"), (photographs, "resized-crop")):
        data = make(images, augmentation)
        assert data.kept.tier == DISK
        assert len(maps_of(tmp_path / "cache")) == 1
        assert not list((tmp_path / "cache").iterdir()), "the file has no name"
        del data
        gc.collect()
        assert not maps_of(tmp_path / "cache")


# -- images whose size is known only when they are decoded -------------------------------------------------------------


def spooled(spool: Spool, pieces: list[int]) -> tuple[torch.Tensor, Kept]:
    for number, length in enumerate(pieces):
        spool.put(np.full(length, number, np.uint8), spool.reserve([1], [length]))
    return spool.finish()


def expected_bytes(pieces: list[int]) -> torch.Tensor:
    return torch.cat([torch.full((length,), number, dtype=torch.uint8) for number, length in enumerate(pieces)])


@pytest.mark.parametrize(
    ("pieces", "tier"), [([10, 10, 10], "device"), ([10, 10, 50], "disk"), ([50, 5, 5], "disk"), ([10, 30, 10], "disk")]
)
def test_they_move_to_the_file_when_they_turn_out_too_large(
    pieces: list[int], tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_room(monkeypatch, 50, 50, 1000)  # three quarters are 37
    flat, kept = spooled(Spool(Keeping(folder=tmp_path), CPU, 3), pieces)
    assert (kept.tier, kept.bytes) == (tier, sum(pieces))
    assert torch.equal(flat, expected_bytes(pieces))
    assert bool(maps_of(tmp_path)) == (tier == DISK)


def test_they_are_refused_as_soon_as_it_is_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known_room(monkeypatch, 50, 50, 1000)
    spool = Spool(Keeping(folder=tmp_path), CPU, 3)
    with pytest.raises(DataError, match="3 images need"):
        spool.reserve([1], [251])


@pytest.mark.parametrize("whole", [False, True])
def test_a_folder_that_cannot_be_written_is_named(whole: bool, photographs: DeferredImages, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"no file for them can be written in .*file.*EFCIL_CACHE"):
        make(photographs if whole else squares(), "resized-crop", Keeping(DISK, tmp_path / "file"))


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal, sys, torch\n"
        "from efcil.data import tiers\n"
        "keeping = tiers.Keeping('disk', pathlib.Path(sys.argv[1]))\n"
        "device = torch.device('cpu')\n"
        "kept = keeping.choose(1, 1 << 20, device, keeping.measure(device))\n"
        "images = tiers.allocate((1 << 20,), kept, keeping).fill_(1)\n"
        "maps = pathlib.Path('/proc/self/maps')\n"
        "assert not maps.exists() or sys.argv[1] in maps.read_text()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "cache")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert list((tmp_path / "cache").iterdir()) == []


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_sentence_has_size_tier_room_and_peak() -> None:
    gib = 2**30
    room = room_of(4 * gib, 40 * gib, 400 * gib)
    on_host = Kept(65_000, 30 * gib, "host", room, CUDA).sentence(gib)
    assert on_host.startswith(
        "65,000 images, 30.0 GiB, are kept in host memory (40.0 GiB free). Expected peak: 1.0 GiB"
    )
    assert "30.0 GiB on the host" in on_host
    assert "31.0 GiB on the host" in Kept(65_000, 30 * gib, "host", room, CUDA).sentence(gib, gib)
    on_device = Kept(65_000, 3 * gib, "device", room, CUDA).sentence(gib)
    assert "peak: 4.0 GiB on the device and 0.0 MiB on the host" in on_device
    mapped = Kept(65_000, 30 * gib, "disk", room_of(None, None, None), CPU).sentence(gib)
    assert "kept in a file that is mapped into memory. Expected peak: 1.0 GiB" in mapped


def test_prepared_steps_are_counted_as_the_feed_has_them() -> None:
    data = make(squares(), "shift")
    # 23 images in batches of 4 are 6 steps, and the batch before them: (6 + 1) * 4 float images of 8 x 8.
    assert feed.prepared_bytes(data, 4) == 28 * 3 * 64 * 4
    assert feed.staged_bytes(data, 4) == 0


def test_images_on_their_way_to_a_gpu_are_counted() -> None:
    data = make(squares(), "shift")
    blocks = 2 * feed.prepared_bytes(data, 4)
    data.device = CUDA
    assert (feed.prepared_bytes(data, 4), feed.staged_bytes(data, 4)) == (blocks, 0)
    data.kept = dataclasses.replace(data.kept, tier="host")
    # Two pieces of all 23 images on the device, two blocks of 6 batches on the host; 192 bytes each.
    assert (feed.prepared_bytes(data, 4), feed.staged_bytes(data, 4)) == (blocks + 46 * 192, 48 * 192)
