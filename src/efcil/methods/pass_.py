"""PASS: prototype augmentation and self-supervision, with the temperature of the EFC paper."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil import seeds
from efcil.core import gaussians
from efcil.core.heads import new_rows
from efcil.core.losses import cross_entropy
from efcil.core.rotation import QUARTER_TURNS, rotate_batch, rotation_labels
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Method, ParameterGroup, Plan, Task, Terms, Traits
from efcil.methods.memory import ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe, option


class PrototypeAugmentation(Method):
    """Rehearses old class means with noise, distils features, and learns rotated classes in every task.

    Every class has one row in its task's head and three more, kept here, for its quarter turns; those take part in the
    softmax and never in predictions. The shared first task discards its rotation rows, so those of the first classes
    start from scratch with the second task.
    """

    name = "pass"
    summary = "noisy class means rehearsed, features distilled, images rotated in every task"
    family = "scheduled"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of PASS, with the values of the EFC paper, and what the sources leave open."""

        replay_weight: float = option(10.0, "Weight of the prototypes' cross-entropy (PASS, EFC paper).", minimum=0)
        distillation_weight: float = option(
            10.0, "Weight of the norm of the feature drift of a batch (PASS, EFC paper).", minimum=0
        )
        temperature: float = option(
            1.0, "Temperature of both softmaxes (EFC paper; PASS's own code has 0.1 for small images).", minimum=1e-3
        )
        rotation_rows: str = option(
            "all",
            "Whose quarter turns have rows in the softmax: those of all seen classes, kept from task to task (PASS's "
            "code), or only those of the current task's, which are discarded after it.",
            choices=("all", "current"),
        )
        replay_rows: str = option(
            "all",
            "Which rows prototypes compete with: all of them (PASS's code), or only the heads', rotation rows left out "
            "(how the EFC authors' code rehearses).",
            choices=("all", "heads"),
        )
        radius: str = option(
            "first",
            "Size of the noise: first, the root of the first classes' mean variance (PASS's code for small images); "
            "deviation, their mean standard deviation (its code for ImageNet); or seen, the root of the mean variance "
            "of all classes seen so far (PyCIL).",
            choices=("first", "deviation", "seen"),
        )
        train_normalisation: bool = option(
            True, "Keep training BatchNorm after the first task (PASS's code; the EFC authors probably did not)."
        )
        train_scales: bool = option(
            True,
            "Train BatchNorm's scales and shifts too; off: only its statistics follow the images (possibly the EFC "
            "authors' way). Without effect if train_normalisation is off.",
            needs=("train_normalisation", True),
        )

    settings: Settings
    radius: Tensor
    rotations: nn.ParameterList

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.keep(
            "radius",
            torch.zeros(()),
            why="how far features scatter around class means",
            title="prototype radius",
            recovery="One number for all classes together.",
        )
        self.keep(
            "rotations",
            nn.ParameterList(),
            why="scores of rotated classes, used in training",
            title="rotation heads",
            recovery="Sums of gradients over all images and epochs. No image is stored in them; like the weights of "
            "every network they show which features a rotated class has.",
            per_class=QUARTER_TURNS,
        )

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """The mean of every class."""
        return ClassMemory(size, why="stand for a class's features when it is rehearsed")

    @classmethod
    def traits(cls, settings: Settings) -> Traits:
        """Heads learn under a temperature."""
        return replace(super().traits(settings), temperature=settings.temperature)

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep the network as the teacher, grow a head, and add rotation rows for the classes that lack them."""
        self.keep_teacher()
        super().begin_task(task)
        if not self.settings.train_scales:
            for parameter in self.network.norm_parameters():
                parameter.requires_grad_(False)
        covered = task.first_class
        if self.settings.rotation_rows == "all":
            covered = sum(len(rows) for rows in self.rotations) // QUARTER_TURNS
        self._first_rotated = task.first_class if self.settings.rotation_rows == "current" else 0
        generator = seeds.generator("cpu", task.seed, "rotations", task.index)
        rows = new_rows(QUARTER_TURNS * (task.seen - covered), self.network.feature_size, generator)
        self.rotations.append(nn.Parameter(rows.to(self.radius.device)))

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Everything the network trains, and the rotation rows with the heads' learning rate."""
        rotations = {"params": list(self.rotations), "learning_rate": recipe.learning_rate}
        return [*super().parameter_groups(recipe), rotations]

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Features of the old network for every image and its quarter turns: (images, 4, n)."""
        count = len(images)
        features = self.old_network.features(rotate_batch(images))
        turned = features[count:].view(count, QUARTER_TURNS, -1)
        return {"features": torch.cat([features[:count, None], turned], dim=1)}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw old classes uniformly, with replacement, and their means with isotropic noise."""
        means, shape, device = self.memory.means, (plan.steps, plan.batch_size), generator.device
        labels = torch.randint(len(means), shape, generator=generator, device=device)
        noise = torch.randn(*shape, means.shape[1], generator=generator, device=device)
        return {"prototypes": means[labels] + self.radius * noise, "prototype_labels": labels}

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy of rotated classes, of noisy prototypes, and the norm of the whole batch's feature drift."""
        settings, size = self.settings, batch.size
        features = self.network.features(rotate_batch(batch.images))
        seen = sum(self.network.head_sizes)
        weight = torch.cat([self.network.head_weight(), *self.rotations])
        rows = torch.cat([features, batch.draws["prototypes"]])
        logits = functional.linear(rows, weight) / settings.temperature
        rehearsed = logits[len(features) :, : seen if settings.replay_rows == "heads" else None]
        turned = rotation_labels(batch.labels - self._first_rotated, seen)[size:]
        before = batch.frozen["features"]
        before = torch.cat([before[:, 0], before[:, 1:].flatten(0, 1)])
        replay = cross_entropy(rehearsed, batch.draws["prototype_labels"])
        return {
            "current": cross_entropy(logits[: len(features)], torch.cat([batch.labels, turned])),
            "replay": settings.replay_weight * replay,
            "distillation": settings.distillation_weight * torch.linalg.vector_norm(features - before),
        }

    # -- statistics and state ----------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Store the new classes' means, and measure how far features scatter around them."""
        features, labels = gaussians.collect(self.network.features, data.augmented("prototypes"))
        _, covariances = self.memory.add(features, labels, range(task.first_class, task.seen))
        if task.index == 0 or self.settings.radius == "seen":
            self.radius = self._measured_radius(task, covariances).to(self.radius.dtype)
        if self.settings.rotation_rows == "current":
            self.rotations = nn.ParameterList()
        self.teacher = None

    def _measured_radius(self, task: Task, covariances: Tensor) -> Tensor:
        """Size of the noise once the covariances of the task's classes are known."""
        if self.settings.radius == "deviation":
            return covariances.diagonal(dim1=1, dim2=2).sqrt().mean()
        radius = gaussians.perturbation_radius(covariances)
        if task.index == 0:
            return radius
        return torch.lerp(self.radius.square(), radius.square(), task.classes / task.seen).sqrt()

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Resize the rotation rows to the saved ones, then load as every method does."""
        numbers = sorted(int(name.split(".")[1]) for name in tensors if name.startswith("rotations."))
        saved = [tensors[f"rotations.{number}"] for number in numbers]
        if [rows.shape for rows in self.rotations] != [rows.shape for rows in saved]:
            self.rotations = nn.ParameterList(nn.Parameter(torch.zeros_like(rows)) for rows in saved)
            self.rotations.to(self.radius.device)
        super().load_tensors(tensors)
