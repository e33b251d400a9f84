"""Elastic weight consolidation: a diagonal Fisher matrix and the quadratic penalty that it weighs.

Parameters are lists of tensors. Lists are handled by multi-tensor operations, because a network has some sixty
parameters and one small kernel for each of them, several times a step, would take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from efcil.core.losses import cross_entropy
from efcil.errors import TrainingError


def fisher_loss(logits: Tensor, labels: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """Mean cross-entropy of `logits` (B, m), whose squared gradient is taken as the Fisher information.

    `kind` says which labels: `predicted` (the largest logit), `true` (`labels`), or `sampled` (drawn from the predicted
    probabilities with `generator`).
    """
    if kind == "predicted":
        labels = logits.detach().argmax(dim=1)
    elif kind == "sampled":
        noise = torch.rand(logits.shape, generator=generator, device=logits.device)
        # Adding Gumbel noise to the logits and taking the largest one draws from their softmax.
        tiny = torch.finfo(noise.dtype).tiny
        labels = (logits.detach() - torch.log(-torch.log(noise.clamp_min(tiny)))).argmax(dim=1)
    return cross_entropy(logits, labels)


def add_squares(totals: Sequence[Tensor], gradients: Sequence[Tensor], weight: float) -> None:
    """Add `weight` times the square of each gradient to its total, in place."""
    torch._foreach_addcmul_(list(totals), list(gradients), list(gradients), value=weight)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one vector, every tensor in row-major order whatever its memory format."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Cut a vector made by `flatten` into tensors with the shapes and memory formats of `like`."""
    sizes = [tensor.numel() for tensor in like]
    if sum(sizes) != len(flat):
        raise TrainingError(
            f"The stored vector has {len(flat)} elements but the backbone has {sum(sizes)} parameters; "
            "load it into the network it was made for."
        )
    return [
        torch.empty_like(tensor, requires_grad=False).copy_(piece.view(tensor.shape))
        for tensor, piece in zip(like, flat.split(sizes), strict=True)
    ]


def elastic_penalty(
    parameters: Sequence[Tensor], anchors: Sequence[Tensor], roots: Sequence[Tensor], strength: float
) -> Tensor:
    """strength / 2 * sum_j F_j (theta_j - theta*_j)^2, where `roots` are the square roots of F; a scalar."""
    return _Penalty.apply(strength, list(anchors), list(roots), *parameters)


class _Penalty(torch.autograd.Function):
    """The penalty with its gradient strength * F (theta - theta*) written out: five multi-tensor kernels in all."""

    @staticmethod
    def forward(ctx: Any, strength: float, anchors: list[Tensor], roots: list[Tensor], *parameters: Tensor) -> Tensor:
        scaled = torch._foreach_sub(list(parameters), anchors)
        torch._foreach_mul_(scaled, roots)
        ctx.strength, ctx.scaled, ctx.roots = strength, scaled, roots
        return 0.5 * strength * torch.stack(torch._foreach_norm(scaled)).square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch._foreach_mul(ctx.scaled, ctx.roots)
        torch._foreach_mul_(gradients, gradient * ctx.strength)
        ctx.scaled = ctx.roots = None
        return None, None, None, *gradients
