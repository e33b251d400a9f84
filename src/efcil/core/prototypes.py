"""Class statistics, Gaussian prototypes drawn from them, and the make-up of the rehearsal batch.

All random draws come from the generator given, on its device, and then move to the device asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.core.covariance import is_factored
from efcil.errors import TrainingError

# Covariances factorised at a time on a GPU: bounds the float64 copies to 128 MiB for 512 features. A CPU factorises
# them one after the other anyway, and large copies cost it more than the factors.
_FACTORISED_TOGETHER = 64
# Bytes of factors copied at a time where rows are few for the number of classes.
_GATHERED_TOGETHER = 1 << 27
# Empty places for every row, from which on a product for all classes wastes more than it saves.
_PADDING = 8
_JITTER_ATTEMPTS = 12
_SMALLEST_JITTER = 1e-12


def class_statistics(features: Tensor, labels: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean (C, n) and unbiased covariance (C, n, n) of the features (N, n) of each class in `classes`.

    Rows follow the order of `classes`; `labels` (N) may hold other classes too. Sums are made in float64 and the
    results have the type of `features`. A class with a single sample gets a zero covariance; one with none is an error.
    """
    size = features.shape[1]
    means = features.new_empty(len(classes), size)
    covariances = features.new_empty(len(classes), size, size)
    for row, label in enumerate(classes):
        members = features[labels == label].double()
        count = len(members)
        refuse_empty(label, count)
        mean = members.mean(dim=0)
        centred = members - mean
        means[row] = mean
        covariances[row] = centred.T @ centred / max(count - 1, 1)
    return means, covariances


def second_moments(features: Tensor, labels: Tensor, classes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean (C, n) and mean product with itself (C, n, n) of the features (N, n) of each class, both in float64."""
    by_class = [features[labels == label].double() for label in classes]
    for label, rows in zip(classes, by_class, strict=True):
        refuse_empty(label, len(rows))
    means = torch.stack([rows.mean(dim=0) for rows in by_class])
    return means, torch.stack([rows.T @ rows / len(rows) for rows in by_class])


def refuse_empty(label: int, count: int) -> None:
    """Refuse a class without any feature."""
    if count == 0:
        raise TrainingError(f"Class {label} has no feature to take statistics of; give every class some images.")


def cholesky_factors(covariances: Tensor, jitter: float = 1e-5) -> Tensor:
    """Lower-triangular L (C, n, n) with L L^T = S + jitter * I for covariances S (C, n, n).

    Factorised in float64, returned in the type of `covariances`. If rounding makes a matrix indefinite beyond the
    jitter, only that matrix is tried again with ten times the jitter (with very little after none), until it succeeds.
    Covariances that are factors already (see core/covariance.py) are returned as they are: they need no jitter.
    """
    if is_factored(covariances):
        return covariances
    together = _FACTORISED_TOGETHER if covariances.device.type == "cuda" else 1
    if len(covariances) <= together:
        return _factorise(covariances.double(), jitter, 0).to(covariances.dtype)
    factors = torch.empty_like(covariances)
    for start in range(0, len(covariances), together):
        part = slice(start, start + together)
        factors[part] = _factorise(covariances[part].double(), jitter, start).to(covariances.dtype)
    return factors


def _factorise(covariances: Tensor, jitter: float, first: int) -> Tensor:
    """Cholesky factors of float64 matrices (C, n, n); `first` is the number of the first one, for the error."""
    if not bool(torch.isfinite(covariances).all()):
        raise TrainingError(
            "A class covariance holds values that are not finite, so no prototype can be drawn from it; training has "
            "probably diverged: lower the learning rate."
        )
    factors = torch.empty_like(covariances)  # on a CPU, memory that is never touched costs nothing
    pending = torch.arange(len(covariances), device=covariances.device)
    for attempt in range(_JITTER_ATTEMPTS):
        added = max(jitter, _SMALLEST_JITTER) * 10.0**attempt if attempt else jitter
        tried = covariances[pending] if attempt else covariances.clone()
        tried.diagonal(dim1=-2, dim2=-1).add_(added)
        attempted, failure = torch.linalg.cholesky_ex(tried)
        done = failure == 0
        if attempt == 0 and bool(done.all()):
            return attempted
        factors[pending[done]] = attempted[done]
        pending = pending[~done]
        if len(pending) == 0:
            return factors
    raise TrainingError(
        f"The covariances of classes {[first + index for index in pending.tolist()]} are not positive semi-definite, "
        f"even with {added:g} added to each variance; compute them from features."
    )


def draw_prototype_labels(
    old_classes: int,
    batch_size: int,
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """Labels of the prototypes of many steps (steps, B): in each row all classes equally often, up to one, shuffled.

    The first n entries of a row are therefore a random draw from a balanced batch.
    """
    labels = _repeated_orders(old_classes, batch_size, steps, generator)
    return labels.gather(1, _random_orders(steps, batch_size, generator))


def coloured_noise(factors: Tensor, labels: Tensor, noise: Tensor, largest_count: int | None = None) -> Tensor:
    """Noise of the covariance of its label: L^c e for factors (C, n, r), labels (K) and standard noise (K, r).

    Rows that share a label are multiplied together, so no factor is copied per row. With `largest_count`, a bound on
    how often one label occurs (ceil(K / C) for balanced labels), it is a single batched product of a fixed shape
    that never waits for the device; without, one product per label that occurs. If there are many more classes than
    rows, most places of that product would be empty: factors are then taken row by row, by pieces of bounded memory.
    """
    if largest_count is not None and len(factors) * largest_count > _PADDING * max(len(labels), 1):
        if labels.device.type == "cuda":
            return _coloured_by_row(factors, labels, noise)
        largest_count = None
    order = torch.argsort(labels, stable=True)
    grouped = labels[order]
    result = noise.new_empty(len(labels), factors.shape[1])
    if largest_count is None:
        counts = torch.bincount(labels, minlength=len(factors)).tolist()
        products = [rows @ factors[label].T for label, rows in enumerate(noise[order].split(counts)) if len(rows)]
        return result.index_copy(0, order, torch.cat(products)) if products else result
    first = torch.searchsorted(grouped, torch.arange(len(factors), device=labels.device, dtype=labels.dtype))
    place = torch.arange(len(labels), device=labels.device) - first[grouped]
    padded = noise.new_zeros(len(factors), largest_count, noise.shape[1])
    padded[grouped, place] = noise[order]
    products_by_label = padded @ factors.transpose(1, 2)
    return result.index_copy(0, order, products_by_label[grouped, place])


def _coloured_by_row(factors: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """L^c e for every row, each with a copy of its factor; shapes are fixed, so it never waits for the device."""
    rows = max(1, _GATHERED_TOGETHER // max(1, factors[:1].numel() * factors.element_size()))
    pieces = zip(labels.split(rows), noise.split(rows), strict=True)
    return torch.cat([torch.bmm(factors[some], part[:, :, None])[:, :, 0] for some, part in pieces])


@dataclass(frozen=True)
class Composition:
    """How the rehearsal batch of each step divides: current images and prototypes, both (steps,) int64."""

    new_count: Tensor
    old_count: Tensor


def total_count(old_classes: int, new_classes: int, batch_size: int) -> int:
    """Size of the rehearsal batch of PR-ACE: the batch size, but at most twice the number of seen classes."""
    return min(2 * (old_classes + new_classes), batch_size)


def largest_new_count(old_classes: int, new_classes: int, batch_size: int) -> int:
    """The most current images a rehearsal batch can hold, whatever is drawn; a fixed width to pad to.

    All new classes have a place, and as many of them a second one as there are second places.
    """
    again = _drawn_again(old_classes + new_classes, batch_size)
    return min(new_classes, batch_size) + min(new_classes, again)


def draw_composition(
    old_classes: int,
    new_classes: int,
    batch_size: int,
    steps: int,
    generator: torch.Generator,
) -> Composition:
    """Draw for many steps how many places of the rehearsal batch go to new classes and how many to old ones.

    With C seen classes and batch size B, a step draws places for classes: B distinct classes if C >= B; otherwise
    all C classes in random order and then the first min(B - C, C) of that order again. The places that fall on
    new classes are filled with current images, the others with prototypes. (The caller handles that the first step of
    a task has no earlier images, and that a short batch has fewer.)
    """
    seen = old_classes + new_classes
    orders = _random_orders(steps, seen, generator)
    once, again = min(seen, batch_size), _drawn_again(seen, batch_size)
    is_new = orders >= old_classes
    new_count = is_new[:, :once].sum(dim=1) + is_new[:, :again].sum(dim=1)
    old_count = total_count(old_classes, new_classes, batch_size) - new_count
    return Composition(new_count, old_count)


def _drawn_again(seen: int, batch_size: int) -> int:
    """How many classes get a second place."""
    return max(0, min(batch_size - seen, seen))


def _repeated_orders(classes: int, count: int, steps: int, generator: torch.Generator) -> Tensor:
    """Per step a random permutation of the classes, repeated or truncated to `count` entries: (steps, count)."""
    if classes < 1:
        raise TrainingError("Prototype labels need at least one old class; draw them from the second task on.")
    places = torch.arange(count, device=generator.device) % classes
    return _random_orders(steps, classes, generator)[:, places]


def _random_orders(steps: int, size: int, generator: torch.Generator) -> Tensor:
    """Independent uniform permutations of 0..size-1, one per row: (steps, size)."""
    # Float64, because equal random numbers, which would bias the order, are then practically impossible.
    noise = torch.rand(steps, size, generator=generator, device=generator.device, dtype=torch.float64)
    return noise.argsort(dim=1)
