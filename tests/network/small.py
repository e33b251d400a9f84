"""A small network for the tests of the fused backbone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from efcil.network.resnet import ResNet


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return normal numbers, the same ones in every type."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make(dtype: torch.dtype, large: bool = False, widths: tuple[int, ...] = (8, 16)) -> ResNet:
    """Return a channels-last network whose normalisation is not the trivial one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = ResNet(widths, (1,) + (2,) * (len(widths) - 1), large_images=large).to(dtype)
    for number, module in enumerate(network.modules()):
        if isinstance(module, nn.BatchNorm2d):
            size = module.num_features
            assert module.running_mean is not None
            assert module.running_var is not None
            module.weight.data = 1 + 0.3 * draw(size, seed=number, dtype=dtype)
            module.bias.data = 0.3 * draw(size, seed=number + 100, dtype=dtype)
            module.running_mean.copy_(0.3 * draw(size, seed=number + 200))
            module.running_var.copy_(0.5 + draw(size, seed=number + 300).abs())
    return network.to(memory_format=torch.channels_last)
