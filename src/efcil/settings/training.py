"""TrainingSettings: what training depends on, wherever the images come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from efcil.settings.options import option, settle
from efcil.settings.recipe import STAGES


@dataclass(frozen=True)
class TrainingSettings:
    """What a model is trained with; values left open come from the preset."""

    method: str = option("efc", "Method to train; see `efcil methods`.", nargs="+", group="what to run")
    preset: str = option("folder", "Dataset whose recipes are used.", group="training")
    seed: int = option(
        0,
        "Seed of everything random in training; for `efcil run`, 0-4 is five.",
        nargs="+",
        group="what to run",
        minimum=0,
    )
    image_size: int | None = option(
        None,
        "Side of the images in pixels, if the dataset allows a choice (folder: that of its images, at most 224).",
        group="data",
        minimum=1,
    )
    network: str | None = option(
        None,
        "Backbone, by default the preset's: resnet18-small (for 32 and 64 pixels), resnet32 (the one of He et al. for "
        "CIFAR), resnet18, resnet34, resnet50 (for 224), slim (for small images on a CPU); pre-trained ones: "
        "efficientnet-lite0, efficientnet-lite1, efficientnet-lite2 (extra `pretrained`), hub:OWNER/NAME, timm:NAME, "
        "or MODULE:FUNCTION for any module that gives features; NAME+NAME puts the features of several side by side.",
        group="training",
    )
    weights: str | None = option(
        None,
        "File of pre-trained weights of the network (.safetensors or .pth, in the names of torchvision or timm), or "
        "none, to train from scratch a network that has weights of its own.",
        group="training",
    )
    input_size: int | None = option(
        None,
        "Side in pixels to which the device enlarges images for the network. Pre-trained networks enlarge images of a "
        "benchmark to the size they know.",
        group="training",
        minimum=1,
    )
    augmentation: str | None = option(
        None,
        "Training augmentation, by default the preset's: none, shift, crop-flip, crop-flip-8 (padded by 4 and 8 "
        "pixels), padded-resized-crop (EFC's for CIFAR-100), resized-crop, crop-flip-trivial, crop-flip-8-trivial, "
        "padded-resized-crop-trivial, resized-crop-trivial (the same, then TrivialAugment in training and not in the "
        "views that statistics are computed from), crop-flip-auto, padded-resized-crop-auto (likewise AutoAugment, "
        "CIFAR-10 policy), crop-flip-8-auto, resized-crop-auto (its ImageNet policy), crop-flip-jitter-auto (CIFAR-10 "
        "policy after a change of brightness).",
        group="training",
    )
    epochs: int | None = option(
        None,
        "Epochs of every task, also of the first one unless first_task_epochs is given. Milestones move in proportion.",
        group="training",
        minimum=1,
    )
    first_task_epochs: int | None = option(None, "Epochs of the first task only.", group="training", minimum=1)
    batch_size: int | None = option(None, "Images in a training step, for every task.", group="training", minimum=1)
    classifier: str = option(
        "own",
        "Classifier at test time: own (the method's way), heads, or one built from the class statistics that the "
        "method keeps: rebalanced, nearest-mean, mahalanobis, bayes, lda, ridge, svm, both (rebalanced and "
        "mahalanobis); auto is rebalanced for methods that classify with their heads, if possible, else own. With all, "
        "the method's way counts and the others are measured too. Training does not depend on it.",
        group="evaluation",
    )
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, or a certain GPU: cuda:1.", group="hardware")
    precision: str = option(
        "auto",
        "auto is bf16 on a GPU that computes in it (NVIDIA, Ampere or later), else fp32. A CPU trains large networks "
        "faster in bf16 if it has units for it (AMX, AVX512-BF16). tf32 is fp32 with "
        "convolutions as PyTorch computes them on a GPU by default: from numbers rounded to ten binary places; on "
        "a CPU it is fp32.",
        choices=("auto", "fp32", "tf32", "bf16"),
        group="hardware",
    )
    path: str = option(
        "auto",
        "Implementation of the training step; auto takes the fused one if it applies.",
        choices=("auto", "plain", "fused"),
        group="hardware",
    )
    deterministic: bool = option(False, "Only operations that repeat bit for bit; slower on a GPU.", group="hardware")
    overrides: Mapping[str, Any] = option(
        {},
        "Settings of the method (efm_weight=5) or of the recipes (first_task.learning_rate=0.01, later.epochs=20).",
        flag="--set",
        nargs="+",
        group="training",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "overrides", flat_overrides(self.overrides))
        settle(self)


def flat_overrides(overrides: Any) -> Any:
    """Return overrides with the values of a stage under dotted names: {later: {epochs: 5}} is {later.epochs: 5}."""
    if not isinstance(overrides, Mapping):
        return overrides  # for `settle` to refuse
    flat: dict[Any, Any] = {}
    for name, value in overrides.items():
        if name in STAGES and isinstance(value, Mapping):
            flat.update({f"{name}.{field}": each for field, each in value.items()})
        else:
            flat[name] = value
    return flat
