"""Whole images of any shape, and the crops that are cut from them on a device.

The images of a task lie one after the other in one flat tensor of bytes. A `window` says what becomes of an image: the
box of pixels that may be read, and which places of that box the pixels of the result come from. A random crop reads its
box alone. The test view reads the whole image, as if that had been resized before the square is cut out of its centre.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil.activity import doing_in_pieces, next_piece
from efcil.compiled import compiled
from efcil.data import tiers, together
from efcil.data.augment import PIXEL_VALUES, Augmentation, Draws, Normalisation
from efcil.data.deferred import DeferredImages, Shapes
from efcil.data.store import TaskImages, View
from efcil.data.tiers import Gathering, Keeping, Kept, Spool


@dataclass(frozen=True, eq=False)
class WholeImages:
    """Images one after the other: their bytes (height x width x 3 each), first bytes, heights and widths.

    The bytes may be kept on the host (data/tiers.py); all else is on the device.
    """

    pixels: Tensor
    starts: Tensor
    heights: Tensor
    widths: Tensor
    shapes: Shapes

    def __len__(self) -> int:
        return len(self.starts)

    def picture(self, row: int) -> Tensor:
        """Return one image (3, height, width)."""
        start, height, width = (int(each[row]) for each in (self.starts, self.heights, self.widths))
        return self.pixels[start : start + 3 * height * width].view(height, width, 3).permute(2, 0, 1)

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First bytes and lengths, on the host."""
        return self.starts.cpu().numpy(), (3 * self.heights * self.widths).cpu().numpy()

    def gather(self, rows: Tensor) -> Gathering:
        """Begin to copy some images of those that are kept on the host; `rows` are on the host too."""
        starts, lengths = (each[rows.numpy()] for each in self._spans)
        return tiers.gather_spans(self.pixels, starts, lengths, self.starts.device)

    def sent(self, gathering: Gathering, rows: Tensor) -> WholeImages:
        """Return the images that were gathered, on the device; `rows`, on the device, say which they are."""
        heights, widths = self.heights[rows], self.widths[rows]
        lengths = 3 * heights * widths
        pixels = gathering.sent(self.starts.device)
        return WholeImages(pixels, torch.cumsum(lengths, 0) - lengths, heights, widths, self.shapes)

    def test_windows(self, rows: Tensor) -> Tensor:
        """Return the windows (count, 8) of the test views."""
        height, width = self.heights[rows].double(), self.widths[rows].double()
        shorter = torch.minimum(height, width)
        tall, wide = (torch.floor(self.shapes.short_side * side / shorter) for side in (height, width))
        first = [torch.round((side - self.shapes.size) / 2) for side in (tall, wide)]
        nothing = torch.zeros_like(height)
        return torch.stack([nothing, nothing, height, width, *first, height / tall, width / wide], dim=1).float()


def crop_windows(box: Tensor, size: int) -> Tensor:
    """Return the windows (count, 8) of random crops: top, left, height, width, first row and column, and scales."""
    nothing = torch.zeros(len(box), 2, device=box.device)
    return torch.cat([box, nothing, box[:, 2:] / size], dim=1)


def bring(images: DeferredImages, device: torch.device, keeping: Keeping | None = None) -> tuple[WholeImages, Kept]:
    """Decode whole images and keep them where there is room; also return where that is.

    Processes of one machine have one copy, except on GPUs, and each decodes a part of it.
    """
    count = len(images)
    mine, own = images.share()
    spans = tiers.table(count, 3)  # first byte, height and width
    spool = Spool(keeping or Keeping(), device, count, own.held)

    # The images lie in the order in which they are read, which need not be that of the rows.
    def keep(places: np.ndarray, pixels: list[np.ndarray], start: int) -> None:
        sizes = np.array([each.shape[:2] for each in pixels])
        ends = start + np.cumsum(3 * sizes.prod(axis=1))
        spans[mine[places]] = np.column_stack([[start, *ends[:-1]], sizes])
        spool.put(np.concatenate([each.reshape(-1) for each in pixels]), start)

    together.bring(own.whole(), keep, spool.reserve)
    flat, kept = spool.finish()
    starts, heights, widths = (torch.from_numpy(each.copy()).to(device) for each in np.asarray(spans).T)
    return WholeImages(flat, starts, heights, widths, images.shapes), kept


def resampled(
    images: WholeImages,
    rows: Tensor,
    windows: Tensor,
    flip: Tensor | None,
    normalisation: Normalisation,
    dtype: torch.dtype,
) -> Tensor:
    """Return network input (count, 3, size, size) for the windows of the images called `rows`."""
    if compiled(images.pixels.device):
        from efcil.data.augment_kernel import windowed_crop

        places = torch.stack([images.starts[rows], images.widths[rows]], dim=1)
        constants = normalisation.constants(images.pixels.device)
        return windowed_crop(images.pixels, places, windows, flip, images.shapes.size, *constants, dtype)
    return normalisation(plain_resampled(images, rows, windows, flip), dtype)


def plain_resampled(images: WholeImages, rows: Tensor, windows: Tensor, flip: Tensor | None) -> Tensor:
    """Return the pixel values (0 .. 255) of the windows, image by image: two small matrix products each."""
    size = images.shapes.size
    found = torch.empty(len(rows), 3, size, size, device=images.pixels.device)
    for place, (row, window) in enumerate(zip(rows.tolist(), windows, strict=True)):
        top, left, height, width = (int(edge) for edge in window[:4])
        box = images.picture(row)[:, top : top + height, left : left + width].float()
        horizontal = window_filter(window[5], window[7], size, width)
        if flip is not None and bool(flip[place]):
            horizontal = horizontal.flip(0)
        lines = (box @ horizontal.T).add_(0.5).floor_()
        found[place] = (window_filter(window[4], window[6], size, height) @ lines).add_(0.5).floor_()
    return found.clamp_(0, 255)


def window_filter(first: Tensor, scale: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return the matrix (outputs, inputs) that resamples a line: `scale` pixels for each one, from number `first` on.

    Weights are those of Pillow's bilinear filter: a triangle as wide as one source pixel when enlarging and as one
    target pixel when shrinking, truncated at the ends and normalised.
    """
    position = torch.arange(inputs, device=first.device, dtype=torch.float32) + 0.5
    centre = (first + torch.arange(outputs, device=first.device, dtype=torch.float32) + 0.5) * scale
    weight = (1 - (position - centre[:, None]).abs() / scale.clamp(min=1.0)).clamp_(min=0)
    return weight / weight.sum(dim=1, keepdim=True)


class WholeTaskImages(TaskImages):
    """The images of a task, whole: crops are cut from them, and the plain view is the test view."""

    images: WholeImages

    def _bring(
        self, images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device, keeping: Keeping
    ) -> tuple[Any, Kept]:
        assert isinstance(images, DeferredImages)
        return bring(images[rows], device, keeping)

    @property
    def _pixels(self) -> Tensor:
        return self.images.pixels

    def _gather(self, rows: Tensor) -> Gathering:
        return self.images.gather(rows)

    def _source(self, rows: Tensor, gathering: Gathering | None) -> tuple[WholeImages, Tensor]:
        """Return images on the device, and which of them `rows` are: all that were gathered, if they must be sent."""
        if gathering is None:
            return self.images, rows
        return self.images.sent(gathering, rows), torch.arange(len(rows), device=self.device)

    @property
    def size(self) -> int:
        """Height and width of the network's input in pixels."""
        return self.images.shapes.size

    def _draw(self, augmentation: Augmentation, order: Tensor, generator: torch.Generator) -> Draws:
        return augmentation.draw_whole(self.images.heights[order], self.images.widths[order], generator)

    def render(self, view: View, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return network input and labels of the images from `start` to `stop` of a view."""
        next_piece()
        chosen = view.order[start:stop]
        draws = {name: value[start:stop] for name, value in view.draws.items()}
        windows, flip = crop_windows(draws["box"], self.size), draws.get("flip")
        images, rows = self._source(chosen, self._gathering(view, start, stop))
        if view.augmentation.weak is view.augmentation:
            found = resampled(images, rows, windows, flip, self.normalisation, self.dtype)
        else:
            pixels = resampled(images, rows, windows, flip, PIXEL_VALUES, torch.float32)
            found = self.normalisation(view.augmentation.change(pixels, draws), self.dtype)
        return found, self.labels[chosen]

    def plain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of the test views of all images in stored order."""
        step = self.chunk_size()
        with doing_in_pieces("images", len(self), step) as work:
            for start in range(0, len(self), step):
                next_piece()
                rows = torch.arange(start, min(start + step, len(self)), device=self.device)
                gathering = self._gather(rows.cpu()) if self.apart else None
                images, places = self._source(rows, gathering)
                windows = self.images.test_windows(rows)
                found = resampled(images, places, windows, None, self.normalisation, self.dtype)
                yield found, self.labels[rows]
                work.done += len(rows)


def task_images(
    images: np.ndarray | DeferredImages, *arguments: Any, augmentation: Augmentation, **keywords: Any
) -> TaskImages:
    """Return the images of a task on a device: whole ones where crops can be cut from them, else squares."""
    whole = isinstance(images, DeferredImages) and augmentation.cuts_whole
    return (WholeTaskImages if whole else TaskImages)(images, *arguments, augmentation=augmentation, **keywords)
