"""The words that all forms of an evaluation share."""

from __future__ import annotations

import os
from collections.abc import Iterator

from efcil.errors import printable, shortened
from efcil.evaluation.result import Evaluation, UnknownClass

LONGEST_NAME = 40


def short(name: str) -> str:
    """Return a name on one line, the middle of a long one left out."""
    return shortened(printable(name), LONGEST_NAME)


def file_name(found: Evaluation, image: str) -> str:
    """Return the name of an image inside the evaluated folder."""
    inside = found.data and image.startswith(found.data + os.sep)
    return printable(image[len(found.data) + 1 :] if inside else image)


def spelling(found: UnknownClass) -> str:
    """Return a sentence about a class whose name is nearly one of the model's."""
    return f"The model's class is called {printable(found.resembles)}: rename the folder if it is the same."


def rejection(found: Evaluation) -> Iterator[str]:
    """Yield sentences about what is answered as unknown, and how well that separates known from unknown classes."""
    rejected = found.rejection
    if rejected is not None:
        if rejected.unknown_images:
            yield (
                f"recognised as unknown: {rejected.unknown_recognised:,} of {rejected.unknown_images:,} images of "
                f"unknown classes ({percent(rejected.unknown_recognised / rejected.unknown_images)})"
            )
        if rejected.known_images:
            yield (
                f"wrongly answered as unknown: {rejected.known_rejected:,} of {rejected.known_images:,} images of "
                f"known classes ({percent(rejected.known_rejected / rejected.known_images)}; expected: "
                f"{percent(rejected.share)})"
            )
        if rejected.accepted_accuracy is not None:
            yield f"accuracy of the others: {percent(rejected.accepted_accuracy)}"
        if rejected.auroc is not None:
            yield f"AUROC of known against unknown classes by typicality: {rejected.auroc:.3f}"
    if found.confidence_auroc is not None:
        yield f"AUROC of known against unknown classes by the probability of the answer: {found.confidence_auroc:.3f}"


def percent(share: float | None, otherwise: str = "") -> str:
    """Return a share in percent, with one decimal."""
    return otherwise if share is None else f"{100 * share:.1f}%"


def leaning(confidence: float, interval: tuple[float, float]) -> str:
    """Return what the mean confidence says of the probabilities, if it lies outside the interval of the accuracy."""
    if confidence > interval[1]:
        return "overconfident: above the accuracy's interval"
    return "underconfident: below the accuracy's interval" if confidence < interval[0] else ""
