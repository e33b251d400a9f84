"""Whether our own kernels can be used; everything they do is also written in plain PyTorch."""

from __future__ import annotations

from functools import cache

import torch


def compiled(device: torch.device) -> bool:
    """Return whether kernels are compiled for a device: it must be a GPU of NVIDIA's, and Triton installed."""
    return device.type == "cuda" and torch.version.hip is None and _triton()


@cache
def _triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
