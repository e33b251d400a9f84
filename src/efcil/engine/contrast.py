"""Supervised contrast beside the loss of any method that allows it, behind two layers of its own.

Features of all images of current classes that a step has looked at pass through the layers. What comes out must be
alike for images of one label and different for others: turned images and mixtures have labels of their own, where there
are any. Pseudo-old images take no part. The layers exist while the task trains: what such a loss throws away is lost
behind them, and not in the features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from efcil import seeds
from efcil.core.losses import supervised_contrast
from efcil.methods.base import Batch, Method, Task
from efcil.settings import Recipe

#: What the layers are called in the learner, for as long as the task trains.
NAME = "contrast"
#: Numbers that come out of the layers.
WIDTH = 128


class Contrast(nn.Module):
    """Two layers, as wide as the features and WIDTH, and the term behind them."""

    def __init__(self, learner: Method, task: Task, temperature: float) -> None:
        super().__init__()
        size, self.temperature, self.first_class = learner.network.feature_size, temperature, task.first_class
        self.layers = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, WIDTH))
        generator, bound = seeds.generator("cpu", task.seed, NAME, task.index), 1.0 / math.sqrt(size)
        with torch.no_grad():
            for parameter in self.layers.parameters():
                parameter.uniform_(-bound, bound, generator=generator)
        self.layers.to(next(learner.network.backbone.parameters()).device)

    def look(self, learner: Method, batch: Batch) -> None:
        """Compute the features of the batch if the learner's loss has not added them to what is compared."""
        if not batch.compared:
            features = learner.network.features(batch.images[: batch.size])
            batch.compared.append((features, batch.labels - self.first_class))

    def loss(self, batch: Batch) -> Tensor:
        """Return the contrastive loss of everything that is compared."""
        features, labels = (torch.cat(each) for each in zip(*batch.compared, strict=True))
        return supervised_contrast(self.layers(features), labels, self.temperature)


def attach(learner: Method, task: Task, recipe: Recipe) -> Contrast | None:
    """Add the layers to a learner whose recipe asks for contrast, so that they are saved with it; else None."""
    if not recipe.contrast or task.classes < 2 or (task.index > 0 and not learner.extra_terms):
        return None
    made = Contrast(learner, task, recipe.contrast_temperature)
    learner.add_module(NAME, made)
    return made
