"""More images of known classes: blended into the Gaussians of their classes, to which the heads are then fitted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch

from efcil import methods, seeds
from efcil.activity import next_piece
from efcil.core import gaussians
from efcil.core.heads import fit_to_gaussians
from efcil.engine import checkpoint
from efcil.engine.progress import Progress
from efcil.methods.base import Method
from efcil.model.card import ModelError, Visit, made_with, now
from efcil.model.in_memory import Model
from efcil.model.measuring import measure_before, say_in_doubt


def refuse_blending(model: Model) -> None:
    """Refuse more images of known classes where what is stored of a class cannot take them up."""
    method = model.method
    if method is not None and not (method.about.learns_more and method.memory.blends):
        able = [name for name, cls in methods.available().items() if cls.traits(cls.Settings()).learns_more]
        raise ModelError(
            f"{model.card.settings.method}, with its present settings, does not keep a mean and a covariance per class "
            f"that more images could be blended into. Use a method that does ({', '.join(able)}), or train a new "
            "model with all images."
        )


@torch.no_grad()
def learn_more(
    model: Model,
    pixels: np.ndarray,
    labels: Sequence[Hashable],
    repeats: np.ndarray | None = None,
    measure: bool = True,
    name_of: Callable[[int], str] = str,
    progress: Progress | None = None,
) -> None:
    """Blend the new images into their classes' Gaussians, then fit heads, if they decide, to those of all classes.

    The backbone does not change: nothing drifts, so no other class can be forgotten through it. What `next_piece`
    raises, between batches and epochs, leaves the model unchanged. With `measure`, the images are classified before
    they are learned from, and `progress` says what to know about the answers; `name_of` gives names of images by rows.
    """
    card, method = model.card, model.twin()
    continues, way = checkpoint.digest(model.tensors()), made_with(model.execution, deterministic=False)
    place = {label: number for number, label in enumerate(card.labels)}
    numbers = np.array([place[label] for label in labels], np.int64)
    measured = None
    if measure:
        measured, answered = measure_before(model, pixels, numbers)
        say_in_doubt(progress, card.labels, answered, name_of)
    data = model.task_images(pixels, numbers, f"more{len(card.visits)}", repeats=repeats)
    features, where = gaussians.collect(method.embed, method.measured_views(data))
    method.memory.blend(features, where, [each.images for each in card.classes])
    if method.about.decides_by_heads:
        refit_heads(model, method)
    method.restored()
    next_piece()
    fresh = np.bincount(numbers, minlength=len(card.classes)).tolist()
    date = now()
    model.adopt(method)
    model.card = replace(
        card,
        classes=tuple(replace(each, images=each.images + n) for each, n in zip(card.classes, fresh, strict=True)),
        visits=(*card.visits, Visit("more", sum(n > 0 for n in fresh), len(labels), date, (way,), measured)),
        continues=continues,
        experiment=None,
    )


def refit_heads(model: Model, method: Method) -> None:
    """Train all heads of a method of this model on samples of the classes' Gaussians."""
    # Equally many of each: the number of training images of a class does not say how frequent the class is in use.
    card, statistics = model.card, method.memory.statistics()

    def generator(epoch: int) -> torch.Generator:
        return seeds.generator(model.execution.device, card.settings.seed, "more", len(card.visits), epoch)

    heads = method.network.head_weight()
    scale = method.network.cosine_scale
    method.replace_heads(fit_to_gaussians(heads, statistics.means, *statistics.spread(), generator, scale=scale))
