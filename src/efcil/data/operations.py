"""Operations that change the images of a batch, each image by its own: what strong augmentations are made of.

The pixels are those of Pillow, to the last bit: positions and grey values are computed in whole numbers, as Pillow
does, blends in float32, contrast stretches in float64. An operation is a map of positions (affine, with the nearest
pixel), a blend with another image (grey, smoothed), or a table of 256 values per channel (brightness, contrast,
posterise and the rest).

The host reads no value of a tensor on a GPU: there every operation is computed for every image, and the one that was
drawn is chosen. On a CPU each is computed for its own images only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

OPERATIONS = (
    "identity",
    "shear-x",
    "shear-y",
    "translate-x",
    "translate-y",
    "rotate",
    "brightness",
    "colour",
    "contrast",
    "sharpness",
    "posterise",
    "solarise",
    "auto-contrast",
    "equalise",
    "invert",
)
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}

_BY_POSITION = ["shear-x", "shear-y", "translate-x", "translate-y", "rotate"]
_BY_TABLE = ["brightness", "contrast", "posterise", "solarise", "auto-contrast", "equalise", "invert"]
_ONE = 1 << 16  # positions are fixed-point numbers with 16 binary places, as in Pillow


@dataclass(frozen=True)
class Scale:
    """How strong operations are: `strength(operation, level, negative, size)` for levels 0 to `levels` - 1.

    A strength is a shear, pixels, degrees, a factor, bits or a threshold. Factors are the same for all blends. `fill`
    is the pixel value outside of the image.
    """

    levels: int
    strength: Callable[[str, int, bool, int], float]
    fill: float = 0.0

    def changed(
        self, pixels: Tensor, operation: Tensor, level: Tensor, negative: Tensor, everywhere: bool | None = None
    ) -> Tensor:
        """Return pixels (batch, 3, size, size; whole numbers 0..255 as float32), each image under its operation.

        `everywhere`: every operation is computed for all images, the default on every device but the CPU. The results
        are the same.
        """
        everywhere = pixels.device.type != "cpu" if everywhere is None else everywhere
        choice = _Choice(operation, everywhere)
        pixels, size = pixels.contiguous(), pixels.shape[-1]

        def strengths(name: str) -> Tensor:
            return _strengths(self, name, size, pixels.device)[level, negative]

        maps = _positions(self, size, pixels.device)[operation, level, negative]
        factor = strengths("brightness")  # the same for all blends
        pixels = choice.among(_BY_POSITION, lambda image, by: _moved(image, by, self.fill), pixels, maps)
        pixels = choice.among(["colour"], _coloured, pixels, factor)
        pixels = choice.among(["sharpness"], _sharpened, pixels, factor)
        values = torch.arange(256, device=pixels.device, dtype=torch.float32)
        table = values.expand(len(pixels), 3, 256).contiguous()
        table = choice.among(["brightness"], brightened, table, factor)
        table = choice.among(["contrast"], _contrasted, table, factor, pixels)
        table = choice.among(["posterise"], _posterised, table, strengths("posterise"))
        table = choice.among(["solarise"], _solarised, table, strengths("solarise"))
        table = choice.among(["auto-contrast"], _stretched, table, pixels)
        table = choice.among(["equalise"], _equalised, table, pixels)
        table = choice.among(["invert"], lambda each: 255 - each, table)
        return choice.among(_BY_TABLE, _looked_up, pixels, table)


def affine(operation: str, value: float, size: int) -> tuple[float, ...]:
    """Return (a, b, c, d, e, f): the pixel at (x, y) comes from (a x + b y + c, d x + e y + f)."""
    if operation == "rotate":
        angle, centre = -math.radians(value), size / 2
        cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)  # so that a right angle is one
        return (
            *(cosine, sine, centre - cosine * centre - sine * centre),
            *(-sine, cosine, centre + sine * centre - cosine * centre),
        )
    numbers = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    place = {"shear-x": 1, "shear-y": 3, "translate-x": 2, "translate-y": 5}.get(operation)
    if place is not None:
        numbers[place] = value
    return tuple(numbers)


def _fixed(matrix: tuple[float, ...]) -> list[int]:
    a, b, c, d, e, f = matrix
    centred = (a, b, c + a / 2 + b / 2, d, e, f + d / 2 + e / 2)  # a pixel is read at its centre
    return [math.floor(number * _ONE + 0.5) for number in centred]


@cache
def _positions(scale: Scale, size: int, device: torch.device) -> Tensor:
    """Return the fixed-point maps (operations, levels, signs, 6) of positions; made once, as copying makes us wait."""
    return torch.tensor(
        [
            [
                [_fixed(affine(name, scale.strength(name, level, negative, size), size)) for negative in (False, True)]
                for level in range(scale.levels)
            ]
            for name in OPERATIONS
        ],
        dtype=torch.int32,
        device=device,
    )


@cache
def _strengths(scale: Scale, operation: str, size: int, device: torch.device) -> Tensor:
    """Return the strengths (levels, signs) of an operation as float32."""
    signs = (False, True)
    values = [[scale.strength(operation, level, sign, size) for sign in signs] for level in range(scale.levels)]
    return torch.tensor(values, dtype=torch.float32, device=device)


class _Choice:
    """Applies a function to the images whose operation it is, and leaves the others as they are."""

    def __init__(self, operation: Tensor, everywhere: bool) -> None:
        self.operation = operation
        self.everywhere = everywhere

    def among(self, names: list[str], function: Callable[..., Tensor], value: Tensor, *others: Tensor) -> Tensor:
        """Return `value` with function(value, *others) in the rows of the operations called `names`."""
        numbers = [NUMBER[name] for name in names]
        chosen = torch.stack([self.operation == number for number in numbers]).any(dim=0)
        if self.everywhere:
            rows_of = chosen.view(-1, *[1] * (value.dim() - 1))
            return torch.where(rows_of, function(value, *others), value)
        rows = chosen.nonzero()[:, 0]
        if not len(rows):
            return value
        return value.index_copy(0, rows, function(value[rows], *(other[rows] for other in others)))


# -- positions -------------------------------------------------------------------------------------------------------


def _moved(pixels: Tensor, maps: Tensor, fill: float) -> Tensor:
    """Fetch every pixel from its source, and `fill` from outside the image."""
    size = pixels.shape[-1]
    steps = torch.arange(size, device=pixels.device, dtype=torch.int32)
    a, b, c, d, e, f = (number[:, None, None] for number in maps.unbind(dim=1))
    column = (a * steps + b * steps[:, None] + c) >> 16
    row = (d * steps + e * steps[:, None] + f) >> 16
    inside = (column >= 0) & (column < size) & (row >= 0) & (row < size)
    place = torch.where(inside, row * size + column, 0).long().flatten(1)[:, None].expand(-1, 3, -1)
    found = pixels.flatten(2).gather(2, place).view_as(pixels)
    return torch.where(inside[:, None], found, fill)


# -- blends with another image ---------------------------------------------------------------------------------------


def _blended(other: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    """Return the image at `factor` on the line from the other one (0) to itself (1), in whole numbers."""
    factor = factor.view(-1, *[1] * (image.dim() - 1))
    # Two operations, not one: a fused one rounds once, and some values would differ.
    step = factor * (image - other)
    return (other + step).clamp(0, 255).floor()


def _grey(pixels: Tensor) -> Tensor:
    """Return the luminance (batch, 1, size, size) in whole numbers (ITU-R 601, as Pillow weighs it), as int32."""
    red, green, blue = pixels.to(torch.int32).unbind(dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None]


def _coloured(pixels: Tensor, factor: Tensor) -> Tensor:
    """More or less colour: a blend with the grey image."""
    return _blended(_grey(pixels).float().expand_as(pixels), pixels, factor)


def _sharpened(pixels: Tensor, factor: Tensor) -> Tensor:
    """Sharper or smoother: a blend with the image smoothed by a filter of 3 x 3 pixels; the border stays."""
    if pixels.shape[-1] < 3:
        return pixels
    whole = pixels.to(torch.int32)
    lines = whole[:, :, :-2] + whole[:, :, 1:-1] + whole[:, :, 2:]
    total = lines[..., :-2] + lines[..., 1:-1] + lines[..., 2:] + 4 * whole[:, :, 1:-1, 1:-1]
    smooth = pixels.clone()
    smooth[:, :, 1:-1, 1:-1] = torch.div(2 * total + 13, 26, rounding_mode="floor").float()  # total / 13, rounded
    return _blended(smooth, pixels, factor)


# -- tables of values ------------------------------------------------------------------------------------------------


def _looked_up(pixels: Tensor, table: Tensor) -> Tensor:
    return table.gather(2, pixels.long().flatten(2)).view_as(pixels)


def brightened(values: Tensor, factor: Tensor) -> Tensor:
    """Brighter or darker: a blend of values (a table, or the pixels themselves) with black."""
    return _blended(torch.zeros_like(values), values, factor)


def _contrasted(table: Tensor, factor: Tensor, pixels: Tensor) -> Tensor:
    """More or less contrast: a blend with the mean luminance."""
    grey = _grey(pixels).flatten(1)
    mean = torch.div(2 * grey.sum(dim=1) + grey.shape[1], 2 * grey.shape[1], rounding_mode="floor")
    return _blended(mean.float()[:, None, None].expand_as(table), table, factor)


def _posterised(table: Tensor, bits: Tensor) -> Tensor:
    step = torch.exp2(8 - bits)[:, None, None].round()
    return (table / step).floor() * step


def _solarised(table: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(table < threshold[:, None, None], table, 255 - table)


def _stretched(table: Tensor, pixels: Tensor) -> Tensor:
    """Stretch every channel to the whole range; one of a single value stays."""
    low, high = (end.double()[..., None] for end in torch.aminmax(pixels.flatten(2), dim=2))
    # Two tensors are divided: of a number and a tensor, PyTorch multiplies by the reciprocal, which rounds twice.
    scale = torch.full_like(high, 255.0) / (high - low).clamp(min=1)
    step = table.double() * scale
    stretched = (step - low * scale).clamp(0, 255).floor().float()
    return torch.where(high > low, stretched, table)


def _equalised(table: Tensor, pixels: Tensor) -> Tensor:
    """Spread the values of every channel so that each is equally frequent; one of few values stays."""
    counts = _histogram(pixels)
    until = counts.cumsum(dim=2)
    last = pixels.flatten(2).amax(dim=2).long()[..., None]
    step = torch.div(until[..., -1:] - counts.gather(2, last), 255, rounding_mode="floor")
    before = until - counts + torch.div(step, 2, rounding_mode="floor")
    spread = torch.div(before, step.clamp(min=1), rounding_mode="floor").clamp(max=255).float()
    return torch.where(step > 0, spread, table)


def _histogram(pixels: Tensor) -> Tensor:
    """Return how many pixels (batch, 3, 256) of every channel have each value."""
    channels = len(pixels) * 3
    first = 256 * torch.arange(channels, device=pixels.device)
    places = (pixels.long().view(channels, -1) + first[:, None]).flatten()
    counts = torch.zeros(channels * 256, device=pixels.device, dtype=torch.int64)
    # Flat, because there it repeats bit for bit on a GPU too; bincount would make the host wait.
    return counts.scatter_add_(0, places, counts.new_ones(1).expand_as(places)).view(-1, 3, 256)
