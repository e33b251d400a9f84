"""Random streams derived by name, so that a draw never depends on earlier draws."""

from __future__ import annotations

import hashlib

import torch


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on `seed` and on every name, and on nothing else."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(device: torch.device | str, seed: int, *names: str | int) -> torch.Generator:
    """Return a fresh generator on `device` for the stream called `names` of `seed`."""
    return torch.Generator(device=device).manual_seed(derive(seed, *names))
