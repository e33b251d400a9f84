"""Compare every stored row of numbers, read as an image, with all training images: is it one, or nearly one?

A row is read as the largest square that fits into it, from its first number on: in grey, and in colour with channels
first and last. Rows and images are made grey and small, so that size, sharpness, noise and colour do not matter, and
are compared by correlation, which does not depend on shift or scale of the values. Short rows and simple patterns
resemble some image by chance. So a row counts only if it is much closer to a training image than to all of them upside
down.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

#: Side of the smallest square that a row is read as, and of the small images that are compared.
SMALLEST_SIDE, THUMBNAIL = 8, 16
#: A row is an image if their correlation is at least MATCH and the row is CLOSER times as far from the best image
#: upside down. It is also an image if they are equal up to rounding, since some images look the same upside down.
MATCH, CLOSER, SAME = 0.9, 4.0, 0.9999
_NUMBERS_TOGETHER = 1 << 24


@dataclass(frozen=True)
class Match:
    """The row of a tensor that is closest to an image, the side of the square it was read as, and that image."""

    tensor: str
    row: int
    side: int
    file: str
    correlation: float
    upside_down: float
    found: bool


def match(tensors: Mapping[str, Tensor], pixels: np.ndarray, files: Sequence[Path]) -> list[Match]:
    """Compare stored tensors with training images (uint8 N x size x size x 3): one match per tensor, best first."""
    thumbnails: dict[int, Tensor] = {}
    matches = []
    for name, tensor in tensors.items():
        for squares in _readings(tensor, pixels.shape[1]):
            side = squares.shape[1]
            small = min(side, THUMBNAIL)
            if small not in thumbnails:
                thumbnails[small] = _thumbnails(pixels, small)
            rows = _resized(squares, small)
            near, image = _closest(rows, thumbnails[small])
            other, _ = _closest(rows.flip(1), thumbnails[small])
            found = (near >= MATCH) & ((1 - near <= (1 - other) / CLOSER) | (near >= SAME))
            row = int((near + 1.0 * found).argmax())
            values = round(float(near[row]), 4), round(float(other[row]), 4), bool(found[row])
            matches.append(Match(name, row, side, str(files[int(image[row])]), *values))
    matches.sort(key=lambda one: (one.found, one.correlation, one.side), reverse=True)
    best: dict[str, Match] = {}
    for one in matches:
        best.setdefault(one.tensor, one)
    return list(best.values())


def _readings(tensor: Tensor, size: int) -> Iterator[Tensor]:
    """Yield the ways to read a tensor as grey squares (rows x side x side).

    Rows are those of the tensor's own shape, and pieces as long as an image of the model, one after another.
    """
    flat = tensor.reshape(-1).float()
    lengths = {math.prod(tensor.shape[place:]) for place in range(tensor.dim() + 1)} | {size**2, 3 * size**2}
    for length in sorted(lengths):
        grey, colour = math.isqrt(length), math.isqrt(length // 3)
        rows = flat[: len(flat) // length * length].reshape(-1, length) if length else flat[:0]
        if len(rows) and grey >= SMALLEST_SIDE:
            yield rows[:, : grey**2].reshape(-1, grey, grey)
        if len(rows) and colour >= SMALLEST_SIDE:
            yield rows[:, : 3 * colour**2].reshape(-1, 3, colour, colour).mean(dim=1)
            yield rows[:, : 3 * colour**2].reshape(-1, colour, colour, 3).mean(dim=3)


def _thumbnails(pixels: np.ndarray, side: int) -> Tensor:
    """Return images small and grey, followed by their mirror images, as standardised rows."""
    pieces = torch.from_numpy(np.ascontiguousarray(pixels)).split(max(1, _NUMBERS_TOGETHER // pixels[0].size))
    small = torch.cat([_resized(piece.float().mean(dim=3), side) for piece in pieces])
    return _standardised(torch.cat([small, small.flip(2)]))


def _resized(squares: Tensor, side: int) -> Tensor:
    return functional.interpolate(squares[:, None], (side, side), mode="bilinear", antialias=True)[:, 0]


def _closest(squares: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return every square's best absolute correlation with an image or its mirror image, and which one that is."""
    pieces = _standardised(squares).split(max(1, _NUMBERS_TOGETHER // len(images)))
    best = [(piece @ images.T).abs().max(dim=1) for piece in pieces]
    values, places = (torch.cat(parts) for parts in zip(*best, strict=True))
    return values, places % (len(images) // 2)


def _standardised(squares: Tensor) -> Tensor:
    """Return squares as rows of mean 0 and length 1; those without variation become zero."""
    rows = squares.flatten(1).double()  # in single precision, nearly equal weights would not cancel out
    centred = rows - rows.mean(dim=1, keepdim=True)
    length = centred.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-6 * rows.norm(dim=1, keepdim=True), centred / length, 0.0).float()
