"""What the tests of AutoAugment and TrivialAugment share: images, and Pillow's way to change one."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.store import TaskImages

SIZE = 17  # odd, so that a centre lies on a pixel

_ENHANCERS = {
    "brightness": ImageEnhance.Brightness, "colour": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast, "sharpness": ImageEnhance.Sharpness,
}  # fmt: skip
_TABLES = {"auto-contrast": ImageOps.autocontrast, "equalise": ImageOps.equalize, "invert": ImageOps.invert}


def pictures(count: int, size: int = SIZE, seed: int = 0) -> np.ndarray:
    """Images of many kinds: noise, few values, a narrow range, one colour, smooth."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, 256, (count, size, size, 3))
    few = random.choice([3, 90, 200], (count, size, size, 3))
    narrow = random.integers(100, 120, (count, size, size, 3))
    plain = np.broadcast_to(random.integers(0, 256, (count, 1, 1, 3)), noise.shape)
    smooth = np.clip(np.cumsum(random.normal(0, 9, noise.shape), axis=1) + 128, 0, 255)
    return np.concatenate([noise, few, narrow, plain, smooth]).astype(np.uint8)


def as_batch(images: np.ndarray) -> Tensor:
    """The same images as augmentations get them."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float()


def by_pillow(picture: Image.Image, operation: str, value: float, fill: int = 0) -> Image.Image:
    """Change one image the obvious way; `fill` is the value of pixels that come from outside."""
    moves = {"shear-x": (1, value, 0, 0, 1, 0), "shear-y": (1, 0, 0, value, 1, 0)}
    moves |= {"translate-x": (1, 0, value, 0, 1, 0), "translate-y": (1, 0, 0, 0, 1, value)}
    nearest, colour = Image.Resampling.NEAREST, (fill, fill, fill)
    if operation in moves:
        return picture.transform(picture.size, Image.Transform.AFFINE, moves[operation], nearest, fillcolor=colour)
    if operation == "rotate":
        return picture.rotate(value, nearest, fillcolor=colour)
    if operation in _ENHANCERS:
        return _ENHANCERS[operation](picture).enhance(value)
    if operation == "posterise":
        return ImageOps.posterize(picture, int(value))
    if operation == "solarise":
        return ImageOps.solarize(picture, value)
    return _TABLES[operation](picture) if operation in _TABLES else picture


def store(augmentation: str, count: int = 40) -> TaskImages:
    """A task of random images with an augmentation."""
    random = np.random.default_rng(3)
    return TaskImages(
        random.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8), np.arange(count),
        augmentation=make_augmentation(augmentation), normalisation=Normalisation((0.5,) * 3, (0.2,) * 3),
        device=torch.device("cpu"), seed=5, name="task0",
    )  # fmt: skip
