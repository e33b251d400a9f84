"""The fast path: a backbone run as one fused operation, if that gives the same result as layer by layer.

The rest of the code knows two things about it: `IncrementalNetwork.features` uses it automatically once it is
installed, and `plainly` is a context without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from efcil.network.fast.fused import FusedBackbone, fits
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet


def install(network: IncrementalNetwork, dtype: torch.dtype) -> None:
    """Run the network's backbone fused, in `dtype`, if that is possible; `network.path` then says so."""
    backbone = network.backbone
    network.fast = FusedBackbone(backbone, dtype) if isinstance(backbone, ResNet) and fits(backbone) else None


def remove(network: IncrementalNetwork) -> None:
    """Run the network's backbone layer by layer from now on."""
    network.fast = None


@contextmanager
def plainly(network: IncrementalNetwork) -> Iterator[None]:
    """Compute features layer by layer in full precision, with ordinary gradients, inside the context."""
    fast, half = network.fast, network.half_precision
    network.fast, network.half_precision = None, False
    try:
        yield
    finally:
        network.fast, network.half_precision = fast, half
        if fast is not None:
            fast.forget()  # some of PyTorch's optimisers change weights without increasing the version counter
