"""A step's batch copied by one kernel, against the same batch by PyTorch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed here; PyTorch's operations are used instead")

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.store import TaskImages
from efcil.engine.feed import Feed
from efcil.methods.base import Method, Plan, Task, Terms
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH = 4


class Drawing(Method):
    """A method that draws numbers of several types and shapes."""

    name = "drawing"

    def previous_images(self, task: Task) -> int:
        return 3

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        pixels = images.flatten(1).float()
        return {"wide": pixels[:, :5].double(), "narrow": pixels[:, :3].bfloat16(), "map": images[:, :2]}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        numbers = torch.rand(plan.steps, 2, 3, 5, generator=generator, device=generator.device)
        return {"map": numbers, "one": numbers[:, 0, 0, 0], "odd": numbers[:, 0, 0] > 0.5}

    def loss(self, batch: object) -> Terms:
        raise NotImplementedError


@pytest.mark.parametrize("index", [0, 1], ids=["first task", "later task"])
def test_the_batch_is_the_same(index: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (14, 8, 8, 3), dtype=np.uint8)
    data = TaskImages(
        images,
        np.arange(14) % 2,
        augmentation=make_augmentation("shift"),
        normalisation=Normalisation((0.5,) * 3, (0.2,) * 3),
        device=DEVICE,
        seed=0,
        name="gather",
        dtype=torch.bfloat16,
    )
    network = IncrementalNetwork(make_backbone("slim", 0)).to(DEVICE)
    feed = Feed(Drawing(network), data, Task(index, 2 * index, 2, 0, BATCH), BATCH)
    for epoch in range(2):
        steps = feed.load(epoch, 0)
        for step in range(steps):
            length, place = feed.batch_length(step), torch.tensor([step], device=DEVICE)
            found = []
            for feed.at_once in (False, True):
                found.append(feed.batch(place, length))
            plain, fast = found
            assert len(fast.images) == length + (3 if index else 0)
            assert fast.images.is_contiguous(memory_format=torch.channels_last)
            for name in ("images", "labels", "previous_labels"):
                assert torch.equal(getattr(fast, name), getattr(plain, name)), name
            for name in ("frozen", "draws"):
                mine, theirs = getattr(fast, name), getattr(plain, name)
                assert mine.keys() == theirs.keys()
                for key in mine:
                    assert torch.equal(mine[key], theirs[key]), key
                    assert mine[key].dtype == theirs[key].dtype
                    assert mine[key].shape == theirs[key].shape
    assert sorted(feed._gathered) == [2, 4]
    odd = feed._gathered[4][1].odd
    assert [part.source.dtype for part in odd] == [torch.bfloat16, torch.bool]
