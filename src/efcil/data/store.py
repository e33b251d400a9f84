"""The images a task may see, resident on the training device as one uint8 tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil import seeds
from efcil.activity import doing
from efcil.data.augment import Augmentation, Draws, Normalisation
from efcil.data.deferred import DeferredImages
from efcil.errors import DataError

PIECE_BYTES = 1 << 28
#: Which views of images give the statistics of classes: plain, or augmented once.
VIEWS = ("plain", "augmented")


def resident(images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device) -> Tensor:
    """Return rows of `images` (N, h, w, 3), a memory map or not decoded yet, as a tensor (n, 3, h, w) on a device.

    They are copied in parts, so that only the result is in memory as a whole.
    """
    _, height, width, channels = images.shape
    bytes_each = height * width * channels
    if device.type == "cuda":
        _refuse_too_many(len(rows), bytes_each, device)
    out = torch.empty((len(rows), channels, height, width), dtype=torch.uint8, device=device)
    if isinstance(images, DeferredImages):  # in the order in which they are read fastest
        for places, pixels in images[rows].views():
            out[torch.from_numpy(places).to(device)] = torch.from_numpy(pixels).to(device).permute(0, 3, 1, 2)
        return out
    step = max(1, PIECE_BYTES // bytes_each)
    for start in range(0, len(rows), step):
        piece = torch.from_numpy(np.ascontiguousarray(images[rows[start : start + step]], dtype=np.uint8))
        out[start : start + step] = piece.to(device).permute(0, 3, 1, 2)
    return out


def free_bytes(device: torch.device) -> int:
    """Return how many bytes of a GPU are free, including those that PyTorch holds and does not use."""
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reusable


def _refuse_too_many(count: int, bytes_each: int, device: torch.device) -> None:
    free = free_bytes(device)
    if count * bytes_each > free:
        raise DataError(
            f"{count:,} images must fit on {device} together, {count * bytes_each / 2**30:.1f} GiB, but it has "
            f"{free / 2**30:.1f} GiB free. Make the images or the tasks smaller, or free the GPU."
        )


@dataclass(frozen=True)
class View:
    """One augmented view of all images: their order, the random numbers of each, and what these are for."""

    order: Tensor
    draws: Draws
    augmentation: Augmentation


class TaskImages:
    """Images (n, 3, size, size) and labels (n,) of one task on a device, with augmentation and normalisation.

    Labels are positions in the class order. `rows` selects from the given images and labels; the default is all.
    Nothing here is ever saved: when a task ends, its images are freed.
    """

    def __init__(
        self,
        images: np.ndarray | DeferredImages,
        labels: np.ndarray,
        *,
        augmentation: Augmentation,
        normalisation: Normalisation,
        device: torch.device,
        seed: int,
        name: str,
        dtype: torch.dtype = torch.float32,
        rows: np.ndarray | None = None,
    ) -> None:
        rows = np.arange(len(labels)) if rows is None else rows
        self.images: Any = self._bring(images, rows, device)
        self.labels = torch.from_numpy(np.asarray(labels, dtype=np.int64)[rows]).to(device)
        self.augmentation = augmentation
        self.normalisation = normalisation
        self.device = device
        self.dtype = dtype
        self._seed = seed
        self._name = name

    def _bring(self, images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device) -> Any:
        return resident(images, rows, device)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> int:
        """Height and width of the images in pixels."""
        return self.images.shape[-1]

    def view(self, purpose: str, index: int = 0, *, training: bool = False) -> View:
        """Return the shuffled, augmented view called (purpose, index); the same name always gives the same view.

        A view for training is a strong one where the augmentation is; all others are weak.
        """
        augmentation = self.augmentation if training else self.augmentation.weak
        generator = seeds.generator(self.device, self._seed, self._name, purpose, index)
        order = torch.randperm(len(self), generator=generator, device=self.device)
        return View(order, self._draw(augmentation, order, generator), augmentation)

    def _draw(self, augmentation: Augmentation, order: Tensor, generator: torch.Generator) -> Draws:
        return augmentation.draw(len(order), self.size, generator)

    def render(self, view: View, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return network input and labels of the images from `start` to `stop` of a view."""
        chosen = view.order[start:stop]
        draws = {name: value[start:stop] for name, value in view.draws.items()}
        images = view.augmentation.render(self.images, chosen, draws, self.normalisation, self.dtype)
        return images, self.labels[chosen]

    def chunk_size(self, limit: int = 1 << 28) -> int:
        """Return how many images may be rendered together so that one float copy stays within `limit` bytes."""
        return max(1, min(len(self), limit // (4 * 3 * self.size * self.size), 2048))

    def augmented(self, purpose: str, index: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of one augmented view of all images, a weak one where training is strong."""
        view, step = self.view(purpose, index), self.chunk_size()
        with doing("images", len(self)) as work:
            for start in range(0, len(self), step):
                work.done = start
                yield self.render(view, start, min(start + step, len(self)))

    def seen(self, views: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of all images: `plain`, or the `augmented` view that prototypes are made of."""
        return self.plain() if views == "plain" else self.augmented("prototypes")

    def plain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of all images in stored order, without augmentation."""
        step = self.chunk_size()
        with doing("images", len(self)) as work:
            for start in range(0, len(self), step):
                work.done = start
                stop = min(start + step, len(self))
                yield self.normalisation(self.images[start:stop], self.dtype), self.labels[start:stop]
