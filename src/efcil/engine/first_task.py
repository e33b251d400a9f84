"""The first task, trained the same way for every method: cross-entropy with rotated images as extra classes."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from efcil import seeds
from efcil.core.losses import cross_entropy
from efcil.core.rotation import rotate_batch, rotation_labels
from efcil.methods.base import Batch, Method, ParameterGroup, Task, Terms, trainable
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe


class FirstTask(Method):
    """Trains backbone and first head. With rotations, an auxiliary layer scores the three turned copies of each class;

    it is discarded when the task ends.
    """

    def __init__(self, network: IncrementalNetwork, task: Task, rotations: bool, rotation_weight: float = 1.0) -> None:
        super().__init__(network)
        self.classes, self.rotation_weight = task.classes, rotation_weight
        self.auxiliary: nn.Linear | None = None
        network.add_head(task.classes, seeds.generator("cpu", task.seed, "head", task.index))
        network.requires_grad_(True)
        if rotations:
            device = next(network.backbone.parameters()).device
            linear = network.cosine_scale is None
            self.auxiliary = nn.Linear(network.feature_size, 3 * task.classes, bias=linear)
            bound = 1.0 / math.sqrt(network.feature_size)
            generator = seeds.generator("cpu", task.seed, "auxiliary", task.index)
            with torch.no_grad():
                self.auxiliary.weight.uniform_(-bound, bound, generator=generator)
                if linear:
                    self.auxiliary.bias.uniform_(-bound, bound, generator=generator)
            self.auxiliary.to(device)

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Everything at one learning rate, unless the backbone has its own, as a pre-trained one does."""
        if recipe.backbone_learning_rate is None:
            return [{"params": trainable(self.parameters()), "learning_rate": recipe.learning_rate}]
        groups = super().parameter_groups(recipe)
        if self.auxiliary is not None:
            groups.append({"params": list(self.auxiliary.parameters()), "learning_rate": recipe.learning_rate})
        return groups

    def loss(self, batch: Batch) -> Terms:
        """Plain cross-entropy over the classes and, with rotations, their turned copies."""
        if self.auxiliary is None:
            features = self.network.features(batch.images)
            batch.compared.append((features, batch.labels))
            logits = self.network.logits(features)
            return {"current": cross_entropy(logits, batch.labels, smoothing=batch.label_smoothing)}
        features = self.network.features(rotate_batch(batch.images))
        weight = torch.cat([self.network.head_weight(), self.auxiliary.weight])
        if self.network.cosine_scale is not None:
            logits = self.network.logits_of(features, weight)
        else:
            bias = torch.cat([self.auxiliary.bias.new_zeros(self.classes), self.auxiliary.bias])
            logits = functional.linear(features, weight, bias)
        labels = rotation_labels(batch.labels, self.classes)
        batch.compared.append((features, labels))
        weights = None
        if self.rotation_weight != 1.0:
            ones = logits.new_ones(len(labels), dtype=torch.float32)
            weights = torch.cat([ones[: batch.size], self.rotation_weight * ones[batch.size :]])
        return {"current": cross_entropy(logits, labels, weights, smoothing=batch.label_smoothing)}
