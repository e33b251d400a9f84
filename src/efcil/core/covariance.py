"""Cheaper descriptions of class covariances: shared by a task, shrunk, of low rank, or diagonal.

Where a tensor of covariances has fewer columns than rows, it holds factors F (C, n, r) from `low_rank`, which stand for
F F^T: many classes are kept so, because whole matrices would not fit (see `is_factored`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.errors import TrainingError

#: Compressed forms of covariances: leading eigenvectors, or variances only.
IN_SHORT = ("low-rank", "diagonal")
#: Bytes of covariances that are added up at a time, in a type of twice their size.
_ADDED_TOGETHER = 1 << 30


def shrink(covariances: Tensor, amount: float) -> Tensor:
    """(1 - a) S + a (tr S / n) I for covariances (C, n, n) or (n, n) and a in [0, 1]; the trace stays the same."""
    if not 0.0 <= amount <= 1.0:
        raise TrainingError(f"The shrinkage of a covariance must be between 0 and 1, but it is {amount}.")
    variance = covariances.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
    shrunk = (1.0 - amount) * covariances
    shrunk.diagonal(dim1=-2, dim2=-1).add_(amount * variance[..., None])
    return shrunk


def average(covariances: Tensor) -> Tensor:
    """The plain mean (1, n, n) of covariances (C, n, n), summed in float64.

    With equally many images per class this is the covariance of the class-centred features of all of them.
    """
    total = torch.zeros(1, *covariances.shape[1:], dtype=torch.float64, device=covariances.device)
    for covariance in covariances:  # one at a time: a float64 copy of all would be large
        total += covariance.double()
    return (total / len(covariances)).to(covariances.dtype)


def low_rank(covariances: Tensor, explained: float) -> Tensor:
    """Factors F (C, n, r) such that F F^T keeps the leading directions of each covariance (C, n, n).

    For each class the fewest eigenvectors are kept that together explain at least the share `explained`, in (0, 1], of
    the variance; r is the largest number any class needs and the other classes are padded with zero columns (see
    `ranks`). `prototypes.coloured_noise` takes these factors as they are. A zero covariance gets no direction at all.
    """
    if not 0.0 < explained <= 1.0:
        raise TrainingError(f"The share of variance to keep must be in (0, 1], but it is {explained}.")
    kept = [_leading_directions(covariance, explained) for covariance in covariances]
    width = max((factor.shape[1] for factor in kept), default=0)
    factors = covariances.new_zeros(covariances.shape[0], covariances.shape[-1], width)
    for index, factor in enumerate(kept):
        factors[index, :, : factor.shape[1]] = factor
    return factors


def shorten(covariances: Tensor, kind: str, share: float) -> Tensor:
    """What is kept of covariances (C, n, n) in one of the forms IN_SHORT: factors (C, n, r), or variances (C, n).

    Factors keep the share `share` of the variance; see `low_rank`.
    """
    return low_rank(covariances, share) if kind == "low-rank" else covariances.diagonal(dim1=1, dim2=2).clone()


def spell_out(compact: Tensor) -> Tensor:
    """The covariances (C, n, n) that factors (C, n, r) or variances (C, n) stand for."""
    return torch.diag_embed(compact) if compact.dim() == 2 else compact @ compact.mT


def join(first: Tensor, second: Tensor) -> Tensor:
    """Concatenate two of the same form; factors (C, n, r) and (D, n, s) are padded with zero columns."""
    if first.dim() == 2:
        return torch.cat([first, second])
    width = max(first.shape[2], second.shape[2])
    both = first.new_zeros(len(first) + len(second), first.shape[1], width)
    both[: len(first), :, : first.shape[2]] = first
    both[len(first) :, :, : second.shape[2]] = second
    return both


def ranks(factors: Tensor) -> Tensor:
    """The number of directions kept per class (C), for factors (C, n, r) from `low_rank`."""
    return (factors != 0).any(dim=1).sum(dim=1)


def is_factored(covariances: Tensor) -> bool:
    """Whether these are factors (..., n, r) with r < n, and not the covariances (..., n, n) themselves."""
    return covariances.shape[-1] < covariances.shape[-2]


def whole(covariances: Tensor) -> Tensor:
    """Covariances (..., n, n), multiplied out if they are factors."""
    return covariances @ covariances.mT if is_factored(covariances) else covariances


def traces(covariances: Tensor) -> Tensor:
    """The sum of the variances of each covariance (C)."""
    if is_factored(covariances):
        return covariances.square().sum(dim=(1, 2))
    return covariances.diagonal(dim1=1, dim2=2).sum(dim=1)


def weighted_sum(covariances: Tensor, weights: Tensor) -> Tensor:
    """The sum (n, n) of covariances (C, n, n), each times its weight (C), in the type of the weights."""
    rows = max(1, _ADDED_TOGETHER // max(1, covariances[:1].numel() * covariances.element_size()))
    total = weights.new_zeros(covariances.shape[1], covariances.shape[1])
    for some, weight in zip(covariances.split(rows), weights.split(rows), strict=True):
        if is_factored(some):
            columns = (some * weight.sqrt().to(some.dtype)[:, None, None]).permute(1, 0, 2).flatten(1)
            total += (columns @ columns.T).to(total.dtype)
        else:
            total += torch.einsum("g,gij->ij", weight, some.to(weight.dtype))
    return total


def _leading_directions(covariance: Tensor, explained: float) -> Tensor:
    """Columns sqrt(eigenvalue) * eigenvector (n, r), leading first, of one covariance (n, n)."""
    values, vectors = torch.linalg.eigh(covariance.double())
    # If the covariance is singular, rounding leaves tiny eigenvalues of either sign; none of them is variance.
    negligible = values.abs().max() * len(values) * torch.finfo(covariance.dtype).eps
    values = torch.where(values > negligible, values, torch.zeros_like(values)).flip(0)
    before = values.cumsum(0) - values
    needed = (values > 0) & (before < explained * values.sum())
    rank = int(needed.sum())
    return (vectors.flip(1)[:, :rank] * values[:rank].sqrt()).to(covariance.dtype)
