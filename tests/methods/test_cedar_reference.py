"""One whole later task of CEDAR beside the obvious computation of it, in float64: every number that is left is equal.

The reference follows docs/methods/cedar.md with loops and autograd. It shares images and random numbers with the
method, and nothing else but the layers of the backbone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from checks import PLAIN, SHORT, Stream, short_stream
from torch import Tensor, nn

from efcil import seeds
from efcil.data.augment import make_augmentation
from efcil.data.store import TaskImages
from efcil.engine import lifecycle
from efcil.engine.trainer import Trainer
from efcil.methods.base import Task
from efcil.methods.cedar import Cedar
from efcil.presets import load_preset
from efcil.settings import Recipe
from efcil.testing.trial import LAST

#: Between the lengths of the gradients of these few steps: some are clipped, others are not.
CLIP = 6.0


def double_images(stream: Stream, index: int) -> TaskImages:
    """The images of a task in float64, augmented by shifts, and while training by TrivialAugment too."""
    pixels, labels = stream.pixels[index]
    return TaskImages(
        pixels,
        labels,
        augmentation=make_augmentation("crop-flip-trivial"),
        normalisation=stream.normalisation,
        device=torch.device("cpu"),
        seed=0,
        name=f"task{index}",
        dtype=torch.float64,
    )


def modern() -> Recipe:
    found = load_preset("cifar100").modern
    assert found is not None
    return replace(found.of_later(SHORT, "efc"), epochs=2, batch_size=SHORT.batch_size, gradient_clip=CLIP)


@dataclass
class Reference:
    """The state that a task begins with, and what becomes of it."""

    backbone: nn.Module
    heads: list[Tensor]
    means: Tensor
    covariances: Tensor
    counts: list[int]
    matrix: Tensor
    data: TaskImages
    task: Task
    settings: Cedar.Settings
    lengths: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.old = copy.deepcopy(self.backbone).eval().requires_grad_(False)

    def learn(self, recipe: Recipe) -> None:
        self.train(recipe)
        self.backbone.eval()
        self.transport()
        self.rebalance()
        self.measure_matrix()
        self.add_classes()

    # -- training --

    def train(self, recipe: Recipe) -> None:
        self.backbone.train()
        head = self.heads[-1].requires_grad_(True)
        parameters = [*self.backbone.parameters(), head]
        velocities = [torch.zeros_like(each) for each in parameters]
        for epoch in range(recipe.epochs):
            images, labels = self.view("epoch", epoch, training=True)
            random = seeds.derive(self.task.seed, "ahead", self.task.index)
            made = self.pseudo_old(images, seeds.generator("cpu", random, "pseudo-old", epoch, 0))
            rate = recipe.learning_rate * (1 + math.cos(math.pi * epoch / recipe.epochs)) / 2
            for rows in torch.arange(len(images)).split(recipe.batch_size):
                features = self.backbone(torch.cat([images[rows], made[rows]]))
                own, others = features[: len(rows)], features[len(rows) :]
                logits = own @ head.T
                right = labels[rows] - self.task.first_class
                loss = -torch.stack([z.log_softmax(0)[y] for z, y in zip(logits, right, strict=True)]).mean()
                loss = loss + self.penalty(own, images[rows]) + self.penalty(others, made[rows])
                gradients = torch.autograd.grad(loss, parameters)
                length = math.sqrt(sum(float((g * g).sum()) for g in gradients))
                self.lengths.append(length)
                factor = min(1.0, CLIP / (length + 1e-6))
                for parameter, gradient, velocity in zip(parameters, gradients, velocities, strict=True):
                    velocity.mul_(recipe.momentum).add_(factor * gradient + recipe.weight_decay * parameter.detach())
                    parameter.data -= rate * velocity
        self.heads[-1] = head.detach()

    def penalty(self, features: Tensor, images: Tensor) -> Tensor:
        drifts = features - self.old(images)
        return torch.stack([self.settings.efm_weight * d @ self.matrix @ d for d in drifts]).mean()

    def pseudo_old(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Every image, moved towards an old class that is near to it."""
        features, classes = self.old(images), len(self.means)
        distances = torch.stack([torch.stack([(f - mean).norm() for mean in self.means]) for f in features])
        for column in range(classes):
            each = distances[:, column]
            distances[:, column] = (each - each.mean()) / each.var(unbiased=False).sqrt()
        gumbel = -torch.empty(len(images), classes).exponential_(generator=generator).log()
        chosen = [int((gumbel[row] - distances[row]).argmax()) for row in range(len(images))]
        variance = torch.stack([covariance.trace() / len(covariance) for covariance in self.covariances]).mean()
        noise = torch.randn(len(images), features.shape[1], generator=generator)
        targets = torch.stack([self.means[c] for c in chosen]) + variance.sqrt() * noise
        made = images.clone()
        for _ in range(self.settings.attack_steps):
            made.requires_grad_(True)
            (slope,) = torch.autograd.grad((self.old(made) - targets).square().sum(), made)
            length = self.settings.attack_length * images.shape[-1] / 32
            made = torch.stack([x - length * g / g.norm() for x, g in zip(made.detach(), slope, strict=True)])
        return made

    # -- the end of the task --

    @torch.no_grad()
    def transport(self) -> None:
        before, after = [], []
        for index in range(self.settings.transport_views):
            images, _ = self.view("drift", index)
            generator = seeds.generator("cpu", self.task.seed, "drift", self.task.index, index)
            with torch.enable_grad():
                made = self.pseudo_old(images, generator)
            for some in (images, made):
                before.append(self.old(some))
                after.append(self.backbone(some))
        x, y = torch.cat(before), torch.cat(after)
        centred, moves = x - x.mean(0), (y - y.mean(0)) - (x - x.mean(0))
        gram = centred.T @ centred / len(x)
        ridge = self.settings.drift_ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
        matrix = torch.eye(len(gram), dtype=gram.dtype) + torch.linalg.solve(gram + ridge, centred.T @ moves / len(x)).T
        shift = y.mean(0) - matrix @ x.mean(0)
        errors = y - x @ matrix.T - shift
        residual = errors.T @ errors / len(x)
        self.means = torch.stack([matrix @ mean + shift for mean in self.means])
        self.covariances = torch.stack([matrix @ each @ matrix.T + residual for each in self.covariances])

    def rebalance(self) -> None:
        settings, weight = self.settings, torch.cat(self.heads).requires_grad_(True)
        optimiser = torch.optim.SGD(
            [weight],
            settings.rebalance_learning_rate,
            momentum=settings.rebalance_momentum,
            weight_decay=settings.rebalance_weight_decay,
        )
        for epoch in range(settings.rebalance_epochs):
            generator = seeds.generator("cpu", self.task.seed, "rebalance", self.task.index, epoch)
            images, labels = self.view("rebalance", epoch)
            with torch.no_grad():
                real = self.backbone(images)
            drawn, old = self.drawn(generator)
            order = torch.randperm(len(real) + len(drawn), generator=generator)
            features, targets = torch.cat([real, drawn])[order], torch.cat([labels, old])[order]
            for rows in torch.arange(len(features)).split(settings.rebalance_batch_size):
                optimiser.zero_grad()
                nn.functional.cross_entropy(features[rows] @ weight.T, targets[rows]).backward()
                optimiser.step()
        self.heads = list(weight.detach().split([len(head) for head in self.heads]))

    def drawn(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """As many features of every old class as it had images."""
        noise = torch.randn(sum(self.counts), self.means.shape[1], generator=generator, dtype=torch.float64)
        features, labels = [], []
        for number, some in enumerate(noise.split(self.counts)):
            jitter = self.settings.jitter * torch.eye(len(self.matrix), dtype=torch.float64)
            factor = torch.linalg.cholesky(self.covariances[number] + jitter)
            features += [self.means[number] + factor @ each for each in some]
            labels += [number] * len(some)
        return torch.stack(features), torch.tensor(labels)

    @torch.no_grad()
    def measure_matrix(self) -> None:
        """The mean, over full batches, of the expected outer product of gradients of log-probabilities."""
        images, _ = self.view("feature-matrix")
        whole = images[: len(images) // self.task.batch_size * self.task.batch_size]
        weight, total = torch.cat(self.heads), torch.zeros_like(self.matrix)
        for feature in self.backbone(whole):
            probabilities = (weight @ feature).softmax(0)
            for each, probability in enumerate(probabilities):
                slope = weight[each] - probabilities @ weight
                total += probability * torch.outer(slope, slope)
        self.matrix = total / len(whole)

    @torch.no_grad()
    def add_classes(self) -> None:
        images, labels = self.view("prototypes")
        features = self.backbone(images)
        for label in range(self.task.first_class, self.task.seen):
            own = features[labels == label]
            self.means = torch.cat([self.means, own.mean(0)[None]])
            self.covariances = torch.cat([self.covariances, torch.cov(own.T)[None]])
            self.counts.append(len(own))

    def view(self, purpose: str, index: int = 0, training: bool = False) -> tuple[Tensor, Tensor]:
        return self.data.render(self.data.view(purpose, index, training=training), 0, len(self.data))


def begun() -> tuple[Cedar, Reference]:
    """The method at the beginning of the last task, all of it in float64, and the reference with the same state."""
    stream = short_stream()
    method = stream.learn(stream.start("cedar", rebalance_epochs=2), LAST - 1, SHORT).double()
    assert isinstance(method, Cedar)
    task = stream.tasks[LAST]
    method.begin_task(task)
    method.double()  # the new head
    memory, heads = method.memory, [head.detach().clone() for head in method.network.heads]
    reference = Reference(
        copy.deepcopy(method.network.backbone),
        heads,
        memory.means.clone(),
        memory.covariances.clone(),
        memory.counts.tolist(),
        method.feature_matrix.clone(),
        double_images(stream, LAST),
        task,
        method.settings,
    )
    return method, reference


def results(method: Cedar) -> Iterator[tuple[str, Tensor]]:
    yield from method.network.backbone.state_dict().items()
    yield "heads", method.network.head_weight()
    yield "means", method.memory.means
    yield "covariances", method.memory.covariances
    yield "feature matrix", method.feature_matrix


def test_a_whole_task_is_what_the_page_says() -> None:
    method, reference = begun()
    Trainer(method, double_images(short_stream(), LAST), reference.task, modern(), PLAIN).run()
    lifecycle.end(method, reference.task, double_images(short_stream(), LAST))
    reference.learn(modern())
    assert min(reference.lengths) < CLIP < max(reference.lengths)
    expected = {
        **reference.backbone.state_dict(),
        "heads": torch.cat(reference.heads),
        "means": reference.means,
        "covariances": reference.covariances,
        "feature matrix": reference.matrix,
    }
    assert method.memory.counts.tolist() == reference.counts
    for name, found in results(method):
        near = torch.allclose(found.double(), expected[name].double(), rtol=1e-6, atol=1e-8)
        assert near, f"{name} differs by up to {float((found - expected[name]).abs().max()):.3g}"
