"""The length that a method may have its gradients cut to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from efcil.engine.optimiser import TorchOptimiser
from efcil.settings import Recipe


@pytest.mark.parametrize(("limit", "expected"), [(None, 13.0), (1.0, 1.0), (20.0, 13.0)])
def test_the_gradient_of_all_parameters_together_is_cut(limit: float | None, expected: float) -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    recipe = Recipe(optimiser="sgd", learning_rate=1.0, weight_decay=0.0)
    groups = [{"params": [first], "learning_rate": 1.0}, {"params": [second], "learning_rate": 1.0}]
    optimiser = TorchOptimiser(groups, recipe, capturable=False, limit=limit)
    optimiser.begin_block(0, 1, 1.0)
    optimiser.begin_step(None)
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    optimiser.step()
    step = torch.cat([first, second]).detach()
    torch.testing.assert_close(step, -torch.tensor([3.0, 4.0, 12.0]) * expected / 13.0, rtol=1e-4, atol=1e-5)
