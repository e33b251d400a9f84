"""The fused backbone against the layers it replaces: features, gradients and running statistics."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from small import draw, make
from torch import Tensor, nn
from torch.nn import functional

from efcil.engine.optimiser import FlatOptimiser
from efcil.errors import TrainingError
from efcil.methods.base import ParameterGroup
from efcil.network import fast
from efcil.network.fast import fused as fused_module
from efcil.network.fast import operations
from efcil.network.fast.fused import FusedBackbone, channels_last_view
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet
from efcil.settings import Recipe

TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4}


def convolution_gradients(fused: FusedBackbone) -> list[Tensor]:
    """The gradients of the module's weights: those of the folded weights, times what was folded in."""
    pieces = fused.gradient.split(fused.sizes)
    gradients = [channels_last_view(p, c.weight.shape) for p, c in zip(pieces, fused.convolutions, strict=True)]
    if fused.folded:
        gradients = [g * s[:, None, None, None] for g, s in zip(gradients, fused.scales(), strict=True)]
    return gradients


def norms(network: ResNet) -> list[nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("large", [False, True], ids=["small images", "large images"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("training", [True, False], ids=["BatchNorm trains", "BatchNorm folded"])
@pytest.mark.parametrize("turned", [True, False], ids=["turned weights", "as they are"])
@pytest.mark.parametrize(("count", "pixels"), [(6, 16), (1, 2)], ids=["batch", "one value per channel"])
def test_features_gradients_and_statistics(
    dtype: torch.dtype, large: bool, passes: int, training: bool, turned: bool, count: int, pixels: int
) -> None:
    plain, other = make(dtype, large).train(training), make(dtype, large).train(training)
    fused = FusedBackbone(other, dtype)
    if turned:
        fused.keep_turned()
    for number in range(passes):  # a loss may look at two batches, whose gradients add up
        images = draw(count, 3, pixels, pixels, seed=number, dtype=dtype)
        direction = draw(count, 16, seed=number + 50, dtype=dtype)
        expected, found = plain(images), fused(images)
        close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
        torch.testing.assert_close(found, expected, **close)
        (expected * direction).sum().backward()
        (found * direction).sum().backward()
    wanted = [c.weight.grad for c in plain.modules() if isinstance(c, nn.Conv2d)]
    for gradient, right in zip(convolution_gradients(fused), wanted, strict=True):
        torch.testing.assert_close(gradient, right, **close)
    for mine, theirs in zip(norms(other), norms(plain), strict=True):
        torch.testing.assert_close(mine.running_mean, theirs.running_mean, **close)
        torch.testing.assert_close(mine.running_var, theirs.running_var, **close)
    if training:
        channels = [norm.num_features for norm in norms(plain)]
        for row, name in enumerate(("weight", "bias")):
            for gradient, norm in zip(fused.norm_gradient[row].split(channels), norms(plain), strict=True):
                torch.testing.assert_close(gradient, getattr(norm, name).grad, **close)


@pytest.mark.parametrize("large", [False, True], ids=["small images", "large images"])
@pytest.mark.parametrize("training", [True, False], ids=["BatchNorm trains", "BatchNorm folded"])
def test_a_step_with_kernels_is_one_with_plain_operations(large: bool, training: bool) -> None:
    kernels = pytest.importorskip("efcil.network.fast.kernels", reason="Triton is not installed here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ends = []
    for module in (operations, kernels):
        backbone = make(torch.float32, large).train(training).to(device)
        fused = FusedBackbone(backbone, torch.float32)
        fused.operations = module
        parameters = list(backbone.parameters())
        if not training:
            parameters = [c.weight for c in backbone.modules() if isinstance(c, nn.Conv2d)]
        groups: list[ParameterGroup] = [{"params": parameters, "learning_rate": 0.01}]
        optimiser = FlatOptimiser(groups, Recipe(optimiser="sgd", learning_rate=0.01), fused, block_steps=2)
        optimiser.begin_block(0, 2, 1.0)
        for step in range(2):
            optimiser.begin_step(None)
            images = draw(3, 3, 16, 16, seed=step, dtype=torch.float32).to(device)
            (fused(images) * draw(3, 16, seed=step + 9, dtype=torch.float32).to(device)).sum().backward()
            optimiser.step()
        state = {name: value for name, value in backbone.state_dict().items() if value.is_floating_point()}
        ends.append(state | {"features": fused(images).detach()})
    begun = make(torch.float32, large).state_dict()["blocks.1.conv1.weight"].to(device)
    assert float((ends[0]["blocks.1.conv1.weight"] - begun).abs().max()) > 1e-3
    tolerance = 1e-2 if device == "cuda" else 1e-4  # cuDNN rounds to TF32
    torch.testing.assert_close(ends[1], ends[0], atol=tolerance, rtol=tolerance)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only there are streams")
@pytest.mark.parametrize("training", [True, False], ids=["BatchNorm trains", "BatchNorm folded"])
def test_projections_beside_other_work_change_no_bit(monkeypatch: pytest.MonkeyPatch, training: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ends = []
    for beside in (True, False):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            backbone = ResNet((64, 128, 256, 512)).cuda().to(memory_format=torch.channels_last).train(training)
        fused = FusedBackbone(backbone, torch.bfloat16)
        fused.keep_turned()
        if not beside:
            fused._branch = None
        for number in range(3):  # memory is used again
            fused.zero_grad()
            images = draw(64, 3, 32, 32, seed=number, dtype=torch.float32).cuda()
            fused(images).square().sum().backward()
            ends.append((fused.gradient.clone(), fused.norm_gradient.clone()))
    for left, right in zip(ends[:3], ends[3:], strict=True):
        assert float(left[0].abs().max()) > 0
        assert torch.equal(left[0], right[0])
        assert torch.equal(left[1], right[1])


def test_turned_weights_follow_the_weights() -> None:
    backbone = make(torch.float64).train()
    fused = FusedBackbone(backbone, torch.float64)
    groups: list[ParameterGroup] = [{"params": list(backbone.parameters()), "learning_rate": 0.1}]
    optimiser = FlatOptimiser(groups, Recipe(learning_rate=0.1), fused, block_steps=2)
    optimiser.begin_block(0, 2, 1.0)
    assert sorted(fused._turned) == [1, 2, 4, 6, 7]  # not the first, those of stride 2 and the projection
    before = fused._turned[1].clone()
    optimiser.begin_step(None)
    fused(draw(6, 3, 8, 8)).square().sum().backward()
    optimiser.step()
    assert not torch.equal(fused._turned[1], before)
    for index, turned in fused._turned.items():
        assert torch.equal(turned, fused.weights[index].flip(2, 3).transpose(0, 1))


def test_a_new_step_forgets_the_gradients_of_the_last() -> None:
    fused = FusedBackbone(make(torch.float64).train(), torch.float64)
    images = draw(4, 3, 8, 8)
    fused(images).sum().backward()
    once, norm = fused.gradient.clone(), fused.norm_gradient.clone()
    fused.zero_grad()
    fused(images).sum().backward()
    torch.testing.assert_close(fused.gradient, once)
    torch.testing.assert_close(fused.norm_gradient, norm)


def scaled_weight(backbone: ResNet) -> None:
    backbone.conv1.weight.mul_(2)


def new_storage(backbone: ResNet) -> None:
    backbone.conv1.weight.data = 2 * backbone.conv1.weight.data


def moved_scale(backbone: ResNet) -> None:
    backbone.norm1.weight.add_(1)


def trained_statistics(backbone: ResNet) -> None:
    backbone.train()(draw(4, 3, 8, 8, seed=9))
    backbone.eval()


def new_buffer(backbone: ResNet) -> None:
    backbone.norm1._buffers["running_mean"] = backbone.norm1.running_mean + 1  # type: ignore[operator]


def loaded(backbone: ResNet) -> None:
    backbone.load_state_dict({name: 1.5 * value for name, value in backbone.state_dict().items()})


def stepped(backbone: ResNet) -> None:
    backbone.conv1.weight.grad = torch.ones_like(backbone.conv1.weight)
    torch.optim.SGD([backbone.conv1.weight], 0.1).step()
    backbone.conv1.weight.grad = None


CHANGES = [scaled_weight, new_storage, moved_scale, trained_statistics, new_buffer, loaded, stepped]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_from_outside_are_noticed(change: Callable[[ResNet], None]) -> None:
    network = IncrementalNetwork(make(torch.float64)).eval()
    fast.install(network, torch.float64)
    images = draw(4, 3, 8, 8)
    before = network.features(images)
    change(network.backbone)
    after = network.features(images)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, network.backbone(images))


def test_working_weights_are_written_no_oftener_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither between looks at an unchanged network, nor between the steps of an optimiser that writes both."""
    written: list[bool] = []
    refresh = FusedBackbone.refresh
    monkeypatch.setattr(FusedBackbone, "refresh", lambda self, folded: (written.append(folded), refresh(self, folded)))
    backbone = make(torch.float64).eval()
    fused = FusedBackbone(backbone, torch.float64)
    fused(draw(4, 3, 8, 8))
    groups: list[ParameterGroup] = [{"params": [c.weight for c in fused.convolutions], "learning_rate": 0.1}]
    optimiser = FlatOptimiser(groups, Recipe(learning_rate=0.1), fused, block_steps=3)
    optimiser.begin_block(0, 3, 1.0)
    for _ in range(3):
        optimiser.begin_step(None)
        optimiser.backward(fused(draw(4, 3, 8, 8)).square().sum())
        optimiser.step()
    torch.testing.assert_close(fused(draw(4, 3, 8, 8)), backbone(draw(4, 3, 8, 8)))
    assert written == [True]


# -- where the layers themselves have to be called -------------------------------------------------------------------


class Doubled(nn.Conv2d):
    """A convolution of somebody else's."""


def other_layer(backbone: ResNet) -> None:
    backbone.conv1 = Doubled(3, 8, 3, padding=1, bias=False).double()


def other_block(backbone: ResNet) -> None:
    backbone.blocks.append(nn.Tanh())


def hook(backbone: ResNet) -> None:
    backbone.blocks[0].register_forward_hook(lambda module, given, returned: 2 * returned)


def other_forward(backbone: ResNet) -> None:
    forward = backbone.norm1.forward
    backbone.norm1.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def bias(backbone: ResNet) -> None:
    backbone.conv1.bias = nn.Parameter(draw(8))


def weight_norm(backbone: ResNet) -> None:
    nn.utils.parametrizations.weight_norm(backbone.conv1)


MODIFICATIONS = [other_layer, other_block, hook, other_forward, bias, weight_norm]


@pytest.mark.parametrize("modify", MODIFICATIONS)
def test_a_modified_backbone_stays_plain(modify: Callable[[ResNet], None]) -> None:
    network = IncrementalNetwork(make(torch.float64)).eval()
    assert network.path == "plain"
    fast.install(network, torch.float64)
    assert network.path == "fused"
    fast.remove(network)
    assert network.path == "plain"
    modify(network.backbone)
    fast.install(network, torch.float64)
    assert network.path == "plain"


def frozen_normalisation(backbone: ResNet) -> None:
    backbone.train()
    backbone.norm1.eval()


@pytest.mark.parametrize("modify", [*(m for m in MODIFICATIONS if m is not other_forward), frozen_normalisation])
@torch.no_grad()
def test_a_backbone_modified_later_is_called_as_it_is(modify: Callable[[ResNet], None]) -> None:
    network = IncrementalNetwork(make(torch.float64)).eval()
    fast.install(network, torch.float64)
    images = draw(4, 3, 8, 8)
    before = network.features(images)
    with torch.random.fork_rng():
        modify(network.backbone)
    expected = copy.deepcopy(network.backbone)(images)
    assert not torch.allclose(expected, before) or modify is weight_norm
    assert torch.equal(network.features(images), expected)


def test_gradients_outside_of_a_training_step_are_ordinary_ones() -> None:
    network = IncrementalNetwork(make(torch.float64)).eval()
    fast.install(network, torch.float64)
    images = draw(4, 3, 8, 8).requires_grad_()
    network.features(images).square().sum().backward()
    assert all(c.weight.grad is not None for c in network.backbone.modules() if isinstance(c, nn.Conv2d))
    assert images.grad is not None
    network.requires_grad_(False)
    images.grad = None
    network.features(images).square().sum().backward()
    assert images.grad.abs().max() > 0


def test_plainly_is_without_the_fast_path_and_without_half_precision() -> None:
    network = IncrementalNetwork(make(torch.float32)).eval()
    fast.install(network, torch.float32)
    network.half_precision = True
    images = draw(4, 3, 8, 8, dtype=torch.float32)
    with torch.no_grad():
        network.features(images)
        with contextlib.suppress(KeyError), fast.plainly(network):
            assert network.path == "plain"
            assert torch.equal(network.features(images), network.backbone(images))
            network.backbone.conv1.weight.data.mul_(2)  # which PyTorch does not count
            raise KeyError
        assert network.path == "fused"
        assert network.half_precision
        torch.testing.assert_close(network.features(images), network.backbone(images), atol=1e-4, rtol=1e-4)


def test_training_and_evaluation_alternate() -> None:
    plain, other = make(torch.float64), make(torch.float64)
    fused = FusedBackbone(other, torch.float64)
    for number, training in enumerate((False, True, True, False)):
        images = draw(4, 3, 8, 8, seed=number)
        plain.train(training)
        other.train(training)
        torch.testing.assert_close(fused(images), plain(images))


def test_a_frozen_copy_is_one_of_its_own() -> None:
    network = IncrementalNetwork(make(torch.float32))
    network.add_head(3, torch.Generator().manual_seed(0))
    fast.install(network, torch.float32)
    network.eval()
    images = draw(4, 3, 8, 8, dtype=torch.float32)
    with torch.no_grad():
        before = network.features(images)
    twin = network.frozen_copy()
    assert twin.fast is not None
    assert twin.fast.backbone is twin.backbone
    assert twin.backbone is not network.backbone
    with torch.no_grad():
        network.backbone.conv1.weight.mul_(2)
        assert torch.equal(twin.features(images), before)
        assert not torch.allclose(network.features(images), before)
    assert not any(parameter.requires_grad for parameter in twin.parameters())


@pytest.mark.parametrize("large", [False, True], ids=["small images", "large images"])
def test_nothing_is_kept_of_a_look_without_gradients(monkeypatch: pytest.MonkeyPatch, large: bool) -> None:
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def bias_relu(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
        alive.append(sum(activation() is not None for activation in made))
        out = operations_bias_relu(x, bias, residual)
        made.append(weakref.ref(out))
        return out

    operations_bias_relu = operations.bias_relu
    monkeypatch.setattr(operations, "bias_relu", bias_relu)
    fused = FusedBackbone(make(torch.float64, large).eval(), torch.float64)
    with torch.no_grad():
        fused(draw(4, 3, 16, 16))
    assert len(alive) == 7
    assert max(alive) <= 3  # what lies between two convolutions of a block, the block's input, and one not yet let go


@pytest.mark.parametrize("deterministic", [False, True])
def test_cudnn_is_asked_only_for_what_it_does_safely(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    asked: list[str] = []
    read: list[bool] = []

    def add_relu(x: Tensor, weight: Tensor, z: Tensor, alpha: float, bias: Tensor, *shape: object) -> Tensor:
        asked.append("residual")
        assert bool(torch.isfinite(z).all())
        read.append(z is x)
        return (functional.conv2d(x, weight, bias, *shape) + alpha * z).relu()  # type: ignore[arg-type]

    def relu(x: Tensor, weight: Tensor, bias: Tensor, *shape: object) -> Tensor:
        asked.append("none")
        out = functional.conv2d(x, weight, bias, *shape)  # type: ignore[arg-type]
        return (out + 0.0 * torch.full_like(out, torch.nan)).relu()  # as PyTorch calls it, on memory that held NaN

    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", add_relu)
    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", deterministic)
    backbone = make(torch.float64).eval()
    fused = FusedBackbone(backbone, torch.float64)
    fused._cudnn = True
    images = draw(4, 3, 8, 8)
    torch.testing.assert_close(fused(images), backbone(images))
    assert asked == ([] if deterministic else ["residual"] * (2 * len(backbone.blocks)))
    # A first convolution that keeps the shape reads its own input once more instead of a residual of zeros.
    assert read == ([] if deterministic else [True, False, False, False, True, False])


def test_batches_beyond_the_reach_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients they go through in pieces; a training step is refused."""
    module = make(torch.float64).eval()
    fused = FusedBackbone(module, torch.float64)
    images = draw(5, 3, 8, 8)
    with torch.no_grad():
        expected = fused(images)
        monkeypatch.setattr(fused_module, "LARGEST_TENSOR", 2 * 8 * 8 * 8 + 1)
        sizes: list[int] = []
        run = fused.run_forward
        monkeypatch.setattr(fused, "run_forward", lambda x, keep: (sizes.append(len(x)), run(x, keep))[1])
        torch.testing.assert_close(fused(images), expected)
        assert sizes == [2, 2, 1]
    with pytest.raises(TrainingError, match="5 images of 8 pixels is too large for the fused network, which takes 2"):
        fused(images)
