"""EFC++: Elastic Feature Consolidation whose heads are re-balanced on Gaussian features after each task."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from efcil import seeds
from efcil.core import gaussians
from efcil.core.feature_matrix import quadratic_drift
from efcil.core.heads import softmax_epoch
from efcil.core.losses import cross_entropy
from efcil.data.store import TaskImages
from efcil.errors import TrainingError
from efcil.methods.base import Batch, Plan, Task, Terms
from efcil.methods.efc import ElasticFeatureConsolidation, ElasticSettings, PrototypeSettings
from efcil.methods.memory import ClassMemory
from efcil.settings import option

#: Bytes of drawn features that heads are re-balanced on at a time; ImageNet-1K's 1,000 classes need 2.4e9.
_FEATURE_BYTES = 4 * 10**9
#: Without epochs of re-balancing, its other settings have no effect.
_NEVER = ("rebalance_epochs", 0)


class ElasticFeatureConsolidationPlusPlus(ElasticFeatureConsolidation):
    """Learns new features with EFC's drift penalty only, and balances old and new classes in the heads afterwards."""

    name = "efc++"
    summary = "EFC without rehearsal while the backbone trains; heads re-balanced on Gaussian features after each task"
    smooths_labels = True
    cosine_heads = True

    @dataclass(frozen=True)
    class Settings(ElasticSettings):
        """Hyper-parameters of EFC++, with the values of its authors' code."""

        rebalance_epochs: int = option(50, "Epochs of re-balancing after each task but the first; 0: none.", minimum=0)
        rebalance_learning_rate: float = option(
            1e-3, "Learning rate of re-balancing (SGD, constant).", minimum=0, unless=_NEVER
        )
        rebalance_momentum: float = option(0.9, "Momentum of re-balancing.", minimum=0, maximum=1, unless=_NEVER)
        rebalance_weight_decay: float = option(5e-4, "Weight decay of re-balancing.", minimum=0, unless=_NEVER)
        rebalance_batch_size: int = option(256, "Features in a step of re-balancing.", minimum=1, unless=_NEVER)
        rebalance_fresh: bool = option(
            True,
            "Augment the current images and compute their features again in every epoch of re-balancing; off: once, as "
            "the authors do for ImageNet-1K.",
            unless=_NEVER,
        )

    settings: Settings  # type: ignore[assignment]

    @classmethod
    def remembers(cls, settings: PrototypeSettings, size: int) -> ClassMemory:
        """Every class as a Gaussian, and how many images it had."""
        return ClassMemory(
            size,
            why="stand for a class's features when heads are re-balanced, and are moved along the drift",
            covariances=settings.covariance,
            share=settings.covariance_share,
            limit=1e9 * settings.covariance_limit,
            table=True,
            counts=True,
        )

    # -- the backbone phase ------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Begin as EFC does, but keep the old heads out of the optimiser: its weight decay would change them."""
        super().begin_task(task)
        self.freeze_old_heads()

    def restored(self) -> None:
        """Nothing is needed: no prototype is drawn while the backbone trains."""

    def previous_images(self, task: Task) -> int:
        """No image is shown twice."""
        return 0

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Nothing is drawn."""
        return {}

    def loss(self, batch: Batch) -> Terms:
        """Drift penalty, and cross-entropy over the new head."""
        return self._terms(self.network.features(batch.images), batch)

    def _terms(self, features: Tensor, batch: Batch) -> Terms:
        """Return the terms of the batch's own images, of which these are the features."""
        settings, labels = self.settings, batch.labels - sum(self.network.head_sizes[:-1])
        batch.compared.append((features, labels))
        delta = features - batch.frozen["features"]
        return {
            "drift": quadratic_drift(delta, self.feature_matrix, settings.efm_weight, settings.damping),
            "current": cross_entropy(self.network.newest_logits(features), labels, smoothing=batch.label_smoothing),
        }

    # -- the end of a task -------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old means, re-balance the heads, and only then measure the feature matrix and the new classes."""
        if task.index > 0:
            if self.settings.prototype_update != "none":
                self._follow_drift(data)
            self._rebalance(task, data)
        self.feature_matrix = self._measure_feature_matrix(task, data)
        self._add_prototypes(task, data)
        self.teacher = None

    def _rebalance(self, task: Task, data: TaskImages) -> None:
        """Train all heads on real features of new classes and as many sampled ones of each old class as it had."""
        settings = self.settings
        sampler, counts = self.memory.sampler(settings.jitter), self.memory.counts.tolist()
        weight = self.network.head_weight().detach().clone()
        velocity = torch.zeros_like(weight)
        # All features of an epoch at once, unless they would take too much memory: then equal parts of every class.
        parts = max(1, -(-sum(counts) * weight.shape[1] * weight.element_size() // _FEATURE_BYTES))
        for epoch, part in product(range(settings.rebalance_epochs), range(parts)):
            if part == 0 and (settings.rebalance_fresh or epoch == 0):
                real, labels = gaussians.collect(self.network.features, data.augmented("rebalance", epoch))
            if part == 0:
                generator = seeds.generator(data.device, task.seed, "rebalance", task.index, epoch)
            drawn, old = sampler.classes([(count + part) // parts for count in counts], generator)
            some, known = real[part::parts], labels[part::parts]
            order = torch.randperm(len(some) + len(drawn), generator=generator, device=data.device)
            softmax_epoch(
                weight,
                velocity,
                torch.cat([some.to(weight.dtype), drawn])[order],
                torch.cat([known, old])[order],
                batch_size=settings.rebalance_batch_size,
                learning_rate=settings.rebalance_learning_rate,
                momentum=settings.rebalance_momentum,
                weight_decay=settings.rebalance_weight_decay,
                scale=self.network.cosine_scale,
            )
        if not bool(torch.isfinite(weight).all()):
            raise TrainingError(
                f"Re-balancing the heads after task {task.index + 1} gave weights that are not finite. "
                "Lower its learning rate (--set rebalance_learning_rate=...)."
            )
        self.replace_heads(weight)
