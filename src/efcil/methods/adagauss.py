"""AdaGauss: class Gaussians in a small feature space, adapted to every new one through a learned map."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil import seeds
from efcil.core import classifiers, gaussians, prototypes, transport
from efcil.core.classifiers import Classifier
from efcil.core.losses import cross_entropy
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, ParameterGroup, Task, Terms, Traits
from efcil.methods.built import BuiltClassifier
from efcil.methods.memory import ClassMemory
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe, option

# Added to batch variances, so that a direction without any spread has a Cholesky factor and a bounded gradient.
_JITTER = 1e-4
_ADAPTER_WEIGHT_DECAY = 5e-4
# Share of the largest standard deviation below which a direction counts as having none: for features computed in
# bfloat16 it is mostly rounding.
_DEAD = 1e-3


class AdaptedGaussians(BuiltClassifier):
    """Keeps a Gaussian per class, carries mean and covariance over through a learned map, and classifies by distance.

    Features pass a linear bottleneck z = P f + b. The shared first task has none, so it starts as the principal
    components of that task's features, each with at least the spread that the term against collapse asks for. A head
    scores z by as many of its weights as z has features; the others are not used.
    """

    name = "adagauss"
    summary = "class Gaussians behind a bottleneck, means and covariances carried over by a learned map, no collapse"
    family = "adagauss"
    smooths_labels = True

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of AdaGauss, with the values of its authors' code except for the adapter."""

        bottleneck: int = option(64, "Features behind the bottleneck, at most as many as the backbone has.", minimum=1)
        distillation_weight: float = option(10.0, "Weight of the projected feature distillation.", minimum=0)
        collapse_weight: float = option(
            1.0, "Weight of the term against collapse; it needs batches larger than the bottleneck.", minimum=0
        )
        collapse_limit: float = option(
            1.0,
            "Spread above which that term has no effect on a direction.",
            minimum=0,
            unless=("collapse_weight", 0.0),
        )
        width: int = option(2048, "Hidden units of the distiller and of the adapter.", minimum=1)
        adapter: str = option(
            "ridge",
            "Map that updates old Gaussians: ridge (linear, in closed form) or mlp (two layers, AdaGauss; it needs "
            "some thousands of images per task).",
            choices=("mlp", "ridge"),
        )
        adapter_epochs: int = option(
            100, "Epochs in which the adapter is learned (SGD).", minimum=1, needs=("adapter", "mlp")
        )
        adapter_learning_rate: float = option(
            0.01,
            "Learning rate of the adapter; a tenth after 3, 6 and 9 tenths of its epochs.",
            minimum=0,
            needs=("adapter", "mlp"),
        )
        adapter_batch_size: int = option(
            256, "Features in a step of learning the adapter.", minimum=1, needs=("adapter", "mlp")
        )
        adapter_samples: int = option(
            10_000, "Points of every class that are passed through the adapter.", minimum=2, needs=("adapter", "mlp")
        )
        shrink_diagonal: float = option(
            3.0, "Mean variances added to every variance of a covariance when classifying.", minimum=0
        )
        mirrored: bool = option(
            True, "Measure classes on their images and mirror images, if training mirrors images too."
        )
        gradient_limit: float | None = option(
            1.0, "Norm that the gradient of a step is clipped to; none: no clipping.", minimum=1e-9
        )
        train_normalisation: bool = option(True, "Keep training BatchNorm after the first task.")

    settings: Settings
    bottleneck: nn.Linear

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.keep(
            "bottleneck",
            nn.Linear(network.feature_size, self.memory.means.shape[1]),
            why="turns features into the fewer ones that class statistics are about",
            title="feature bottleneck",
            recovery="Sums of gradients over all images and epochs. No image is stored in them; like the weights of "
            "every network it shows which features vary most.",
        )
        self.distiller: nn.Module | None = None
        self.teacher_bottleneck: nn.Module | None = None

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Every class as a Gaussian behind the bottleneck."""
        size = min(settings.bottleneck, size)
        return ClassMemory(size, why="are compared with features, and carried over by a map", covariances="class")

    @classmethod
    def traits(cls, settings: Settings) -> Traits:
        """Heads are trained only on their own task: no classifier can be built on them."""
        return replace(super().traits(settings), keeps=("means", "covariances"))

    @classmethod
    def recipe(cls, settings: Settings, preset: Recipe) -> Recipe:
        """The preset's, with gradient clipping as the settings say."""
        return replace(super().recipe(settings, preset), gradient_clip=settings.gradient_limit)

    def embed(self, images: Tensor) -> Tensor:
        """Features behind the bottleneck."""
        return self.bottleneck(self.network.features(images))

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep a copy of network and bottleneck as the teacher, grow a head, and start a new distiller."""
        self.keep_teacher()
        object.__setattr__(self, "teacher_bottleneck", copy.deepcopy(self.bottleneck).requires_grad_(False))
        super().begin_task(task)
        self.freeze_old_heads()
        self.distiller = self._new_map(task, "distiller")

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Everything the network trains, and bottleneck and distiller with the heads' learning rate."""
        assert self.distiller is not None
        own = [*self.bottleneck.parameters(), *self.distiller.parameters()]
        return [*super().parameter_groups(recipe), {"params": own, "learning_rate": recipe.learning_rate}]

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Features of the old network behind the old bottleneck."""
        return {"features": self._old_embed(images)}

    def _old_embed(self, images: Tensor) -> Tensor:
        assert self.teacher_bottleneck is not None
        return self.teacher_bottleneck(self.old_network.features(images))

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy over the new head, distillation through the distiller, and the term against collapse."""
        assert self.distiller is not None
        settings, first = self.settings, sum(self.network.head_sizes[:-1])
        features = self.embed(batch.images)
        head = self.network.heads[-1][:, : features.shape[1]]
        distilled = functional.mse_loss(self.distiller(features), batch.frozen["features"])
        terms = {
            "current": cross_entropy(features @ head.T, batch.labels - first, smoothing=batch.label_smoothing),
            "distillation": settings.distillation_weight * distilled,
        }
        if settings.collapse_weight > 0:
            terms["collapse"] = settings.collapse_weight * collapse(
                features, settings.collapse_limit, by_columns=features.is_cuda
            )
        return terms

    # -- the end of a task -------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Carry the old classes over, then measure the new ones."""
        if task.index == 0:
            features, _ = gaussians.collect(self.network.features, data.plain())
            least = self.settings.collapse_limit if self.settings.collapse_weight > 0 else 0.0
            weight, bias = principal_components(features, self.bottleneck.out_features, least)
            self.bottleneck.weight.copy_(weight)
            self.bottleneck.bias.copy_(bias)
        else:
            self._carry(task, data)
        features, labels = gaussians.collect(self.embed, self._both_sides(data))
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self.distiller, self.teacher, self.teacher_bottleneck = None, None, None
        self.restored()

    def _both_sides(self, data: TaskImages) -> Iterator[tuple[Tensor, Tensor]]:
        mirrored = self.settings.mirrored and data.augmentation.flip
        for images, labels in data.plain():
            yield images, labels
            if mirrored:
                yield images.flip(3), labels

    def _carry(self, task: Task, data: TaskImages) -> None:
        """Map the Gaussians of the old classes to the new feature space."""
        settings, memory = self.settings, self.memory
        if settings.adapter == "ridge":
            memory.carry(transport.ridge_map(*self._pairs(data, 0)))
            return
        adapter = self._learn_adapter(task, data)
        factors = prototypes.cholesky_factors(memory.covariances)
        generator = seeds.generator(memory.means.device, task.seed, "adapted", task.index)
        for number, (mean, factor) in enumerate(zip(memory.means.clone(), factors, strict=True)):
            noise = torch.randn(settings.adapter_samples, len(mean), generator=generator, device=mean.device)
            points = adapter(mean + noise @ factor.T).double()
            memory.replace(number, points.mean(dim=0), torch.cov(points.T).reshape(len(mean), -1))

    def _new_map(self, task: Task, purpose: str) -> nn.Module:
        """Return an untrained map between old and new features."""
        generator = seeds.generator("cpu", task.seed, purpose, task.index)
        made = two_layers(self.bottleneck.out_features, self.settings.width, generator)
        return made.to(self.bottleneck.weight.device)

    def _new_adapter(self, task: Task) -> nn.Module:
        """Return the map from old to new features before it is learned."""
        return self._new_map(task, "adapter")

    def _learn_adapter(self, task: Task, data: TaskImages) -> nn.Module:
        """Learn the map from old to new features, a fresh view of all images in every epoch."""
        settings, adapter = self.settings, self._new_adapter(task)
        optimiser = torch.optim.SGD(
            adapter.parameters(), settings.adapter_learning_rate, momentum=0.9, weight_decay=_ADAPTER_WEIGHT_DECAY
        )
        milestones = [max(1, round(share * settings.adapter_epochs)) for share in (0.3, 0.6, 0.9)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimiser, milestones)
        for epoch in range(settings.adapter_epochs):
            before, after = self._pairs(data, epoch)
            for rows, targets in zip(
                before.split(settings.adapter_batch_size), after.split(settings.adapter_batch_size), strict=True
            ):
                optimiser.zero_grad()
                with torch.enable_grad():
                    adapted = adapter(rows)
                    error = functional.mse_loss(adapted, targets)
                    if settings.collapse_weight > 0:
                        error = error + settings.collapse_weight * collapse(adapted, settings.collapse_limit)
                    error.backward()
                nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
                optimiser.step()
            schedule.step()
        return adapter

    def _pairs(self, data: TaskImages, epoch: int) -> tuple[Tensor, Tensor]:
        """Features of all images before and after the task, in one augmented view."""
        pairs = [(self._old_embed(x), self.embed(x)) for x, _ in data.augmented("drift", epoch)]
        before, after = zip(*pairs, strict=True)
        return torch.cat(before), torch.cat(after)

    # -- inference ---------------------------------------------------------------------------------------------

    def build(self) -> Classifier:
        """Minus the squared Mahalanobis distance to every class."""
        return classifiers.mahalanobis(self.memory.statistics(), self.settings.shrink_diagonal, 0.0)


def collapse(features: Tensor, limit: float, by_columns: bool = False) -> Tensor:
    """Minus the mean of the Cholesky diagonal, clamped to `limit`, of the batch covariance of features (B, n).

    That diagonal holds the spread of each feature that the earlier ones do not explain. Zero if B <= n, because the
    covariance of so few rows always has directions without spread. `by_columns` is for steps that are captured in a
    CUDA graph, which the library's factorisation cannot be; in all other cases the library is faster.
    """
    if len(features) <= features.shape[1]:
        return features.sum() * 0.0
    centred = features.float() - features.float().mean(dim=0)
    identity = torch.eye(features.shape[1], device=features.device)
    covariance = centred.T @ centred / (len(features) - 1)
    # Single precision has limited digits: if features vary much, more must be added.
    scale = covariance.detach().diagonal().mean().clamp(min=1.0)
    covariance = covariance + _JITTER * scale * identity
    diagonal: Tensor = _CholeskyDiagonal.apply(covariance, by_columns)
    return -diagonal.clamp(max=limit).mean()


class _CholeskyDiagonal(torch.autograd.Function):
    """The diagonal of the Cholesky factor L of S. With g its gradient, that of S is L^-T diag(g_i L_ii / 2) L^-1."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, by_columns: bool) -> Tensor:
        factor = factor_by_columns(matrix) if by_columns else torch.linalg.cholesky_ex(matrix)[0]
        ctx.save_for_backward(factor)
        return factor.diagonal().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        identity = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(factor, identity, upper=False)
        return inverse.T @ ((0.5 * gradient * factor.diagonal())[:, None] * inverse), None


def factor_by_columns(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a positive definite matrix (n, n), column by column, in operations of fixed shape."""
    rest, columns = matrix.clone(), []
    for place in range(len(matrix)):
        columns.append(rest[:, place] * torch.rsqrt(rest[place, place]))
        rest.addr_(columns[-1], columns[-1], alpha=-1.0)
    return torch.stack(columns, dim=1).tril()


def principal_components(features: Tensor, count: int, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Weight (count, n) and bias (count) that turn features (N, n) into their leading principal components.

    Components have mean zero and are all scaled alike, so that the mean of their variances is one; those whose standard
    deviation is then below `least` are scaled up to it.
    """
    centre = features.double().mean(dim=0)
    centred = features.double() - centre
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(features))
    spread = values.flip(0)[:count].clamp(min=0.0).sqrt()
    size = spread.square().mean().sqrt()
    scale = 1.0 / torch.where(size > 0.0, size, 1.0)
    # A direction in which images hardly differ is not scaled up.
    raised = torch.where(spread > _DEAD * spread[0], least / spread, scale)
    weight = vectors.flip(1)[:, :count].T * torch.maximum(scale, raised)[:, None]
    return weight.to(features.dtype), -(weight @ centre).to(features.dtype)


def two_layers(size: int, width: int, generator: torch.Generator) -> nn.Sequential:
    """A perceptron size -> width -> size with GELU, its weights drawn as PyTorch does, but from `generator`."""
    layers = nn.Sequential(nn.Linear(size, width), nn.GELU(), nn.Linear(width, size))
    with torch.no_grad():
        for parameter, inputs in zip(layers.parameters(), (size, size, width, width), strict=True):
            parameter.uniform_(-1.0 / math.sqrt(inputs), 1.0 / math.sqrt(inputs), generator=generator)
    return layers
