"""Rotated copies of a later task's classes, as classes of their own, beside the loss of any method that allows it.

The first task has them in its own loss (first_task.py). Here they are a term of their own: the quarter turns of the
current images pass through the network, and a softmax over the newest head and three more rows for each of its classes
must say which class it is and how it is turned. The rows exist while the task trains.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from efcil import seeds
from efcil.core.heads import new_rows
from efcil.core.losses import cross_entropy
from efcil.core.rotation import QUARTER_TURNS, rotate_batch, rotation_labels
from efcil.methods.base import Batch, Method, Task
from efcil.settings import Recipe

#: What the rows are called in the learner, for as long as the task trains.
NAME = "rotated"


class RotatedClasses(nn.Module):
    """Three rows for every class of a task: its turns by 90, 180 and 270 degrees."""

    def __init__(self, learner: Method, task: Task) -> None:
        super().__init__()
        generator = seeds.generator("cpu", task.seed, "auxiliary", task.index)
        rows = new_rows(QUARTER_TURNS * task.classes, learner.network.feature_size, generator)
        self.rows = nn.Parameter(rows.to(next(learner.network.backbone.parameters()).device))
        self.first_class, self.classes = task.first_class, task.classes

    def loss(self, learner: Method, batch: Batch) -> Tensor:
        """Return the cross-entropy of the turned images."""
        network, size = learner.network, batch.size
        features = network.features(rotate_batch(batch.images[:size])[size:])
        logits = network.logits_of(features, torch.cat([network.heads[-1], self.rows]))
        labels = rotation_labels(batch.labels - self.first_class, self.classes)[size:]
        batch.compared.append((features, labels))
        return cross_entropy(logits, labels, smoothing=batch.label_smoothing)


def attach(learner: Method, task: Task, recipe: Recipe) -> RotatedClasses | None:
    """Add the rows to a learner whose recipe rotates a later task, so that they are saved with it; else None."""
    if task.index == 0 or not recipe.rotations or not learner.extra_terms:
        return None
    made = RotatedClasses(learner, task)
    learner.add_module(NAME, made)
    return made
