"""Networks of the real timm, with random weights in a cache of the Hugging Face Hub that is written by hand.

These tests need packages that the others do not: `make test-timm` installs and runs them.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from efcil.cli import main
from efcil.errors import SettingsError
from efcil.model.in_memory import Model
from efcil.network.backbones import locate
from efcil.network.weights import WeightsError

#: torchvision's operators are compiled for CUDA builds of torch; timm uses none of them, but they must have a name.
OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _imported() -> Any:
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pytest.skip("torchvision is not installed: run `make test-timm`", allow_module_level=True)
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        library.define(f"nms{OPERATOR}")
        library.define(f"qnms{OPERATOR}")
        globals()["_library"] = library  # they live as long as this
    return pytest.importorskip("timm", reason="timm is not installed: run `make test-timm`")


timm: types.ModuleType = _imported()
hub: Any = pytest.importorskip("huggingface_hub")

#: Name with its tag, side, features. test_... are timm's own small ones.
FAMILIES = {
    "test_resnet.r160_in1k": (160, 96),
    "test_vit.r160_in1k": (160, 64),
    "test_convnext.r160_in1k": (160, 64),
    "test_efficientnet.r160_in1k": (160, 256),
    "mobilenetv3_small_050.lamb_in1k": (224, 1024),
    "vit_tiny_patch16_224.augreg_in21k_ft_in1k": (224, 192),
    "eva02_tiny_patch14_224.mim_in22k": (224, 192),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return what writes a network with random weights where the Hub's would be, and its file."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)

    def write(name: str) -> Path:
        torch.manual_seed(1)
        place = tmp_path / "hub" / f"models--timm--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("0" * 40)
        timm.models.save_for_hf(timm.create_model(name), place / "snapshots" / ("0" * 40), safe_serialization=True)
        return place / "snapshots" / ("0" * 40) / "model.safetensors"

    return write


@pytest.mark.parametrize("name", list(FAMILIES))
def test_features_are_those_of_timm_however_the_weights_come(name: str, cache: Callable[[str], Path]) -> None:
    side, size = FAMILIES[name]
    file = cache(name)
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = timm.create_model(name, pretrained=True, num_classes=0).eval()(images)
    for chosen in (locate(f"timm:{name}"), locate(f"hub:timm/{name}"), locate(f"timm:{name}", str(file))):
        assert chosen.weights is not None
        assert (chosen.weights.view.size, chosen.feature_size) == (side, size)
        with torch.no_grad():
            torch.testing.assert_close(chosen.build(0).eval()(images), expected, rtol=1e-4, atol=1e-5)


def test_the_default_weights_are_named_with_their_licence(cache: Callable[[str], Path]) -> None:
    cache("test_vit.r160_in1k")
    weights = locate("timm:test_vit").weights
    assert weights is not None
    assert (weights.source, weights.licence) == ("timm test_vit.r160_in1k", "apache-2.0")
    assert (weights.view.mean, weights.view.std) == ((0.5,) * 3, (0.5,) * 3)


def test_a_transformer_reads_another_size(cache: Callable[[str], Path]) -> None:
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    cache(name)
    chosen = locate(f"timm:{name}")
    with torch.no_grad():
        assert chosen.build(0).eval()(torch.randn(1, 3, 112, 112)).shape == (1, 192)
    chosen.refuse_images(112)
    with pytest.raises(SettingsError, match=r"should be divisible by patch size .*--image-size 224"):
        chosen.refuse_images(120)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("timm:vit_tiny_patch16_22", r"Did you mean 'vit_tiny_patch16_224'"),
        ("timm:test_vit.in1k", r"Invalid pretrained tag .* It knows test_vit\.r160_in1k"),
        ("timm:resnet10t", r"Check the network, or give a file of its weights"),
    ],
)
def test_what_cannot_be_had(name: str, why: str, cache: Callable[[str], Path]) -> None:
    with pytest.raises(WeightsError, match=why):
        locate(name)


@pytest.mark.parametrize("name", ["timm:test_vit", "hub:timm/test_convnext.r160_in1k"])
def test_a_model_of_folders(
    name: str, cache: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache("test_vit.r160_in1k" if name == "timm:test_vit" else name.partition("/")[2])
    random = np.random.default_rng(0)
    for label, level in (("dark", 0), ("light", 128)):
        folder = tmp_path / "images" / label
        folder.mkdir(parents=True)
        for index in range(4):
            Image.fromarray(random.integers(level, level + 127, (40, 40, 3), np.uint8)).save(folder / f"{index}.png")
    model, images = str(tmp_path / "model"), str(tmp_path / "images")
    on = ["--device", "cpu"]
    assert main(["learn", model, "--data", images, "--network", name, *on]) == 0
    assert main(["evaluate", model, "--data", images, *on]) == 0
    assert main(["inspect", model]) == 0
    assert "unexplained" not in capsys.readouterr().out
    assert main(["audit", model, "--data", images]) == 0
    assert "Passed" in capsys.readouterr().out
    assert main(["export", model, "--to", "torch"]) == 0
    assert main(["forget", model, "dark"]) == 0
    pretrained = Model.load(model, "cpu").card.pretrained
    assert pretrained is not None
    assert pretrained.licence == "apache-2.0"


@pytest.mark.parametrize("method", ["efc++", "lwf", "ssre"])
@pytest.mark.parametrize("name", ["timm:test_vit", "timm:test_convnext"])
def test_a_run_trains_it(
    name: str, method: str, cache: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache(f"{name.removeprefix('timm:')}.r160_in1k")
    command = ["run", "--method", method, "--network", name, "--tasks", "2", "--epochs", "1", "--input-size", "32"]
    refused = method == "ssre" and name == "timm:test_vit"
    done = main([*command, "--device", "cpu", "--output", str(tmp_path / "runs")])
    assert bool(done) == refused
    if refused:
        assert "ssre trains adapters beside convolutions" in capsys.readouterr().err
