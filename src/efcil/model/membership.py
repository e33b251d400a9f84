"""Membership inference: how well what a model stores separates training images from others, as a ROC AUC."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from efcil.core import classifiers
from efcil.evaluation.classification import wilson_of_share
from efcil.model.in_memory import Model, probabilities
from efcil.network.memo import remembered_features

#: Shrinkage of the class covariances; small, because an attack needs the training images' own directions.
SHRINKAGE = 0.01


@dataclass(frozen=True)
class Membership:
    """One attack: how it scores an image, its AUC (0.5 is chance) and the 95 % confidence interval."""

    attack: str
    auc: float
    low: float
    high: float
    members: int
    others: int


def membership(
    model: Model, training: tuple[np.ndarray, Sequence[Hashable]], others: tuple[np.ndarray, Sequence[Hashable]]
) -> list[Membership]:
    """Attack the model with images it was trained on and images it was not; both as pixels and labels.

    Images of classes the model does not know are left out.
    """
    sides = [_known(model, *images) for images in (training, others)]
    count = min(len(labels) for _, labels in sides)
    results = []
    with remembered_features(model.ready.network):  # both attacks look at the same images
        for attack, score in (("class statistics", _density), ("scores", _confidence)) if count else ():
            members, rest = (score(model, pixels, labels) for pixels, labels in sides)
            if members is not None and rest is not None:
                truth = np.repeat([1, 0], [len(members), len(rest)])
                auc = float(roc_auc_score(truth, np.concatenate([members, rest])))
                results.append(Membership(attack, auc, *interval(auc, count), len(members), len(rest)))
    return results


def interval(auc: float, count: int) -> tuple[float, float]:
    """Return a 95 % confidence interval of an AUC from samples of which the smaller has `count` images.

    The variance of an AUC is at most AUC (1 - AUC) / count, whatever the distributions, which is that of a proportion;
    so Wilson's interval for a proportion applies, and is conservative. It has a width even if the AUC is 1.
    """
    low, high = wilson_of_share(auc, count)
    return max(0.0, low), min(1.0, high)


def _known(model: Model, pixels: np.ndarray, labels: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    place = {label: number for number, label in enumerate(model.card.labels)}
    numbers = np.array([place.get(label, -1) for label in labels], np.int64)
    return pixels[numbers >= 0], numbers[numbers >= 0]


@torch.no_grad()
def _density(model: Model, pixels: np.ndarray, labels: np.ndarray) -> np.ndarray | None:
    """Log-density of an image's features under its class's stored Gaussian, or minus the distance from its mean."""
    method = model.ready
    statistics = method.statistics()
    if statistics is None:
        return None
    plain = statistics.covariances is None
    scores = classifiers.nearest_mean(statistics) if plain else classifiers.bayes(statistics, SHRINKAGE)
    values = model.by_pieces(pixels, lambda images: scores(method.embed(images)))
    return values[np.arange(len(labels)), labels]


def _confidence(model: Model, pixels: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Log-probability of an image's own class."""
    chances = probabilities(model.scores(pixels))
    return np.log(np.maximum(chances[np.arange(len(labels)), labels], 1e-300))
