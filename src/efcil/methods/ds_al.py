"""DS-AL: a frozen backbone, ridge regression on random features, and a second one for what the first leaves over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil import seeds
from efcil.core import analytic, gaussians
from efcil.core.heads import new_rows
from efcil.data.store import TaskImages
from efcil.methods.base import Task
from efcil.methods.frozen import FrozenBackbone
from efcil.methods.kept import Keeping
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option

#: Numbers of the random features that are computed together: 256 MB in float64.
_LARGEST = 1 << 25
_RECOVERY = (
    "A sum over the images of a class, or of all. Of a class with a single image, its features can be recovered."
)


class Regression(Keeping):
    """Ridge regression from rows of `width` numbers onto targets by class, kept as sums over all rows."""

    gram: Tensor
    sums: Tensor
    weights: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        why = "solve for a classifier"
        gram, none = torch.zeros(width, width, dtype=torch.float64), torch.zeros(0, width, dtype=torch.float64)
        self.keep("gram", gram, why=why, title="products of random features", recovery=_RECOVERY)
        self.keep("sums", none, why=why, title="sums of random features by class", recovery=_RECOVERY)
        self.keep(
            "weights",
            none.clone(),
            why="weights of a classifier solved from class statistics",
            title="solved classifier",
            recovery="A function of the class statistics. No image can be recovered from it.",
        )

    def grow(self, classes: int) -> None:
        """Make room for so many new classes."""
        self.sums = torch.cat([self.sums, self.sums.new_zeros(classes, self.sums.shape[1])])

    def add(self, rows: Tensor, targets: Tensor) -> None:
        """Add rows (N, width), float64, with their targets (N, classes)."""
        self.gram.addmm_(rows.T, rows)
        self.sums.addmm_(targets.T, rows)

    def solve(self, ridge: float) -> None:
        """Compute the weights from the sums."""
        self.weights = analytic.solve(self.gram, self.sums, ridge)

    def forward(self, rows: Tensor) -> Tensor:
        """What the regression says of rows (N, width)."""
        return rows @ self.weights.T

    def average_rows(self, classes: Sequence[int], weights: Tensor, seen: int) -> None:
        """Give the first of `classes` what one class of all their images would have: targets, so all rows, add up."""
        for rows in (self.sums, self.weights):
            rows[classes[0]] = rows[list(classes)].sum(dim=0)


class DualStream(FrozenBackbone):
    """Solves a ridge regression on rectified random features; another, on their tangents, fits its errors.

    The first is equal to one that saw all images at once. The second learns, of every task, what the first leaves over
    for the new classes.
    """

    name = "ds-al"
    summary = "frozen backbone, ridge regression on random features, and a second one on what the first leaves over"
    cosine_heads = True

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of DS-AL, with the values of its authors for CIFAR-100."""

        expansion: int = option(
            16, "Random features per feature of the network (DS-AL: 8,192 in all, 16 x 512).", minimum=1
        )
        ridge: float = option(0.1, "Penalty of the regression (DS-AL).", minimum=1e-12)
        compensation: float = option(
            0.6, "Weight of the second regression (DS-AL; ImageNet: 1.5); 0 leaves it out, which is ACIL.", minimum=0
        )
        compensation_ridge: float = option(
            0.1, "Penalty of the second regression (DS-AL).", minimum=1e-12, unless=("compensation", 0)
        )

    settings: Settings
    projection: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        size = network.feature_size
        width = self.settings.expansion * size
        self.keep(
            "projection",
            torch.zeros(size, width),
            why="turns features into random ones",
            title="random projection",
            recovery="Random numbers.",
        )
        self.main = Regression(width)
        self.compensation = Regression(width) if self.settings.compensation else None

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Add the task's images, without augmentation, to the sums, and solve for the weights of all classes."""
        features, labels = gaussians.collect(self.network.features, data.plain())
        if task.index == 0:
            generator = seeds.generator("cpu", task.seed, "projection")
            size, width = self.projection.shape
            self.projection.copy_(new_rows(width, size, generator).T)
        self.main.grow(task.classes)
        for rows, targets in self._expanded(features, labels, task.seen):
            self.main.add(rows.relu(), targets)
        self.main.solve(self.settings.ridge)
        if self.compensation is None:
            return
        self.compensation.grow(task.classes)
        for rows, targets in self._expanded(features, labels, task.seen):
            left = targets - self.main(rows.relu())
            left[:, : task.first_class] = 0.0  # what the first says of old classes is no error of theirs
            self.compensation.add(rows.tanh(), left)
        self.compensation.solve(self.settings.compensation_ridge)

    def _expanded(self, features: Tensor, labels: Tensor, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random features and one-hot labels of some images at a time."""
        size = max(1, _LARGEST // self.projection.shape[1])
        for rows, own in zip(features.split(size), labels.split(size), strict=True):
            yield self._expand(rows), functional.one_hot(own, classes).double()

    def _expand(self, features: Tensor) -> Tensor:
        return features.double() @ self.projection.double()

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """What the first regression says, and the second with its weight."""
        rows = self._expand(self.network.features(images))
        scores = self.main(rows.relu())
        if self.compensation is not None:
            scores = scores + self.settings.compensation * self.compensation(rows.tanh())
        return scores.float()
