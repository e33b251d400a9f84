"""Features that are computed once: while nothing trains, the same image has the same features."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from efcil.core.growing import GrowingRows
from efcil.network.folded import version
from efcil.network.incremental import IncrementalNetwork

_HOOK = "features"


class FeatureMemo:
    """Remembers the features of images by the images' content, for networks that hold the same weights.

    Attach it to networks that do not train. If a network's weights change in place nevertheless, its features are
    computed as if there were no memo. Features are a thousandth of the images, so that all of a task fit.
    """

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._features = GrowingRows()

    def attach(self, network: IncrementalNetwork) -> None:
        """Let the network look up its features here first."""
        compute, weights = network.features, [*network.backbone.parameters(), *network.backbone.buffers()]
        versions = [version(each) for each in weights]

        def features(images: Tensor) -> Tensor:
            if torch.is_grad_enabled() or [version(each) for each in weights] != versions:
                return compute(images)
            return self.look_up(images, compute)

        object.__setattr__(network, _HOOK, features)

    def look_up(self, images: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the features (batch, n) of images, computing those that are not known yet."""
        digests = [_digest(image) for image in images]
        missing = [row for row, digest in enumerate(digests) if digest not in self._places]
        if len(missing) == len(images):
            return self._keep(digests, compute(images))
        if missing:
            rows = torch.tensor(missing, device=images.device)
            self._keep([digests[row] for row in missing], compute(images[rows]))
        return self._features.tensor[[self._places[digest] for digest in digests]]

    def _keep(self, digests: list[int], found: Tensor) -> Tensor:
        """Remember features (batch, n), and return them."""
        self._places.update(zip(digests, itertools.count(self._features.count)))
        self._features.add(found)
        return found


@contextlib.contextmanager
def remembered_features(network: IncrementalNetwork) -> Iterator[None]:
    """Let the network compute the features of an image once within this context, unless it does so already."""
    if _HOOK in network.__dict__:
        yield
        return
    FeatureMemo().attach(network)
    try:
        yield
    finally:
        forget_features(network)


def forget_features(network: IncrementalNetwork) -> None:
    """Let the network compute its features every time again."""
    network.__dict__.pop(_HOOK, None)


def _digest(image: Tensor) -> int:
    """Return a number of 64 bits for an image (3, h, w).

    Every image of a visit is looked up about seven times, and Python's hash takes a third of the time of SHA-256. The
    chance that two of 100,000 images share a number is 3 in 10 billion.
    """
    pixels = image.detach().cpu().permute(1, 2, 0).contiguous()  # no copy: network input is channels-last
    return hash(pixels.view(torch.uint8).numpy().tobytes())
