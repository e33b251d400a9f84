"""Elastic Feature Consolidation (ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from efcil.core import drift, gaussians, prototypes
from efcil.core.covariance import IN_SHORT, join, shorten, spell_out, task_average
from efcil.core.elastic import elastic_loss
from efcil.core.feature_matrix import FeatureMatrixSum, accumulate
from efcil.core.losses import cross_entropy
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Method, Plan, Task, Terms
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option


@dataclass(frozen=True)
class ElasticSettings:
    """Hyper-parameters that EFC and EFC++ share: the drift penalty, and what is kept of old classes."""

    efm_weight: float = option(
        10.0, "Weight of the empirical feature matrix in the drift penalty.", minimum=0, needs=("regulariser", "efm")
    )
    damping: float = option(
        0.1, "Weight of the identity in the drift penalty.", minimum=0, needs=("regulariser", "efm")
    )
    prototype_update: str = option(
        "efm",
        "How old classes follow the drift: efm (means, weights from the feature matrix), none (ablation), linear "
        "(means and covariances, by one ridge map from old to new features), or linear-residual (the same, and "
        "what the map leaves unexplained is added to the covariances).",
        choices=("efm", "none", "linear", "linear-residual"),
    )
    drift_ridge: float = option(
        0.01,
        "Pull of a linear prototype_update towards the identity, in mean variances of a feature.",
        minimum=0,
        needs=("prototype_update", ("linear", "linear-residual")),
    )
    drift_sigma: float = option(
        0.2, "Width of the kernel that weighs drift vectors.", minimum=1e-6, needs=("prototype_update", "efm")
    )
    covariance: str = option(
        "class",
        "Covariances kept: one per class, one per task (average of its classes), or only the last task's; or one per "
        "class in short: low-rank (leading eigenvectors) or diagonal (variances alone).",
        choices=("class", "task", "last-task", *IN_SHORT),
    )
    covariance_share: float = option(
        0.99,
        "Share of a class's variance that low-rank covariances keep (EFC paper: 0.9, 0.95 and 0.99).",
        minimum=1e-3,
        maximum=1,
        needs=("covariance", "low-rank"),
    )
    jitter: float = option(1e-5, "Added to the diagonal of a covariance when it is sampled from.", minimum=0)


class ElasticFeatureConsolidation(Method):
    """Lets features drift where old classes do not care, and rehearses old classes as Gaussians in feature space."""

    name = "efc"
    summary = "feature drift penalised by the empirical feature matrix, Gaussian prototypes rehearsed and moved along"
    family = "efc"
    trains_normalisation = False
    keeps = ("heads", "means", "covariances")

    @dataclass(frozen=True)
    class Settings(ElasticSettings):
        """Hyper-parameters of EFC and the ablations of its paper."""

        regulariser: str = option(
            "efm",
            "Drift penalty: efm, or features for plain feature distillation of weight feature_weight (ablation).",
            choices=("efm", "features"),
        )
        feature_weight: float = option(
            10.0, "Weight of the penalty where regulariser is features.", minimum=0, needs=("regulariser", "features")
        )
        loss: str = option(
            "prace",
            "Rehearsal: prace (asymmetric, PR-ACE) or symmetric (all classes in both terms; ablation).",
            choices=("prace", "symmetric"),
        )
        symmetric_weight: float = option(
            10.0, "Weight of the prototypes where loss is symmetric.", minimum=0, needs=("loss", "symmetric")
        )

    settings: Settings
    feature_matrix: Tensor
    means: Tensor
    covariances: Tensor
    covariance_of: Tensor
    compact: Tensor
    factors: Tensor
    penalty: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        size = network.feature_size
        self.register_buffer("feature_matrix", torch.zeros(size, size))
        self.register_buffer("means", torch.zeros(0, size))
        # Where covariances are kept in short, that is what is saved; the full ones are put together again from it.
        kind = self.settings.covariance
        self.register_buffer("covariances", torch.zeros(0, size, size), persistent=kind not in IN_SHORT)
        if kind in IN_SHORT:
            self.register_buffer("compact", torch.zeros(0, size, 0) if kind == "low-rank" else torch.zeros(0, size))
        self.register_buffer("covariance_of", torch.zeros(0, dtype=torch.int64))
        # Derived from the above, needed while a task trains, never saved.
        self.register_buffer("factors", torch.zeros(0, size, size), persistent=False)
        self.register_buffer("penalty", torch.zeros(size, size), persistent=False)

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep the network as it is as the teacher, then grow it; BatchNorm is frozen in values and statistics."""
        self.keep_teacher()
        super().begin_task(task)
        self.restored()
        self._task = task

    def restored(self) -> None:
        """Factorise the covariances and put the penalty matrix together."""
        self._spell_out()
        settings = self.settings
        factors = prototypes.cholesky_factors(self.covariances, settings.jitter)
        self.factors = factors.to(self.covariances.dtype)
        self._classes_per_covariance = int(torch.bincount(self.covariance_of).max()) if len(self.means) else 1
        identity = torch.eye(self.network.feature_size, device=self.feature_matrix.device)
        if settings.regulariser == "efm":
            self.penalty = settings.efm_weight * self.feature_matrix + settings.damping * identity
        else:
            self.penalty = settings.feature_weight * identity

    def previous_images(self, task: Task) -> int:
        """PR-ACE shows up to this many images of the step before once more, among the prototypes."""
        if self.settings.loss == "symmetric":
            return 0
        return prototypes.largest_new_count(task.first_class, task.classes, task.batch_size)

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Features of the old network."""
        return {"features": self.old_network.features(images)}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the prototypes of every step, and how many of them and of the step before's images count."""
        old, task, width = len(self.means), self._task, plan.batch_size
        labels = prototypes.draw_prototype_labels(old, width, plan.steps, generator)
        noise = torch.randn(labels.numel(), self.network.feature_size, generator=generator, device=labels.device)
        most = plan.steps * (width // old + 1) * self._classes_per_covariance
        flat = labels.flatten()
        groups = self.covariance_of[flat]
        samples = self.means[flat] + prototypes.coloured_noise(self.factors, groups, noise, most)
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
        old_features, prototypes_ = batch.frozen["features"], batch.draws["prototypes"]
        if self.settings.loss == "prace":
            targets = torch.cat([batch.labels, batch.previous_labels, batch.draws["prototype_labels"]])
            drift_term, current, replay = elastic_loss(
                features, weight, old_features, self.penalty, prototypes_, targets,
                batch.draws["replay_weights"], len(self.means),
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

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means along the drift, then compute the new feature matrix, means and covariances."""
        if task.index > 0 and self.settings.prototype_update != "none":
            self._follow_drift(data)
        self.feature_matrix = self._measure_feature_matrix(task, data)
        self._add_prototypes(task, data)
        self.teacher = None

    def _follow_drift(self, data: TaskImages) -> None:
        settings = self.settings
        if settings.prototype_update == "efm":
            pairs = self.before_and_after(data)
            self.means = drift.compensate(self.means, *pairs, self.feature_matrix, settings.drift_sigma)
        else:
            residual = settings.prototype_update == "linear-residual"
            self.carry_gaussians(data, settings.drift_ridge, residual)
            if settings.covariance in IN_SHORT:
                # A map alone does not raise a rank, so that nothing needs to be left out once more.
                share = settings.covariance_share if residual else 1.0
                self.compact = shorten(self.covariances, settings.covariance, share)
                self._spell_out()

    def _measure_feature_matrix(self, task: Task, data: TaskImages) -> Tensor:
        weight = self.network.head_weight()
        total = FeatureMatrixSum.empty(task.seen, weight.device)
        # Whole batches only, as in the authors' code, unless that would leave nothing.
        left = len(data) // task.batch_size * task.batch_size or len(data)
        for images, _ in data.augmented("feature-matrix"):
            logits = functional.linear(self.network.features(images), weight)[:left]
            left -= len(logits)
            if len(logits):
                total = accumulate(total, logits)
        return total.matrix(weight)

    def _add_prototypes(self, task: Task, data: TaskImages) -> None:
        features, labels = gaussians.collect(self.network.features, data.augmented("prototypes"))
        means, covariances = prototypes.class_statistics(features, labels, range(task.first_class, task.seen))
        groups = torch.arange(task.classes, device=means.device)
        if self.settings.covariance in ("task", "last-task"):
            covariances = task_average(covariances, torch.zeros_like(groups), 1)
            groups = torch.zeros_like(groups)
        self.means = torch.cat([self.means, means.to(self.means.dtype)])
        if self.settings.covariance == "last-task":
            self.covariances = covariances
            self.covariance_of = torch.zeros(len(self.means), dtype=torch.int64, device=groups.device)
        else:
            self.covariance_of = torch.cat([self.covariance_of, groups + len(self.covariances)])
            self._append(covariances.to(self.covariances.dtype))

    # -- covariances in short ----------------------------------------------------------------------------------

    def _append(self, covariances: Tensor) -> None:
        """Add the covariances of new classes, in the form that they are kept in."""
        kind = self.settings.covariance
        if kind in IN_SHORT:
            self.compact = join(self.compact, shorten(covariances, kind, self.settings.covariance_share))
            self._spell_out()
        else:
            self.covariances = torch.cat([self.covariances, covariances])

    def _spell_out(self) -> None:
        """Put the full covariances together from what is kept of them."""
        if self.settings.covariance in IN_SHORT:
            self.covariances = spell_out(self.compact)
