"""FeTrIL: a frozen backbone, old classes imitated by translated features of new ones, and linear SVMs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil import seeds
from efcil.core import gaussians, svm
from efcil.core.heads import softmax_epoch
from efcil.data.store import VIEWS, TaskImages
from efcil.methods.base import Task
from efcil.methods.frozen import FrozenBackbone
from efcil.methods.memory import ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option

# PyCIL's training of the layer: SGD, momentum 0.9, cosine schedule.
SOFTMAX_EPOCHS = 50
SOFTMAX_RATE = 0.05
SOFTMAX_BATCH = 128


class FeatureTranslation(FrozenBackbone):
    """Moves the features of the most similar new class onto each old class's mean and fits one linear classifier.

    Its weights are the network's heads; its intercepts are kept here. SVMs see features of unit length.
    """

    name = "fetril"
    summary = "frozen backbone, old classes as translated features of new ones, one-vs-rest linear SVMs"

    @dataclass(frozen=True)
    class Settings:
        """How old classes are imitated, and how the classifier is fitted."""

        views: str = option(
            "plain",
            "Images that features are computed from: plain (the authors' code) or augmented, as EFC computes its "
            "statistics (which reproduces the EFC paper, and is in the presets of its datasets).",
            choices=VIEWS,
        )
        similarity: str = option(
            "euclidean",
            "How the new class that lends its features is chosen: euclidean (the authors' code) or cosine (PyCIL).",
            choices=("euclidean", "cosine"),
        )
        first_step: str = option(
            "head",
            "Classifier after the first task: head, the softmax head all methods start from (the EFC paper's plots "
            "suggest it), or svm (the authors' code; if linear is softmax, that layer).",
            choices=("head", "svm"),
        )
        linear: str = option(
            "svm",
            "The classifier: svm, one-vs-rest machines on features of unit length (the authors' code), or softmax, one "
            "layer trained by gradient on features as they are (FeTrIL's other form, by PyCIL's recipe).",
            choices=("svm", "softmax"),
        )
        solver: str = option(
            "torch",
            "Solver of the SVMs: torch (on the training device) or sklearn (liblinear, on the CPU).",
            choices=svm.SOLVERS,
            needs=("linear", "svm"),
        )
        cost: float = option(1.0, "Weight C of the squared hinge loss (FeTrIL).", minimum=1e-9, needs=("linear", "svm"))
        tolerance: float = option(
            1e-4, "Tolerance of the solver, by liblinear's rule (FeTrIL).", minimum=1e-12, needs=("linear", "svm")
        )

    settings: Settings
    intercepts: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.keep(
            "intercepts",
            torch.zeros(0),
            why="weights of a classifier solved from class statistics",
            title="solved classifier",
            recovery="A function of the class statistics. No image can be recovered from it.",
        )

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """The mean of every class."""
        return ClassMemory(size, why="say where to move features of new classes to imitate an old one")

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Store the new classes' means, imitate the old classes, and fit the classifier of all classes."""
        features, labels = gaussians.collect(self.network.features, data.seen(self.settings.views))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        if task.index == 0 and (self.settings.first_step == "head" or task.classes < 2):
            return
        imitated, old_labels = self.imitate(features, labels, self.memory.means[task.first_class :], task.first_class)
        rows, targets = torch.cat([imitated, features]), torch.cat([old_labels, labels])
        weight, self.intercepts = self._machines(rows, targets) if self._unit else self._layer(rows, targets, task)
        self.replace_heads(weight)

    @property
    def _unit(self) -> bool:
        return self.settings.linear == "svm"

    def _machines(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and intercepts of one machine per class, from scratch."""
        settings = self.settings
        machines = svm.fit(
            functional.normalize(rows, dim=1),
            labels,
            sum(self.network.head_sizes),
            cost=settings.cost,
            tolerance=settings.tolerance,
            solver=settings.solver,
        )
        return machines.weight, machines.intercept

    def _layer(self, rows: Tensor, labels: Tensor, task: Task) -> tuple[Tensor, Tensor]:
        """Weights and intercepts of a softmax layer, trained further from its present ones."""
        missing = self.intercepts.new_zeros(task.seen - len(self.intercepts))
        both = torch.cat([self.network.head_weight(), torch.cat([self.intercepts, missing])[:, None]], dim=1)
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)  # the intercept is the weight of a constant
        velocity = torch.zeros_like(both)
        for epoch in range(SOFTMAX_EPOCHS):
            generator = seeds.generator(rows.device, task.seed, "softmax", task.index, epoch)
            order = torch.randperm(len(rows), generator=generator, device=rows.device)
            rate = SOFTMAX_RATE * 0.5 * (1.0 + math.cos(math.pi * epoch / SOFTMAX_EPOCHS))
            softmax_epoch(
                both,
                velocity,
                rows[order],
                labels[order],
                batch_size=SOFTMAX_BATCH,
                learning_rate=rate,
                momentum=0.9,
                weight_decay=5e-4,
            )
        return both[:, :-1].contiguous(), both[:, -1].contiguous()

    def imitate(self, features: Tensor, labels: Tensor, new_means: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Features and labels of all old classes: those of the most similar new class, moved by the means' difference.

        features (N, n) and labels (N) are those of the new classes, `first` on, whose means are new_means (q, n).
        """
        if first == 0:
            return features[:0], labels[:0]
        old_means = self.memory.means[:first]
        if self.settings.similarity == "cosine":
            similar = functional.normalize(old_means, dim=1) @ functional.normalize(new_means, dim=1).T
        else:
            similar = -torch.cdist(old_means.double(), new_means.double())
        rows, targets = [], []
        for old, donor in enumerate(similar.argmax(dim=1).tolist()):
            lent = features[labels == first + donor]
            rows.append(lent + (old_means[old] - new_means[donor]))
            targets.append(torch.full((len(lent),), old, device=labels.device))
        return torch.cat(rows), torch.cat(targets)

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Decision values of the fitted classifier, or the logits of the first task's head if there is none yet."""
        features = self.network.features(images)
        if len(self.intercepts) == 0:
            return self.network.logits(features)
        if self._unit:
            features = functional.normalize(features, dim=1)
        return functional.linear(features, self.network.head_weight(), self.intercepts)
