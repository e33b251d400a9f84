"""The exponential moving average of the weights during a task."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from efcil.methods.base import Method


class WeightAverage:
    """Averages over the steps of a task what trains: parameters, and the statistics of BatchNorm.

    It begins with the weights before the first step. Its tensors keep their addresses, and an update reads nothing back
    from the device, so that a captured step can contain it.
    """

    def __init__(self, learner: Method, decay: float) -> None:
        self.share = 1.0 - decay
        trained = [(name, value) for name, value in learner.named_parameters() if value.requires_grad and value.numel()]
        statistics = [(f"network.{name}", value) for name, value in learner.network.named_buffers()]
        tensors = [(name, value.detach()) for name, value in trained + statistics if value.is_floating_point()]
        self.present = dict(tensors)
        self.average = {name: value.clone() for name, value in tensors}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights after a step."""
        torch._foreach_lerp_(list(self.average.values()), list(self.present.values()), self.share)

    @torch.no_grad()
    def replace(self) -> None:
        """Give the learner the averaged weights."""
        for name, value in self.average.items():
            self.present[name].copy_(value)

    def state(self) -> dict[str, Tensor]:
        """Return the average, by name."""
        return self.average

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Resume from what `state` returned; raises KeyError where something is missing."""
        for name, value in self.average.items():
            value.copy_(state[name])
