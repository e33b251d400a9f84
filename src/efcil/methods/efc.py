"""Elastic Feature Consolidation (ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import drift, gaussians, prototypes
from efcil.core.covariance import IN_SHORT
from efcil.core.elastic import elastic_loss
from efcil.core.feature_matrix import FeatureMatrixSum, accumulate, accumulate_cosine
from efcil.core.losses import cross_entropy
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Method, Plan, Task, Terms
from efcil.methods.memory import LIMIT, ClassMemory, Sampler
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option


@dataclass(frozen=True)
class PrototypeSettings:
    """What is stored about old classes, and how it follows the drift."""

    prototype_update: str = option(
        "efm",
        "How old classes follow the drift: efm (means, weights from the feature matrix), none (ablation), linear "
        "(means and covariances, by one ridge map from old to new features), or linear-residual (the same, and "
        "what the map leaves unexplained is added to the covariances).",
        choices=("efm", "none", "linear", "linear-residual"),
    )
    drift_ridge: float = option(
        0.01,
        "Ridge of a linear prototype_update towards the identity, in mean variances of a feature.",
        minimum=0,
        needs=("prototype_update", ("linear", "linear-residual")),
    )
    drift_sigma: float = option(
        0.2, "Width of the kernel that weighs drift vectors.", minimum=1e-6, needs=("prototype_update", "efm")
    )
    covariance: str = option(
        "class",
        "Covariances kept: one per class, one per task (average of its classes), or only the last task's; or one per "
        "class in compressed form: low-rank (leading eigenvectors) or diagonal (only variances).",
        choices=("class", "task", "last-task", *IN_SHORT),
    )
    covariance_share: float = option(
        0.99,
        "Share of a class's variance that low-rank covariances keep (EFC paper: 0.9, 0.95 and 0.99).",
        minimum=1e-3,
        maximum=1,
        needs=("covariance", "low-rank"),
    )
    covariance_limit: float = option(
        LIMIT / 1e9,
        "Gigabytes that covariances of single classes may take. If they would take more (2 GB: 1,907 classes with 512 "
        "features), only directions with 0.9 of the variance are kept, as with covariance=low-rank.",
        minimum=0,
        needs=("covariance", ("class", "low-rank")),
    )
    jitter: float = option(1e-5, "Added to the diagonal of a covariance when it is sampled from.", minimum=0)


@dataclass(frozen=True)
class PenaltySettings:
    """How much each direction of feature space may drift."""

    efm_weight: float = option(
        10.0, "Weight of the empirical feature matrix in the drift penalty.", minimum=0, needs=("regulariser", "efm")
    )
    damping: float = option(
        0.1, "Weight of the identity in the drift penalty.", minimum=0, needs=("regulariser", "efm")
    )


@dataclass(frozen=True)
class ElasticSettings(PrototypeSettings, PenaltySettings):
    """Hyper-parameters that EFC and EFC++ share."""


class ElasticFeatureConsolidation(Method):
    """Lets features drift in directions unimportant to old classes, which are rehearsed as Gaussians of features."""

    name = "efc"
    summary = "feature drift penalised by the empirical feature matrix, Gaussian prototypes rehearsed and moved along"
    family = "efc"
    extra_terms = True

    @dataclass(frozen=True)
    class Settings(ElasticSettings):
        """Hyper-parameters of EFC and the ablations of its paper."""

        regulariser: str = option(
            "efm",
            "Drift penalty: efm, or features for plain feature distillation of weight feature_weight (ablation).",
            choices=("efm", "features"),
        )
        feature_weight: float = option(
            10.0, "Weight of the penalty if regulariser is features.", minimum=0, needs=("regulariser", "features")
        )
        loss: str = option(
            "prace",
            "Rehearsal: prace (asymmetric, PR-ACE) or symmetric (all classes in both terms; ablation).",
            choices=("prace", "symmetric"),
        )
        symmetric_weight: float = option(
            10.0, "Weight of the prototypes if loss is symmetric.", minimum=0, needs=("loss", "symmetric")
        )

    settings: Settings
    feature_matrix: Tensor
    penalty: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        size = network.feature_size
        self.keep(
            "feature_matrix",
            torch.zeros(size, size),
            why="which directions of feature space the classes depend on",
            title="empirical feature matrix",
            recovery="One average over the last task's images. No image can be recovered from it.",
        )
        # Both are derived from what is kept, needed while a task trains, and never saved.
        self.register_buffer("penalty", torch.zeros(size, size), persistent=False)
        self._sampler: Sampler | None = None

    @classmethod
    def remembers(cls, settings: PrototypeSettings, size: int) -> ClassMemory:
        """Every class as a Gaussian."""
        return ClassMemory(
            size,
            why="stand for a class's features when it is rehearsed, and are moved along the drift",
            covariances=settings.covariance,
            share=settings.covariance_share,
            limit=1e9 * settings.covariance_limit,
            table=True,
        )

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, then grow it."""
        self.keep_teacher()
        super().begin_task(task)
        self.restored()
        self._task = task

    def restored(self) -> None:
        """Factorise the covariances and compute the penalty matrix."""
        self._sampler = self.memory.sampler(self.settings.jitter)
        self.penalty = self._penalty_matrix()

    def _penalty_matrix(self) -> Tensor:
        settings, identity = self.settings, torch.eye(self.network.feature_size, device=self.feature_matrix.device)
        if settings.regulariser == "features":
            return settings.feature_weight * identity
        return settings.efm_weight * self.feature_matrix + settings.damping * identity

    def previous_images(self, task: Task) -> int:
        """PR-ACE repeats up to this many images of the previous step, among the prototypes."""
        if self.settings.loss == "symmetric":
            return 0
        return prototypes.largest_new_count(task.first_class, task.classes, task.batch_size)

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Features of the old network."""
        return {"features": self.old_network.features(images)}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the prototypes of every step, and how many of them and of the previous step's images count."""
        assert self._sampler is not None
        task, width = self._task, plan.batch_size
        old = task.first_class
        labels = prototypes.draw_prototype_labels(old, width, plan.steps, generator)
        samples = self._sampler.features(labels.flatten(), generator, most=plan.steps * (width // old + 1))
        draws = {"prototypes": samples.view(plan.steps, width, -1), "prototype_labels": labels}
        if self.settings.loss == "symmetric":
            return draws
        composition = prototypes.draw_composition(old, task.classes, width, plan.steps, generator)
        first = plan.previous_counts == 0
        old_count = torch.where(first, width, composition.old_count)
        new_count = torch.minimum(composition.new_count, plan.previous_counts)
        place = torch.arange(width, device=labels.device)
        again = torch.arange(self.previous_images(task), device=labels.device)
        counts = torch.cat([again < new_count[:, None], place < old_count[:, None]], dim=1).float()
        draws["replay_weights"] = counts / counts.sum(dim=1, keepdim=True).clamp(min=1.0)
        return draws

    def loss(self, batch: Batch) -> Terms:
        """Drift penalty plus PR-ACE (or the symmetric loss)."""
        features, weight = self.network.features(batch.images), self.network.head_weight()
        batch.compared.append((features[: batch.size], batch.labels - self._task.first_class))
        old_features, prototypes_ = batch.frozen["features"], batch.draws["prototypes"]
        if self.settings.loss == "prace":
            targets = torch.cat([batch.labels, batch.previous_labels, batch.draws["prototype_labels"]])
            drift_term, current, replay = elastic_loss(
                features, weight, old_features, self.penalty, prototypes_, targets,
                batch.draws["replay_weights"], self._task.first_class,
            )  # fmt: skip
            return {"drift": drift_term, "current": current, "replay": replay}
        delta = features - old_features
        rehearsal = cross_entropy(functional.linear(prototypes_, weight), batch.draws["prototype_labels"])
        return {
            "drift": ((delta @ self.penalty) * delta).sum(dim=1).mean(),
            "current": cross_entropy(functional.linear(features, weight), batch.labels),
            "replay": self.settings.symmetric_weight * rehearsal,
        }

    # -- statistics --------------------------------------------------------------------------------------------

    def importance_matrix(self) -> Tensor:
        """The empirical feature matrix."""
        return self.feature_matrix

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means along the drift, then compute the new feature matrix, means and covariances."""
        self._sampler = None  # its factors take as much memory as the covariances, of which there will be more
        if task.index > 0 and self.settings.prototype_update != "none":
            self._follow_drift(data)
        self.feature_matrix = self._measure_feature_matrix(task, data)
        self._add_prototypes(task, data)
        self.teacher = None

    def _follow_drift(self, data: TaskImages) -> None:
        settings, memory = self.settings, self.memory
        if settings.prototype_update == "efm":
            pairs = self.before_and_after(data)
            memory.move(drift.compensate(memory.means, *pairs, self.feature_matrix, settings.drift_sigma))
        else:
            self.carry_memory(data, settings.drift_ridge, settings.prototype_update == "linear-residual")

    def _measure_feature_matrix(self, task: Task, data: TaskImages) -> Tensor:
        return self._measured(task, data).matrix(self.network.head_weight())

    def _measured(self, task: Task, data: TaskImages) -> FeatureMatrixSum:
        """Return what the feature matrix is made of: the predictions for one view of the task's images."""
        weight = self.network.head_weight()
        total = FeatureMatrixSum.of_head(weight)
        # Full batches only, as in the authors' code, unless there is none.
        left = len(data) // task.batch_size * task.batch_size or len(data)
        for images, _ in data.augmented("feature-matrix"):
            if left > 0:
                total = self._accumulated(total, self.network.features(images), left)
                left -= len(images)
        return total

    def _accumulated(self, total: FeatureMatrixSum, features: Tensor, most: int | None = None) -> FeatureMatrixSum:
        """Add what the heads predict for features, for the first `most` of them."""
        weight, scale = self.network.head_weight(), self.network.cosine_scale
        if scale is not None:
            return accumulate_cosine(total, features[:most], weight, scale)
        return accumulate(total, functional.linear(features, weight)[:most])

    def _add_prototypes(self, task: Task, data: TaskImages) -> None:
        features, labels = gaussians.collect(self.network.features, data.augmented("prototypes"))
        self.memory.add(features, labels, range(task.first_class, task.seen))
