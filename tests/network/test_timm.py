"""Networks of timm, with a stand-in that has what the real ones have; tests/outside tries the real ones."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from efcil.errors import SettingsError
from efcil.experiment import run_grid
from efcil.methods.ssre import RepresentationExpansion
from efcil.model import purposes
from efcil.model.in_memory import Model
from efcil.network import backbones, weights
from efcil.network.backbones import Backbone, locate
from efcil.network.incremental import IncrementalNetwork
from efcil.network.weights import UNSTATED, View, Weights, WeightsError
from efcil.report.table import _pretrained
from efcil.settings import Settings, TrainingSettings

SIDE, TAG = 8, "a1_in1k"


class Mobile(nn.Module):
    """As MobileNetV3: a layer between the features that are counted and those that it gives."""

    num_features, head_hidden_size = 4, 6

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.conv_head = nn.Conv2d(3, 4, 3), nn.Linear(4, 6)
        self.pretrained_cfg = {
            "input_size": (3, SIDE, SIDE), "mean": (0.5,) * 3, "std": (0.5,) * 3,
            "classifier": "classifier", "license": "apache-2.0", "tag": TAG,
        }  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.conv_head(self.conv_stem(images).mean(dim=(2, 3)))


class Transformer(nn.Module):
    """As a ViT: parameters that are called neither weight nor bias, a size of its own, and a classifier `head`."""

    num_features = 5

    def __init__(self, dynamic_img_size: bool = False) -> None:
        super().__init__()
        self.cls_token, self.proj = nn.Parameter(torch.randn(1, 1, 5)), nn.Conv2d(3, 5, 4, stride=4)
        self.dynamic = dynamic_img_size
        self.pretrained_cfg = {"input_size": (3, SIDE, SIDE), "classifier": ("head", "head_dist"), "tag": TAG}

    def forward(self, images: Tensor) -> Tensor:
        side = images.shape[-1]
        assert side == SIDE or (self.dynamic and side % 4 == 0), f"Input height ({side}) doesn't fit."
        return self.proj(images).mean(dim=(2, 3)) + self.cls_token[:, 0]


MADE = {"mobile_small": Mobile, "vit_tiny": Transformer}


def create_model(name: str, pretrained: bool, num_classes: int, **more: Any) -> nn.Module:
    architecture, _, tag = name.partition(".")
    if tag not in ("", TAG):
        raise RuntimeError(f"Invalid pretrained tag ({tag}) for {architecture}.")
    assert num_classes == 0
    module = MADE[architecture](**more)
    if pretrained and architecture == "mobile_large":
        raise OSError("We couldn't connect.\nCheck your connection.")
    if pretrained:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(0.25)
    return module


@pytest.fixture(autouse=True)
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """Put a stand-in where timm is imported from."""
    module: Any = types.ModuleType("timm")
    module.is_model = lambda name: name.partition(".")[0] in MADE
    module.list_models = lambda like="", pretrained=False: [f"{n}.{TAG}" if pretrained else n for n in MADE]
    module.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", module)
    monkeypatch.setitem(MADE, "mobile_large", Mobile)
    yield module
    backbones._measured.cache_clear()
    backbones._readable.cache_clear()


def test_features_behind_the_head_are_counted() -> None:
    chosen = locate("timm:mobile_small")
    with torch.no_grad():
        assert chosen.build(0).eval()(torch.zeros(2, 3, SIDE, SIDE)).shape == (2, 6)
    assert chosen.feature_size == 6


@pytest.mark.parametrize("name", ["timm:vit_tiny", f"timm:vit_tiny.{TAG}"])
def test_the_card_says_which_of_several_weights_it_got(name: str) -> None:
    weights = locate(name).weights
    assert weights is not None
    assert weights.source == f"timm vit_tiny.{TAG}"
    assert weights.trained_on == UNSTATED


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("timm:vit_tinny", r"no network called 'vit_tinny'\. Did you mean 'vit_tiny'\? See timm\.list_models"),
        ("timm:vit_tiny.a2", rf"Invalid pretrained tag \(a2\) for vit_tiny\)\. It knows .*vit_tiny\.{TAG}"),
        ("timm:mobile_large", r"\(OSError: We couldn't connect\)\. Check the network, or give a file"),
    ],
)
def test_what_timm_cannot_make(name: str, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        locate(name)


def written(module: nn.Module, folder: Path, **more: Tensor) -> Path:
    """Write a network's tensors under timm's names, with those of a classifier."""
    tensors = {name: value.clone().contiguous() for name, value in module.state_dict().items()}
    save_file(tensors | more, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_weights_may_be_in_a_file(tmp_path: Path) -> None:
    source = Transformer()
    chosen = locate("timm:vit_tiny", str(written(source, tmp_path, **{"head.weight": torch.ones(9, 5)})))
    assert chosen.weights is not None
    assert (chosen.weights.source, chosen.weights.view.size) == ("file model.safetensors", SIDE)
    assert torch.equal(chosen.build(0).state_dict()["module.cls_token"], source.cls_token)
    written(Mobile(), tmp_path)
    with pytest.raises(WeightsError, match=r"does not fit this network: it lacks cls_token, proj\.weight"):
        locate("timm:vit_tiny", str(tmp_path / "model.safetensors")).build(0)


def test_a_transformer_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classifier is called `head`, which is known from the network alone; nobody says what it was trained on."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "hf_hub_download", lambda repository, file, revision: str(tmp_path / file))
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny"}))
    source = Transformer()
    written(source, tmp_path, **{"head.weight": torch.ones(9, 5), "head_dist.bias": torch.ones(9)})
    chosen = locate("hub:timm/vit_tiny")
    assert chosen.weights is not None
    assert chosen.weights.trained_on == UNSTATED
    assert torch.equal(chosen.build(0).state_dict()["module.cls_token"], source.cls_token)
    written(source, tmp_path, **{"neck.weight": torch.ones(9, 5)})
    with pytest.raises(WeightsError, match=r"it also has neck\.weight"):
        locate("hub:timm/vit_tiny").build(0)


def test_networks_of_the_hub_are_not_advised_to_do_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Weights("Hub", UNSTATED, "0" * 64, UNSTATED, View())
    monkeypatch.setattr(weights, "of_hub", lambda name: ({"architecture": "vit_tiny"}, found))
    for name, advised in (("slim+hub:timm/vit_tiny", False), ("slim+timm:vit_tiny", True)):
        with pytest.raises(SettingsError, match="slim has no pre-trained weights") as refused:
            locate(name)
        assert ("--weights none" in str(refused.value)) == advised


def test_transformers_read_other_sizes_or_say_which() -> None:
    chosen = locate("timm:vit_tiny")
    for side in (SIDE, 2 * SIDE):
        chosen.refuse_images(side)
    wanted = r"gives no features for an image of 9 x 9 pixels .*give `efcil learn` --image-size 8, or `efcil run`"
    with pytest.raises(SettingsError, match=wanted):
        chosen.refuse_images(9)
    with pytest.raises(SettingsError, match=wanted):
        Model.create(TrainingSettings(method="lda", network="timm:vit_tiny", image_size=9), 30)
    for joined in ("timm:vit_tiny+timm:mobile_small", "slim+timm:vit_tiny"):
        with pytest.raises(SettingsError, match=wanted):
            Backbone("x", joined).refuse_images(9)
    locate("slim").refuse_images(9)


def test_joined_networks_say_for_which_sizes_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mobile, "input_size", 2 * SIDE, raising=False)
    wanted = r"made for 8, 16 pixels: give one size that all .* `efcil run` as --input-size\.$"
    with pytest.raises(SettingsError, match=wanted):
        Backbone("x", "timm:mobile_small+timm:vit_tiny").refuse_images(10)


def test_a_run_refuses_images_that_the_network_cannot_read(tmp_path: Path) -> None:
    settings = Settings("lda", network="timm:vit_tiny", input_size=9, tasks=2, device="cpu")
    with pytest.raises(SettingsError, match="no features for an image of 9 x 9 pixels"):
        run_grid([settings], tmp_path, quiet=True)


def test_every_parameter_of_a_network_from_elsewhere_has_a_purpose() -> None:
    backbone = locate("timm:vit_tiny").build(0)
    names = [f"network.backbone.{name}" for name in (*backbone.state_dict(), "module.memory")]
    known = purposes.including({}, backbone)
    assert purposes.unaccounted(names, known) == ["network.backbone.module.memory"]
    purpose = purposes.purpose_of("network.backbone.module.cls_token", known)
    assert purpose is not None
    assert purposes.recovery(purpose, as_pretrained=True).startswith("As published")


def test_a_report_does_not_name_images_that_nobody_stated() -> None:
    facts = {"source": "timm vit_tiny", "trained_on": UNSTATED}
    assert _pretrained([{"pretrained": facts}]) == ("pre-trained (timm vit_tiny)",)
    assert _pretrained([{"pretrained": facts | {"trained_on": "X"}}]) == ("pre-trained on X (timm vit_tiny)",)


def test_ssre_needs_convolutions() -> None:
    with pytest.raises(SettingsError, match="ssre trains adapters beside convolutions"):
        RepresentationExpansion(IncrementalNetwork(locate("timm:vit_tiny").build(0)))
