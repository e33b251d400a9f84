"""APR: adversarial pseudo-replay. LwF on current images and on such that an attack has turned into old classes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil import seeds
from efcil.core import classifiers, gaussians, transport
from efcil.core.classifiers import Classifier
from efcil.core.losses import cross_entropy, distillation
from efcil.data.store import TaskImages, View
from efcil.methods.attacked import Neighbours, images_of, nearest
from efcil.methods.base import Batch, Method, Plan, Task, Terms
from efcil.methods.built import BuiltClassifier
from efcil.methods.lwf import LearningWithoutForgetting
from efcil.methods.memory import ClassMemory
from efcil.network import attack
from efcil.settings import option

#: Length per image of the attack that follows the drift: 25 for a thousand images together.
_DRIFT_LENGTH = 25.0 / math.sqrt(1000.0)
#: Numbers of the covariances whose maps are learned side by side: 64 classes of 512 features.
_LARGEST = 1 << 24


@dataclass(frozen=True)
class _Sources:
    """What pseudo-old images are made of: a view of the task's images, and pairs of a row of it and an old class."""

    data: TaskImages
    view: View
    rows: Tensor
    labels: Tensor


class AdversarialPseudoReplay(BuiltClassifier, LearningWithoutForgetting):
    """Distils the old network on current and pseudo-old images, follows the drift of every class, compares with all."""

    name = "apr"
    summary = "LwF on current and pseudo-old images; every class's Gaussian follows the drift; Mahalanobis distance"
    family = "transport"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of APR, with the values of its authors for CIFAR-100."""

        weight: float = option(10.0, "Weight of the distillation (APR).", minimum=0)
        temperature: float = option(2.0, "Temperature of the distillation (APR).", minimum=1e-3)
        sources: int = option(
            200, "Current images, the nearest to an old class, that its pseudo-old images are made of (APR).", minimum=1
        )
        pseudo_batch: int = option(
            64, "Pseudo-old images in a training step, beside the current ones (APR).", minimum=1
        )
        attack_steps: int = option(
            4, "Steps of gradient descent that make a pseudo-old image (APR; Tiny-ImageNet: 6).", minimum=0
        )
        attack_length: float = option(
            8.0,
            "Length of such a step, as the root mean square over the pseudo-old images of a training step. APR's 64 is "
            "for 64 images together.",
            minimum=0,
            unless=("attack_steps", 0),
        )
        noise: float = option(
            1.0, "Spread of the targets about the mean of their class, in mean standard deviations (APR).", minimum=0
        )
        drift_images: int = option(
            1000,
            "Current images, the nearest to an old class, that its drift is measured on after the task (APR).",
            minimum=1,
        )
        drift_steps: int = option(9, "Steps of the attack on these (APR; Tiny-ImageNet: 6).", minimum=0)
        drift_length: float = option(
            _DRIFT_LENGTH,
            "Length of such a step, as the root mean square over a batch. APR's 25 is for 1,000 images together.",
            minimum=0,
            unless=("drift_steps", 0),
        )
        drift_batch: int = option(
            64, "Images that share the length of a step there (APR).", minimum=1, unless=("drift_steps", 0)
        )
        map_epochs: int = option(
            64,
            "Epochs in which the map of a class's covariance is learned (APR; Adam, on the mean distance).",
            minimum=0,
        )
        map_learning_rate: float = option(
            1e-4, "Learning rate of these maps (APR).", minimum=0, unless=("map_epochs", 0)
        )
        map_batch_size: int = option(
            16, "Features in a step of learning a map (APR's code).", minimum=1, unless=("map_epochs", 0)
        )
        shrink: float = option(
            24.0,
            "Mean variances added to every variance, and mean covariances to every other entry, of a covariance when "
            "classifying (APR; Tiny-ImageNet: 40).",
            minimum=0,
        )
        train_normalisation: bool = option(True, "Keep training BatchNorm after the first task (APR).")

    settings: Settings  # type: ignore[assignment]

    #: There are some while a later task is learned.
    _sources: _Sources | None = None

    @classmethod
    def remembers(cls, settings: Settings, size: int) -> ClassMemory:
        """Every class as a Gaussian."""
        why = "are compared with features, are what an attack makes images of, and follow the drift"
        return ClassMemory(size, why=why, covariances="class")

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, then grow a head; old heads keep training."""
        self.keep_teacher()
        Method.begin_task(self, task)

    def prepare(self, task: Task, data: TaskImages) -> None:
        """Choose the current images that resemble each old class most, in one view that is used all the time."""
        view = data.view("pseudo-old", training=True)
        features, _ = gaussians.collect(self.old_network.features, data.rendered(view))
        rows = nearest(features, self.memory.means, self.settings.sources)
        labels = torch.arange(len(rows), device=rows.device).repeat_interleave(rows.shape[1])
        self._sources = _Sources(data, view, rows.flatten(), labels)

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Make the pseudo-old images of every step, with the logits that the old network gives them."""
        sources, settings = self._sources, self.settings
        assert sources is not None
        count, pairs, device = plan.steps * settings.pseudo_batch, len(sources.rows), generator.device
        if not pairs:  # all old classes were forgotten
            return {}
        shuffles = range(-(-count // pairs))
        chosen = torch.cat([torch.randperm(pairs, generator=generator, device=device) for _ in shuffles])[:count]
        means = self.memory.means[sources.labels[chosen]]
        radius = settings.noise * gaussians.perturbation_radius(self.memory.covariances)
        targets = means + radius * torch.randn(means.shape, generator=generator, device=device)
        images = images_of(sources.data, sources.view.of(sources.rows[chosen]))
        lengths = [settings.attack_length] * settings.attack_steps
        made = attack.towards(self.old_network, images, targets, lengths, group=settings.pseudo_batch)
        logits = self.frozen(made)["logits"]
        # Channels last, because so a step's images are read as the network wants them.
        return {
            "images": made.permute(0, 2, 3, 1).unflatten(0, (plan.steps, -1)),
            "logits": logits.unflatten(0, (plan.steps, -1)),
        }

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy of current images over the newest head, and distillation on all images over all old heads."""
        settings, old = self.settings, sum(self.network.head_sizes[:-1])
        images, taught = batch.images, batch.frozen["logits"]
        if "images" in batch.draws:
            # In one pass, so that BatchNorm sees old and new classes together.
            images = torch.cat([images, batch.draws["images"].permute(0, 3, 1, 2)])
            taught = torch.cat([taught, batch.draws["logits"]])
        features, labels = self.network.features(images), batch.labels - old
        batch.compared.append((features[: batch.size], labels))
        logits = self.network.logits(features)
        current = logits[: batch.size, old:]
        retained = distillation(logits[:, :old], taught, settings.temperature, smoothing=0.0)
        return {
            "current": cross_entropy(current, labels, smoothing=batch.label_smoothing),
            "distillation": settings.weight * retained,
        }

    # -- the end of a task -------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Let the old classes follow the drift, then measure the new ones on plain images."""
        if task.index > 0 and len(self.memory.means):
            self._follow_drift(task, data)
        features, labels = gaussians.collect(self.network.features, data.plain())
        self.memory.add(features, labels, range(task.first_class, task.seen))
        self._sources = None
        super().end_task(task, data)
        self.restored()

    def _follow_drift(self, task: Task, data: TaskImages) -> None:
        """Move every old class by what its own pseudo-old images say: the mean by their mean shift."""
        settings, memory = self.settings, self.memory
        near = Neighbours(self.old_network, data, data.view("drift"), memory.means, settings.drift_images)
        rows, before, after, counts = near.rows, [], [], []
        for number in range(len(rows)):
            old, new, made = self._pairs(near, number)
            before.append(old)
            after.append(new)
            counts.append(made)
        found = torch.stack(counts)
        generator = seeds.generator(data.device, task.seed, "map", task.index)
        step = max(1, _LARGEST // memory.covariances[0].numel())
        for start in range(0, len(rows), step):
            each = slice(start, start + step)
            maps = transport.learned_maps(
                torch.stack(before[each]), torch.stack(after[each]), found[each], epochs=settings.map_epochs,
                learning_rate=settings.map_learning_rate, batch_size=settings.map_batch_size, generator=generator,
            )  # fmt: skip
            for number, matrix in enumerate(maps.double(), start):
                shift = (after[number] - before[number])[: int(found[number])].double().mean(dim=0)
                covariance = matrix @ memory.covariances[number].double() @ matrix.T
                memory.replace(number, memory.means[number].double() + shift, covariance)

    def _pairs(self, near: Neighbours, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return old and new features (K, n) of images attacked towards a class, those that got there first.

        The third is how many got there: the old network has them nearest to this class. If none did, it is all of them.
        """
        settings = self.settings
        made = near.attacked(number, [settings.drift_length] * settings.drift_steps, settings.drift_batch)
        old, new = self.old_network.features(made).float(), self.network.features(made).float()
        there = near.arrived(old, number)
        order = (~there).int().argsort(stable=True)
        made_it = there.sum()
        return old[order], new[order], torch.where(made_it > 0, made_it, len(there))

    # -- inference ---------------------------------------------------------------------------------------------

    def build(self) -> Classifier:
        """Minus the squared Mahalanobis distance to every class."""
        return classifiers.mahalanobis(self.memory.statistics(), self.settings.shrink, self.settings.shrink)
