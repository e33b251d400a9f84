"""Whether our own kernels can be used; everything they do is also written in plain PyTorch."""

from __future__ import annotations

import os
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
    # Products and sums are rounded once, together. Versions up to 3.9 do so unless told otherwise, later ones do not:
    # without this, the same kernels would give other bits there.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    return True
