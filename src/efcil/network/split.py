"""Features of a batch by several processes: each computes those of its rows, and all get all of them.

Everything before and after the network is computed by every process for the whole batch, so a loss is the same
function of the same features as in a single process, whatever it is. Its gradient for the features is then the same in
all processes. Each passes its own rows back through the network, multiplied by the number of processes, and the
optimiser averages the gradients of all parameters (`ranks.average`). So the gradients that only reach the network
through features are summed, and those that every process computes alike (of heads, of penalties on weights) stay as
they are. BatchNorm that trains normalises by the statistics of the rows of all processes.

Code that takes gradients of its own, which nobody averages, gets all features from its own process: see `averaged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from efcil import ranks

_HALF = (torch.bfloat16, torch.float16)
_splitting = False
_averaged = False


def splitting() -> bool:
    """Return whether the rows that pass through the network now are a part of a batch."""
    return _splitting


def features(compute: Callable[[Tensor], Tensor], network: nn.Module, images: Tensor) -> Tensor:
    """Return the features of all images, a part of which this process computes.

    So few images that a process would get a single one are computed by all of them, and so are features whose
    gradients will not be averaged.
    """
    alone = torch.is_grad_enabled() and not _averaged and any(each.requires_grad for each in network.parameters())
    if alone or len(images) < 2 * ranks.count():
        return compute(images)
    with _as_a_part(any(module.training for module in network.modules())):
        own = compute(images[ranks.share(len(images))])
    found: Tensor = _Gathered.apply(own, len(images))
    return found


@contextmanager
def averaged() -> Iterator[None]:
    """Declare that gradients of the features computed within will be averaged over the processes."""
    global _averaged
    before, _averaged = _averaged, True
    try:
        yield
    finally:
        _averaged = before


@contextmanager
def _as_a_part(trains: bool) -> Iterator[None]:
    global _splitting
    _splitting = True
    try:
        if trains:
            with _SharedNorms():
                yield
        else:
            yield
    finally:
        _splitting = False


class _Gathered(torch.autograd.Function):
    """All rows, of which every process has its share."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: int) -> Tensor:
        ctx.rows = rows
        return ranks.gather_rows(own, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ranks.share(ctx.rows)] * ranks.count(), None


# -- BatchNorm -------------------------------------------------------------------------------------------------------


class _SharedNorms(TorchFunctionMode):
    """Replaces the BatchNorm of any network, in training mode, by one over the rows of all processes."""

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = named or {}
        if function is functional.batch_norm:
            return _batch_norm(*given, **named)
        return function(*given, **named)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """As PyTorch's function of that name, whose parameters it has."""
    if not training:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    wide = input.float() if input.dtype in _HALF else input
    channels = input.shape[1]
    scale = wide.new_ones(channels) if weight is None else weight
    shift = wide.new_zeros(channels) if bias is None else bias
    result: Tensor = _Normalised.apply(wide, scale, shift, running_mean, running_var, momentum, eps)
    return result.to(input.dtype)


def moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance (channels) of x (batch, channels, ...) over the rows of all processes, and how many."""
    variance, mean = torch.var_mean(x, dim=_others(x), correction=0)
    size = x.shape[1]
    table = ranks.gather(torch.cat([mean, variance, mean.new_full((1,), x.numel() // size)]))
    means, variances, counts = table[:, :size], table[:, size:-1], table[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(dim=0) / total
    return mean, ((variances + (means - mean).square()) * counts).sum(dim=0) / total, total


def total(*sums: Tensor) -> list[Tensor]:
    """Return sums (channels) over the rows of all processes, from those over the rows of this one."""
    return list(ranks.gather(torch.stack(sums)).sum(dim=0))


def follow(running: Tensor, new: Tensor, momentum: float) -> None:
    """Move a running statistic towards that of a batch.

    As in PyTorch's BatchNorm, its version stays: a pass of few images, which that has computed, still needs it.
    """
    running.data.lerp_(new.to(running.dtype), momentum)


def unbiased(variance: Tensor, count: Tensor) -> Tensor:
    """Return the variance as it is kept."""
    return variance * (count / (count - 1).clamp(min=1.0))


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        mean, variance, count = moments(x)
        if running_mean is not None and running_var is not None:
            follow(running_mean, mean, momentum)
            follow(running_var, unbiased(variance, count), momentum)
        inverse = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, inverse, count)
        scale = weight * inverse
        return x * _along(scale, x) + _along(bias - mean * scale, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, mean, inverse, count = ctx.saved_tensors
        normalised = (x - _along(mean, x)) * _along(inverse, x)
        summed = gradient.sum(dim=_others(x))
        weighted = (gradient * normalised).sum(dim=_others(x))
        all_summed, all_weighted = total(summed, weighted)
        centred = gradient - _along(all_summed / count, x) - normalised * _along(all_weighted / count, x)
        return centred * _along(weight * inverse, x), weighted, summed, None, None, None, None


def _others(x: Tensor) -> list[int]:
    """Return all dimensions but that of channels."""
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Return values (channels) in the shape in which they meet x."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
