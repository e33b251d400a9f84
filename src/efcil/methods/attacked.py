"""Current images near old classes, and such that an attack has turned into one: where ADC and APR measure drift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from efcil.data.store import TaskImages, View
from efcil.network import attack
from efcil.network.incremental import IncrementalNetwork


class Neighbours:
    """The current images, in one view, that the old network has nearest to each old class."""

    def __init__(self, network: IncrementalNetwork, data: TaskImages, view: View, means: Tensor, count: int) -> None:
        self.network = network
        self.data = data
        self.view = view
        self.means = means
        features, lowest, highest = [], [], []
        for images, _ in data.rendered(view):
            features.append(network.features(images))
            lowest.append(images.amin())
            highest.append(images.amax())
        self.limits = torch.stack(lowest).amin(), torch.stack(highest).amax()
        self.rows = nearest(torch.cat(features), means, count)

    def images(self, number: int) -> Tensor:
        """Return those of a class, nearest first."""
        return images_of(self.data, self.view.of(self.rows[number]))

    def attacked(self, number: int, lengths: Sequence[float], group: int) -> Tensor:
        """Return them after steps towards the class's mean, with pixels in the range of all images of the view."""
        images = self.images(number)
        wanted = self.means[number].expand(len(images), -1)
        return attack.towards(self.network, images, wanted, lengths, group=group, limits=self.limits)

    def arrived(self, features: Tensor, number: int) -> Tensor:
        """Return which features (K, n) of the old network are nearer to this class than to any other."""
        return torch.cdist(features, self.means).argmin(dim=1) == number


def nearest(features: Tensor, means: Tensor, count: int) -> Tensor:
    """Return the rows (C, k) of features (N, n) nearest to each mean (C, n), nearest first; k is `count`, or N."""
    distances = torch.cdist(means.to(features.dtype), features)
    return distances.topk(min(count, len(features)), dim=1, largest=False).indices


def images_of(data: TaskImages, view: View) -> Tensor:
    """Return all images of a view."""
    return torch.cat([images for images, _ in data.rendered(view)])
