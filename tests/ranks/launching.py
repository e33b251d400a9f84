"""A warm process that runs `efcil` in several processes at once, `torchrun` itself, and how runs are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from efcil.runfolder import RunFolder
from warm import Server

HERE = Path(__file__).parent
Launch = Callable[..., tuple[list[int], str]]

#: Whose values would be those of a run that these tests are part of.
_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def environment() -> dict[str, str]:
    """Return the environment of processes that have one thread each, and no GPU, of which there may be too few."""
    kept = {name: value for name, value in os.environ.items() if name not in _OURS}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def launcher(output: Path) -> Iterator[Launch]:
    """Yield a function that runs a command line, or a unit, in so many processes: exit codes, and what they printed.

    They take themselves for processes of so many machines.
    """
    server = Server(HERE / "forks.py", output, environment())

    def run(ranks: int, *arguments: object, unit: str | None = None, machines: int = 1) -> tuple[list[int], str]:
        return server.do(ranks=ranks, unit=unit, machines=machines, arguments=[str(each) for each in arguments])

    yield run
    server.close()


def torchrun(count: int, given: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Start processes. SIGNAL_AT is the rank that gets a signal, after how many steps, and which."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    port = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [*launcher, *port, str(HERE / "exact.py"), *given],
        env=environment() | variables, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def assert_same(first: RunFolder, second: RunFolder, tolerance: float = 1e-7) -> None:
    """Two runs have the same results, and what they keep differs by rounding in float64."""
    for one, other in zip(first.read_accuracy(), second.read_accuracy(), strict=True):
        np.testing.assert_allclose(one, other)
    tensors = [load_file(next(run.model.glob("*.safetensors"))) for run in (first, second)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        assert value.dtype in (torch.float64, torch.int64)
        size = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(tensors[1][name], value, rtol=0, atol=tolerance * size, msg=name)
