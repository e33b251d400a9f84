"""Residual networks for small and large images, without any dependency but PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm that can be trained with a single value per channel, which PyTorch's refuses.

    The last batch of an epoch may be like that: one image, whose map is one pixel. As in the fused network, the value
    is then its own mean.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (batch, channels, h, w), by the batch's statistics in training mode, else by the running ones."""
        if self.training and input.numel() == input.shape[1]:
            return super().forward(torch.cat([input, input]))[:1]  # two equal values have the same mean and no variance
        return super().forward(input)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut; the shortcut is a 1x1 projection if the shape changes."""

    widening = 1

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = BatchNorm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = BatchNorm(outputs)
        self.shortcut_conv: nn.Conv2d | None = None
        self.shortcut_norm: BatchNorm | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut_conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut_norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, outputs, h / stride, w / stride), non-negative."""
        hidden = functional.relu(self.norm1(self.conv1(x)))
        hidden = self.norm2(self.conv2(hidden))
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut_conv(x))
        return functional.relu(hidden + x)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, which narrow and widen again by four, and a shortcut."""

    widening = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.widening
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = BatchNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = BatchNorm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = BatchNorm(outputs)
        self.shortcut_conv: nn.Conv2d | None = None
        self.shortcut_norm: BatchNorm | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut_conv = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut_norm = BatchNorm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, inputs, h, w) to (batch, 4 * width, h / stride, w / stride), non-negative."""
        hidden = functional.relu(self.norm1(self.conv1(x)))
        hidden = functional.relu(self.norm2(self.conv2(hidden)))
        hidden = self.norm3(self.conv3(hidden))
        if self.shortcut_conv is not None and self.shortcut_norm is not None:
            x = self.shortcut_norm(self.shortcut_conv(x))
        return functional.relu(hidden + x)


class ResNet(nn.Module):
    """A residual network that maps images (batch, 3, h, w) to non-negative features (batch, feature_size).

    `large_images` selects the 7x7 stride-2 stem with max-pooling; otherwise the stem is one 3x3 convolution, so that
    32 and 64 pixel images keep their resolution. `scaled_initialisation` draws convolution weights with standard
    deviation sqrt(2 / (k * k * outputs)); without it PyTorch's default applies. `block` is the kind of its blocks.
    """

    def __init__(
        self,
        widths: tuple[int, ...] = (64, 128, 256, 512),
        blocks: tuple[int, ...] = (2, 2, 2, 2),
        *,
        large_images: bool = False,
        scaled_initialisation: bool = True,
        block: type[BasicBlock] | type[Bottleneck] = BasicBlock,
    ) -> None:
        super().__init__()
        self.large_images = large_images
        self.block_counts = blocks
        self.feature_size = widths[-1] * block.widening
        stem = dict(kernel_size=7, stride=2, padding=3) if large_images else dict(kernel_size=3, stride=1, padding=1)
        self.conv1 = nn.Conv2d(3, widths[0], bias=False, **stem)  # type: ignore[arg-type]
        self.norm1 = BatchNorm(widths[0])
        layers: list[nn.Module] = []
        inputs = widths[0]
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            for index in range(count):
                layers.append(block(inputs, width, 2 if stage > 0 and index == 0 else 1))
                inputs = width * block.widening
        self.blocks = nn.ModuleList(layers)
        if scaled_initialisation:
            for module in self.modules():
                if isinstance(module, nn.Conv2d) and not module.weight.is_meta:  # else a compiler is imported
                    fan = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
                    nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan))

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 features (batch, feature_size): globally averaged final activations, not normalised."""
        x = functional.relu(self.norm1(self.conv1(images)))
        if self.large_images:
            x = functional.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(x)
        return x.float().mean(dim=(2, 3)) if x.dtype in (torch.bfloat16, torch.float16) else x.mean(dim=(2, 3))
