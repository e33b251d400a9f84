"""Head training with its gradient written out against torch.optim."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from efcil.core import heads
from efcil.core.heads import fit_to_gaussians, softmax_epoch
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


def test_fitting_to_gaussians_approaches_what_many_samples_ask_for() -> None:
    """On fresh samples the gradient of the loss is smaller afterwards; the given heads stay as they are."""
    generator = torch.Generator().manual_seed(0)
    means = torch.rand(3, 5, generator=generator) * 2.0
    covariances = 0.2 * torch.eye(5).expand(2, -1, -1)
    groups = torch.tensor([0, 1, 1])
    given = torch.randn(3, 5, generator=generator)
    before = given.clone()
    fitted = fit_to_gaussians(given, means, covariances, groups, lambda epoch: torch.Generator().manual_seed(epoch))
    assert torch.equal(given, before)
    labels = torch.arange(3).repeat_interleave(2000)
    features = means[labels] + 0.2**0.5 * torch.randn(6000, 5, generator=generator)
    losses, lengths = [], []
    for weight in (before, fitted):
        weight = weight.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(features @ weight.T, labels)
        losses.append(loss.item())
        lengths.append(float(torch.autograd.grad(loss, weight)[0].norm()))
    assert losses[1] < losses[0]
    assert lengths[1] < 0.7 * lengths[0]


@pytest.mark.parametrize(("classes", "each"), [(3, 1707), (60, 100)])
def test_what_heads_are_fitted_to(classes: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty epochs of equally many samples per class, drawn anew every ten and shown in another order every time."""
    epochs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(weight: torch.Tensor, velocity: torch.Tensor, features: Any, labels: Any, **others: Any) -> None:
        assert others == {
            "batch_size": 256,
            "learning_rate": 1e-3,
            "momentum": 0.9,
            "weight_decay": 0.25,
            "scale": None,
        }
        epochs.append((features, labels))

    monkeypatch.setattr(heads, "softmax_epoch", record)
    covariances = torch.stack([4.0 * torch.eye(2), torch.zeros(2, 2)])
    groups = torch.arange(classes) % 2
    fit_to_gaussians(
        torch.zeros(classes, 2),
        torch.zeros(classes, 2),
        covariances,
        groups,
        lambda epoch: torch.Generator().manual_seed(epoch),
        weight_decay=0.25,
    )
    assert len(epochs) == 50
    assert all(torch.bincount(labels).tolist() == [each] * classes for _, labels in epochs)
    assert len({tuple(labels.tolist()) for _, labels in epochs}) == 50
    drawn = [features.sort(dim=0).values for features, _ in epochs]
    assert [torch.equal(one, other) for one, other in pairwise(drawn)] == [epoch % 10 != 9 for epoch in range(49)]
    features, labels = epochs[0]
    # Classes without spread have that of the jitter, 1e-5.
    for label, deviation in ((0, 2.0), (1, 1e-5**0.5)):
        assert float(features[labels == label].std()) == pytest.approx(deviation, rel=0.15)


def test_cosine_steps_are_those_of_torch_sgd() -> None:
    generator = torch.Generator().manual_seed(1)
    features, labels = torch.randn(23, 6, generator=generator), torch.randint(4, (23,), generator=generator)
    weight, scale = torch.randn(4, 6, generator=generator), torch.tensor([5.0])
    reference = torch.nn.Parameter(weight.clone())
    velocity = torch.zeros_like(weight)
    optimiser = torch.optim.SGD([reference], lr=0.1, momentum=0.9, weight_decay=0.02)
    for _ in range(3):
        softmax_epoch(
            weight, velocity, features, labels,
            batch_size=10, learning_rate=0.1, momentum=0.9, weight_decay=0.02, scale=scale,
        )  # fmt: skip
        for start in range(0, 23, 10):
            optimiser.zero_grad()
            logits = heads.cosine_logits(features[start : start + 10], reference, scale)
            torch.nn.functional.cross_entropy(logits, labels[start : start + 10]).backward()
            optimiser.step()
    torch.testing.assert_close(weight, reference.detach())


def test_cosine_scores_depend_on_directions_alone() -> None:
    generator = torch.Generator().manual_seed(2)
    features, weight = torch.randn(5, 6, generator=generator), torch.randn(4, 6, generator=generator)
    scores = heads.cosine_logits(features, weight, torch.tensor([3.0]))
    assert scores.abs().max() <= 3.0
    for row in range(5):
        for place in range(4):
            cosine = torch.nn.functional.cosine_similarity(features[row], weight[place], dim=0)
            torch.testing.assert_close(scores[row, place], 3.0 * cosine)
    torch.testing.assert_close(heads.cosine_logits(7.0 * features, 0.1 * weight, torch.tensor([3.0])), scores)


def test_untrained_rows_fill_the_range_of_a_linear_layer() -> None:
    rows = heads.new_rows(400, 16, torch.Generator().manual_seed(0))
    assert rows.shape == (400, 16)
    assert 0.249 < float(rows.max()) <= 0.25
    assert -0.25 <= float(rows.min()) < -0.249
    layer = torch.nn.Linear(16, 400)
    assert float(rows.std()) == pytest.approx(float(layer.weight.detach().std()), rel=0.03)
