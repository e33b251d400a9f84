"""Images decoded ahead: the same pieces in the same order, within a bound, and errors where they belong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efcil.data import ahead, tiers
from efcil.data.ahead import Ahead, has_room, most_bytes, still_has_room
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.decode import Encoded
from efcil.data.deferred import DeferredImages, FileSupply, Shapes
from efcil.data.tiers import DEVICE, DISK, Keeping, Kept, Room
from efcil.data.whole import task_images
from efcil.errors import DataError

CPU = torch.device("cpu")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeferredImages:
    """Eleven photographs of several shapes, decoded two at a time."""
    monkeypatch.setattr(ahead, "CHUNK_IMAGES", 2)
    random, paths = np.random.default_rng(0), []
    for number in range(11):
        noise = random.integers(0, 256, (12 + number % 3, 10 + number, 3), dtype=np.uint8)
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(noise).save(paths[-1])
    return DeferredImages.of(FileSupply(paths), Shapes(8, 60))


def task(images: DeferredImages, whole: bool, **keywords: Any) -> Any:
    augmentation = make_augmentation("resized-crop" if whole else "crop-flip")
    return task_images(
        images, np.arange(11) % 3, augmentation=augmentation, normalisation=Normalisation((0.5,) * 3, (0.5,) * 3),
        device=CPU, seed=0, name="test", **keywords,
    )  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("most", [0, 2500, 10**9])
def test_a_task_is_the_same_however_much_was_decoded_ahead(images: DeferredImages, whole: bool, most: int) -> None:
    rows = np.array([7, 1, 2, 10, 3, 4, 5, 0])
    plain = task(images, whole, rows=rows)
    early = Ahead(images[rows], whole, most).start()
    early.wait()
    held = early.held
    found = task(replace(images, ahead=early), whole, rows=rows)
    for name in ("pixels", "starts", "heights", "widths") if whole else ():
        assert torch.equal(getattr(found.images, name), getattr(plain.images, name))
    if not whole:
        assert torch.equal(found.images, plain.images)
    view, other = found.view("epoch", 0, training=True), plain.view("epoch", 0, training=True)
    assert torch.equal(found.render(view, 0, 8)[0], plain.render(other, 0, 8)[0])
    assert early.held == 0
    assert held <= most
    assert (held > 0) == (most > 0)


def test_what_is_decoded_ahead_is_not_decoded_again(images: DeferredImages, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[str, str]] = []
    decode = DeferredImages.decoded

    def watched(self: DeferredImages, encoded: list[Encoded], whole: bool) -> Any:
        decoded.extend((threading.current_thread().name, each.where) for each in encoded)
        return decode(self, encoded, whole)

    monkeypatch.setattr(DeferredImages, "decoded", watched)
    early = Ahead(images, True, 10**9).start()
    early.wait()
    list(replace(images, ahead=early).whole())
    assert len(decoded) == len(set(decoded)) == 11
    assert {name for name, _ in decoded} == {"efcil-ahead"}


def test_other_images_than_those_decoded_are_decoded_as_ever(images: DeferredImages) -> None:
    early = Ahead(images[[1, 2]], True, 10**9).start()
    early.wait()
    both = replace(images, ahead=early)
    for other, whole in ((both[[2, 1]], True), (both[[1, 2]], False)):
        assert not early.serves(other, whole)
        plain = replace(other, ahead=None)
        pairs = zip(other._pieces(whole), plain._pieces(whole), strict=True)
        for (places, pixels), (places_too, pixels_too) in pairs:
            assert np.array_equal(places, places_too)
            assert all(np.array_equal(one, two) for one, two in zip(pixels, pixels_too, strict=True))
    assert early.serves(both[[1, 2]], True)


def test_it_stops_at_the_bound(images: DeferredImages) -> None:
    each = sum(pixels.nbytes for _, pieces in images[[0, 1]].whole() for pixels in pieces)
    early = Ahead(images, True, 3 * each).start()
    early.wait()
    assert each <= early.held <= 3 * each
    assert sum(len(places) for places, _ in early.pieces()) == 11


def test_it_stops_when_memory_becomes_short(images: DeferredImages, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [500, 500, 99, 500]
    monkeypatch.setattr(tiers, "_free_host", lambda: free.pop(0))
    early = Ahead(images, True, 10**9, lambda: still_has_room(Keeping(), 100)).start()
    early.wait()
    assert free == [500]
    assert len(early._decoded) == 2
    assert sum(len(places) for places, _ in early.pieces()) == 11


def test_an_error_is_the_one_that_it_is_without(images: DeferredImages) -> None:
    Path(images.supply.paths[5]).write_bytes(b"not an image")  # type: ignore[attr-defined]
    with pytest.raises(DataError) as plain:
        list(images.whole())
    early = Ahead(images, True, 10**9).start()
    early.wait()
    with pytest.raises(DataError) as found:
        list(replace(images, ahead=early).whole())
    assert str(found.value) == str(plain.value)


def test_an_error_of_reading_is_not_lost(images: DeferredImages) -> None:
    class Broken(FileSupply):
        def read(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, list[Encoded]]]:
            yield next(super().read(rows[:2]))
            raise DataError("The shard is damaged.")

    early = Ahead(replace(images, supply=Broken(images.supply.paths)), True, 10**9).start()  # type: ignore[attr-defined]
    early.wait()
    with pytest.raises(DataError, match="The shard is damaged"):
        list(replace(early.images, ahead=early).whole())


def test_cancelling_stops_the_thread_and_frees_the_images(images: DeferredImages) -> None:
    early = Ahead(images, True, 10**9).start()
    early.cancel()
    assert early.held == 0
    assert not early._thread.is_alive()


def test_room_is_needed_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(10**9, 1000, lambda: 10**9)
    monkeypatch.setattr(Keeping, "measure", lambda self, device, held=0: room)
    kept = Kept(10, 100, DEVICE, room, CPU)
    assert most_bytes(kept, 20) == 250
    assert has_room(Keeping(), kept, 375)
    assert not has_room(Keeping(), kept, 376)
    assert not has_room(Keeping(), replace(kept, tier=DISK), 1)
    monkeypatch.setattr(Keeping, "measure", lambda self, device, held=0: replace(room, host=None))
    assert has_room(Keeping(), kept, 10**12)


def test_images_that_wait_on_the_host_do_not_make_it_look_full(
    images: DeferredImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = Ahead(images, True, 10**9).start()
    early.wait()
    free = 2 * early.held
    monkeypatch.setattr(tiers, "_free_host", lambda: free - early.held)
    found = task(replace(images, ahead=early), True)
    assert found.kept.tier == DEVICE
    assert found.kept.room.host == free


def test_training_keeps_most_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((None, 1), (1, 1), (2, 1), (16, 2)):
        monkeypatch.setattr(ahead.os, "cpu_count", lambda cores=cores: cores)
        assert ahead.fewer(None) == threads
        assert ahead.fewer(1) == 1
