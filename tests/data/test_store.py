"""Images on their way to a device: which ones, in what order, and never all of them twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from efcil.activity import Activity, followed
from efcil.data import store
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.store import ImagesInPlace, TaskImages, resident

CPU = torch.device("cpu")


def pixels(count: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)


@pytest.mark.parametrize("piece", [1, 100, 1 << 28])
def test_rows_of_a_memory_map_in_pieces(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "images.npy", pixels())
    images = np.load(tmp_path / "images.npy", mmap_mode="r")
    monkeypatch.setattr(store, "CPU_PIECE_BYTES", piece)
    rows = np.array([5, 0, 6, 3])
    found, kept = resident(images, rows, CPU)
    assert (kept.tier, kept.count, kept.bytes) == ("device", 4, 4 * 48)
    assert found.is_contiguous()
    np.testing.assert_array_equal(found.permute(0, 2, 3, 1).numpy(), pixels()[rows])


def test_a_task_has_the_rows_it_is_given() -> None:
    labels = np.array([3, 1, 3, 1, 2, 3, 1])
    rows = np.flatnonzero(labels == 3)
    data = TaskImages(
        pixels(),
        labels,
        augmentation=make_augmentation("none"),
        normalisation=Normalisation((0.5,) * 3, (0.25,) * 3),
        device=CPU,
        seed=0,
        name="task",
        rows=rows,
    )
    assert data.labels.tolist() == [3, 3, 3]
    np.testing.assert_array_equal(data.images.permute(0, 2, 3, 1).numpy(), pixels()[rows])


@pytest.mark.parametrize("augmentation", ["none", "crop-flip", "resized-crop-trivial"])
def test_images_that_are_not_copied_look_the_same(augmentation: str) -> None:
    given = pixels(9)[..., ::-1]  # as from a camera that gives blue first
    given.flags.writeable = False

    def task(kind: type[TaskImages]) -> TaskImages:
        return kind(
            given,
            np.arange(9),
            augmentation=make_augmentation(augmentation),
            normalisation=Normalisation((0.5, 0.4, 0.3), (0.25, 0.2, 0.3)),
            device=CPU,
            seed=0,
            name="task",
            rows=np.array([5, 0, 0, 8, 3]),
        )

    copied, in_place = task(TaskImages), task(ImagesInPlace)
    assert np.shares_memory(in_place.images.images, given)
    assert len(in_place) == 5
    assert in_place.size == 4
    for one, other in zip(copied.plain(), in_place.plain(), strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    views = [data.render(data.view("epoch", training=True), 0, 5)[0] for data in (copied, in_place)]
    assert torch.equal(*views)


def test_a_cpu_reads_few_large_images_at_a_time() -> None:
    """A network's activations are many times its input: hundreds of photographs at once would take gigabytes."""
    images = np.zeros((20, 224, 224, 3), np.uint8)
    data = TaskImages(
        images,
        np.arange(20),
        augmentation=make_augmentation("none"),
        normalisation=Normalisation((0.5,) * 3, (0.25,) * 3),
        device=CPU,
        seed=0,
        name="task",
    )
    found = list(data.plain())
    assert [len(labels) for _, labels in found] == [6, 6, 6, 2]
    assert torch.cat([labels for _, labels in found]).tolist() == list(range(20))


@pytest.mark.parametrize(("most", "said"), [(100, "7 images"), (7, "7 images"), (6, "images 0/7")])
def test_what_is_rendered_all_at_once_has_no_counter(most: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = TaskImages(
        pixels(),
        np.zeros(7),
        augmentation=make_augmentation("none"),
        normalisation=Normalisation((0.5,) * 3, (0.25,) * 3),
        device=CPU,
        seed=0,
        name="task",
    )
    monkeypatch.setattr(data, "chunk_size", lambda: min(most, len(data)))
    for views in (data.plain(), data.augmented("prototypes")):
        activity = Activity()
        with followed(activity):
            next(views)
            assert [str(work) for work in activity.stack] == [said]
