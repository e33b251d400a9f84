"""Head training with its gradient written out against torch.optim."""

from __future__ import annotations

import pytest
import torch

from efcil.core.heads import softmax_epoch
from efcil.errors import TrainingError


def test_steps_are_those_of_torch_sgd() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(23, 6, generator=generator), torch.randint(4, (23,), generator=generator)
    weight = torch.randn(4, 6, generator=generator)
    reference = torch.nn.Parameter(weight.clone())
    velocity = torch.zeros_like(weight)
    optimiser = torch.optim.SGD([reference], lr=0.1, momentum=0.9, weight_decay=0.02)
    for _ in range(3):
        softmax_epoch(
            weight, velocity, features, labels, batch_size=10, learning_rate=0.1, momentum=0.9, weight_decay=0.02
        )
        for start in range(0, 23, 10):
            optimiser.zero_grad()
            logits = features[start : start + 10] @ reference.T
            torch.nn.functional.cross_entropy(logits, labels[start : start + 10]).backward()
            optimiser.step()
    torch.testing.assert_close(weight, reference.detach())


def test_features_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TrainingError, match="one row of 6 features per label"):
        softmax_epoch(
            torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(3, 5), torch.zeros(3), batch_size=2, learning_rate=0.1
        )
