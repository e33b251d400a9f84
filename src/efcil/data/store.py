"""The images a task may see, as one uint8 tensor: on the training device, or where there is room (tiers.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil import ranks, seeds
from efcil.activity import doing_in_pieces, next_piece
from efcil.data import tiers, together
from efcil.data.augment import Augmentation, Draws, Normalisation
from efcil.data.deferred import DeferredImages
from efcil.data.tiers import DEVICE, Gathering, Keeping, Kept

PIECE_BYTES = 1 << 28
#: A CPU is fastest when the activations of a batch stay near it: six images of 224 pixels.
CPU_PIECE_BYTES = 1 << 22
#: Which views of images give the statistics of classes: plain, or augmented once.
VIEWS = ("plain", "augmented")


def resident(
    images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device, keeping: Keeping | None = None
) -> tuple[Tensor, Kept]:
    """Return rows of `images` (N, h, w, 3), a memory map or not decoded yet, as a tensor (n, 3, h, w), and where it is.

    They are copied in parts, so that only the result is in memory as a whole. Processes of one machine have one copy,
    except on GPUs, and each brings a part of it.
    """
    keeping = keeping or Keeping()
    _, height, width, channels = images.shape
    bytes_each = height * width * channels
    held = images.held if isinstance(images, DeferredImages) else 0
    kept = keeping.choose(len(rows), len(rows) * bytes_each, device, keeping.agreed(device, held))
    first = tiers.collected(kept) if isinstance(images, DeferredImages) else kept
    out = tiers.allocate((len(rows), channels, height, width), first, keeping)

    def keep(places: Any, pixels: np.ndarray, _: int) -> None:
        out[places] = torch.from_numpy(pixels).to(out.device).permute(0, 3, 1, 2)

    if isinstance(images, DeferredImages):  # in the order in which they are read fastest
        mine, own = images[rows].share()
        pieces = ((torch.from_numpy(mine[places]).to(out.device), pixels) for places, pixels in own.views())
        together.bring(pieces, keep)
        return out.to(device) if kept.tier == DEVICE else out, kept
    mine = ranks.part(len(rows)) if tiers.common(kept) else slice(0, len(rows))
    # Small parts where they stay in host memory, so that they hardly add to it.
    step = max(1, (CPU_PIECE_BYTES if out.device.type == "cpu" else PIECE_BYTES) // bytes_each)
    slices = (slice(start, min(start + step, mine.stop)) for start in range(mine.start, mine.stop, step))
    together.bring(((each, np.ascontiguousarray(images[rows[each]], np.uint8)) for each in slices), keep)
    return out, kept


@dataclass(frozen=True)
class View:
    """One augmented view of all images: their order, the random numbers of each, and what these are for."""

    order: Tensor
    draws: Draws
    augmentation: Augmentation

    @cached_property
    def order_on_host(self) -> Tensor:
        """The order, for images that are kept on the host."""
        return self.order.cpu()

    def of(self, rows: Tensor) -> View:
        """Return a view of some rows of this one, perhaps more than once, each with the same random numbers."""
        return View(self.order[rows], {name: value[rows] for name, value in self.draws.items()}, self.augmentation)


class TaskImages:
    """Images (n, 3, size, size) and labels (n,) of one task for a device, with augmentation and normalisation.

    The images are where there is room for them (`kept`); what is rendered is on the device and does not depend on that.
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
        keeping: Keeping | None = None,
    ) -> None:
        rows = np.arange(len(labels)) if rows is None else rows
        found: tuple[Any, Kept] = self._bring(images, rows, device, keeping or Keeping())
        self.images, self.kept = found
        self.labels = torch.from_numpy(np.asarray(labels, dtype=np.int64)[rows]).to(device)
        self.augmentation = augmentation
        self.normalisation = normalisation
        self.device = device
        self.dtype = dtype
        self._seed = seed
        self._name = name
        self._fetched: dict[tuple[int, int], tuple[View, Gathering]] = {}

    def _bring(
        self, images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device, keeping: Keeping
    ) -> tuple[Any, Kept]:
        return resident(images, rows, device, keeping)

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
        next_piece()
        chosen = view.order[start:stop]
        draws = {name: value[start:stop] for name, value in view.draws.items()}
        kept, rows = self.images, chosen
        if (gathering := self._gathering(view, start, stop)) is not None:
            kept = gathering.sent(self.device)
            rows = torch.arange(len(chosen), device=self.device)
        images = view.augmentation.render(kept, rows, draws, self.normalisation, self.dtype)
        return images, self.labels[chosen]

    # -- images that are kept on the host, for another device -----------------------------------------------------

    @property
    def apart(self) -> bool:
        """Whether images are elsewhere than the device that computes, so that they are sent to it in pieces."""
        return tiers.apart(self._pixels, self.device)

    @property
    def _pixels(self) -> Tensor:
        return self.images

    def _gather(self, rows: Tensor) -> Gathering:
        return tiers.gather(self.images, rows, self.device)

    def fetch(self, view: View, start: int, stop: int) -> None:
        """Begin to gather images that will be rendered, beside other work; without this, `render` waits for them."""
        if self.apart:
            self._fetched[start, stop] = view, self._gather(view.order_on_host[start:stop])

    def _gathering(self, view: View, start: int, stop: int) -> Gathering | None:
        """Return the images of a view that must be sent, gathered or about to be; None if they are on the device."""
        if not self.apart:
            return None
        fetched_view, gathering = self._fetched.pop((start, stop), (None, None))
        if gathering is None or fetched_view is not view:
            return self._gather(view.order_on_host[start:stop])
        return gathering

    def chunk_size(self) -> int:
        """Return how many images are rendered together, so that one float copy of them stays small."""
        limit = CPU_PIECE_BYTES if self.device.type == "cpu" else PIECE_BYTES
        return max(1, min(len(self), limit // (4 * 3 * self.size * self.size), 2048))

    def augmented(self, purpose: str, index: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of one augmented view of all images, a weak one where training is strong."""
        with doing_in_pieces("images", len(self), self.chunk_size()) as work:
            for images, labels in self.rendered(self.view(purpose, index)):
                yield images, labels
                work.done += len(labels)

    def rendered(self, view: View) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of a view."""
        count, step = len(view.order), self.chunk_size()
        for start in range(0, count, step):
            yield self.render(view, start, min(start + step, count))

    def seen(self, views: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of all images: `plain`, or the `augmented` view that prototypes are made of."""
        return self.plain() if views == "plain" else self.augmented("prototypes")

    def plain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of all images in stored order, without augmentation."""
        step = self.chunk_size()
        with doing_in_pieces("images", len(self), step) as work:
            for start in range(0, len(self), step):
                next_piece()
                work.done = start
                stop = min(start + step, len(self))
                pixels = self.images[start:stop].to(self.device)
                yield self.normalisation(pixels, self.dtype), self.labels[start:stop]


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Rows of images (N, h, w, 3), perhaps repeated, as a tensor (n, 3, h, w) that is read when it is indexed."""

    images: np.ndarray
    rows: Tensor
    device = torch.device("cpu")

    def __getitem__(self, places: Any) -> Tensor:
        chosen = self.images[self.rows[places].numpy()]
        return torch.from_numpy(np.ascontiguousarray(chosen, np.uint8)).permute(0, 3, 1, 2)

    @property
    def shape(self) -> tuple[int, ...]:
        _, height, width, channels = self.images.shape
        return len(self.rows), channels, height, width


class ImagesInPlace(TaskImages):
    """Images of a task that are in memory already, for a CPU: they are read where they are, not copied first."""

    def _bring(
        self, images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device, keeping: Keeping
    ) -> tuple[Any, Kept]:
        assert isinstance(images, np.ndarray)
        kept = Kept(len(rows), 0, DEVICE, keeping.measure(device), device)
        return _Chosen(images, torch.from_numpy(rows)), kept
