"""SSRE: folding and merging change nothing, adapters are 1x1 convolutions, and the loss by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from checks import SHORT, assert_equal, clone, short_stream
from torch import Tensor, nn
from torch.nn import functional

from efcil.methods.ssre import RepresentationExpansion, adapted_kernels, fold_normalisation
from efcil.network.backbones import locate
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet


def disturbed_backbone() -> ResNet:
    """A backbone whose BatchNorm layers are far from trivial; one channel has the scale zero."""
    torch.manual_seed(0)
    backbone = ResNet((8, 12, 16), (1, 2, 1)).double().eval()
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.3, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.2, 2.0)
            module.weight.data[0] = 0.0
    return backbone


def begun(**settings: object) -> RepresentationExpansion:
    """The method in the middle of the second task, with adapters that are not zero."""
    stream = short_stream()
    method = stream.start("ssre", **settings)
    method.begin_task(stream.tasks[1])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for adapter in method.adapters.values():
            adapter.normal_(std=0.05, generator=generator)
    method.eval()
    return method


def test_folding_changes_no_feature() -> None:
    network, images = IncrementalNetwork(disturbed_backbone()), torch.randn(5, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        before = network.features(images)
        fold_normalisation(network, images)
        torch.testing.assert_close(network.features(images), before)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            scale = module.weight / (module.running_var + module.eps).sqrt()
            torch.testing.assert_close(scale, torch.ones_like(scale))
            assert float(module.running_mean.abs().max()) == 0.0


class Biased(nn.Sequential):
    """Convolutions with biases."""

    def __init__(self, **norm: bool) -> None:
        first, second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2)
        super().__init__(first, nn.BatchNorm2d(4, **norm), nn.ReLU(), second, nn.BatchNorm2d(4, **norm), nn.Flatten())


class Preactivated(nn.Module):
    """A block whose shortcut begins before the BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        return self.norm2(x + self.conv(self.norm1(x).relu())).flatten(1)


@pytest.mark.parametrize(
    ("make", "folds"),
    [(Biased, True), (Preactivated, False), (lambda: Biased(affine=False), False)],
    ids=["biased", "preactivated", "unscaled"],
)
def test_folding_changes_no_feature_of_other_networks(make: Callable[[], nn.Module], folds: bool) -> None:
    torch.manual_seed(0)
    backbone, images = make().double(), 3 * torch.randn(40, 3, 8, 8, dtype=torch.float64)
    for _ in range(20):
        backbone(images)  # which moves the statistics away from zero and one
    network = IncrementalNetwork(backbone.eval())
    state = clone(backbone.state_dict())
    with torch.no_grad():
        before = network.features(images)
        fold_normalisation(network, images)
        torch.testing.assert_close(network.features(images), before)
    changed = [name for name, value in backbone.state_dict().items() if not torch.equal(value, state[name])]
    assert bool(changed) == folds


@pytest.mark.parametrize("folded", [True, False])
def test_folding_is_a_choice(folded: bool) -> None:
    stream = short_stream()
    scale, before = stream.start("ssre", folded=folded).network.backbone.norm1.weight, stream.network().backbone.norm1
    assert torch.equal(scale, torch.ones_like(scale) if folded else before.weight)


@pytest.mark.parametrize("folded", [True, False])
def test_merging_changes_no_feature(folded: bool) -> None:
    method, images = begun(folded=folded), short_stream().test_images[:40]
    with torch.no_grad():
        without, before = method.network.features(images), method.features(images)
        method.merge()
        assert float((before - without).abs().max()) > 0.01
        torch.testing.assert_close(method.features(images), before)
        torch.testing.assert_close(method.network.features(images), before)
    assert not method.adapters


def test_an_adapter_is_a_1x1_convolution_beside_the_3x3_one() -> None:
    """Of the same stride and without bias, beside both convolutions of every block, behind the folded BatchNorm."""
    method, images = begun(), short_stream().test_images[:6]
    backbone = method.network.backbone

    def convolve(x: Tensor, convolution: nn.Conv2d, norm: nn.BatchNorm2d, name: str) -> Tensor:
        adapter = method.adapters[f"{name}_weight"][:, :, None, None]
        return norm(convolution(x)) + functional.conv2d(x, adapter, stride=convolution.stride)

    with torch.no_grad():
        x = functional.relu(backbone.norm1(backbone.conv1(images)))
        for index, block in enumerate(backbone.blocks):
            hidden = functional.relu(convolve(x, block.conv1, block.norm1, f"blocks_{index}_conv1"))
            hidden = convolve(hidden, block.conv2, block.norm2, f"blocks_{index}_conv2")
            shortcut = x if block.shortcut_conv is None else block.shortcut_norm(block.shortcut_conv(x))
            x = functional.relu(hidden + shortcut)
        torch.testing.assert_close(method.features(images), x.mean(dim=(2, 3)), rtol=1e-4, atol=1e-5)
    assert len(method.adapters) == 2 * len(backbone.blocks) == len(adapted_kernels(backbone))


@pytest.mark.parametrize("selection", ["soft", "hard"])
def test_loss_by_hand(selection: str) -> None:
    stream = short_stream()
    settings = {"distillation_weight": 3.0, "replay_weight": 7.0, "temperature": 0.5, "threshold": 0.9}
    method = begun(selection=selection, **settings)
    batch = stream.batch(method, 1)
    terms = method.loss(batch)
    features, head = method.features(batch.images).detach(), method.network.head_weight()
    similar = torch.stack([torch.cosine_similarity(features, mean[None], dim=1) for mean in method.memory.means]).amax(
        dim=0
    )
    if selection == "hard":
        similar = (similar > 0.9).float()
        assert 0 < float(similar.sum()) < len(similar), "The threshold should divide this batch."
    errors = functional.cross_entropy(features @ head.T / 0.5, batch.labels, reduction="none")
    torch.testing.assert_close(terms["current"], ((1 - similar) * errors).sum() / batch.size)
    drift = (features - batch.frozen["features"]).square().sum(dim=1).sqrt()
    torch.testing.assert_close(terms["distillation"], 3.0 * (similar * drift).sum())
    labels = batch.draws["prototype_labels"]
    replay = functional.cross_entropy(method.memory.means[labels] @ head.T / 0.5, labels)
    torch.testing.assert_close(terms["replay"], 7.0 * replay)
    assert int(labels.max()) < 4


def test_detaching_changes_gradients_and_no_value() -> None:
    stream, results = short_stream(), []
    for detach in (True, False):
        method = begun(detach=detach)
        terms = method.loss(stream.batch(method, 1))
        sum(terms.values()).backward()
        results.append((float(terms["current"].detach()), method.adapters["blocks_0_conv1_weight"].grad))
    assert results[0][0] == results[1][0]
    assert not torch.allclose(results[0][1], results[1][1])


def test_kernels_without_a_centre_get_no_adapter() -> None:
    """Pyramid transformers have convolutions of 4x4 pixels that read every fourth place."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 4, stride=4), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1))
    assert [name for name, _ in adapted_kernels(network)] == ["2.weight"]


def test_only_centres_of_3x3_kernels_and_heads_change() -> None:
    stream = short_stream()
    method = stream.start("ssre")
    before = clone(method.network.state_dict())
    stream.learn(method, 1, SHORT)
    after = clone(method.network.state_dict())
    adapted = {f"backbone.{name}" for name, _ in adapted_kernels(method.network.backbone)}
    for name, value in before.items():
        if name in adapted:
            centre = torch.zeros(3, 3, dtype=torch.bool)
            centre[1, 1] = True
            assert torch.equal(after[name][..., ~centre], value[..., ~centre])
            assert not torch.equal(after[name][..., centre], value[..., centre])
        elif name.startswith("backbone."):
            assert_equal({name: after[name]}, {name: value})
    assert not torch.equal(after["heads.0"], before["heads.0"])


def test_the_stem_of_every_joined_network_stays() -> None:
    single = [adapted_kernels(locate(name, "none").build(0)) for name in ("slim", "resnet32")]
    joined = adapted_kernels(locate("slim+resnet32", "none").build(0))
    assert [name for name, _ in joined] == [
        f"parts.{index}.{name}" for index, kernels in enumerate(single) for name, _ in kernels
    ]
