"""The Fisher matrix and the penalty of EWC against autograd and hand-made cases."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from efcil.core import fisher
from efcil.errors import TrainingError
from efcil.network.resnet import ResNet


def parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 3, 2, 2, generator=generator).contiguous(memory_format=torch.channels_last)
    return [weight.requires_grad_(), torch.randn(4, generator=generator).requires_grad_()]


def test_penalty_is_the_weighted_squared_distance() -> None:
    theta, anchor = torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([0.0, 1.0])
    penalty = fisher.elastic_penalty([theta], [anchor], [torch.tensor([2.0, 0.5]).sqrt()], 10.0)
    # 10 / 2 * (2 * 1^2 + 0.5 * 2^2)
    assert penalty.item() == pytest.approx(20.0)
    (gradient,) = torch.autograd.grad(penalty, theta)
    torch.testing.assert_close(gradient, torch.tensor([20.0, 10.0]))


def test_penalty_has_the_gradient_that_autograd_finds() -> None:
    theta = parameters()
    generator = torch.Generator().manual_seed(1)
    anchors = [torch.randn(p.shape, generator=generator) for p in theta]
    information = [torch.rand(p.shape, generator=generator) for p in theta]
    naive = 3.5 * sum((f * (p - a).square()).sum() for p, a, f in zip(theta, anchors, information, strict=True))
    written_out = fisher.elastic_penalty(theta, anchors, [f.sqrt() for f in information], 7.0)
    torch.testing.assert_close(written_out, naive)
    expected = torch.autograd.grad(naive, theta)
    # As one term of several, so that the incoming gradient is not 1.
    found = torch.autograd.grad(2.0 * written_out, theta)
    torch.testing.assert_close([g / 2 for g in found], list(expected))


def test_penalty_and_its_gradient_vanish_at_the_anchor() -> None:
    theta = parameters()
    penalty = fisher.elastic_penalty(
        theta, [p.detach().clone() for p in theta], [torch.ones_like(p) for p in theta], 9.0
    )
    assert penalty.item() == 0.0
    assert all(bool((gradient == 0).all()) for gradient in torch.autograd.grad(penalty, theta))


def test_flattening_is_undone_whatever_the_memory_format() -> None:
    theta = parameters()
    flat = fisher.flatten(theta)
    torch.testing.assert_close(flat[:48], theta[0].detach().contiguous().view(-1))
    for piece, parameter in zip(fisher.unflatten(flat, theta), theta, strict=True):
        assert torch.equal(piece, parameter)
        assert piece.stride() == parameter.stride()
        assert not piece.requires_grad


def test_a_vector_of_another_network_is_refused() -> None:
    with pytest.raises(TrainingError, match="51 elements but the backbone has 52"):
        fisher.unflatten(torch.zeros(51), parameters())


def test_squares_are_added_with_their_weight() -> None:
    totals = [torch.tensor([1.0, 0.0])]
    fisher.add_squares(totals, [torch.tensor([2.0, -3.0])], 0.5)
    torch.testing.assert_close(totals[0], torch.tensor([3.0, 4.5]))


def of_other_layers() -> nn.Module:
    """A backbone as people write them: biases, groups, dilation, a linear layer at the end."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2, dilation=2, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(64, 8),
    )


@pytest.mark.parametrize("make", [lambda: ResNet((4, 8), (1, 1)), of_other_layers], ids=["resnet", "others"])
def test_squares_of_every_image_by_itself(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module, images = make().eval(), torch.randn(5, 3, 8, 8)
    for norm in (layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)):
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
        norm.eps = 0.1  # large enough to be missed
    weight, labels = torch.randn(3, 8), torch.tensor([0, 1, 2, 0, 1])

    def loss(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(features @ weight.T, labels, reduction="sum")

    parameters = list(module.parameters())
    expected = [torch.ones_like(parameter) for parameter in parameters]
    for place in range(len(images)):
        one = slice(place, place + 1)
        gradients = torch.autograd.grad(loss(module(images[one]), labels[one]), parameters)
        for total, gradient in zip(expected, gradients, strict=True):
            total += 0.5 * gradient.square()
    totals = [torch.ones_like(parameter) for parameter in parameters]
    fisher.add_squares_per_image(totals, module, images, labels, loss, 0.5)
    torch.testing.assert_close(totals, expected)


def test_labels_of_the_fisher_pass() -> None:
    logits, labels = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 0.0]]), torch.tensor([2, 1])
    assert fisher.fisher_labels(logits, labels, "predicted").tolist() == [1, 0]
    assert fisher.fisher_labels(logits, labels, "true").tolist() == [2, 1]


def test_sampled_labels_follow_the_prediction() -> None:
    count = 200_000
    probabilities = torch.tensor([0.7, 0.2, 0.1])
    logits = probabilities.log().expand(count, 3)
    generator = torch.Generator().manual_seed(0)
    drawn = fisher.fisher_labels(logits, torch.zeros(count, dtype=torch.int64), "sampled", generator)
    shares = torch.bincount(drawn, minlength=3) / count
    torch.testing.assert_close(shares, probabilities, atol=0.005, rtol=0)
