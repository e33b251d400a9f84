"""Images that bring their labels along: torch datasets, DataLoaders, iterators of pairs, Datasets of the Hub.

The package `datasets` is never imported: its Datasets are known by their `column_names` and `features`.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from efcil.errors import DataError, some

#: How many channels an image may have: grey, RGB, RGB with transparency.
CHANNELS = (1, 3, 4)
#: Names of columns, in order of preference, where their types do not say what they are.
IMAGE_COLUMNS = ("image", "img", "picture", "pixel_values", "images")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")


class InputError(DataError, ValueError):
    """Images or labels that cannot be learned from; a ValueError too, as scikit-learn's callers expect."""


def are_pairs(images: Any) -> bool:
    """Return whether images may come with labels: from a dataset, a loader, an iterator, or in a list of pairs."""
    if have_labels(images):
        return True
    single = isinstance(images, str | Sequence | np.ndarray | torch.Tensor) or hasattr(images, "__array__")
    return isinstance(images, Iterable) and not single


def have_labels(images: Any) -> bool:
    """Return whether images cannot come without their labels: from a dataset, a loader, or in a list of pairs."""
    if isinstance(images, list | tuple):
        return bool(images) and all(isinstance(item, tuple) and len(item) == 2 for item in images)
    return isinstance(images, Dataset | DataLoader | Mapping) or _is_table(images)


def kind_of(images: Any) -> str:
    """Return what the user calls it, for a sentence."""
    if isinstance(images, DataLoader):
        return "DataLoader"
    return "dataset" if isinstance(images, Dataset) or _is_table(images) else "sequence of pairs"


def refuse_unordered(images: Any) -> None:
    """Refuse weights for a loader that shuffles: nobody could say which weight belongs to which image."""
    if isinstance(images, DataLoader) and isinstance(images.sampler, RandomSampler):
        raise InputError(
            "The DataLoader shuffles its images, so weights cannot be matched to them. Give one with shuffle=False; "
            "learning shuffles by itself."
        )


def split(source: Any) -> tuple[Any, list[Any]]:
    """Return the images and the labels of a source of pairs."""
    features = _features(source)
    if _is_table(source) and hasattr(source, "__getitem__"):
        image, label = _columns(source.column_names, features, labelled=True)
        return _Column(source, image), _named(list(source[label]), features, label)
    images: list[Any] = []
    labels: list[Any] = []
    for element in _elements(source):
        found, own = _unbatched(element, True, features)
        images += found
        labels += own
    return _together(images, source), labels


def images_of(source: Any) -> Any:
    """Return the images of a source of pairs; it may have no labels."""
    features = _features(source)
    if _is_table(source) and hasattr(source, "__getitem__"):
        return _Column(source, _columns(source.column_names, features, labelled=False)[0])
    found = [image for element in _elements(source) for image in _unbatched(element, False, features)[0]]
    return _together(found, source)


def channels_last(array: np.ndarray, first: bool = False) -> np.ndarray:
    """Return images ... x H x W x C, whether channels come first or last: the axis of size 1, 3 or 4 says which.

    If both may be channels, `first` decides. If neither, the array is returned as it is.
    """
    leading, trailing = array.shape[-3] in CHANNELS, array.shape[-1] in CHANNELS
    return np.moveaxis(array, -3, -1) if leading and (first or not trailing) else array


# -- streams ---------------------------------------------------------------------------------------------------------


def _elements(source: Any) -> Iterable[Any]:
    if isinstance(source, Mapping):
        raise InputError(f"Several datasets were given ({some(list(source))}). Give one of them, such as its 'train'.")
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        return (source[index] for index in range(len(source)))  # type: ignore[arg-type]
    if isinstance(source, Iterable):
        return source
    raise InputError(f"Images cannot be read from a {type(source).__name__}. Give an array, a list or a folder.")


def _unbatched(element: Any, labelled: bool, features: Any) -> tuple[list[Any], list[Any]]:
    """Return images and labels of one element of a stream: an image, a pair, or a batch of either."""
    images, labels = _parts(element, labelled, features)
    if not _is_batch(images, labels):
        return [_image(images)], [labels]
    found = _rows(images)
    if labels is not None and len(labels) != len(found):
        raise InputError(f"A batch has {len(found)} images but {len(labels)} labels. Give one label per image.")
    return found, [] if labels is None else list(labels)


def _parts(element: Any, labelled: bool, features: Any) -> tuple[Any, Any]:
    """Return the images and the labels of one element of a stream; labels are None if it has none."""
    if isinstance(element, Mapping):
        image, label = _columns(list(element), features, labelled)
        if not label:
            return element[image], None
        many = isinstance(element[label], list) or getattr(element[label], "ndim", 0) == 1
        named = _named(list(element[label]) if many else [element[label]], features, label)
        return element[image], named if many else named[0]
    listed = isinstance(element, tuple | list)
    if listed and len(element) == 2 and not _is_image(element[1]):
        return element[0], element[1]
    if labelled:
        raise InputError("The dataset must give (image, label) pairs, but some of its items are not pairs.")
    # A tuple, or what a DataLoader makes of one: the images come first. Any other list is a batch of images.
    first = isinstance(element, tuple) or (listed and len(element) > 0 and getattr(element[0], "ndim", 0) == 4)
    return element[0] if first else element, None


def _is_image(item: Any) -> bool:
    """Return whether this may be an image, and is no label."""
    return isinstance(item, Image.Image) or getattr(item, "ndim", 0) > 1


def _is_batch(images: Any, labels: Any) -> bool:
    """Return whether these are several images: four axes, a list, or grey ones with as many labels."""
    if isinstance(images, list | tuple):
        return True
    if not isinstance(images, np.ndarray | torch.Tensor):
        return False
    many = getattr(labels, "ndim", 0) == 1 or isinstance(labels, list)
    return images.ndim == 4 or (images.ndim == 3 and many)


def _rows(images: Any) -> list[Any]:
    if isinstance(images, list | tuple):
        return [_image(image) for image in images]
    first = isinstance(images, torch.Tensor)
    array = images.detach().cpu().numpy() if isinstance(images, torch.Tensor) else images
    return list(channels_last(array, first) if array.ndim == 4 else array)


def _image(item: Any) -> Any:
    """Return an image, a tensor as an array H x W x C, a name as a path."""
    if isinstance(item, str | os.PathLike):
        return Path(item).expanduser()
    if isinstance(item, torch.Tensor):
        array = item.detach().cpu().numpy()
        return channels_last(array, first=True) if array.ndim == 3 else array
    return item


def _together(images: list[Any], source: Any) -> Any:
    """Return the images of a loader or an iterator as one array where they are alike, as if given as one."""
    shapes = {(item.shape, item.dtype) if isinstance(item, np.ndarray) else None for item in images}
    alike = len(shapes) == 1 and None not in shapes and not isinstance(source, Dataset)
    if not alike or images[0].ndim not in (2, 3) or images[0].dtype != np.uint8:
        return images
    return np.stack(images)


# -- Datasets of the Hub ---------------------------------------------------------------------------------------------


def _features(source: Any) -> Any:
    """Return the types of a table's columns, also of one that a DataLoader reads; None if they are not known."""
    found = getattr(getattr(source, "dataset", source), "features", None)
    return found if isinstance(found, Mapping) else None


def _is_table(images: Any) -> bool:
    """Return whether this is a Dataset of the package `datasets`, in memory or streamed."""
    return hasattr(images, "column_names") and hasattr(images, "features") and not isinstance(images, Mapping)


class _Column(Sequence[Any]):
    """The images of a table, decoded one by one when they are needed: together they may not fit into memory."""

    def __init__(self, table: Any, name: str) -> None:
        self._table, self._name = table, name

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        return _image(self._table[int(index)][self._name])


def _columns(names: Sequence[str], features: Any, labelled: bool) -> tuple[str, str]:
    """Return the names of the columns of images and of labels; the latter may be empty if it is not needed."""
    kinds = {name: type(features[name]).__name__ if features and name in features else "" for name in names}
    found = []
    for kind, known, needed in (("Image", IMAGE_COLUMNS, True), ("ClassLabel", LABEL_COLUMNS, labelled)):
        typed = [name for name in names if kinds[name] == kind]
        named = [name for name in known if name in names]
        chosen = typed if len(typed) == 1 else [name for name in named if name in typed] or named
        if needed and not chosen:
            title = "images" if kind == "Image" else "labels"
            raise InputError(
                f"None of the columns {some(names)} is known to hold {title}. Rename it to {known[0]!r}, "
                f"for example with rename_column."
            )
        found.append(chosen[0] if chosen else "")
    return found[0], found[1]


def _named(labels: list[Any], features: Any, column: str) -> list[Hashable]:
    """Return labels by their names where the table has names for its numbers."""
    names = getattr(features.get(column) if features else None, "names", None)
    return [names[int(label)] for label in labels] if isinstance(names, list) else labels
