"""Random streams derived by name, so that a draw never depends on earlier draws."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed that depends on `seed` and on every name, and on nothing else."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(device: torch.device | str, seed: int, *names: str | int) -> torch.Generator:
    """Return a fresh generator on `device` for the stream called `names` of `seed`."""
    return torch.Generator(device=device).manual_seed(derive(seed, *names))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let PyTorch's global random numbers, which new layers are drawn from, follow from `seed` inside the context."""
    gpus = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed GPUs that are not in use yet
        if gpus:
            torch.cuda.manual_seed_all(seed)
        yield
