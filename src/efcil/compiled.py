"""Whether kernels of our own can be used; everything they do is also written in plain PyTorch."""

from __future__ import annotations

from functools import cache

import torch


def compiled(device: torch.device) -> bool:
    """Say whether kernels are compiled for a device: one of CUDA, where Triton is installed."""
    return device.type == "cuda" and _triton()


@cache
def _triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
