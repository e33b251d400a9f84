"""IL2A: class augmentation by mixing images, and semantic augmentation of class Gaussians in closed form."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil import seeds
from efcil.core import gaussians
from efcil.core.heads import new_rows
from efcil.core.losses import cross_entropy
from efcil.core.mixing import pair_numbers
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Method, ParameterGroup, Plan, Task, Terms, Traits
from efcil.methods.memory import ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe, option


class DualAugmentation(Method):
    """Rehearses old classes as Gaussians without sampling them, and learns mixtures of two classes as classes.

    The rows of mixed classes take part in the softmax of current images while their task lasts, and are then dropped.
    """

    name = "il2a"
    summary = "class Gaussians rehearsed in closed form, features distilled, mixed images as extra classes"
    family = "scheduled"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of IL2A, with the values of its authors' code unless said otherwise."""

        replay_weight: float = option(10.0, "Weight of the Gaussians' cross-entropy (IL2A).", minimum=0)
        distillation_weight: float = option(
            10.0, "Weight of the norm of the feature drift of a batch (IL2A).", minimum=0
        )
        covariance_scale: float = option(2.5, "Factor on the class covariances in the closed form (IL2A).", minimum=0)
        temperature: float = option(
            0.1,
            "Temperature of both softmaxes (IL2A); the lower it is, the less covariance_scale matters.",
            minimum=1e-3,
        )
        mixing_rounds: int = option(4, "How often a batch is mixed with itself; 0: no mixed classes (IL2A).", minimum=0)
        mixing_concentration: int = option(
            20,
            "Shares of the two images come from Beta(a, a) with this a (IL2A).",
            minimum=1,
            unless=("mixing_rounds", 0),
        )
        mixing_range: float = option(
            0.1,
            "Shares further than this from one half become one half (IL2A: 0.1; 0.2 for Tiny-ImageNet).",
            minimum=0,
            unless=("mixing_rounds", 0),
        )
        prototype_update: str = option(
            "none",
            "How old classes follow the drift: none (IL2A), linear (means and covariances, by one ridge map from old "
            "to new features), or linear-residual (the same, and what the map leaves unexplained is added to the "
            "covariances).",
            choices=("none", "linear", "linear-residual"),
        )
        drift_ridge: float = option(
            0.01,
            "Ridge of a linear prototype_update towards the identity, in mean variances of a feature.",
            minimum=0,
            needs=("prototype_update", ("linear", "linear-residual")),
        )
        train_normalisation: bool = option(True, "Keep training BatchNorm after the first task (IL2A's code).")

    settings: Settings
    pair_of: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.register_buffer("pair_of", torch.zeros(0, 0, dtype=torch.int64), persistent=False)
        self.pairs = nn.ParameterList()

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Every class as a Gaussian."""
        return ClassMemory(size, why="stand for a class's features when it is rehearsed", covariances="class")

    @classmethod
    def traits(cls, settings: Settings) -> Traits:
        """Heads learn under a temperature."""
        return replace(super().traits(settings), temperature=settings.temperature)

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep the network as the teacher, grow a head, and make a row for every pair of new classes."""
        self.keep_teacher()
        super().begin_task(task)
        self._first_class = task.first_class
        self.pair_of, self.pairs = pair_numbers(task.classes).to(self.pair_of.device), nn.ParameterList()
        if self.settings.mixing_rounds and task.classes > 1:
            generator = seeds.generator("cpu", task.seed, "pairs", task.index)
            rows = new_rows(task.classes * (task.classes - 1) // 2, self.network.feature_size, generator)
            self.pairs.append(nn.Parameter(rows.to(self.pair_of.device)))

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Everything the network trains, and the rows of mixed classes with the heads' learning rate."""
        groups = super().parameter_groups(recipe)
        if len(self.pairs):
            groups.append({"params": list(self.pairs), "learning_rate": recipe.learning_rate})
        return groups

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Features of the old network."""
        return {"features": self.old_network.features(images)}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw the old classes to rehearse, and with which image and in which shares each image is mixed."""
        shape, device = (plan.steps, plan.batch_size), generator.device
        draws = {"prototype_labels": torch.randint(len(self.memory.means), shape, generator=generator, device=device)}
        settings = self.settings
        if len(self.pairs):
            mixing = (plan.steps, settings.mixing_rounds, plan.batch_size)
            # Ranks of random keys, not a permutation: a short batch needs one of its own length.
            draws["mixing_keys"] = torch.rand(mixing, generator=generator, device=device)
            shares = symmetric_beta(mixing, settings.mixing_concentration, generator)
            near = (shares - 0.5).abs() <= settings.mixing_range
            draws["mixing_shares"] = torch.where(near, shares, 0.5)
        return draws

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy of images and mixtures, of old classes in closed form, and the norm of the feature drift."""
        settings, memory, size = self.settings, self.memory, batch.size
        images, targets, weights = batch.images, batch.labels, None
        if len(self.pairs):
            images, targets, weights = self._mixed(batch)
        features = self.network.features(images)
        moved = features[:size] - batch.frozen["features"]
        if weights is not None:
            with torch.no_grad():
                old = self.old_network.features(images[size:])
            moved = torch.cat([moved, (features[size:] - old) * weights[size:, None]])
        head = self.network.head_weight()
        logits = functional.linear(features, torch.cat([head, *self.pairs])) / settings.temperature
        labels = batch.draws["prototype_labels"]
        semantic = gaussians.semantic_logits(head, memory.means, memory.covariances, labels, settings.covariance_scale)
        return {
            "current": cross_entropy(logits, targets, weights),
            "replay": settings.replay_weight * cross_entropy(semantic / settings.temperature, labels),
            "distillation": settings.distillation_weight * torch.linalg.vector_norm(moved),
        }

    def _mixed(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Images, labels and weights of the batch and its mixtures; mixtures within one class weigh nothing."""
        size = batch.size
        partners = batch.draws["mixing_keys"][:, :size].argsort(dim=1).flatten()
        shares = batch.draws["mixing_shares"][:, :size].reshape(-1, 1, 1, 1).to(batch.images.dtype)
        rounds = len(partners) // size
        # shares * x + (1 - shares) * partner
        mixtures = torch.lerp(batch.images[partners], batch.images.repeat(rounds, 1, 1, 1), shares)
        labels, others = batch.labels.repeat(rounds), batch.labels[partners]
        pairs = self.pair_of[labels - self._first_class, others - self._first_class]
        targets = torch.cat([batch.labels, sum(self.network.head_sizes) + pairs])
        weights = torch.cat([torch.ones_like(batch.labels), (labels != others).long()]).float()
        return torch.cat([batch.images, mixtures]), targets, weights

    # -- statistics --------------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Move the old Gaussians if the settings say so, store those of the new classes, and drop the mixed rows."""
        settings = self.settings
        if task.index > 0 and settings.prototype_update != "none":
            self.carry_memory(data, settings.drift_ridge, settings.prototype_update == "linear-residual")
        features, labels = gaussians.collect(self.network.features, data.augmented("prototypes"))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.pairs = nn.ParameterList()
        self.teacher = None


def symmetric_beta(shape: tuple[int, ...], concentration: int, generator: torch.Generator) -> Tensor:
    """Draws of Beta(a, a) for a whole number a: the median of 2a - 1 uniform numbers has exactly this distribution."""
    uniform = torch.rand(*shape, 2 * concentration - 1, generator=generator, device=generator.device)
    return uniform.median(dim=-1).values
