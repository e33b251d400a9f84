"""What images that were not learned from have shown in a visit: counts and a few sums, nothing about one image."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from efcil.core import calibration, typicality
from efcil.core.calibration import GRID, Likelihood
from efcil.core.typicality import Spread

#: How the images of a visit were measured without having been learned from: a share was held out and never learned;
#: every image was left out once, and learned from in the end; or the images were measured before they were learned.
HELD_OUT, FOLDS, BEFORE = "held out", "folds", "before"
WAYS = (HELD_OUT, FOLDS, BEFORE)
_MOST = 1 << 62


@dataclass(frozen=True)
class Measured:
    """How many of these images got the right class among all classes known then, and what that says of others.

    `classifier` is the one that gave the scores; temperatures of different classifiers do not compare.
    """

    way: str
    right: int
    images: int
    among: int
    classifier: str
    likelihood: Likelihood | None = None
    closeness: Spread | None = None


def temperature(parts: Iterable[Measured | None], classifier: str, classes: int) -> float:
    """Return the temperature of a model that knows so many classes; 1 where nothing was measured.

    Scores among few classes say little about scores among many, so a visit counts with the square of the share of the
    present classes that were known then.
    """
    known = [
        (part.likelihood, min(1.0, part.among / max(classes, 1)) ** 2)
        for part in parts
        if part is not None and part.likelihood is not None and part.classifier == classifier
    ]
    return calibration.temperature([each for each, _ in known], [weight for _, weight in known])


def closeness(parts: Iterable[Measured | None]) -> Spread | None:
    """Return the closeness of held-out images of all visits together; None where nothing was measured."""
    return typicality.pooled([part.closeness for part in parts if part is not None and part.closeness is not None])


def read_measured(value: Any) -> Measured | None:
    """Return what `dataclasses.asdict` made of a measurement; raises a ValueError where a value is impossible."""
    if value is None:
        return None
    facts = group(value)
    if facts["way"] not in WAYS:
        raise ValueError(f"images are measured in one of the ways {', '.join(WAYS)}, not {facts['way']!r}")
    images = whole(facts["images"], 1, _MOST)
    if not isinstance(facts["classifier"], str) or len(facts["classifier"]) > 80:
        raise ValueError("a measurement does not name its classifier")
    return Measured(
        way=facts["way"],
        right=whole(facts["right"], 0, images),
        images=images,
        among=whole(facts["among"], 1, _MOST),
        classifier=facts["classifier"],
        likelihood=_read_likelihood(facts.get("likelihood")),
        closeness=_read_spread(facts.get("closeness")),
    )


def _read_likelihood(value: Any) -> Likelihood | None:
    if value is None:
        return None
    facts = group(value)
    curve = facts["curve"]
    if not isinstance(curve, list) or len(curve) != len(GRID):
        raise ValueError(f"a likelihood is known at {len(GRID)} temperatures")
    return Likelihood(images=whole(facts["images"], 1, _MOST), curve=tuple(_number(each, 0.0, 1e30) for each in curve))


def _read_spread(value: Any) -> Spread | None:
    if value is None:
        return None
    facts = group(value)
    return Spread(
        images=whole(facts["images"], 1, _MOST),
        mean=_number(facts["mean"], -1.001, 1.001),
        variance=_number(facts["variance"], 0.0, 4.0),
    )


def group(value: Any) -> Mapping[str, Any]:
    """Return a value that must be a group of values; anything else raises a TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError("a group of values is expected")
    return value


def whole(value: Any, least: int, most: int) -> int:
    """Return a value that must be a whole number in a range; anything else raises a ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"a whole number from {least} to {most} is expected, not {value!r}")
    return value


def _number(value: Any, least: float, most: float) -> float:
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or not least <= value <= most:
        raise ValueError(f"a number from {least:g} to {most:g} is expected, not {value!r}")
    return float(value)
