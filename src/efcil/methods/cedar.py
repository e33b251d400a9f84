"""CEDAR: EFC++ without damping, with transported class Gaussians and pseudo-old images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil import seeds
from efcil.core import class_transport, gaussians, pseudo_old, transport
from efcil.core.feature_matrix import FeatureMatrixSum, quadratic_drift
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Piece, Task, Terms
from efcil.methods.efc_plus_plus import ElasticFeatureConsolidationPlusPlus
from efcil.methods.memory import Sampler
from efcil.network import attack
from efcil.settings import option

#: Side of the images, in pixels, that the length of an attack step is stated for.
USUAL_SIDE = 32
#: Numbers held at a time of a table that has a row per pseudo-old image and a column per image: 64 MiB.
_TABLE_ENTRIES = 1 << 24
_MADE = ("pseudo_old", (True,))
_LINEAR = ("prototype_update", ("linear", "linear-residual"))
_BY_CLASS = ("transport_maps", ("shift", "class"))


@dataclass(frozen=True)
class _OldClasses:
    """The old classes in the feature space of the old network, as they were when the task began."""

    means: Tensor
    radius: Tensor
    sampler: Sampler | None


@dataclass(frozen=True)
class _Choice:
    """What becomes what: which image each pseudo-old image is made of (K), and the features it is to have (K, n)."""

    sources: Tensor
    targets: Tensor


class Cedar(ElasticFeatureConsolidationPlusPlus):
    """EFC++ whose features may move freely where no old class depends on them: statistics follow.

    Class Gaussians are transported, and pseudo-old images show where old classes depend on features.
    """

    name = "cedar"
    summary = "EFC++ without damping: class Gaussians transported, drift also penalised on pseudo-old images"
    usual_recipe = "modern"

    @dataclass(frozen=True)
    class Settings(ElasticFeatureConsolidationPlusPlus.Settings):
        """Hyper-parameters of CEDAR, chosen on held-out training images."""

        damping: float = option(
            0.0, "Weight of the identity in the drift penalty.", minimum=0, needs=("regulariser", "efm")
        )
        prototype_update: str = option(
            "linear-residual",
            "How old classes follow the drift: efm (means, weights from the feature matrix), none (ablation), linear "
            "(means and covariances, by one ridge map from old to new features), or linear-residual (the same, and "
            "what the map leaves unexplained is added to the covariances).",
            choices=("efm", "none", "linear", "linear-residual"),
        )
        transport_views: int = option(
            3,
            "Augmented views of the current images that a linear prototype_update is fitted on.",
            minimum=1,
            needs=_LINEAR,
        )
        transport_ridge: str = option(
            "round",
            "Where the ridge of a linear prototype_update is measured: round (alike in all directions of the old "
            "features) or whitened (where features of all old classes together have variance 1 in every direction; "
            "drift_ridge is then a share of it).",
            choices=("round", "whitened"),
            needs=_LINEAR,
        )
        transport_maps: str = option(
            "one",
            "Maps of a linear prototype_update: one (for all classes), or for every old class that one and a "
            "correction of it, fitted on images near the class: shift (a vector) or class (a ridge map).",
            choices=("one", "shift", "class"),
            needs=_LINEAR,
        )
        transport_temperature: float = option(
            0.3,
            "How far from a class images count as near: they have weight exp(-(m - 1) / 2T), where m, the squared "
            "Mahalanobis distance divided by the number of features, is about 1 for images of the class.",
            minimum=1e-3,
            needs=_BY_CLASS,
        )
        transport_pull: float = option(
            30.0,
            "Pull of the correction towards none, in images: with so many near a class, it is about half of what "
            "they say.",
            minimum=1e-3,
            needs=_BY_CLASS,
        )
        pseudo_old: bool = option(
            True, "Make pseudo-old images: current images, changed until the old network takes them for old classes."
        )
        pseudo_old_weight: float = option(
            1.0,
            "Weight of the drift penalty on pseudo-old images; that on current ones is 1.",
            minimum=0,
            needs=_MADE,
        )
        pseudo_old_fade: float = option(
            0.0,
            "How fast that weight falls: in the n-th task after the first it is divided by n to this power.",
            minimum=0,
            needs=_MADE,
        )
        pseudo_old_transport: bool = option(
            True, "Fit a linear prototype_update on pseudo-old images too.", needs=_MADE
        )
        pseudo_old_per_class: int = option(
            0,
            "Pseudo-old images of every old class, made of images near it, that the transport is fitted on, over all "
            "views; 0: as many in all as there are current images, of the classes that pseudo_old_sources chooses.",
            minimum=0,
            needs=("pseudo_old_transport", (True,)),
        )
        pseudo_old_copies: int = option(1, "Pseudo-old images per current image.", minimum=1, maximum=8, needs=_MADE)
        pseudo_old_every: int = option(
            1, "Epochs after which pseudo-old images are made anew; 0: once a task.", minimum=0, needs=_MADE
        )
        pseudo_old_sources: str = option(
            "each",
            "Images they are made of: each (every current image, a class is chosen for it) or near (every old class "
            "equally often, an image is chosen for it).",
            choices=("each", "near"),
            needs=_MADE,
        )
        pseudo_old_choice: str = option(
            "gumbel",
            "How classes or images are chosen by their distances, standardised per class: gumbel (drawn, near ones "
            "more often) or nearest.",
            choices=("gumbel", "nearest"),
            needs=_MADE,
        )
        pseudo_old_targets: str = option(
            "round",
            "Features they are to have: the mean of their class plus noise, round (the same in all directions, of the "
            "mean variance of all classes) or gaussian (of the covariance of the class).",
            choices=("round", "gaussian"),
            needs=_MADE,
        )
        attack_steps: int = option(4, "Steps of gradient descent on an image.", minimum=1, needs=_MADE)
        attack_length: float = option(
            6.0,
            "Length of a step, over all normalised pixels of an image of 32 x 32; in proportion to the side of others.",
            minimum=0,
            needs=_MADE,
        )
        attack_schedule: str = option(
            "equal",
            "Lengths of the steps: equal, or falling (in equal parts, from attack_length in the first one towards 0).",
            choices=("equal", "falling"),
            needs=_MADE,
        )
        efm_on: str = option(
            "current",
            "What the feature matrix is measured on: current (images), gaussians (also features drawn of every old "
            "class) or pseudo-old (also pseudo-old images, if they are made).",
            choices=("current", "gaussians", "pseudo-old"),
        )

    settings: Settings

    def begin_task(self, task: Task) -> None:
        """Begin as EFC++ does, and remember where the old network has the old classes."""
        super().begin_task(task)
        settings, memory = self.settings, self.memory
        covariances = memory.statistics().spread()[0]
        sampler = memory.sampler(settings.jitter) if settings.pseudo_old_targets == "gaussian" else None
        self._old = _OldClasses(memory.means.clone(), gaussians.perturbation_radius(covariances), sampler)
        # Pseudo-old images that are used again: by place in the epoch, with the epoch they were made in.
        self._made: dict[int, tuple[int, Tensor, Tensor]] = {}

    # -- pseudo-old images ---------------------------------------------------------------------------------------

    @property
    def _makes_images(self) -> bool:
        """Whether pseudo-old images are made: not if all old classes were forgotten."""
        return self.settings.pseudo_old and len(self._old.means) > 0

    def _choose(self, features: Tensor, generator: torch.Generator, per_class: int = 0) -> _Choice:
        """Choose what images become, by their old features (N, n): `pseudo_old_copies` times N pseudo-old images.

        With `per_class`, so many of every old class instead, each made of an image near it.
        """
        settings, old = self.settings, self._old
        distances = pseudo_old.standardised_distances(features, old.means)
        images, classes, device = len(features), len(old.means), features.device
        count = per_class * classes or images * settings.pseudo_old_copies
        drawn = settings.pseudo_old_choice == "gumbel"
        if settings.pseudo_old_sources == "each" and not per_class:
            sources = torch.arange(count, device=device) % images
            noise = pseudo_old.gumbel(count, classes, generator) if drawn else None
            labels = pseudo_old.choose_classes(distances[sources], noise)
        else:
            labels = torch.arange(count, device=device) % classes
            labels = labels[torch.randperm(count, generator=generator, device=device)]
            sources = torch.cat(
                [
                    pseudo_old.choose_sources(
                        distances, some, pseudo_old.gumbel(len(some), images, generator) if drawn else None
                    )
                    for some in labels.split(max(1, _TABLE_ENTRIES // images))
                ]
            )
        if old.sampler is not None:
            # In parts, because each of them has room for the case that all are of one class.
            parts = labels.split(max(1, 4 * _TABLE_ENTRIES // old.means.numel()))
            return _Choice(sources, torch.cat([old.sampler.features(x, generator, most=len(x)) for x in parts]))
        noise = torch.randn(count, features.shape[1], generator=generator, device=device)
        return _Choice(sources, old.means[labels] + old.radius * noise)

    def _make(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return pseudo-old images made of `images`, and what features the old network gives them."""
        settings = self.settings
        length = settings.attack_length * images.shape[-1] / USUAL_SIDE
        lengths = pseudo_old.step_lengths(settings.attack_steps, length, settings.attack_schedule == "falling")
        made = attack.towards(self.old_network, images, targets, lengths)
        return made, self.old_network.features(made)

    def ahead(self, piece: Piece) -> dict[str, Tensor]:
        """Features of the old network, and pseudo-old images with theirs: those depend on the old network alone."""
        found = self.frozen(piece.images)
        if not self._makes_images:
            return found
        made, features = self._made_for(piece, found["features"])
        for copy, (images, theirs) in enumerate(zip(made, features, strict=True)):
            found |= {f"images-{copy}": images, f"features-{copy}": theirs}
        return found

    def _made_for(self, piece: Piece, features: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the pseudo-old images of a piece and their features, every copy for itself: made now, or again."""
        every, size = self.settings.pseudo_old_every, len(piece.images)
        epoch = piece.epoch - piece.epoch % every if every else 0
        kept = self._made.get(piece.start)
        if kept is None or kept[0] != epoch or len(kept[1]) != size * self.settings.pseudo_old_copies:
            images = piece.images
            if epoch != piece.epoch:  # training was resumed in between
                images = piece.at(epoch)
                features = self.old_network.features(images)
            choice = self._choose(features, piece.generator("pseudo-old", epoch))
            kept = (epoch, *self._make(images[choice.sources], choice.targets))
        made, theirs = kept[1:]
        if every != 1:
            self._made[piece.start] = kept
            # Used again, they meet other images.
            order = torch.randperm(len(made), generator=piece.generator("order"), device=made.device)
            made, theirs = made[order], theirs[order]
        return list(made.split(size)), list(theirs.split(size))

    def _made_of(self, data: TaskImages, index: int, per_class: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of pseudo-old images, with their old features, of one view of a whole task.

        They are chosen over the whole view: the pieces in which images are rendered do not matter. With `per_class`
        there may be many, so that pieces are at most as large as those.
        """
        features, _ = gaussians.collect(self.old_network.features, data.augmented("drift", index))
        generator = seeds.generator(data.device, self._task.seed, "drift", self._task.index, index)
        choice = self._choose(features, generator, per_class)
        start = 0
        for images, _ in data.augmented("drift", index):
            chosen = ((choice.sources >= start) & (choice.sources < start + len(images))).nonzero()[:, 0]
            for some in chosen.split(len(images) if per_class else max(1, len(chosen))) if len(chosen) else ():
                yield self._make(images[choice.sources[some] - start], choice.targets[some])
            start += len(images)

    # -- training ------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch) -> Terms:
        """The terms of EFC++, and the drift penalty on pseudo-old images."""
        settings = self.settings
        if not self._makes_images:
            return super().loss(batch)
        copies = range(settings.pseudo_old_copies)
        # In one pass, so that BatchNorm sees old and new classes together.
        images = torch.cat([batch.images, *(batch.frozen[f"images-{copy}"] for copy in copies)])
        features = self.network.features(images)
        delta = features[batch.size :] - torch.cat([batch.frozen[f"features-{copy}"] for copy in copies])
        weight = settings.pseudo_old_weight / self._task.index**settings.pseudo_old_fade
        drift = quadratic_drift(delta, self.feature_matrix, settings.efm_weight, settings.damping)
        return {**self._terms(features[: batch.size], batch), "pseudo-old": weight * drift}

    # -- statistics ----------------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """End as EFC++ does, and forget what belonged to the old network."""
        super().end_task(task, data)
        self.__dict__.pop("_made", None)
        self.__dict__.pop("_old", None)

    def _follow_drift(self, data: TaskImages) -> None:
        settings = self.settings
        if settings.prototype_update == "efm":
            super()._follow_drift(data)
            return
        pairs = [self.before_and_after(data, index) for index in range(settings.transport_views)]
        if self._makes_images and settings.pseudo_old_transport:
            per_class = -(-settings.pseudo_old_per_class // settings.transport_views)
            for index in range(settings.transport_views):
                made_here = self._made_of(data, index, per_class)
                pairs += [(before, self.network.features(made)) for made, before in made_here]
        before, after = (torch.cat(side) for side in zip(*pairs, strict=True))
        self._transport(before, after)

    def _transport(self, before: Tensor, after: Tensor) -> None:
        """Move the old classes by what old and new features (N, n) of the same images say about the drift."""
        settings, memory = self.settings, self.memory
        residual, statistics = settings.prototype_update == "linear-residual", memory.statistics()
        metric = None
        if settings.transport_ridge == "whitened" and len(memory.means):
            metric = gaussians.mixture_covariance(memory.means, *statistics.spread())
        common = transport.ridge_map(before, after, settings.drift_ridge, metric=metric)
        if settings.transport_maps == "one":
            memory.carry(common, residual)
            return
        maps = class_transport.class_maps(
            before,
            after,
            common,
            statistics,
            temperature=settings.transport_temperature,
            pull=settings.transport_pull,
            only_shift=settings.transport_maps == "shift",
        )
        memory.carry_each(maps, residual)

    def _measured(self, task: Task, data: TaskImages) -> FeatureMatrixSum:
        total, settings = super()._measured(task, data), self.settings
        if task.index > 0 and settings.efm_on == "gaussians":
            generator = seeds.generator(data.device, task.seed, "feature-matrix", task.index)
            drawn, _ = self.memory.sampler(settings.jitter).classes(self.memory.counts.tolist(), generator)
            total = self._accumulated(total, drawn)
        elif task.index > 0 and settings.efm_on == "pseudo-old" and self._makes_images:
            for made, _ in self._made_of(data, 0):
                total = self._accumulated(total, self.network.features(made))
        return total
