"""Gradients with respect to images: against a difference quotient, image by image, and without side effects."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efcil.network import attack, fast
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork


@pytest.fixture
def network() -> IncrementalNetwork:
    """A frozen network in float64 whose BatchNorm has seen something."""
    made = IncrementalNetwork(make_backbone("slim", 0)).double()
    generator = torch.Generator().manual_seed(1)
    for module in made.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
    return made.frozen_copy()


def images_and_targets(network: IncrementalNetwork, count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.randn(count, network.feature_size, generator=generator, dtype=torch.float64)


def test_gradient_is_that_of_half_the_squared_distance(network: IncrementalNetwork) -> None:
    images, targets = images_and_targets(network)
    with torch.no_grad():  # as where it is used
        found = attack.input_gradient(network, images, targets)
    step = 1e-6 * torch.randn(images.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def distance(some: Tensor) -> Tensor:
        return (network.backbone(some) - targets).square().sum(dim=1).detach() / 2

    quotient = distance(images + step) - distance(images - step)
    torch.testing.assert_close((2 * found * step).flatten(1).sum(dim=1), quotient, rtol=1e-4, atol=1e-12)
    assert not found.requires_grad
    assert not images.requires_grad
    assert all(parameter.grad is None for parameter in network.parameters())


def test_attack_brings_features_nearer_and_is_per_image(
    network: IncrementalNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, targets = images_and_targets(network)
    with torch.no_grad():
        moved = attack.towards(network, images, targets, [1.5] * 4)
        pairs = zip(images.split(1), targets.split(1), strict=True)
        alone = torch.cat([attack.towards(network, image, target, [1.5] * 4) for image, target in pairs])
        monkeypatch.setattr(attack, "LARGEST_PIECE", 4 * images[0, 0].numel())
        pieces = attack.towards(network, images, targets, [1.5] * 4)
        before, after = ((network.features(x) - targets).norm(dim=1) for x in (images, moved))
    torch.testing.assert_close(moved, alone)
    torch.testing.assert_close(moved, pieces)
    assert bool((after < before).all())
    assert not moved.requires_grad


def test_fused_network_gives_the_gradient_of_its_layers(network: IncrementalNetwork) -> None:
    images, targets = images_and_targets(network)
    expected = attack.input_gradient(network, images, targets)
    fast.install(network, torch.float64)
    assert network.path == "fused"
    torch.testing.assert_close(attack.input_gradient(network, images, targets), expected)


def test_groups_and_limits_use_the_fused_network_too(
    network: IncrementalNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, targets = images_and_targets(network)
    limits = images.amin() / 2, images.amax() / 2
    expected = attack.towards(network, images, targets, [1.5] * 3, group=4, limits=limits)
    fast.install(network, torch.float64)
    monkeypatch.setattr(attack, "input_gradient", None)  # layer by layer
    found = attack.towards(network, images, targets, [1.5] * 3, group=4, limits=limits)
    torch.testing.assert_close(found, expected)
