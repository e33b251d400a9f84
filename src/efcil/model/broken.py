"""Learning and testing without the images that cannot be read: they are named, counted and left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efcil.data.decode import Broken, Encoded, decode_intact
from efcil.errors import DataError, printable, some
from efcil.model.images import InputError, Pictures, model_fit

#: How many broken images are explained one by one.
_EXPLAINED = 20


@dataclass(frozen=True, eq=False)
class Intact:
    """The images that could be read, their labels, their places among those that were given, and the broken ones."""

    pixels: np.ndarray
    labels: list[Hashable]
    places: list[int]
    broken: list[Broken]


def intact(pictures: Pictures, labels: Sequence[Hashable], size: int) -> Intact:
    """Return the pixels of all images that can be read; an error names a class of which none can."""
    pixels = np.empty((len(pictures), size, size, 3), np.uint8)
    items = [pictures.items[index] for index in range(len(pictures))]
    if all(isinstance(item, Path) for item in items):
        broken = decode_intact(pixels, [Encoded(item, str(item)) for item in items], model_fit(size))
    else:
        broken = []
        for index in range(len(pictures)):
            try:
                pixels[index] = pictures.pixels(size, index, index + 1)[0]
            except DataError as error:
                broken.append(Broken(index, f"Image {index}", error))
    left_out = {each.index for each in broken}
    places = [index for index in range(len(items)) if index not in left_out]
    _refuse_lost_classes(labels, places, broken)
    return Intact(pixels[places] if broken else pixels, [labels[place] for place in places], places, broken)


def report(found: Intact, say: Callable[[str], None]) -> None:
    """Say which images were left out and why, at most twenty one by one, and how many there are."""
    for each in found.broken[:_EXPLAINED]:
        say(printable(f"{each.error} Left out."))
    if found.broken:
        count, total = len(found.broken), len(found.broken) + len(found.places)
        say(f"{count} of {total} images {'is' if count == 1 else 'are'} broken and left out")


def _refuse_lost_classes(labels: Sequence[Hashable], places: Sequence[int], broken: Sequence[Broken]) -> None:
    """Refuse a class without an intact image: it would be missing from the model without a word."""
    kept = {labels[place] for place in places}
    lost = Counter(labels[each.index] for each in broken if labels[each.index] not in kept)
    if lost:
        first = next(each for each in broken if labels[each.index] in lost)
        names = some([f"{label} ({count})" for label, count in lost.items()])
        raise InputError(
            f"All images are broken of {names}. {first.error} Replace the images of such a class, or remove its folder."
        )
