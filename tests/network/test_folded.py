"""EfficientNet-lite with BatchNorm folded into its convolutions gives what its layers give."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from efcil.network import efficientnet
from efcil.network.efficientnet import EfficientNetLite
from efcil.network.folded import Folded, applies


@pytest.fixture
def network() -> EfficientNetLite:
    """A network with running statistics that are not those of a new one."""
    torch.manual_seed(0)
    made = EfficientNetLite(width=0.25, depth=0.4)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2.0)
    return made.eval()


def layers(network: EfficientNetLite, images: Tensor) -> Tensor:
    """Return the features layer by layer: gradients are asked for, so nothing is folded."""
    with torch.enable_grad():
        assert not applies(network, images)
        return network(images).detach()


def same(network: EfficientNetLite, images: Tensor) -> bool:
    with torch.no_grad():
        assert applies(network, images)
        return torch.allclose(network(images), layers(network, images), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mkldnn", [True, False])
@pytest.mark.parametrize("sides", [(32, 32), (33, 33), (32, 33), (34, 30)])
def test_the_same_features(
    network: EfficientNetLite, sides: tuple[int, int], mkldnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mkldnn:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    images = torch.randn(3, 3, *sides)
    given = images.clone()
    assert same(network, images)
    assert torch.equal(images, given), "the input is not changed in place"


def test_new_weights_are_folded_again(network: EfficientNetLite) -> None:
    images = torch.randn(2, 3, 32, 32)
    assert same(network, images)
    before = layers(network, images)
    with torch.no_grad():
        network.stem_conv.weight.mul_(1.5)  # as an optimiser does
    assert same(network, images)
    network.load_state_dict({name: value * 0.9 for name, value in network.state_dict().items()})
    assert same(network, images)
    network.head_norm.bias.data = network.head_norm.bias.data + 1.0  # as moving to another device does
    assert same(network, images)
    network.train()(torch.randn(4, 3, 32, 32))  # moves the running statistics
    assert same(network.eval(), images)
    assert not torch.allclose(before, layers(network, images), atol=1e-2)


def test_copies_fold_their_own_weights(network: EfficientNetLite) -> None:
    images = torch.randn(2, 3, 32, 32)
    assert same(network, images)
    for other in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
        assert other._folded is not network._folded
        assert not other._folded._kept
        with torch.no_grad():
            other.stem_conv.weight.mul_(2.0)
        assert same(other, images)
    assert network.state_dict().keys() == EfficientNetLite(width=0.25, depth=0.4).state_dict().keys()


def test_where_it_does_not_apply(network: EfficientNetLite, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert applies(network, images)
        assert not applies(network, images.double())
        assert not applies(network.train(), images)
        with torch.autocast("cpu", torch.bfloat16):
            assert not applies(network.eval(), images)
    monkeypatch.setattr(Folded, "weights", lambda *arguments: pytest.fail("folded while it is exported"))
    monkeypatch.setattr(efficientnet, "applies", applies)
    with torch.no_grad():
        torch.export.export(network.eval(), (images,))


def test_networks_made_in_inference_mode_are_folded_too() -> None:
    """Tensors made in inference mode do not count their changes."""
    with torch.inference_mode():
        backbone = EfficientNetLite(width=0.25, depth=0.4).eval()
        images = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        before = backbone(images)
        backbone.stem_norm.weight.mul_(2.0)
        assert not torch.equal(backbone(images), before)
