"""Gradients with respect to images, and images changed by them until a frozen network gives certain features."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from efcil import ranks
from efcil.core.pseudo_old import descend
from efcil.network.fast.attack import attack_on
from efcil.network.incremental import IncrementalNetwork

#: Pixels that pass through the network together: activations of 512 images of 32 pixels take about 2 GB in bfloat16.
LARGEST_PIECE = 512 * 32 * 32


def input_gradient(network: IncrementalNetwork, images: Tensor, targets: Tensor) -> Tensor:
    """Return the gradient of ||f(x) - target||^2 / 2 with respect to images (K, 3, h, w), in their type.

    The network is frozen, in eval mode and without gradients of its own, so that images do not depend on each other.
    Nothing here waits for the device or depends on values, so that it can be captured. It is computed layer by layer,
    in bfloat16 where the network has half precision; `towards` uses the fused backbone where it can.
    """
    with torch.enable_grad():
        leaf = images.detach().requires_grad_(True)
        features = network.own_features(leaf)
        (found,) = torch.autograd.grad(features, leaf, (features - targets).detach())
    return found


def towards(
    network: IncrementalNetwork,
    images: Tensor,
    targets: Tensor,
    lengths: Sequence[float],
    *,
    group: int = 1,
    limits: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return images after steps of these `lengths` towards features `targets` (K, n) of a frozen network.

    As many images pass through the network at a time as fit a fixed amount of memory. In a run of several processes
    each changes its own part; all must call this with the same images. `group` and `limits` are those of `descend`;
    groups stay together.
    """
    groups = -(-len(images) // group)
    share = ranks.share(groups) if ranks.several() else slice(0, groups)
    rows = slice(share.start * group, share.stop * group)
    size = max(1, LARGEST_PIECE // (images.shape[2] * images.shape[3]) // group) * group

    def move(some: Tensor, wanted: Tensor) -> Tensor:
        fused = attack_on(network, some)
        if fused is not None and group == 1 and limits is None:
            return fused.towards(some, wanted, lengths)
        gradient = partial(input_gradient, network) if fused is None else fused.input_gradient
        return descend(some, wanted, gradient, lengths, group=group, limits=limits)

    images = images.contiguous(memory_format=torch.channels_last)
    parts = zip(images[rows].split(size), targets[rows].split(size), strict=True)
    moved = [move(some, wanted) for some, wanted in parts]
    own = torch.cat(moved) if moved else images[rows]
    if not ranks.several():
        return own
    if group == 1:
        return ranks.gather_rows(own, len(images))
    whole = own.new_zeros((share.stop - share.start) * group, *own.shape[1:])  # the last group may be smaller
    whole[: len(own)] = own
    return ranks.gather_rows(whole.unflatten(0, (-1, group)), groups).flatten(0, 1)[: len(images)]
