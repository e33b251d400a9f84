"""The `efcil` command in float64, where processes that share a run must agree with a single one almost to the last bit.

In float32 they cannot, on any machine: a value next to zero that is rounded to the other side of a ReLU changes a
gradient by some percent.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from efcil import ranks
from efcil.engine.execution import Execution
from efcil.engine.trainer import Trainer


def use_float64() -> None:
    """Compute everything in float64 in this process."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    Execution.dtype = property(lambda execution: torch.float64)  # type: ignore[assignment, method-assign]


def send_signal(rank: int, step: int, number: int) -> None:
    """Let the process `rank` send itself a signal after so many steps of training."""
    taken, compute = 0, Trainer._compute

    def counted(trainer: Trainer, *given: Any) -> None:
        nonlocal taken
        compute(trainer, *given)
        taken += 1
        if taken == step and ranks.place().rank == rank:
            os.kill(os.getpid(), number)

    Trainer._compute = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        time.sleep(float(os.environ.get("SECONDS_LATER", "0")))
    torch.set_num_threads(1)
    use_float64()
    if "SIGNAL_AT" in os.environ:
        send_signal(*map(int, os.environ["SIGNAL_AT"].split()))
    from efcil.cli import command

    command()
