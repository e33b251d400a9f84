"""Whether a stored tensor is, or contains, an image: every stored row against images, resized images and patches.

A row of k numbers is compared with everything that has k numbers: the images resized to s x s pixels (3 s^2 numbers in
colour, s^2 in grey or in one of the colours), turned and mirrored in all eight ways, since training does that to
images, and patches of s x s pixels; as pixel values and normalised, channels first and last. Images that are larger
than the model's are made from the originals, patches are those of the image that the model sees. Where there are too
many patches, those on a grid of up to an eighth of their side are compared, and all around those that come near. The
measure is the absolute normalised cross-correlation, which no shift or scale of the values can hide. Rows are also the
columns of a matrix, and the pieces of a tensor into which a whole number of images would fit.

Long rows hardly correlate with anything by chance, short ones do; so each row's best correlation with the training
images is held against its best with other images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

SHORTEST_ROW = 48
#: Images are looked for up to this side, or twice the model's where that is more.
LARGEST_SIDE = 224
#: Patches are compared at every place as long as there are no more of them, and beyond on a grid, which is a fraction
#: of their side wide: fine enough for the neighbour of a stored patch to be among the nearest, as a quarter is not.
MANY_PATCHES, GRID = 50_000, 8
#: A row whose correlation with a patch on the grid is at least this is compared with all patches around its best ones.
NEAR, NEAREST = 0.4, 8
#: Images are nearly the same when their thumbnails of this side correlate as much as this.
THUMBNAIL, LOOKALIKE = 16, 0.98
PIECE_NUMBERS = 1 << 24
#: Ways to turn and mirror a square.
TURNS = 8
#: What red, green and blue count for when an image is turned grey, besides equally (ITU-R BT.601, as in Pillow).
LUMA = (0.299, 0.587, 0.114)
#: A row matches when its correlation with a training image is at least this, and at most a quarter as far from 1 as its
#: best correlation with other images; or when it is one in all but rounding, and too long for that to be chance.
MATCH, CLOSER, EXACT, LONG_ROW = 0.9, 4.0, 0.999, 192


@dataclass(frozen=True)
class Match:
    """The best correlation of a tensor's rows with training images, and the same row's with other images.

    `image` is the number of the training image, `file` its file where it has one.
    """

    tensor: str
    row: int
    numbers: int
    compared_with: str
    image: int
    correlation: float
    unrelated: float
    file: str = ""

    @property
    def found(self) -> bool:
        """Whether the row must be taken for an image."""
        closer = 1.0 - self.correlation <= (1.0 - self.unrelated) / CLOSER
        exact = self.correlation >= EXACT and self.numbers >= LONG_ROW
        return exact or (self.correlation >= MATCH and closer)


@dataclass(frozen=True)
class Images:
    """Images as the model sees them (uint8 N x size x size x 3), and how to read some of them at a larger side.

    `finer(side, start, stop)` does that; without it, larger ones are made from those that the model sees.
    """

    pixels: np.ndarray
    finer: Callable[[int, int, int], np.ndarray] | None = None

    @property
    def size(self) -> int:
        """The side that the model sees."""
        return int(self.pixels.shape[1])

    @property
    def limit(self) -> int:
        """The largest side that is looked for."""
        return max(LARGEST_SIDE, 2 * self.size)

    def read(self, side: int, start: int, stop: int) -> Tensor:
        """Return the images from `start` to `stop` as n x 3 x side x side."""
        finer = self.finer if side > self.size else None
        found = self.pixels[start:stop] if finer is None else finer(side, start, stop)
        pixels = torch.from_numpy(np.ascontiguousarray(found)).permute(0, 3, 1, 2).float()
        if pixels.shape[2] == side:
            return pixels
        return functional.interpolate(pixels, (side, side), mode="bilinear", antialias=True, align_corners=False)


def match(
    tensors: Mapping[str, Tensor],
    training: Images,
    others: Images,
    constants: Constants,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Match]:
    """Compare stored tensors with training images and with others: best match per tensor.

    `constants` are the factor and summand per channel that normalise pixel values. `progress` is told the share of the
    comparisons that is done.
    """
    best: dict[str, Match] = {}
    by_length = _rows_by_length(tensors, training.size, training.limit)
    total, done = sum(_work(images, numbers) for numbers in by_length for images in (training, others)), 0

    def advance(work: int) -> None:
        nonlocal done
        done += work
        progress(done / total)

    for numbers, rows in by_length.items():
        # In double precision: weights that are nearly equal would not add up to nothing.
        stacked = _standardise(torch.cat([values for _, values in rows]).double()).float()
        here, where, what = _best(stacked, training, numbers, constants, advance)
        there, _, _ = _best(stacked, others, numbers, constants, advance)
        start = 0
        for name, values in rows:
            part = slice(start, start + len(values))
            start += len(values)
            # The row that stands out most from its own chance level, which is not always the one that correlates most.
            found = [
                Match(name, row, numbers, what[place], int(where[place]), float(here[place]), float(there[place]))
                for row, place in enumerate(range(part.start, part.stop))
            ]
            chosen = max(found, key=_telling)
            if name not in best or _telling(chosen) > _telling(best[name]):
                best[name] = chosen
    return sorted(best.values(), key=lambda one: (not one.found, -one.correlation))


Constants = tuple[Sequence[float], Sequence[float]]


def _telling(one: Match) -> tuple[bool, float, int]:
    """Order matches by what they say: of two that are the same but for rounding, the one of more numbers says more."""
    return one.found, round(one.correlation, 4), one.numbers


def scrambled(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return images with the same spectrum and random phases: as smooth as the originals, and unrelated to them."""
    draw = np.random.default_rng(seed)
    together = max(1, PIECE_NUMBERS // (8 * images[:1].size))
    result = np.empty_like(images)
    for start in range(0, len(images), together):
        result[start : start + together] = _with_phases(images[start : start + together], draw)
    return result


def _with_phases(images: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    size = images.shape[1]
    spectrum = np.fft.fft2(images.astype(np.float64), axes=(1, 2))
    # The phases of real noise, one set for all channels, keep the result real.
    phases = np.angle(np.fft.fft2(draw.standard_normal((len(images), size, size, 1)), axes=(1, 2)))
    mean = spectrum[:, :1, :1].copy()
    turned = spectrum * np.exp(1j * phases)
    turned[:, :1, :1] = mean
    return np.clip(np.fft.ifft2(turned, axes=(1, 2)).real, 0, 255).astype(np.uint8)


def lookalikes(training: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Say which of the other images are a training image in all but small differences, as a copy saved anew is."""
    known, asked = _thumbnails(training), _thumbnails(others)
    shape = (math.isqrt(known.shape[1]),) * 2
    together = max(1, PIECE_NUMBERS // len(known))
    pieces = [_best_turned(part, known, shape, 0)[0] for part in asked.split(together)]
    return (torch.cat(pieces) >= LOOKALIKE).numpy()


def _thumbnails(pixels: np.ndarray) -> Tensor:
    """Return images small, grey and standardised."""
    images = Images(pixels)
    side, together = min(THUMBNAIL, images.size), max(1, PIECE_NUMBERS // pixels[:1].size)
    starts = range(0, len(pixels), together)
    parts = [images.read(side, start, start + together).mean(dim=1).flatten(1) for start in starts]
    return _standardise(torch.cat(parts))


def _rows_by_length(tensors: Mapping[str, Tensor], size: int, limit: int) -> dict[int, list[tuple[str, Tensor]]]:
    """Return every way to read a tensor as rows whose length is that of a square image or patch, by length.

    `size` is the side of the images, as which a tensor without that structure is read too.
    """
    found: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        lengths = {math.prod(tensor.shape[place:]) for place in range(tensor.dim() + 1)}
        lengths |= {numbers for numbers in (size * size, 3 * size * size) if tensor.numel() % numbers == 0}
        ways = [(numbers, tensor) for numbers in sorted(lengths)]
        if tensor.dim() == 2:
            ways.append((len(tensor), tensor.T))
        for numbers, values in ways:
            if numbers >= SHORTEST_ROW and tensor.numel() and _sides(numbers, limit):
                found.setdefault(numbers, []).append((name, values.reshape(-1, numbers).float()))
    return found


def _sides(numbers: int, limit: int) -> list[tuple[int, int]]:
    """Return (side, channels) of the square images that have so many numbers."""
    options = [(math.isqrt(numbers // channels), channels) for channels in (1, 3)]
    return [(side, c) for side, c in options if side * side * c == numbers and side <= limit]


def _work(images: Images, numbers: int) -> int:
    """Return how many comparisons rows of so many numbers take, as `_best` counts them."""
    total = len(images.pixels)
    sides = [side for side, _ in _sides(numbers, images.limit)]
    patches = sum(_grid(images.size, total, side)[1] ** 2 for side in sides if side < images.size)
    return total * (len(sides) * TURNS + patches)


def _best(
    rows: Tensor, images: Images, numbers: int, constants: Constants, advance: Callable[[int], None]
) -> tuple[Tensor, Tensor, list[str]]:
    """Return every standardised row's best correlation, the image it is with, and what was made of that image."""
    best = torch.zeros(len(rows))
    where = torch.zeros(len(rows), dtype=torch.int64)
    what = [""] * len(rows)

    def improve(value: Tensor, image: Tensor, words: str) -> None:
        nonlocal best, where
        better = value > best
        best, where = torch.where(better, value, best), torch.where(better, image, where)
        for row in better.nonzero().flatten().tolist():
            what[row] = words

    for side, channels in _sides(numbers, images.limit):
        most = max(1, PIECE_NUMBERS // max(len(rows), 3 * side * side))
        words = "an image" if side == images.size else f"an image resized to {side} x {side}"
        step = max(1, min(most, PIECE_NUMBERS // (3 * images.size**2)))
        for start in range(0, len(images.pixels), step):
            squares = images.read(side, start, min(start + step, len(images.pixels)))
            for values, axis in _layouts(squares, channels, constants):
                value, place = _best_turned(rows, _standardise(values.flatten(1)), values.shape[1:], axis - 1)
                improve(value, place + start, words)
            advance(TURNS * len(squares))
        if side < images.size:
            improve(
                *_best_patches(rows, images.pixels, side, channels, constants, most, advance),
                f"a patch of {side} x {side}",
            )
    return best.clamp(max=1.0), where, what


def _best_turned(rows: Tensor, images: Tensor, shape: Sequence[int], axis: int) -> tuple[Tensor, Tensor]:
    """Return every row's best correlation with standardised images, turned and mirrored, and which one that is with.

    `shape` is that of an image, whose lines and columns are its axes `axis` and `axis` + 1.
    """
    # Turning rows does the same as turning images, and costs less where there are fewer.
    few, many = (rows, images) if len(rows) < len(images) else (images, rows)
    best, where = torch.zeros(len(rows)), torch.zeros(len(rows), dtype=torch.int64)
    for turns in range(4):
        turned = few.reshape(-1, *shape).rot90(turns, (axis + 1, axis + 2))
        for mirrored in (turned, turned.flip(axis + 2)):
            products = (mirrored.flatten(1) @ many.T).abs()
            value, place = (products if few is rows else products.T).max(dim=1)
            better = value > best
            best, where = torch.where(better, value, best), torch.where(better, place, where)
    return best, where


def _grid(size: int, images: int, side: int) -> tuple[int, int]:
    """Return how far apart patches are compared, and how many of them lie side by side in an image."""
    coarsest = max(1, side // GRID)
    fine = (s for s in range(1, coarsest) if images * ((size - side) // s + 1) ** 2 <= MANY_PATCHES)
    step = next(fine, coarsest)
    return step, (size - side) // step + 1


def _best_patches(
    rows: Tensor,
    images: np.ndarray,
    side: int,
    channels: int,
    constants: Constants,
    most: int,
    advance: Callable[[int], None],
) -> tuple[Tensor, Tensor]:
    """Return every row's best correlation with a patch, and the image that is from."""
    total = len(images)
    step, across = _grid(images.shape[1], total, side)
    # Every patch has been seen where they lie side by side, so that the best one is enough.
    kept = NEAREST if step > 1 else 1
    near, found = torch.zeros(len(rows), 0), torch.zeros(len(rows), 0, dtype=torch.int64)
    together = max(1, PIECE_NUMBERS // max(3 * images[0].size, len(rows) * across**2))
    for start in range(0, total, together):
        pixels = torch.from_numpy(np.ascontiguousarray(images[start : start + together])).permute(0, 3, 1, 2)
        layers = [_Layer(*layout, side, step) for layout in _layouts(pixels.float(), channels, constants)]
        few = max(1, PIECE_NUMBERS // (len(pixels) * across**2))
        nearest = [_nearest(part, layers, kept) for part in rows.split(few)]
        value, number = (torch.cat(pieces) for pieces in zip(*nearest, strict=True))
        near = torch.cat([near, value], dim=1)
        found = torch.cat([found, number + start * across**2], dim=1)
        near, places = near.topk(min(kept, near.shape[1]), dim=1)
        found = found.gather(1, places)
        advance(len(pixels) * across**2)
    best, where = near[:, 0].clone(), found[:, 0] // across**2
    for row in (best >= NEAR).nonzero().flatten().tolist() if step > 1 else []:
        for number in found[row].tolist():
            image, top, left = number // across**2, number // across % across * step, number % across * step
            closest = _around(rows[row : row + 1], images[image], (top, left), step, side, channels, constants, most)
            if closest > best[row]:
                best[row], where[row] = closest, image
    return best, where


class _Layer:
    """All patches on a grid of images in one layout, without cutting them out: rows slide over the images instead."""

    def __init__(self, values: Tensor, axis: int, side: int, step: int) -> None:
        self.side, self.step, self.lines = side, step, axis
        planes = values[:, None] if values.dim() == 3 else values if axis == 2 else values.permute(0, 3, 1, 2)
        # A row adds up to nothing, so that a constant makes no difference; a small one costs no digits.
        self.planes = planes - planes.mean(dim=(1, 2, 3), keepdim=True)
        doubled = self.planes.double()
        mean = self._averages(doubled)
        variation = (self._averages(doubled.square()) - mean.square()).clamp(min=0) * (planes.shape[1] * side**2)
        smallest = 1e-7 * planes.abs().amax(dim=(1, 2, 3), keepdim=True).double().square()
        self.scale = torch.where(variation > smallest, variation.rsqrt(), 0.0).float()

    def _averages(self, values: Tensor) -> Tensor:
        """Return the average of every patch."""
        return functional.avg_pool2d(values.mean(dim=1, keepdim=True), self.side, self.step)

    def correlations(self, rows: Tensor) -> Tensor:
        """Return the absolute correlation (images, rows, down, across) with every patch."""
        count, channels, side = len(rows), self.planes.shape[1], self.side
        shape = (count, channels, side, side) if self.lines == 2 else (count, side, side, channels)
        kernels = rows.reshape(shape) if self.lines == 2 else rows.reshape(shape).permute(0, 3, 1, 2)
        return functional.conv2d(self.planes, kernels, stride=self.step).mul_(self.scale).abs_()


def _nearest(rows: Tensor, layers: Sequence[_Layer], kept: int) -> tuple[Tensor, Tensor]:
    """Return the `kept` best correlations of every row with the patches of a batch of images, and their numbers."""
    best = layers[0].correlations(rows)
    for layer in layers[1:]:
        torch.maximum(best, layer.correlations(rows), out=best)
    patches = best.shape[2] * best.shape[3]
    by_image = best.flatten(2)  # images, rows, patches
    if kept == 1:
        value, image = by_image.amax(dim=2).max(dim=0)
        return value[:, None], image[:, None] * patches
    value, place = by_image.topk(min(kept, patches), dim=2)
    place = place + patches * torch.arange(len(place))[:, None, None]
    value, place = (part.transpose(0, 1).flatten(1) for part in (value, place))
    value, order = value.topk(min(kept, value.shape[1]), dim=1)
    return value, place.gather(1, order)


def _around(
    row: Tensor,
    image: np.ndarray,
    corner: tuple[int, int],
    reach: int,
    side: int,
    channels: int,
    constants: Constants,
    most: int,
) -> float:
    """Return a row's best correlation with the patches whose corners lie less than `reach` from `corner`."""
    (top, bottom), (left, right) = ((max(0, c - reach + 1), c + reach - 1 + side) for c in corner)
    region = torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])).permute(2, 0, 1)
    windows = region.unfold(1, side, 1).unfold(2, side, 1).permute(1, 2, 0, 3, 4)
    best = 0.0
    for line in windows:
        for start in range(0, len(line), most):
            best = max(best, float(_correlations(row, line[start : start + most], channels, constants).max()))
    return best


def _correlations(rows: Tensor, patches: Tensor, channels: int, constants: Constants) -> Tensor:
    """Return the correlation (rows, M) with M patches (M, 3, side, side), the best over their layouts."""
    best = torch.zeros(len(rows), len(patches))
    for values, _ in _layouts(patches.float(), channels, constants):
        best = torch.maximum(best, (rows @ _standardise(values.flatten(1)).T).abs())
    return best


def _layouts(pixels: Tensor, channels: int, constants: Constants) -> Iterator[tuple[Tensor, int]]:
    """Yield the ways in which M images (M x 3 x side x side) may lie in memory, and which axis are their lines."""
    if channels == 1:
        yield pixels.mean(dim=1), 1
        yield torch.einsum("mcyx,c->myx", pixels, torch.tensor(LUMA)), 1
        for colour in range(3):
            yield pixels[:, colour], 1
        return
    factor, summand = (torch.tensor(values, dtype=torch.float32)[:, None, None] for values in constants)
    for values in (pixels, pixels * factor + summand):
        yield values, 2
        yield values.permute(0, 2, 3, 1), 1


def _standardise(rows: Tensor) -> Tensor:
    """Return rows of mean 0 and length 1; rows without variation become zero."""
    centred = rows - rows.mean(dim=1, keepdim=True)
    length = centred.norm(dim=1, keepdim=True)
    return torch.where(length > 1e-6 * rows.abs().amax(dim=1, keepdim=True), centred / length.clamp(min=1e-30), 0.0)
