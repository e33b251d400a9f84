"""Whole images of any shape on a device, and the crops that are cut from them.

The images of a task lie one after the other in one flat tensor of bytes. A `window` says what becomes of an image: the
box of pixels that may be read, and which places of that box the pixels of the result come from. A random crop reads its
box alone. The test view reads the whole image, as if that had been resized before the square is cut out of its centre.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efcil.activity import doing
from efcil.compiled import compiled
from efcil.data.augment import PIXEL_VALUES, Augmentation, Draws, Normalisation
from efcil.data.deferred import DeferredImages, Shapes
from efcil.data.store import TaskImages, View, free_bytes
from efcil.errors import DataError


@dataclass(frozen=True, eq=False)
class WholeImages:
    """Images one after the other: their bytes (height x width x 3 each), first bytes, heights and widths."""

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


def bring(images: DeferredImages, device: torch.device) -> WholeImages:
    """Decode whole images and put them on a device."""
    count = len(images)
    sizes = np.zeros((count, 2), np.int64)
    pieces: list[tuple[np.ndarray, np.ndarray]] = []
    decoded = 0
    for places, pixels in images.whole():
        sizes[places] = [each.shape[:2] for each in pixels]
        pieces.append((places, np.concatenate([each.reshape(-1) for each in pixels])))
        decoded += len(places)
        total = sum(len(piece) for _, piece in pieces)
        _refuse_too_many(count, total * count // decoded, device)
    # The images lie in the order in which they were read, which need not be that of the rows.
    starts = np.zeros(count, np.int64)
    flat = torch.empty(sum(len(piece) for _, piece in pieces), dtype=torch.uint8, device=device)
    end = 0
    while pieces:
        places, piece = pieces.pop(0)  # freed as it is copied
        lengths = 3 * sizes[places].prod(axis=1)
        starts[places] = end + np.cumsum(lengths) - lengths
        flat[end : end + len(piece)] = torch.from_numpy(piece).to(device)
        end += len(piece)
    places_of, heights, widths = (torch.from_numpy(each.copy()).to(device) for each in (starts, *sizes.T))
    return WholeImages(flat, places_of, heights, widths, images.shapes)


def _refuse_too_many(count: int, expected: int, device: torch.device) -> None:
    """Refuse images that will not fit, as soon as those that are decoded show it."""
    if device.type == "cuda" and expected > (free := free_bytes(device)):
        raise DataError(
            f"{count:,} whole images must fit on {device} together, about {expected / 2**30:.1f} GiB, but it has "
            f"{free / 2**30:.1f} GiB free. Set stored_side to less (256 keeps a shorter side of 256 pixels), make the "
            "tasks smaller, or free the GPU."
        )


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

    def _bring(self, images: np.ndarray | DeferredImages, rows: np.ndarray, device: torch.device) -> Any:
        assert isinstance(images, DeferredImages)
        return bring(images[rows], device)

    @property
    def size(self) -> int:
        """Height and width of the network's input in pixels."""
        return self.images.shapes.size

    def _draw(self, augmentation: Augmentation, order: Tensor, generator: torch.Generator) -> Draws:
        return augmentation.draw_whole(self.images.heights[order], self.images.widths[order], generator)

    def render(self, view: View, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return network input and labels of the images from `start` to `stop` of a view."""
        chosen = view.order[start:stop]
        draws = {name: value[start:stop] for name, value in view.draws.items()}
        windows, flip = crop_windows(draws["box"], self.size), draws.get("flip")
        if view.augmentation.weak is view.augmentation:
            found = resampled(self.images, chosen, windows, flip, self.normalisation, self.dtype)
        else:
            pixels = resampled(self.images, chosen, windows, flip, PIXEL_VALUES, torch.float32)
            found = self.normalisation(view.augmentation.change(pixels, draws), self.dtype)
        return found, self.labels[chosen]

    def plain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of the test views of all images in stored order."""
        step = self.chunk_size()
        with doing("images", len(self)) as work:
            for start in range(0, len(self), step):
                rows = torch.arange(start, min(start + step, len(self)), device=self.device)
                windows = self.images.test_windows(rows)
                found = resampled(self.images, rows, windows, None, self.normalisation, self.dtype)
                work.done += len(rows)
                yield found, self.labels[rows]


def task_images(
    images: np.ndarray | DeferredImages, *arguments: Any, augmentation: Augmentation, **keywords: Any
) -> TaskImages:
    """Return the images of a task on a device: whole ones where crops can be cut from them, else squares."""
    whole = isinstance(images, DeferredImages) and augmentation.cuts_whole
    return (WholeTaskImages if whole else TaskImages)(images, *arguments, augmentation=augmentation, **keywords)
