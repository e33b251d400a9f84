"""Handwritten digits, bundled with scikit-learn: the dataset that needs no files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from efcil.data.images import Dataset, ImageSet
from efcil.data.sources import Known, Source, SourceOptions
from efcil.errors import SettingsError


class Digits(Source):
    """10 classes, 1,442 training and 355 test images of 8 x 8 pixels.

    The last fifth of each class, in scikit-learn's order, is the test set.
    """

    name = "digits"
    title = "Digits"
    description = "Handwritten digits of 8 x 8 pixels, 10 classes, bundled with scikit-learn"
    expected = "No files are needed: the images come with scikit-learn."
    needs_path = False
    fixed_size = 8
    known = Known(10, 1442, 355, in_both=0)

    # Mean and standard deviation of the training pixels, as shares of 255.
    mean = 0.3054
    deviation = 0.3753

    def recognise(self, path: Path) -> None:
        """Refuse every place."""
        raise SettingsError(
            f"{self.title} reads no files, so it takes no path ({path} was given). Leave it out, or name the dataset "
            "that is there; images of your own are the dataset folder."
        )

    def load(self, path: Path | None, options: SourceOptions) -> Dataset:
        """Return the bundled images, 0 .. 16 scaled to 0 .. 255 and repeated over three channels."""
        if path is not None:
            self.recognise(path)
        from sklearn.datasets import load_digits

        bundled = load_digits()
        grey = np.rint(bundled.images * (255 / 16)).astype(np.uint8)
        images = np.repeat(grey[..., None], 3, axis=3)
        labels = bundled.target.astype(np.int64)
        is_test = np.zeros(len(labels), dtype=bool)
        for label in range(10):
            members = np.flatnonzero(labels == label)
            is_test[members[len(members) - len(members) // 5 :]] = True
        return Dataset(
            name=self.name,
            train=ImageSet(images[~is_test], labels[~is_test]),
            test=ImageSet(images[is_test], labels[is_test]),
            class_names=tuple(str(name) for name in bundled.target_names),
            image_size=8,
            mean=(self.mean,) * 3,
            std=(self.deviation,) * 3,
        )
