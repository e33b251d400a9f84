"""The two things a run is described by: how a task is optimised (Recipe), and everything the user may choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from efcil.errors import SettingsError
from efcil.settings.options import option, settle

CUSTOM = "custom"
NAMED_CLASS_ORDERS = ("efc", "icarl", "efc-imagenet", "natural")
STAGES = ("first_task", "later")


@dataclass(frozen=True)
class Recipe:
    """How the network is optimised during a task."""

    optimiser: str = option("adam", "Optimiser; weight decay is coupled L2 in both.", choices=("adam", "sgd"))
    learning_rate: float = option(1e-3, "Learning rate at the start of the task.", minimum=0)
    backbone_learning_rate: float | None = option(
        None, "Learning rate of the backbone where it differs from that of the heads.", minimum=0
    )
    momentum: float = option(0.0, "Momentum of SGD; Adam ignores it.", minimum=0, maximum=1)
    weight_decay: float = option(2e-4, "L2 penalty added to the gradient.", minimum=0)
    epochs: int = option(100, "Passes over the task's images.", minimum=1)
    schedule: str = option("constant", "How the learning rate changes.", choices=("steps", "cosine", "constant"))
    milestones: tuple[int, ...] = option((), "Epochs after which schedule 'steps' lowers the learning rate.", minimum=1)
    decay: float = option(0.1, "Factor applied at every milestone.", minimum=0)
    batch_size: int = option(64, "Images in a training step, before rotations.", minimum=1)
    rotations: bool = option(False, "Add three rotated copies of every class as classes of their own.")
    gradient_clip: float | None = option(
        None, "Length that the gradient of all parameters together is clipped to; none: no clipping.", minimum=1e-9
    )
    normalisation: str = option(
        "trained",
        "Whether BatchNorm is trained, or frozen with its statistics, scales and shifts.",
        choices=("trained", "frozen"),
    )

    def __post_init__(self) -> None:
        settle(self)
        if any(later <= earlier for earlier, later in zip(self.milestones, self.milestones[1:], strict=False)):
            raise SettingsError(f"Setting 'milestones' must grow, but it is {list(self.milestones)}.")

    def with_epochs(self, epochs: int) -> Recipe:
        """Return the recipe for another number of epochs, its milestones moved in proportion.

        Milestones stay distinct and inside the training as long as there are more epochs than milestones;
        with fewer epochs the last ones, which could no longer change anything, are dropped.
        """
        if epochs == self.epochs:
            return self
        scaled: list[int] = []
        for milestone in self.milestones:
            earliest = scaled[-1] + 1 if scaled else 1
            scaled.append(max(earliest, round(milestone * epochs / self.epochs)))
        for place in range(1, len(scaled) + 1):
            latest = max(epochs - place, len(scaled) - place + 1)
            scaled[-place] = min(scaled[-place], latest)
        return replace(self, epochs=epochs, milestones=tuple(m for m in scaled if m < epochs))


@dataclass(frozen=True)
class Settings:
    """Everything that describes one run; what is left open comes from the dataset's preset."""

    method: str = option("efc", "Method to train; see `efcil methods`.", nargs="+", group="what to run")
    dataset: str = option("digits", "Dataset; see `efcil data`.", nargs="+", group="what to run")
    scenario: str = option(
        "cs5",
        "How classes become tasks: ws5, ws10, ws20 (a large first task, then N steps), cs5, cs10, cs20 (N equal "
        "tasks), or custom, which giving the number of tasks implies.",
        nargs="+",
        group="what to run",
    )
    seed: int = option(0, "Seed of everything random in training.", nargs="+", group="what to run", minimum=0)
    data: str | None = option(
        None, "File or folder that holds the dataset; bundled and downloaded ones need none.", group="what to run"
    )
    tasks: int | None = option(
        None, "Number of tasks, for a scenario of your own instead of a named one.", group="scenario", minimum=1
    )
    first_task_classes: int | None = option(
        None,
        "Classes in the first task of a scenario of your own; later tasks share the rest.",
        group="scenario",
        minimum=1,
    )
    class_order: str = option(
        "efc",
        "Order of the classes: efc (the shuffle of the paper's authors), icarl (seed 1993), efc-imagenet "
        "(theirs of ImageNet-1K, one for all seeds), natural, or a file.",
        nargs="+",
        group="scenario",
    )
    class_seed: int | None = option(
        None, "Seed of the class order; where not given it follows the seed.", nargs="+", group="scenario", minimum=0
    )
    held_out: float | None = option(
        None,
        "Share of each class's training images that is tested on instead of being trained on: in place of the "
        "dataset's test images, to choose settings without them, or because it has none (folder).",
        group="data",
        minimum=0,
        maximum=1,
    )
    image_size: int | None = option(
        None,
        "Side of the images in pixels, where the dataset lets it be chosen (folder: that of its images, at most 224).",
        group="data",
        minimum=1,
    )
    network: str | None = option(
        None,
        "Backbone; where not given, the preset's: resnet18-small (for 32 and 64 pixels), resnet18 (for 224), slim (for "
        "small images on a CPU).",
        group="training",
    )
    augmentation: str | None = option(
        None,
        "Training augmentation; where not given, the preset's: none, shift, crop-flip, crop-flip-8 (padded by 4 and 8 "
        "pixels), padded-resized-crop (EFC's for CIFAR-100), resized-crop.",
        group="training",
    )
    epochs: int | None = option(
        None,
        "Epochs of every task, the first one too unless first_task_epochs is given. Milestones move in proportion.",
        group="training",
        minimum=1,
    )
    first_task_epochs: int | None = option(None, "Epochs of the first task alone.", group="training", minimum=1)
    batch_size: int | None = option(None, "Images in a training step, for every task.", group="training", minimum=1)
    classifier: str = option(
        "own",
        "What tells classes apart at test time: own (the method's way), heads, or one built from the class statistics "
        "that the method keeps: rebalanced, nearest-mean, mahalanobis, bayes, lda, ridge, svm; auto is rebalanced for "
        "methods that decide by heads, where it is possible, else own. With all, the method's way counts and the "
        "others are measured beside it. Training does not depend on it.",
        group="evaluation",
    )
    device: str = option("auto", "auto (a GPU if there is one), cpu, cuda, or a certain GPU: cuda:1.", group="hardware")
    precision: str = option(
        "auto",
        "auto is bf16 on a GPU and fp32 on a CPU. tf32 is fp32 with the convolutions of a GPU as PyTorch computes them "
        "unless told otherwise: from numbers rounded to ten binary places; on a CPU it is fp32.",
        choices=("auto", "fp32", "tf32", "bf16"),
        group="hardware",
    )
    path: str = option(
        "auto",
        "Implementation of the training step; auto takes the fused one where it applies.",
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
        if self.held_out is not None and not 0 < self.held_out < 1:
            raise SettingsError(
                f"Setting 'held_out' must lie between 0 and 1 (0.2 keeps a fifth), but it is {self.held_out:g}."
            )
        self._check_scenario()

    def _check_scenario(self) -> None:
        if self.scenario == CUSTOM and self.tasks is None:
            raise SettingsError("A custom scenario needs the number of its tasks: give tasks (--tasks N).")
        if self.tasks is None and self.first_task_classes is not None:
            raise SettingsError(
                "Setting 'first_task_classes' describes a scenario of your own and needs the number of tasks too: "
                "give tasks as well (--tasks N), or leave it out and use a named scenario."
            )
        if self.tasks is not None and self.scenario != CUSTOM:
            raise SettingsError(
                f"Scenario {self.scenario!r} has its own tasks, so their number cannot be set. "
                f"Leave out the scenario or the tasks, or set the scenario to {CUSTOM}."
            )

    @property
    def effective_class_seed(self) -> int:
        """The seed of the class order: `class_seed`, or the seed where that is none."""
        return self.seed if self.class_seed is None else self.class_seed


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
