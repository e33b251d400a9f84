"""The `efcil` command in float64, where processes that share a run must agree with a single one almost to the last bit.

In float32 they cannot, on any machine: a value next to zero that is rounded to the other side of a ReLU changes a
gradient by some percent.
"""

from __future__ import annotations

import torch

from efcil.engine.execution import Execution


def use_float64() -> None:
    """Compute everything in float64 in this process."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    Execution.dtype = property(lambda execution: torch.float64)  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    use_float64()
    from efcil.cli import command

    command()
