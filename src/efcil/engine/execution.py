"""How training runs on a machine: device, precision and path."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from efcil.methods.base import Method
from efcil.network import fast
from efcil.network.fast.fused import FIRST


@dataclass(frozen=True)
class Execution:
    """How training runs on this machine; chosen once per run."""

    device: torch.device
    half: bool
    fused: bool
    captured: bool
    tf32: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The type images are prepared in."""
        return torch.bfloat16 if self.half and self.device.type == "cuda" else torch.float32

    def equip(self, learner: Method) -> None:
        """Let the learner's network compute features on the chosen path, fused or plain."""
        learner.network.half_precision = self.half
        if self.fused:
            fast.install(learner.network, self.dtype)
        else:
            fast.remove(learner.network)

    def stream(self) -> AbstractContextManager[object]:
        """Return the context of a run: its own CUDA stream, since the default one cannot be captured."""
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(_main_stream(self.device))


@cache
def _main_stream(device: torch.device) -> torch.cuda.Stream:
    # One for all runs of a process: PyTorch's cached memory belongs to a stream, and would be lost with it.
    return torch.cuda.Stream(device, priority=FIRST)
