"""Mixtures of two classes of a task, as classes of their own, beside the loss of any method that allows it.

Images of two classes in about equal shares pass through the network, and a softmax over the newest head and a row for
every pair of its classes must say which two they are. So features must describe more than what separates the classes.
The rows exist while the task trains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from efcil import seeds
from efcil.core import mixing
from efcil.core.heads import new_rows
from efcil.core.losses import cross_entropy
from efcil.core.rotation import QUARTER_TURNS
from efcil.methods.base import Batch, Method, Task
from efcil.settings import Recipe

#: What the rows are called in the learner, for as long as the task trains.
NAME = "mixed"


class MixedClasses(nn.Module):
    """A row for every pair of classes of a task; if there are many pairs, for several of them."""

    table: Tensor

    def __init__(self, learner: Method, task: Task, rounds: int) -> None:
        super().__init__()
        device = next(learner.network.backbone.parameters()).device
        table = mixing.mixture_labels(task.classes)
        generator = seeds.generator("cpu", task.seed, "mixed", task.index)
        rows = new_rows(int(table.max()) + 1 - task.classes, learner.network.feature_size, generator)
        self.rows = nn.Parameter(rows.to(device))
        self.register_buffer("table", table.to(device), persistent=False)
        self.first_class, self.classes, self.rounds = task.first_class, task.classes, rounds

    def loss(self, learner: Method, batch: Batch) -> Tensor:
        """Return the cross-entropy of the mixed images."""
        network, labels = learner.network, batch.labels - self.first_class
        images, targets = mixing.mix(batch.images[: batch.size], labels, self.rounds, self.table)
        features = network.features(images)
        # Rotated classes have the labels between those of classes and those of pairs.
        batch.compared.append((features, targets + (targets >= self.classes) * QUARTER_TURNS * self.classes))
        logits = network.logits_of(features, torch.cat([network.heads[-1], self.rows]))
        return cross_entropy(logits, targets, smoothing=batch.label_smoothing)


def attach(learner: Method, task: Task, recipe: Recipe) -> MixedClasses | None:
    """Add the rows to a learner whose recipe mixes classes, so that they are saved with it; else None."""
    if not recipe.mixing or task.classes < 2 or (task.index > 0 and not learner.extra_terms):
        return None
    made = MixedClasses(learner, task, recipe.mixing)
    learner.add_module(NAME, made)
    return made
