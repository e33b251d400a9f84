"""SSRE: self-sustaining representation expansion, with the temperature and weights of the EFC paper."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from efcil.core import gaussians
from efcil.core.losses import cross_entropy, weighted_mean
from efcil.data.store import TaskImages
from efcil.errors import SettingsError
from efcil.methods.base import Batch, Method, ParameterGroup, Plan, Task, Terms, Traits
from efcil.methods.memory import ClassMemory
from efcil.network import fast
from efcil.network.backbones import Joined
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe, option

#: Images that tell whether folding BatchNorm leaves features as they are.
_TRIED = 16


class RepresentationExpansion(Method):
    """Trains 1x1 adapters in parallel to the 3x3 convolutions of a backbone that is otherwise frozen, and merges them.

    A 1x1 convolution parallel to a 3x3 one is the same as an addition to the centre of its kernel. So an adapter is a
    matrix kept here while a task trains, the step computes with kernel + adapter, and merging adds it for good.
    """

    name = "ssre"
    summary = "1x1 adapters trained beside frozen convolutions and merged; old class means rehearsed"
    family = "ssre"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of SSRE. The sources disagree; the defaults are those of the EFC paper if it has any."""

        distillation_weight: float = option(
            10.0,
            "Weight kappa of the feature distillation, a sum over the batch (EFC and SSRE papers; SSRE's code has 1).",
            minimum=0,
        )
        replay_weight: float = option(10.0, "Weight of the old means' cross-entropy (EFC paper, SSRE).", minimum=0)
        temperature: float = option(
            1.0, "Temperature of both softmaxes (EFC paper; SSRE's code has 0.1).", minimum=1e-3
        )
        selection: str = option(
            "soft",
            "How an image's similarity s to the nearest old class mean divides it between learning and distillation: "
            "soft, 1 - s and s (SSRE's code), or hard, all to one or the other by threshold (SSRE's paper).",
            choices=("soft", "hard"),
        )
        threshold: float = option(
            0.8, "Similarity above which hard selection distils (SSRE's paper).", maximum=1, needs=("selection", "hard")
        )
        detach: bool = option(True, "Stop the gradient through the similarities (PyCIL); SSRE's own code does not.")
        folded: bool = option(
            True,
            "Fold BatchNorm into the convolutions after the first task, so that adapters act behind it (SSRE's code); "
            "off: adapters act before a BatchNorm that stays frozen (PyCIL). Only the adapters' scale differs.",
        )

    settings: Settings

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        if not adapted_kernels(network.backbone):
            raise SettingsError(
                "ssre trains adapters beside convolutions of 3x3 pixels or more, and this network has none behind its "
                "first layer, as transformers have not. Choose another method, or a convolutional network."
            )
        self.adapters = nn.ParameterDict()

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """The mean of every class."""
        return ClassMemory(size, why="stand for a class's features when it is rehearsed, and are compared with images")

    @classmethod
    def traits(cls, settings: Settings) -> Traits:
        """Heads decide, and learn under a temperature."""
        return replace(super().traits(settings), decides_by_heads=True, temperature=settings.temperature)

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep the network as the teacher, grow a head, freeze the backbone, put a zero adapter beside each kernel."""
        # The loss, which replaces kernels, runs layer by layer. So must the teacher: their distance starts at exactly
        # zero, where the norm has no gradient; with rounding errors instead, the gradient would have full length.
        fast.remove(self.network)
        self.keep_teacher()
        super().begin_task(task)
        self.network.backbone.requires_grad_(False)
        self.adapters = nn.ParameterDict(
            {
                _key(name): nn.Parameter(weight.new_zeros(weight.shape[:2]))
                for name, weight in adapted_kernels(self.network.backbone)
            }
        )

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """The adapters, with the backbone's learning rate, and all heads."""
        rate = recipe.learning_rate if recipe.backbone_learning_rate is None else recipe.backbone_learning_rate
        adapters = [{"params": list(self.adapters.values()), "learning_rate": rate}] if self.adapters else []
        return [*adapters, *super().parameter_groups(recipe)]

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Features of the old network."""
        return {"features": self.old_network.features(images)}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw old classes uniformly, with replacement."""
        shape = (plan.steps, plan.batch_size)
        old = len(self.memory.means)
        return {"prototype_labels": torch.randint(old, shape, generator=generator, device=generator.device)}

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy and distillation, weighted image by image, and the cross-entropy of old class means."""
        settings, means = self.settings, self.memory.means
        features, weight = self.features(batch.images), self.network.head_weight() / settings.temperature
        similar = (functional.normalize(features, dim=1) @ functional.normalize(means, dim=1).T).amax(dim=1)
        if settings.detach or settings.selection == "hard":
            similar = similar.detach()
        if settings.selection == "hard":
            similar = (similar > settings.threshold).to(features.dtype)
        errors = functional.cross_entropy(features @ weight.T, batch.labels, reduction="none")
        moved = torch.linalg.vector_norm(features - batch.frozen["features"], dim=1)
        labels = batch.draws["prototype_labels"]
        return {
            "current": weighted_mean((1.0 - similar) * errors),
            "replay": settings.replay_weight * cross_entropy(means[labels] @ weight.T, labels),
            "distillation": settings.distillation_weight * (similar * moved).sum(),
        }

    def features(self, images: Tensor) -> Tensor:
        """Features of the backbone with its adapters beside it."""
        if not self.adapters:
            return self.network.features(images)
        kernels = {
            f"backbone.{name}": weight + _centred(self.adapters[_key(name)], weight.shape[-1])
            for name, weight in adapted_kernels(self.network.backbone)
        }
        return functional_call(_Features(self.network), {f"network.{k}": v for k, v in kernels.items()}, (images,))

    # -- the end of a task -------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Merge the adapters (after the first task: fold BatchNorm), then store the new classes' means."""
        fast.remove(self.network)  # the means are compared with features computed layer by layer
        if task.index == 0 and self.settings.folded:
            fold_normalisation(self.network, data.render(data.view("fold"), 0, min(_TRIED, len(data)))[0])
        self.merge()
        features, labels = gaussians.collect(self.network.features, data.augmented("prototypes"))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.teacher = None

    @torch.no_grad()
    def merge(self) -> None:
        """Add the adapters to the centres of their kernels and remove them; features do not change."""
        if self.adapters:
            for name, weight in adapted_kernels(self.network.backbone):
                centre = weight.shape[-1] // 2
                weight[:, :, centre, centre] += self.adapters[_key(name)]
        self.adapters = nn.ParameterDict()

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Logits of all heads."""
        return self.network.logits(self.features(images)) / self.head_temperature


class _Features(nn.Module):
    """The network's features as a module's forward pass, so that `functional_call` can replace weights in it."""

    def __init__(self, network: IncrementalNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.features(images)


def adapted_kernels(backbone: nn.Module) -> list[tuple[str, Tensor]]:
    """Name and kernel of every convolution that has a centre (3x3 pixels, 5x5, ...), except the first one, the stem.

    In a ResNet these are the convolutions inside the residual blocks, without the shortcuts. Each of several networks
    that are joined has a stem.
    """
    if isinstance(backbone, Joined):
        parts = [(f"parts.{index}", adapted_kernels(part)) for index, part in enumerate(backbone.parts)]
        return [(f"{prefix}.{name}", weight) for prefix, kernels in parts for name, weight in kernels]
    wide = [
        (f"{name}.weight", module.weight)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size[0] == module.kernel_size[1] >= 3
    ]
    return [(name, weight) for name, weight in wide[1:] if weight.shape[-1] % 2]


def _centred(adapter: Tensor, side: int) -> Tensor:
    """The adapter, a 1x1 kernel, as the centre of a kernel that is `side` pixels wide."""
    return functional.pad(adapter[:, :, None, None], [side // 2] * 4)


@torch.no_grad()
def fold_normalisation(network: IncrementalNetwork, images: Tensor) -> None:
    """Fold every BatchNorm (in eval mode) into the convolution before it; the BatchNorm then only adds the bias.

    W' = W g / sqrt(v + e), b' = b - m g / sqrt(v + e). The layers stay, so that a state fits any network of this kind.
    A network whose convolutions are not all followed by one stays as it is. So does one in which this would change the
    features of `images`: a shortcut may begin between a convolution and its BatchNorm.
    """
    layers = [module for module in network.backbone.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)]
    pairs = list(zip(layers[::2], layers[1::2], strict=False))
    if not all(isinstance(first, nn.Conv2d) and _scales(second) for first, second in pairs):
        return
    images = images.to(next(network.backbone.parameters()).dtype)  # those of a GPU have half precision
    with fast.plainly(network):
        before, state = network.features(images), copy.deepcopy(network.backbone.state_dict())
        for convolution, norm in pairs:
            _fold(convolution, norm)
        moved = torch.linalg.vector_norm(network.features(images) - before)
        if moved > 0.01 * torch.linalg.vector_norm(before):
            network.backbone.load_state_dict(state)


def _scales(norm: nn.Module) -> bool:
    return isinstance(norm, nn.BatchNorm2d) and norm.affine and norm.track_running_stats


def _fold(convolution: nn.Module, norm: nn.Module) -> None:
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    convolution.weight.mul_(scale[:, None, None, None])
    if convolution.bias is not None:
        convolution.bias.mul_(scale)
    norm.bias.sub_(norm.running_mean * scale)
    norm.weight.fill_(1.0)
    norm.running_mean.zero_()
    norm.running_var.fill_(1.0 - norm.eps)


def _key(name: str) -> str:
    """A parameter's name without dots, which the keys of a ParameterDict must not have."""
    return name.replace(".", "_")
