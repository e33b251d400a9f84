"""Recipe: how the network is optimised during a task."""

from __future__ import annotations

from dataclasses import dataclass, replace

from efcil.errors import SettingsError
from efcil.settings.options import option, settle

#: The two recipes of a run or a model, as overrides name them: `first_task.epochs`, `later.epochs`.
STAGES = ("first_task", "later")


@dataclass(frozen=True)
class Recipe:
    """How the network is optimised during a task."""

    optimiser: str = option("adam", "Optimiser; weight decay is coupled L2 in both.", choices=("adam", "sgd"))
    learning_rate: float = option(1e-3, "Learning rate at the start of the task.", minimum=0)
    backbone_learning_rate: float | None = option(
        None, "Learning rate of the backbone, if it differs from that of the heads; 0 freezes it.", minimum=0
    )
    momentum: float = option(0.0, "Momentum of SGD; Adam ignores it.", minimum=0, maximum=1)
    weight_decay: float = option(2e-4, "L2 penalty added to the gradient.", minimum=0)
    epochs: int = option(100, "Passes over the task's images; 0 trains nothing.", minimum=0)
    schedule: str = option("constant", "How the learning rate changes.", choices=("steps", "cosine", "constant"))
    milestones: tuple[int, ...] = option((), "Epochs after which schedule 'steps' lowers the learning rate.", minimum=1)
    decay: float = option(0.1, "Factor applied at every milestone.", minimum=0)
    batch_size: int = option(64, "Images in a training step, before rotations.", minimum=1)
    rotations: bool = option(
        False,
        "Add three rotated copies of every class as classes of their own; in later tasks for the methods around "
        "fine-tuning and EFC, as a term of the loss.",
    )
    rotation_weight: float = option(
        1.0, "Weight of a rotated image; 1: that of the image itself, or of the term.", minimum=0
    )
    mixing: int = option(
        0,
        "Mixtures of every image with others of its batch, in about equal shares, as classes of their own: one for "
        "every pair of classes, 190 at most; in later tasks for the methods around fine-tuning and EFC. 0: none.",
        minimum=0,
        maximum=8,
    )
    mixing_weight: float = option(1.0, "Weight of the term of mixtures.", minimum=0)
    contrast: float = option(
        0.0,
        "Weight of a supervised contrastive term: images of a batch with the same label, rotation or mixture are drawn "
        "together, and others apart, behind two layers that exist while a task trains; in later tasks for the methods "
        "around fine-tuning and EFC. 0: none.",
        minimum=0,
    )
    contrast_temperature: float = option(
        0.1, "Temperature of the contrastive term: the smaller, the more the nearest images count.", minimum=1e-3
    )
    head: str = option(
        "linear",
        "Heads, for all tasks: linear, or cosine (cosines of features and weights, times a scale). Set it for the "
        "first task.",
        choices=("linear", "cosine"),
    )
    head_scale: float | None = option(
        None, "Scale of cosine heads, fixed; none: it is learned, and begins with 1.", minimum=1e-6
    )
    gradient_clip: float | None = option(
        None, "Norm that the gradient of all parameters together is clipped to; none: no clipping.", minimum=1e-9
    )
    label_smoothing: float = option(
        0.0,
        "Share of a label's probability that is spread evenly over all classes of the softmax; 0: labels as they are.",
        minimum=0,
        maximum=1,
    )
    ema: float | None = option(
        None,
        "Decay per step of an exponential moving average of the weights, which takes their place when the task ends, "
        "before statistics and tests: 0.99 averages about the last 100 steps; none: no average.",
        minimum=0,
        maximum=0.999999,
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

    @property
    def views(self) -> int:
        """How many images a step computes for each one of its batch: with its turns and mixtures."""
        return (4 if self.rotations else 1) + self.mixing

    def with_epochs(self, epochs: int) -> Recipe:
        """Return the recipe for another number of epochs, its milestones moved in proportion.

        Milestones stay distinct and inside the training as long as there are more epochs than milestones;
        with fewer epochs the last ones, which could have no effect, are dropped.
        """
        if epochs == self.epochs or not self.epochs:
            return replace(self, epochs=epochs)
        scaled: list[int] = []
        for milestone in self.milestones:
            earliest = scaled[-1] + 1 if scaled else 1
            scaled.append(max(earliest, round(milestone * epochs / self.epochs)))
        for place in range(1, len(scaled) + 1):
            latest = max(epochs - place, len(scaled) - place + 1)
            scaled[-place] = min(scaled[-place], latest)
        return replace(self, epochs=epochs, milestones=tuple(m for m in scaled if m < epochs))
