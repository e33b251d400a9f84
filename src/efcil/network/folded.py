"""Convolutions with their BatchNorm folded in: what a CPU computes where nothing is trained.

BatchNorm by running statistics is a scale and a shift per channel. Multiplied into the weights of the convolution
before it, they cost nothing, and what follows can work in place. Results differ from the layers' in the last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SIX = 6.0

#: Rows above and below an image, and columns to its left and right.
Border = tuple[tuple[int, int], tuple[int, int]]


class Folded:
    """The folded weights of the convolutions of a network, made again whenever what they are made of has changed."""

    def __init__(self) -> None:
        self._kept: dict[nn.Conv2d, tuple[tuple[int, ...], Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> Folded:
        return Folded()  # the copy has weights of its own

    def __getstate__(self) -> dict[str, Any]:
        return {"_kept": {}}

    def weights(self, conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
        """Return the weight and the bias of a convolution followed by BatchNorm."""
        sources = (conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked)
        # Training and loading change the version of a tensor, moving it changes its place. Of the running statistics,
        # training leaves the version as it is, but it counts its batches.
        there = [tensor for tensor in sources if tensor is not None]
        state = tuple(number for tensor in there for number in (version(tensor), tensor.data_ptr()))
        kept = self._kept.get(conv)
        if kept is None or kept[0] != state or conv.weight.is_inference():  # whose changes are not counted
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
            weight = (conv.weight.double() * scale[:, None, None, None]).float()
            bias = (norm.bias.double() - norm.running_mean.double() * scale).float()
            kept = (state, weight.contiguous(memory_format=torch.channels_last), bias)
            self._kept[conv] = kept
        return kept[1], kept[2]

    def __call__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, images: Tensor, border: Border | None = None) -> Tensor:
        """Convolve and normalise; the result is new, so that it may be changed in place.

        `border` takes the place of the convolution's padding. It is as wide before the image as after it, or narrower.
        """
        weight, bias = self.weights(conv, norm)
        padding = conv.padding
        assert not isinstance(padding, str)
        if border is not None:
            (top, bottom), (left, right) = border
            # Zeros before the small kernel let the borders be equal: no image is copied to be padded.
            weight, padding = functional.pad(weight, [right - left, 0, bottom - top, 0]), (bottom, right)
        if torch.backends.mkldnn.is_available():
            # On one thread, conv2d takes a function for 1 x 1 kernels that is half as fast.
            return torch.mkldnn_convolution(images, weight, bias, padding, conv.stride, conv.dilation, conv.groups)
        return functional.conv2d(images, weight, bias, conv.stride, padding, conv.dilation, conv.groups)

    def limited(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, images: Tensor, border: Border | None = None) -> Tensor:
        """Convolve, normalise, and limit the result to 0 .. 6 (ReLU6)."""
        return self(conv, norm, images, border).clamp_(0.0, _SIX)


def version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place; one made in inference mode does not count."""
    return 0 if tensor.is_inference() else tensor._version


def applies(network: nn.Module, images: Tensor) -> bool:
    """Say whether folding is right: on a CPU in float32, by running statistics, with nothing to train or to trace."""
    return (
        images.device.type == "cpu"
        and images.dtype == torch.float32
        and not network.training
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )
