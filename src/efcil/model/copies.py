"""Images that are given more than once: in two classes by mistake, or as copies, which make a measurement too good."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def remarks(pixels: np.ndarray, labels: Sequence[Hashable], items: Sequence[Any]) -> Iterator[str]:
    """Yield what to know about images whose pixels, as the network sees them, are the same; `items` may be files."""
    places: dict[bytes, list[int]] = {}
    for place, image in enumerate(pixels):
        places.setdefault(hashlib.sha256(np.ascontiguousarray(image).data).digest(), []).append(place)
    repeated = [(same, len({labels[place] for place in same})) for same in places.values() if len(same) > 1]
    apart, copies = ([same for same, classes in repeated if (classes > 1) is several] for several in (True, False))
    if apart:
        are = "1 image is" if len(apart) == 1 else f"{len(apart)} images are"
        yield f"{are} in more than one class: {_example(apart, labels, items)} are the same. Remove what is wrong"
    if copies:
        count = sum(len(same) - 1 for same in copies)
        are = "1 image is a copy" if count == 1 else f"{count} images are copies"
        yield (
            f"{are} of another of the same class: {_example(copies, labels, items)} are the same. Copies count as "
            "images of their own, and an accuracy on held-out images that have copies is too good"
        )


def _example(groups: list[list[int]], labels: Sequence[Hashable], items: Sequence[Any]) -> str:
    """Name two images of the first group, of different classes where there are such."""
    first, *others = groups[0]
    second = next((place for place in others if labels[place] != labels[first]), others[0])
    return f"{'for example, ' if len(groups) > 1 else ''}{named(items, first)} and {named(items, second)}"


def named(items: Sequence[Any] | None, place: int) -> str:
    """Return what the image at a place is called: its file, or its number."""
    if items is not None and isinstance(items[place], Path):
        return str(items[place])
    return f"image {place + 1}"
