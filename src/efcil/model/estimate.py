"""How long learning will take, from a few images that the network is tried on first, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import torch

from efcil.data.tiers import Keeping
from efcil.model import folder
from efcil.model.card import Card
from efcil.model.in_memory import Model
from efcil.model.measuring import trains_network

_TRIED = 4
#: How often they are timed, of which the shortest counts: other programs make some longer.
_LOOKS = 3
#: A training step costs about three forward passes.
_STEP = 3.0
#: Memory that a visit takes where nothing trains: a program, and for every byte of the network, every number of a
#: covariance and every byte of the images, as the network sees them, so many. Measured with 231 to 3,696 photographs,
#: 1,280 and 3,840 features (docs/own-images-study.md has the numbers), and networks of 1 to 350 MB.
_PROGRAM_BYTES = 407 * 10**6
_BYTES_PER_WEIGHT_BYTE = 4
_BYTES_PER_COVARIANCE = 48
_BYTES_PER_BYTE = 1.2
#: Less is not worth a line.
_NOTABLE_BYTES = 2 * 10**9


def estimate(model: Model, pixels: np.ndarray, fresh: int) -> tuple[float, str]:
    """Return the expected seconds, and a line about them.

    `fresh` images are of new classes. A network that is not trained sees every image once.
    """
    looks = _looks(model) if fresh else 1.0
    known = len(pixels) - fresh
    seconds = _seconds_per_image(model, pixels) * (known + fresh * looks)
    of_new = f" at each of the {fresh} of new classes" if known else " at each"
    what = f"{looks:.0f} looks{of_new}" if looks > 2 else "each is read once"
    images = "1 image" if len(pixels) == 1 else f"{len(pixels)} images"
    return seconds, f"{images}, {what}: {in_words(seconds)}"


def memory_needed(card: Card, images: int) -> Iterator[str]:
    """Yield how much memory images take while they are learned, if that is much, or more than is free.

    What training takes depends on the network, and was not measured; nothing is said of it.
    """
    if trains_network(card, len(card.task_sizes)):
        return
    backbone, pixels = folder.backbone(card), images * 3 * card.image_size**2
    needed = _PROGRAM_BYTES + _BYTES_PER_WEIGHT_BYTE * backbone.bytes() + _BYTES_PER_BYTE * pixels
    needed += _BYTES_PER_COVARIANCE * backbone.feature_size**2
    free = Keeping().measure(torch.device("cpu")).host
    short = free is not None and needed > free
    if short or needed >= _NOTABLE_BYTES:
        less = f", and {(free or 0) / 1e9:.1f} GB are free: learn fewer classes in a visit" if short else ""
        yield f"{images:,} images take about {needed / 1e9:.1f} GB of memory while they are learned{less}"


def _looks(model: Model) -> float:
    """Return how many forward passes an image of a new class costs."""
    resolved, index = model.card.resolved, len(model.card.task_sizes)
    recipe = resolved.later if index else resolved.first_task
    return 1.0 + (recipe.epochs * _STEP * recipe.views if trains_network(model.card, index) else 0.0)


@torch.no_grad()
def _seconds_per_image(model: Model, pixels: np.ndarray) -> float:
    network = model.blueprint.empty_network().eval() if model.method is None else model.method.network
    network.half_precision = model.execution.half
    few = pixels[np.arange(_TRIED) % len(pixels)]

    def look() -> float:
        began = time.perf_counter()
        model.by_pieces(few, network.features)  # copies the result to the host, so it waits for the device
        return time.perf_counter() - began

    look()  # the first pass also prepares libraries
    return min(look() for _ in range(_LOOKS)) / _TRIED


def in_words(seconds: float) -> str:
    """Return about how long that is."""
    if seconds < 5:
        return "a few seconds"
    if seconds < 100:
        return f"about {round(seconds, -1):.0f} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"
