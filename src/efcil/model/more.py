"""More images of classes that a model knows already: their Gaussians are blended, and the heads fitted to them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch

from efcil import seeds
from efcil.core import gaussians, prototypes
from efcil.core.heads import fit_to_gaussians
from efcil.engine.interrupt import Interrupted, StopRequest
from efcil.methods.base import Method
from efcil.model.card import ModelError, Visit, now
from efcil.model.in_memory import Model

#: Methods whose means and covariances are those of plain features, and which classify with the heads.
METHODS = ("efc", "efc++", "fd", "il2a")

Gaussian = tuple[torch.Tensor, torch.Tensor, int]


@torch.no_grad()
def learn_more(model: Model, pixels: np.ndarray, labels: Sequence[Hashable], stop: StopRequest | None = None) -> None:
    """Blend the new images into their classes' Gaussians, then fit the heads to the Gaussians of all classes.

    The backbone stays as it is: nothing drifts, so no other class can be forgotten through it. A request to stop is
    followed at any batch or epoch; the model is as it was then.
    """
    card, method = model.card, model.twin()
    classes = len(card.classes)
    means, covariances = getattr(method, "means", None), getattr(method, "covariances", None)
    whole = "covariances" in method.state_dict() and covariances is not None and len(covariances) == classes
    if card.settings.method not in METHODS or means is None or covariances is None or not whole:
        raise ModelError(
            f"{card.settings.method}, with its present settings, does not keep a mean and a covariance per class "
            f"that more images could be blended into. Methods that do ({', '.join(METHODS)}) can learn more of them; "
            "with this one, begin a new model with all images."
        )
    place = {label: number for number, label in enumerate(card.labels)}
    numbers = np.array([place[label] for label in labels], np.int64)
    data = model.task_images(pixels, numbers, f"more{len(card.visits)}")

    def features_of(images: torch.Tensor) -> torch.Tensor:
        _stop_if_asked(stop)
        return method.network.features(images)

    features, where = gaussians.collect(features_of, data.augmented("prototypes"))
    touched = sorted(set(numbers.tolist()))
    fresh = np.bincount(numbers, minlength=classes)
    new_means, new_covariances = prototypes.class_statistics(features, where, touched)
    for row, number in enumerate(touched):
        before, count = card.classes[number].images, int(fresh[number])
        mean, covariance = blend(
            (means[number], covariances[number], before), (new_means[row], new_covariances[row], count)
        )
        means[number], covariances[number] = mean, covariance
    if "counts" in method._buffers:
        counts = method._buffers["counts"]
        assert counts is not None
        counts += torch.from_numpy(fresh).to(counts)
    totals = [each.images + int(n) for each, n in zip(card.classes, fresh, strict=True)]
    _refit_heads(model, method, stop)
    method.restored()
    _stop_if_asked(stop)
    date = now()
    model.adopt(method)
    model.card = replace(
        card,
        classes=tuple(replace(each, images=total) for each, total in zip(card.classes, totals, strict=True)),
        visits=(*card.visits, Visit("more", len(touched), len(labels), date)),
    )


def blend(first: Gaussian, second: Gaussian) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and unbiased covariance of two samples taken together, each given as mean, covariance and count."""
    (mean, covariance, count), (other, other_covariance, more) = first, second
    total, shift = count + more, (other - mean).double()
    scatter = max(count - 1, 0) * covariance.double() + max(more - 1, 0) * other_covariance.double()
    scatter += torch.outer(shift, shift) * (count * more / total)
    return mean + (shift * (more / total)).to(mean), (scatter / max(total - 1, 1)).to(covariance)


def _refit_heads(model: Model, method: Method, stop: StopRequest | None) -> None:
    """Train all heads on samples of the classes' Gaussians."""
    # Equally many of each: how many images a class has had says nothing about how often it will be met.
    network, device, card = method.network, model.execution.device, model.card
    which = torch.arange(len(method.means), device=device)

    def generator(epoch: int) -> torch.Generator:
        _stop_if_asked(stop)
        return seeds.generator(device, card.settings.seed, "more", len(card.visits), epoch)

    weight = fit_to_gaussians(network.head_weight(), method.means, method.covariances, which, generator)
    for head, rows in zip(network.heads, weight.split(network.head_sizes), strict=True):
        head.copy_(rows)


def _stop_if_asked(stop: StopRequest | None) -> None:
    if stop is not None and stop.requested:
        raise Interrupted(
            "Stopped. The model is as it was, without these images. Give the same command again to blend them in."
        )
