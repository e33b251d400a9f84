"""FeTrIL: a frozen backbone, old classes imitated by translated features of new ones, and linear SVMs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import gaussians, prototypes, svm
from efcil.data.store import TaskImages
from efcil.methods.base import Task
from efcil.methods.frozen import FrozenBackbone
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option


class FeatureTranslation(FrozenBackbone):
    """Moves the features of the most similar new class onto each old class's mean and fits all classes' SVMs anew.

    The weights of the machines are the network's heads; their intercepts are kept here. Features have unit length.
    """

    name = "fetril"
    summary = "frozen backbone, old classes as translated features of new ones, one-vs-rest linear SVMs"
    keeps = ("means",)

    @dataclass(frozen=True)
    class Settings:
        """How old classes are imitated, and how the classifier is fitted."""

        similarity: str = option(
            "euclidean",
            "How the new class that lends its features is chosen: euclidean (the authors' code) or cosine (PyCIL).",
            choices=("euclidean", "cosine"),
        )
        first_step: str = option(
            "head",
            "Classifier after the first task: head, the softmax head all methods start from (the EFC paper's plots "
            "suggest it), or svm (the authors' code).",
            choices=("head", "svm"),
        )
        solver: str = option(
            "torch",
            "Who fits the SVMs: torch (on the training device) or sklearn (liblinear, on the CPU).",
            choices=svm.SOLVERS,
        )
        cost: float = option(1.0, "Weight C of the squared hinge loss (FeTrIL).", minimum=1e-9)
        tolerance: float = option(1e-4, "When a machine is done, by liblinear's rule (FeTrIL).", minimum=1e-12)

    settings: Settings
    means: Tensor
    intercepts: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.register_buffer("means", torch.zeros(0, network.feature_size))
        self.register_buffer("intercepts", torch.zeros(0))

    @torch.no_grad()
    def end_task(self, task: Task, data: TaskImages) -> None:
        """Store the new classes' means, imitate the old classes, and fit the machines of all classes."""
        features, labels = gaussians.collect(self.network.features, data.plain())
        means, _ = prototypes.class_statistics(features, labels, range(task.first_class, task.seen))
        imitated, old_labels = self.imitate(features, labels, means.to(self.means), task.first_class)
        self.means = torch.cat([self.means, means.to(self.means)])
        if task.index == 0 and (self.settings.first_step == "head" or task.classes < 2):
            return
        rows = functional.normalize(torch.cat([imitated, features]), dim=1)
        machines = svm.fit(
            rows,
            torch.cat([old_labels, labels]),
            task.seen,
            cost=self.settings.cost,
            tolerance=self.settings.tolerance,
            solver=self.settings.solver,
        )
        for head, weight in zip(self.network.heads, machines.weight.split(self.network.head_sizes), strict=True):
            head.copy_(weight)
        self.intercepts = machines.intercept

    def imitate(self, features: Tensor, labels: Tensor, new_means: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Features and labels of all old classes: those of the most similar new class, moved by the means' difference.

        features (N, n) and labels (N) are those of the new classes, `first` on, whose means are new_means (q, n).
        """
        if len(self.means) == 0:
            return features[:0], labels[:0]
        if self.settings.similarity == "cosine":
            similar = functional.normalize(self.means, dim=1) @ functional.normalize(new_means, dim=1).T
        else:
            similar = -torch.cdist(self.means.double(), new_means.double())
        rows, targets = [], []
        for old, donor in enumerate(similar.argmax(dim=1).tolist()):
            lent = features[labels == first + donor]
            rows.append(lent + (self.means[old] - new_means[donor]))
            targets.append(torch.full((len(lent),), old, device=labels.device))
        return torch.cat(rows), torch.cat(targets)

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Decision values of the machines, or the softmax head's logits where none have been fitted yet."""
        features = self.network.features(images)
        if len(self.intercepts) == 0:
            return self.network.logits(features)
        return functional.linear(functional.normalize(features, dim=1), self.network.head_weight(), self.intercepts)
