"""Gradients of images by the fused backbone against autograd and finite differences, and the steps down them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from types import ModuleType

import pytest
import small
import torch
from small import draw
from torch import Tensor, nn

from efcil.errors import TrainingError
from efcil.network import fast
from efcil.network.fast import operations
from efcil.network.fast.attack import FusedAttack, attack_on
from efcil.network.fast.fused import FusedBackbone
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def make(dtype: torch.dtype, large: bool = False, widths: tuple[int, ...] = (8, 16)) -> ResNet:
    """A small network that is frozen."""
    return small.make(dtype, large, widths).eval().requires_grad_(False)


def by_autograd(network: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    leaf = images.detach().requires_grad_()
    loss = (network(leaf) - targets).square().sum() / 2
    return torch.autograd.grad(loss, leaf)[0]


LENGTHS = (0.1, 0.07, 0.03)


def by_autograd_towards(network: nn.Module, images: Tensor, targets: Tensor, lengths: Sequence[float]) -> Tensor:
    for length in lengths:
        slope = by_autograd(network, images, targets)
        images = images - length * slope / slope.flatten(1).norm(dim=1)[:, None, None, None]
    return images


@pytest.mark.parametrize("large", [False, True], ids=["small images", "large images"])
@pytest.mark.parametrize(("height", "width"), [(16, 16), (9, 11)])
def test_the_gradient_is_that_of_autograd(large: bool, height: int, width: int) -> None:
    backbone = make(torch.float64, large)
    fused = FusedBackbone(backbone, torch.float64)
    images, targets = draw(3, 3, height, width), draw(3, 16, seed=1).abs()
    features, gradient = FusedAttack(fused).features_and_input_gradient(images, targets)
    torch.testing.assert_close(features, backbone(images), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradient, by_autograd(backbone, images, targets), atol=1e-10, rtol=1e-10)
    assert all(parameter.grad is None for parameter in backbone.parameters())
    assert not fused.has_gradient


def test_the_gradient_is_that_of_finite_differences() -> None:
    fused = FusedBackbone(make(torch.float64), torch.float64)
    attack = FusedAttack(fused)
    images, targets, direction = draw(2, 3, 8, 8), draw(2, 16, seed=1).abs(), draw(2, 3, 8, 8, seed=2)
    gradient = attack.features_and_input_gradient(images, targets)[1]

    def loss(x: Tensor) -> Tensor:
        return (attack.features_and_input_gradient(x, targets)[0] - targets).square().sum() / 2

    step = 1e-6
    difference = (loss(images + step * direction) - loss(images - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), difference, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("large", [False, True], ids=["small images", "large images"])
@pytest.mark.parametrize("module", ["operations", "kernels"])
def test_in_float32_with_plain_operations_and_with_kernels(large: bool, module: str) -> None:
    chosen: ModuleType = operations
    if module == "kernels":
        chosen = pytest.importorskip("efcil.network.fast.kernels", reason="Triton is not installed here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fused = FusedBackbone(make(torch.float32, large).to(device), torch.float32)
    fused.operations = chosen
    images, targets = draw(3, 3, 12, 12), draw(3, 16, seed=1).abs()
    found = FusedAttack(fused).features_and_input_gradient(images.float().to(device), targets.float().to(device))[1]
    expected = by_autograd(make(torch.float64, large), images, targets)
    tolerance = 2e-2 if device == "cuda" else 1e-4  # cuDNN may round to TF32
    torch.testing.assert_close(found.cpu().double(), expected, atol=tolerance, rtol=tolerance)


def test_steps_of_a_length_towards_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces too, the last of which is short: images do not depend on each other."""
    monkeypatch.setattr("efcil.network.fast.attack.LARGEST_PIECE", 2 * 8 * 8)
    backbone = make(torch.float64)
    fused = FusedBackbone(backbone, torch.float64)
    images, targets = draw(5, 3, 8, 8), draw(5, 16, seed=1).abs()
    moved = FusedAttack(fused).towards(images, targets, LENGTHS)
    torch.testing.assert_close(moved, by_autograd_towards(backbone, images, targets, LENGTHS), atol=1e-9, rtol=1e-9)
    for count, lengths in ((5, ()), (0, LENGTHS)):
        assert torch.equal(FusedAttack(fused).towards(images[:count], targets[:count], lengths), images[:count])
    before, after = ((backbone(x) - targets).square().sum(dim=1) for x in (images, moved))
    assert bool((after < before).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_an_image_without_gradient_stays(dtype: torch.dtype) -> None:
    fused = FusedBackbone(make(dtype), dtype)
    images = draw(2, 3, 8, 8, dtype=dtype)
    targets = draw(2, 16, seed=1, dtype=dtype).abs()
    targets[0] = fused(images)[0]
    moved = FusedAttack(fused).towards(images, targets, [6.0])
    assert torch.equal(moved[0], images[0])
    torch.testing.assert_close((moved[1] - images[1]).norm(), torch.tensor(6.0, dtype=dtype))


def test_weights_that_changed_are_noticed() -> None:
    backbone = make(torch.float64)
    fused = FusedBackbone(backbone, torch.float64)
    attack = FusedAttack(fused)
    images, targets = draw(2, 3, 8, 8), draw(2, 16, seed=1).abs()
    attack.features_and_input_gradient(images, targets)
    backbone.blocks[1].conv2.weight.mul_(0.5)  # type: ignore[union-attr, operator]
    _, gradient = attack.features_and_input_gradient(images, targets)
    torch.testing.assert_close(gradient, by_autograd(backbone, images, targets), atol=1e-10, rtol=1e-10)


def test_which_networks_have_one() -> None:
    images = draw(2, 3, 8, 8)
    network = IncrementalNetwork(make(torch.float64)).eval()
    assert attack_on(network, images) is None
    fast.install(network, torch.float64)
    attack = attack_on(network, images)
    assert attack is not None
    assert attack is attack_on(network, images)
    network.input_size = 16
    assert attack_on(network, images) is None
    network.input_size = None
    network.train()
    assert attack_on(network, images) is None
    with pytest.raises(TrainingError, match="frozen network only"):
        attack.towards(images, draw(2, 16), [0.1])
    network.eval()
    hook = network.backbone.register_forward_hook(lambda *_: None)
    assert attack_on(network, images) is None
    hook.remove()
    copied = network.frozen_copy()
    assert attack_on(copied, images) is not attack


def test_nothing_outlives_the_network() -> None:
    network = IncrementalNetwork(make(torch.float64)).eval()
    fast.install(network, torch.float64)
    attack = attack_on(network, draw(2, 3, 8, 8))
    held = weakref.ref(attack)
    gc.collect()
    gc.disable()
    try:
        del attack, network
        assert held() is None
    finally:
        gc.enable()


@GPU
@pytest.mark.parametrize(("count", "pixels"), [(7, 32), (300, 32), (40, 64)])
def test_a_graph_takes_the_same_steps(count: int, pixels: int) -> None:
    backbone = make(torch.float32, widths=(64, 128, 256)).cuda()
    fused = FusedBackbone(backbone, torch.bfloat16)
    attack = FusedAttack(fused)
    images, targets = draw(count, 3, pixels, pixels).bfloat16().cuda(), draw(count, 256, seed=1).abs().float().cuda()
    eager = attack.towards(images, targets, (1.0, 0.8, 0.6))
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        captured = [attack.towards(images, targets, (1.0, 0.8, 0.6)) for _ in range(2)]
        torch.cuda.synchronize()
    assert attack._graphs
    for moved in captured:
        distance = (moved.float() - eager.float()).flatten(1).norm(dim=1)
        assert float(distance.max()) < 0.3  # three steps of length 1; sums may be split differently
    wide = by_autograd_towards(backbone, images.float(), targets, (1.0, 0.8, 0.6))
    ways = [(x.float() - images.float()).flatten(1) for x in (wide, captured[0])]
    assert float(torch.cosine_similarity(*ways, dim=1).median()) > 0.9
