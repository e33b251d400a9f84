"""Running a training step: as it is written, or captured once per batch length as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from efcil.engine.execution import Execution
from efcil.network.fast.graphs import capture

WARM_UP_STEPS = 3

#: A step: it gets its index in the block (a number, or a tensor on the device that it increments) and its batch length.
Compute = Callable[[int | Tensor, int], None]


class StepRunner:
    """Runs every step as it is written."""

    def start_at(self, index: int) -> None:
        """Set which step of the block comes next."""

    def run(self, compute: Compute, index: int, length: int) -> None:
        """Run step `index` of the block, of `length` images."""
        compute(index, length)


class CapturedStepRunner(StepRunner):
    """Runs a few steps of each batch length as they are written, captures one as a graph, and replays it.

    A graph reads the index of its step from the device, and each step increments it. The step is passed with every call
    and not kept, so that its owner and the memory of a task can be freed immediately.
    """

    def __init__(self, device: torch.device, batch_size: int) -> None:
        self.batch_size = batch_size
        self.place = torch.zeros(1, device=device, dtype=torch.int64)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.eager_steps: dict[int, int] = {}

    def start_at(self, index: int) -> None:
        """Set which step of the block comes next."""
        self.place.fill_(index)

    def run(self, compute: Compute, index: int, length: int) -> None:
        """Run the next step of the block, of `length` images."""
        graph = self.graphs.get(length)
        if graph is None:
            eager = self.eager_steps.get(length, 0)
            if eager < (WARM_UP_STEPS if length == self.batch_size else 1):
                self.eager_steps[length] = eager + 1
                compute(self.place, length)
                return
            graph = self.graphs[length] = capture(lambda: compute(self.place, length))
        graph.replay()


def step_runner(execution: Execution, batch_size: int) -> StepRunner:
    """Return the runner for the steps of a task whose full batches have `batch_size` images."""
    return CapturedStepRunner(execution.device, batch_size) if execution.captured else StepRunner()
