"""Elastic weight consolidation: a diagonal Fisher matrix and the quadratic penalty that it weighs.

Parameters are lists of tensors. Lists are handled by multi-tensor operations, because a network has some sixty
parameters and one small kernel for each of them, several times a step, would take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil.errors import TrainingError


def fisher_labels(logits: Tensor, labels: Tensor, kind: str, generator: torch.Generator | None = None) -> Tensor:
    """Labels (B) of the cross-entropy whose squared gradient is taken as the Fisher information.

    `kind` says which: `predicted` (the largest of the `logits` (B, m)), `true` (`labels`), or `sampled` (drawn from the
    predicted probabilities with `generator`).
    """
    if kind == "true":
        return labels
    logits = logits.detach()
    if kind == "sampled":
        noise = torch.rand(logits.shape, generator=generator, device=logits.device)
        # Adding Gumbel noise to the logits and taking the largest one draws from their softmax.
        logits = logits - torch.log(-torch.log(noise.clamp_min(torch.finfo(noise.dtype).tiny)))
    return logits.argmax(dim=1)


def add_squares_per_image(
    totals: Sequence[Tensor],
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    weight: float,
) -> None:
    """Add `weight` times the sum over images of the squared gradient of each image's own loss, in place.

    `loss` maps the module's results for the images (B, ...) and their labels (B) to the sum of their losses. BatchNorm
    layers must not be in training mode. Plain convolutions and BatchNorm give each image's gradient, a product of a
    layer's input and the gradient of its output, in one pass over all images; modules with anything else see them one
    by one.
    """
    if not _in_one_pass(module):
        for image, label in zip(images.split(1), labels.split(1), strict=True):
            add_squares(totals, torch.autograd.grad(loss(module(image), label), list(module.parameters())), weight)
        return
    kept: list[tuple[nn.Module, Tensor, Tensor]] = []

    def keep(layer: nn.Module, given: tuple[Tensor, ...], returned: Tensor) -> None:
        kept.append((layer, given[0].detach(), returned))

    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d))]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        total_loss = loss(module(images), labels)
    finally:
        for hook in hooks:
            hook.remove()
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    gradients = torch.autograd.grad(total_loss, [returned for *_, returned in kept])
    for (layer, given, _), gradient in zip(kept, gradients, strict=True):
        for parameter, per_image in _gradients_per_image(layer, given, gradient):
            squares = per_image.square_().sum(dim=0).view(parameter.shape)
            totals[places[id(parameter)]].add_(squares, alpha=weight)


def _in_one_pass(module: nn.Module) -> bool:
    """Say whether all parameters are in layers that `_gradients_per_image` knows, each of which is there once."""
    known = [parameter for layer in module.modules() if _is_plain(layer) for parameter in layer.parameters()]
    every = {id(parameter) for parameter in module.parameters()}
    return len(known) == len(every) and {id(parameter) for parameter in known} == every


def _is_plain(layer: nn.Module) -> bool:
    if isinstance(layer, nn.Conv2d):
        simple = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
        return simple and layer.bias is None and not isinstance(layer.padding, str)
    return isinstance(layer, nn.BatchNorm2d) and layer.affine and layer.track_running_stats


def _gradients_per_image(layer: nn.Module, given: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the layer's parameters with their gradients (B, elements) for every single image."""
    if isinstance(layer, nn.Conv2d):
        assert not isinstance(layer.padding, str)
        windows = functional.unfold(given, layer.kernel_size, padding=layer.padding, stride=layer.stride)
        yield layer.weight, torch.bmm(gradient.flatten(2), windows.transpose(1, 2)).flatten(1)
        return
    assert isinstance(layer, nn.BatchNorm2d)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    mean, inverse = layer.running_mean[:, None, None], torch.rsqrt(layer.running_var + layer.eps)[:, None, None]
    yield layer.weight, (gradient * (given - mean) * inverse).sum(dim=(2, 3))
    yield layer.bias, gradient.sum(dim=(2, 3))


def add_squares(totals: Sequence[Tensor], gradients: Sequence[Tensor], weight: float) -> None:
    """Add `weight` times the square of each gradient to its total, in place."""
    torch._foreach_addcmul_(list(totals), list(gradients), list(gradients), value=weight)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return all elements in one vector, every tensor in row-major order whatever its memory format."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split a vector made by `flatten` into tensors with the shapes and memory formats of `like`."""
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
