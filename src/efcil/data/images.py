"""What every source returns: images as arrays, labels, class names and normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from efcil.data.deferred import DeferredImages
from efcil.errors import DataError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (uint8, N x H x W x 3, a memory map or decoded when they are read) and their labels (int64, N)."""

    images: np.ndarray | DeferredImages
    labels: np.ndarray

    def __post_init__(self) -> None:
        if self.images.dtype != np.uint8 or self.images.ndim != 4 or self.images.shape[3] != 3:
            raise DataError(
                f"Images must be a uint8 array of shape N x H x W x 3; this one is {self.images.dtype} of shape "
                f"{self.images.shape}. Convert it before building an ImageSet."
            )
        labels = np.asarray(self.labels)  # a list, or other whole numbers
        object.__setattr__(self, "labels", labels.astype(np.int64) if labels.dtype.kind in "iu" else labels)
        if self.labels.dtype != np.int64 or self.labels.shape != self.images.shape[:1]:
            raise DataError(
                f"Labels must be whole numbers, one per image ({len(self.images)} here); these are {self.labels.dtype} "
                f"of shape {self.labels.shape}. Convert them before building an ImageSet."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def class_counts(self, classes: int) -> np.ndarray:
        """Return how many images each of the classes 0 .. classes - 1 has."""
        return np.bincount(self.labels, minlength=classes)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training and a test set over the same classes, with class names and normalisation."""

    name: str
    train: ImageSet
    test: ImageSet
    class_names: tuple[str, ...]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        for split, images in (("training", self.train), ("test", self.test)):
            if len(images) == 0:
                raise DataError(f"The {split} set of {self.name} holds no image. Check the files it was read from.")
            height, width = images.images.shape[1:3]
            if (height, width) != (self.image_size, self.image_size):
                raise DataError(
                    f"The {split} images of {self.name} are {width} x {height} pixels, "
                    f"not {self.image_size} x {self.image_size}. Check the files they were read from."
                )
            low, high = int(images.labels.min()), int(images.labels.max())
            if low < 0 or high >= len(self.class_names):
                raise DataError(
                    f"The {split} labels of {self.name} run from {low} to {high}, but it has {len(self.class_names)} "
                    "classes, numbered from 0. Check the files they were read from."
                )

    @property
    def number_of_classes(self) -> int:
        """How many classes the dataset has."""
        return len(self.class_names)
