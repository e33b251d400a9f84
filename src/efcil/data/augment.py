"""Batched augmentations: the same tensor code on CPU and GPU.

An augmentation works in two steps. `draw` makes the random numbers of a whole epoch (small tensors); `apply` turns a
slice of images with its slice of numbers into normalised network input. So the look of an image in an epoch does not
depend on how the epoch is split into slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from efcil.compiled import compiled
from efcil.data import auto, trivial
from efcil.errors import unknown

Draws = dict[str, Tensor]


@dataclass(frozen=True)
class Normalisation:
    """Per-channel mean and standard deviation of pixel values scaled to [0, 1]."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return scale and shift (3,) that map pixel values 0..255 to network input."""
        return _constants(self, device)

    def __call__(self, pixels: Tensor, dtype: torch.dtype) -> Tensor:
        """Map pixel values 0..255 (batch, 3, h, w) to channels-last network input of type `dtype`."""
        if pixels.device.type == "cpu":  # a loop over whole lines is twenty times as fast as one over three channels
            width = pixels.shape[3]
            scale, shift = (c.repeat(width) for c in self.constants(pixels.device))
            lines = (pixels.permute(0, 2, 3, 1).flatten(2).float() * scale).add_(shift).to(dtype)
            return lines.unflatten(2, (width, 3)).permute(0, 3, 1, 2)
        scale, shift = (c[None, :, None, None] for c in self.constants(pixels.device))
        return (pixels.float() * scale + shift).to(dtype).contiguous(memory_format=torch.channels_last)


#: Keeps pixel values 0..255 as they are.
PIXEL_VALUES = Normalisation((0.0,) * 3, (1 / 255,) * 3)


@cache
def _constants(normalisation: Normalisation, device: torch.device) -> tuple[Tensor, Tensor]:
    # Created once: copying even three numbers makes the host wait for the device.
    scale = torch.tensor([1.0 / (255.0 * s) for s in normalisation.std], device=device)
    shift = [-m / s for m, s in zip(normalisation.mean, normalisation.std, strict=True)]
    return scale, torch.tensor(shift, device=device)


class Augmentation:
    """Does not change images; the base class of the others."""

    description = "no augmentation"
    #: Whether images are mirrored at random.
    flip = False
    #: Whether crops can be cut from whole images of any shape.
    cuts_whole = False

    @property
    def weak(self) -> Augmentation:
        """The augmentation of the views that statistics are computed from: this one, unless it is a strong one."""
        return self

    def draw(self, count: int, size: int, generator: torch.Generator) -> Draws:
        """Return the random numbers for `count` square images of `size` pixels, one row per image."""
        return {}

    def draw_whole(self, heights: Tensor, widths: Tensor, generator: torch.Generator) -> Draws:
        """Return the same for whole images of these shapes, where crops can be cut from them."""
        raise NotImplementedError(f"{type(self).__name__} cuts no crops from whole images")

    def change(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Return the pixel values (float, whole numbers 0..255) of crops after what follows the crop; here nothing."""
        return pixels

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Return pixel values (float, 0..255) of uint8 images (batch, 3, size, size) under their draws."""
        return images.float()

    def render(
        self, images: Tensor, order: Tensor, draws: Draws, normalisation: Normalisation, dtype: torch.dtype
    ) -> Tensor:
        """Return network input for images[order] under their draws."""
        return normalisation(self.apply(images[order], draws), dtype)


class ShiftedCrop(Augmentation):
    """Zero padding, a crop of the original size at a random place, and perhaps a horizontal flip."""

    def __init__(self, padding: int, flip: bool) -> None:
        self.padding = padding
        self.flip = flip
        self.description = f"zero-pad {padding}, random crop" + (", flip" if flip else "")

    def draw(self, count: int, size: int, generator: torch.Generator) -> Draws:
        """Draw integer corners in [0, 2 * padding] and flips."""
        device = generator.device
        draws = {
            "corner": torch.randint(0, 2 * self.padding + 1, (count, 2), generator=generator, device=device),
        }
        if self.flip:
            draws["flip"] = torch.rand(count, generator=generator, device=device) < 0.5
        return draws

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Gather the cropped pixels in one indexing operation."""
        size = images.shape[-1]
        padded = torch.nn.functional.pad(images, [self.padding] * 4)
        steps = torch.arange(size, device=images.device)
        rows = draws["corner"][:, :1] + steps
        columns = draws["corner"][:, 1:] + steps
        if self.flip:
            columns = torch.where(draws["flip"][:, None], columns.flip(1), columns)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        # (batch, rows, columns, 3): a channels-last gather, turned back to channels-first as a view.
        return padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).float()


class ResizedCrop(Augmentation):
    """Zero padding, then a crop of random area and shape resized to the original size, and a horizontal flip.

    Areas are uniform in `area` (as a share of the padded image), aspect ratios log-uniform in [3/4, 4/3]; of ten
    candidates the first that fits is taken, else the whole image (of a long one, the most in its centre that has such
    a ratio). Resizing is the antialiased triangle filter of
    Pillow, horizontally then vertically, each rounded to whole pixel values, written as two small matrix products per
    image; pixels of the padding are zero and are left out of the products.
    """

    attempts = 10
    flip = True

    def __init__(self, padding: int = 0, area: tuple[float, float] = (0.08, 1.0)) -> None:
        self.padding = padding
        self.area = area
        self.cuts_whole = padding == 0
        pad = f"zero-pad {padding}, " if padding else ""
        self.description = f"{pad}random resized crop ({area[0]:g} to {area[1]:g} of the area), flip"

    def draw(self, count: int, size: int, generator: torch.Generator) -> Draws:
        """Draw integer boxes (top, left, height, width) inside the padded image, and flips."""
        side = torch.full((count,), size + 2 * self.padding, device=generator.device)
        return self.draw_whole(side, side, generator)

    def draw_whole(self, heights: Tensor, widths: Tensor, generator: torch.Generator) -> Draws:
        """Draw the same for images of any shape; heights and widths (count,) include the padding."""
        device, count = generator.device, len(heights)
        tall, wide = heights.double(), widths.double()
        uniform = torch.rand(count, self.attempts, 2, generator=generator, device=device, dtype=torch.float64)
        place = torch.rand(count, 2, generator=generator, device=device, dtype=torch.float64)
        area = (self.area[0] + (self.area[1] - self.area[0]) * uniform[..., 0]) * wide[:, None] * tall[:, None]
        low, high = math.log(3 / 4), math.log(4 / 3)
        ratio = torch.exp(low + (high - low) * uniform[..., 1])
        width, height = torch.sqrt(area * ratio).round(), torch.sqrt(area / ratio).round()
        fits = (width > 0) & (width <= wide[:, None]) & (height > 0) & (height <= tall[:, None])
        first = fits.int().argmax(dim=1, keepdim=True)
        found = fits.any(dim=1)
        # Where nothing fits: the largest box in the centre whose shape is within the limits.
        width = torch.where(found, width.gather(1, first)[:, 0], torch.minimum(wide, (tall * (4 / 3)).round()))
        height = torch.where(found, height.gather(1, first)[:, 0], torch.minimum(tall, (wide / (3 / 4)).round()))
        # floor(u * (n + 1)) is a uniform integer in 0..n for u in [0, 1)
        top = torch.where(found, torch.floor(place[:, 0] * (tall - height + 1)), torch.floor((tall - height) / 2))
        left = torch.where(found, torch.floor(place[:, 1] * (wide - width + 1)), torch.floor((wide - width) / 2))
        box = torch.stack([top, left, height, width], dim=1).float()
        return {"box": box, "flip": torch.rand(count, generator=generator, device=device) < 0.5}

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Resize every box to the full size with two batched matrix products."""
        size = images.shape[-1]
        box = draws["box"]
        horizontal = triangle_filter(box[:, 1], box[:, 3], size, size, self.padding)
        vertical = triangle_filter(box[:, 0], box[:, 2], size, size, self.padding)
        horizontal = torch.where(draws["flip"][:, None, None], horizontal.flip(1), horizontal)
        pixels = images.float().flatten(1, 2) @ horizontal.transpose(1, 2)
        pixels = pixels.add_(0.5).floor_().view(len(images), 3, size, size)
        return (vertical[:, None] @ pixels).add_(0.5).floor_().clamp_(0, 255)

    def render(
        self, images: Tensor, order: Tensor, draws: Draws, normalisation: Normalisation, dtype: torch.dtype
    ) -> Tensor:
        """As in the base class, but in a single kernel on CUDA devices."""
        if compiled(images.device):
            from efcil.data.augment_kernel import resized_crop

            constants = normalisation.constants(images.device)
            return resized_crop(images, order, draws["box"], draws["flip"], self.padding, *constants, dtype)
        return super().render(images, order, draws, normalisation, dtype)


class Strong(Augmentation):
    """A strong augmentation: another one, and after it random operations on every image.

    Statistics of classes are computed from views of the other one alone.
    """

    operations = ""

    def __init__(self, inner: Augmentation) -> None:
        self.inner = inner
        self.flip = inner.flip
        self.cuts_whole = inner.cuts_whole
        self.description = f"{inner.description}, {self.operations} (statistics without it)"

    @property
    def weak(self) -> Augmentation:
        """The augmentation without the operations."""
        return self.inner

    def draw_operations(self, count: int, generator: torch.Generator) -> Draws:
        """Return what `change` needs for `count` images."""
        raise NotImplementedError(f"{type(self).__name__} must define draw_operations()")

    def draw(self, count: int, size: int, generator: torch.Generator) -> Draws:
        """Draw what the inner augmentation needs, then the operations."""
        return {**self.inner.draw(count, size, generator), **self.draw_operations(count, generator)}

    def draw_whole(self, heights: Tensor, widths: Tensor, generator: torch.Generator) -> Draws:
        """Draw the same for images of any shape."""
        drawn = self.inner.draw_whole(heights, widths, generator)
        return {**drawn, **self.draw_operations(len(heights), generator)}

    def apply(self, images: Tensor, draws: Draws) -> Tensor:
        """Crop, then change."""
        return self.change(self.inner.apply(images, draws), draws)

    def render(
        self, images: Tensor, order: Tensor, draws: Draws, normalisation: Normalisation, dtype: torch.dtype
    ) -> Tensor:
        """As in the base class, with the kernel of the inner augmentation if it has one."""
        pixels = self.inner.render(images, order, draws, PIXEL_VALUES, torch.float32)
        return normalisation(self.change(pixels, draws), dtype)


class Trivial(Strong):
    """TrivialAugment: one random operation for every image."""

    operations = "TrivialAugment"

    def draw_operations(self, count: int, generator: torch.Generator) -> Draws:
        """Draw an operation, its level and its sign."""
        return trivial.draw(count, generator)

    def change(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Change every image by its operation."""
        return trivial.changed(pixels, draws["operation"], draws["level"], draws["negative"])


class Auto(Strong):
    """AutoAugment: one sub-policy of two operations for every image, perhaps after a change of brightness."""

    def __init__(self, inner: Augmentation, policy: str, jitter: float = 0.0) -> None:
        names = {"cifar": "CIFAR-10", "imagenet": "ImageNet"}
        before = f"brightness up to {jitter:.0%} off, " if jitter else ""
        self.operations = f"{before}AutoAugment for {names[policy]}"
        self.policy, self.jitter = policy, jitter
        super().__init__(inner)

    def draw_operations(self, count: int, generator: torch.Generator) -> Draws:
        """Draw two operations, their levels and signs, and a factor of brightness."""
        return auto.draw(self.policy, count, generator, self.jitter)

    def change(self, pixels: Tensor, draws: Draws) -> Tensor:
        """Change every image by its brightness and its operations."""
        drawn = draws["operation"], draws["level"], draws["negative"]
        return auto.changed(pixels, *drawn, jitter=draws.get("jitter"))


def triangle_filter(start: Tensor, length: Tensor, outputs: int, inputs: int, padding: int) -> Tensor:
    """Return matrices (batch, outputs, inputs) that resize the interval [start, start + length) to `outputs` pixels.

    Positions count in the padded image; the columns returned are those of the `inputs` real pixels. Weights are those
    of a triangle as wide as one source pixel when enlarging and as one target pixel when shrinking, truncated at the
    ends of the interval and normalised to sum to one over it, padding included.
    """
    position = torch.arange(inputs + 2 * padding, device=start.device, dtype=torch.float32)
    target = torch.arange(outputs, device=start.device, dtype=torch.float32)
    scale = (length / outputs)[:, None, None]
    support = scale.clamp(min=1.0)
    centre = start[:, None, None] + (target[None, :, None] + 0.5) * scale
    weight = (1 - (position[None, None, :] + 0.5 - centre).abs() / support).clamp_(min=0)
    inside = (position >= start[:, None]) & (position < (start + length)[:, None])
    weight = weight * inside[:, None, :]
    weight = weight / weight.sum(dim=2, keepdim=True)
    return weight[:, :, padding : padding + inputs]


AUGMENTATIONS: dict[str, Callable[[], Augmentation]] = {
    "none": Augmentation,
    "shift": lambda: ShiftedCrop(padding=1, flip=False),
    "crop-flip": lambda: ShiftedCrop(padding=4, flip=True),
    "crop-flip-8": lambda: ShiftedCrop(padding=8, flip=True),
    "padded-resized-crop": lambda: ResizedCrop(padding=4),
    "resized-crop": lambda: ResizedCrop(padding=0),
    "crop-flip-trivial": lambda: Trivial(ShiftedCrop(padding=4, flip=True)),
    "crop-flip-8-trivial": lambda: Trivial(ShiftedCrop(padding=8, flip=True)),
    "padded-resized-crop-trivial": lambda: Trivial(ResizedCrop(padding=4)),
    "resized-crop-trivial": lambda: Trivial(ResizedCrop(padding=0)),
    "crop-flip-auto": lambda: Auto(ShiftedCrop(padding=4, flip=True), "cifar"),
    "crop-flip-jitter-auto": lambda: Auto(ShiftedCrop(padding=4, flip=True), "cifar", jitter=63 / 255),
    "crop-flip-8-auto": lambda: Auto(ShiftedCrop(padding=8, flip=True), "imagenet"),
    "padded-resized-crop-auto": lambda: Auto(ResizedCrop(padding=4), "cifar"),
    "resized-crop-auto": lambda: Auto(ResizedCrop(padding=0), "imagenet"),
}


def make_augmentation(name: str) -> Augmentation:
    """Return the augmentation called `name`."""
    if name not in AUGMENTATIONS:
        raise unknown("augmentation", name, AUGMENTATIONS)
    return AUGMENTATIONS[name]()
