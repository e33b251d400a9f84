"""What a method is: the contract between the engine and one file per method."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from efcil import seeds
from efcil.core import transport
from efcil.core.classifiers import ClassStatistics
from efcil.data.store import TaskImages
from efcil.errors import SettingsError, some
from efcil.methods.kept import Keeping, rows_of, weighted
from efcil.methods.memory import ClassMemory, renamed
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe
from efcil.settings import Settings as RunSettings

#: Class attributes that methods had in earlier versions, and what replaces them.
_REPLACED = {
    "recipe_family": "override `traits`, its field `family`",
    "heads_have_temperature": "override `traits`, its field `temperature`",
    "exemplar_free": "override `traits`, its field `images`",
    "keeps": "`remembers` returns a ClassMemory, or override `traits`, its field `keeps`",
    "gradient_limit": "it is `gradient_clip` of a recipe; override `recipe`",
    "trains_normalisation": "it is `normalisation` of a recipe; have a setting `train_normalisation`",
    "purposes": "give the purpose to `keep`, which registers a buffer or a module",
}

Terms = dict[str, Tensor]
ParameterGroup = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """The classes of a task. Classes are positions in the class order: those of a task are consecutive."""

    index: int
    first_class: int
    classes: int
    seed: int
    batch_size: int

    @property
    def seen(self) -> int:
        """Number of classes seen once this task is learned."""
        return self.first_class + self.classes


@dataclass
class Batch:
    """One training step's data. `images` holds the batch itself, then `previous_images` of the step before it."""

    images: Tensor
    labels: Tensor
    previous_labels: Tensor
    frozen: dict[str, Tensor] = field(default_factory=dict)
    draws: dict[str, Tensor] = field(default_factory=dict)
    #: The share of a label's probability that the recipe spreads over all classes.
    label_smoothing: float = 0.0
    #: Features of images of the current classes by the network that is trained, with labels from 0, as losses of this
    #: step have computed them: what the term `contrast` compares.
    compared: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of images in the batch itself."""
        return len(self.labels)


@dataclass(frozen=True)
class Piece:
    """Images of an epoch that are looked at together, before its steps: from number `start` of the epoch on.

    `at(epoch)` renders those that have the same places in another epoch. `seed` is that of the task.
    """

    images: Tensor
    epoch: int
    start: int
    seed: int
    at: Callable[[int], Tensor]

    def generator(self, purpose: str, epoch: int | None = None) -> torch.Generator:
        """Return a generator of random numbers for this piece, or for the one at its place in another epoch."""
        chosen = self.epoch if epoch is None else epoch
        return seeds.generator(self.images.device, self.seed, purpose, chosen, self.start)


@dataclass(frozen=True)
class Plan:
    """The steps that random numbers are drawn for: how many, and how many images the step before each one had."""

    steps: int
    batch_size: int
    previous_counts: Tensor


@dataclass(frozen=True)
class Traits:
    """What the rest of the program must know about a method. The defaults fit most methods; see `Method.traits`."""

    #: Which of the preset's recipes later tasks follow.
    family: str
    #: What a classifier at test time may be built on: trained `heads`, and `means` and `covariances` of the features
    #: that `embed` gives.
    keeps: tuple[str, ...] = ("heads",)
    #: Whether `scores` are those of the heads.
    decides_by_heads: bool = True
    #: The temperature of the softmax that later tasks train the heads with.
    temperature: float = 1.0
    #: Whether more images of known classes can be blended into the memory (`efcil learn --more`).
    learns_more: bool = False
    #: Whether the recipe of later tasks trains anything.
    trains_later: bool = True
    #: Whether the loss of later tasks smooths labels by `batch.label_smoothing`; that of the first task always does.
    smooths_labels: bool = False
    #: Which images training sees: the current task's, or those of all tasks so far, every time from scratch.
    images: Literal["task", "all"] = "task"
    #: After which tasks the method is trained and tested.
    trained_after: Literal["every", "last"] = "every"


class Method(Keeping):
    """A class-incremental learner. Its state is parameters, buffers and submodules, and nothing else.

    Subclasses set `name` and `summary`, state their hyper-parameters as a frozen dataclass called `Settings`, and write
    `loss`; the rest has defaults. The first task is trained by the engine, alike for all methods that share it;
    `end_task` is called for it as for the others.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    #: Which of the preset's recipes later tasks follow.
    family: ClassVar[str] = "efc"
    #: Whether `loss` smooths labels by `batch.label_smoothing`.
    smooths_labels: ClassVar[bool] = False
    #: Whether later tasks may have the terms of a recipe: rotated and mixed classes, and contrast (`later.rotations`,
    #: `later.mixing`, `later.contrast`). The method must train the newest head on features. If `loss` adds those of
    #: the batch to `batch.compared`, contrast needs no pass of its own.
    extra_terms: ClassVar[bool] = False
    #: Whether the method also works with cosine heads: it asks the network for scores, and computes none of its own.
    cosine_heads: ClassVar[bool] = False
    #: The recipe where none is asked for, if the preset has it: `paper` (that of the family) or `modern`.
    usual_recipe: ClassVar[str] = "paper"

    @dataclass(frozen=True)
    class Settings:
        """No settings of its own."""

    #: What is stored about every class, if `remembers` returns something.
    memory: ClassMemory

    def __init__(self, network: IncrementalNetwork, settings: Any = None) -> None:
        super().__init__()
        self.network = network
        self.settings: Any = settings if settings is not None else type(self).Settings()
        self.teacher: IncrementalNetwork | None = None
        memory = self.remembers(self.settings, network.feature_size)
        if memory is not None:
            self.memory = memory
        self.about = self.traits(self.settings)

    def __init_subclass__(cls, **others: Any) -> None:
        super().__init_subclass__(**others)
        for name, instead in _REPLACED.items():
            if not callable(vars(cls).get(name, len)):
                raise SettingsError(f"Method {cls.name or cls.__name__} sets {name!r}, which is not read: {instead}.")
        # Inherited parameters are those of another class, whose decorator knows no field of this one.
        own = vars(cls).get("Settings")
        if own is None:
            return
        if not getattr(vars(own).get("__dataclass_params__"), "frozen", False):
            raise SettingsError(
                f"The Settings of method {cls.name or cls.__name__} are not a frozen dataclass. "
                "Write @dataclass(frozen=True) above them."
            )
        # Tables and the folders of runs name a setting by its name alone.
        taken = sorted({each.name for each in fields(own)} & {each.name for each in fields(RunSettings)})
        if taken:
            raise SettingsError(
                f"Method {cls.name or cls.__name__} has settings that are called as those of every run: "
                f"{', '.join(taken)}. Give them other names."
            )

    # -- what is known about the method before it is built -----------------------------------------------------

    @classmethod
    def remembers(cls, settings: Any, size: int) -> ClassMemory | None:
        """Return an empty memory of classes with `size` features, the method's `self.memory`; None for none."""
        return None

    @classmethod
    def traits(cls, settings: Any) -> Traits:
        """Return what the rest of the program must know; an override changes what differs, with `replace`."""
        memory = cls.remembers(settings, 1)
        by_heads = cls.scores is Method.scores
        return Traits(
            family=cls.family,
            keeps=("heads", *(memory.keeps if memory is not None else ())),
            decides_by_heads=by_heads,
            learns_more=by_heads and memory is not None and memory.blends and cls.embed is Method.embed,
            smooths_labels=cls.smooths_labels,
        )

    @classmethod
    def recipe(cls, settings: Any, preset: Recipe) -> Recipe:
        """Return the recipe of later tasks: the preset's, except for values that settings of the method determine.

        One called `train_normalisation` determines whether BatchNorm is trained. `later.NAME=VALUE` overrides both.
        """
        trains = getattr(settings, "train_normalisation", None)
        return preset if trains is None else replace(preset, normalisation="trained" if trains else "frozen")

    # -- the life of a task ------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Grow the network for the classes of `task` (not called for the first task) and decide what trains."""
        self.network.add_head(task.classes, seeds.generator("cpu", task.seed, "head", task.index))
        self.network.requires_grad_(True)

    def freeze_old_heads(self) -> None:
        """Leave all heads but the newest as they are; for `begin_task`, where the loss has no gradient for them."""
        for head in list(self.network.heads)[:-1]:
            head.requires_grad_(False)

    def prepare(self, task: Task, data: TaskImages) -> None:
        """Look at the images of a later task before its training begins, or resumes; what is held is freed at its end.

        It may depend on the images, the frozen networks and the task's seed, and on nothing else.
        """

    def training_mode(self, recipe: Recipe) -> None:
        """Set the network to training mode: BatchNorm trained, or frozen in values and statistics.

        A backbone whose learning rate is 0 needs no gradients.
        """
        trained = recipe.normalisation == "trained"
        self.network.train(trained)
        if not trained:
            for parameter in self.network.norm_parameters():
                parameter.requires_grad_(False)
        if recipe.backbone_learning_rate == 0 and self.network.fast is None:
            self.network.backbone.requires_grad_(False).eval()

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """Return what the optimiser gets: trainable backbone and head parameters with their learning rates."""
        rate = recipe.learning_rate if recipe.backbone_learning_rate is None else recipe.backbone_learning_rate
        groups = [
            {"params": trainable(self.network.backbone.parameters()), "learning_rate": rate},
            {"params": trainable(self.network.head_parameters()), "learning_rate": recipe.learning_rate},
        ]
        return [group for group in groups if group["params"]]

    def previous_images(self, task: Task) -> int:
        """Return how many images of the previous step the loss needs again."""
        return 0

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Return what frozen networks compute from `images`, one row per image. Called ahead, in large batches."""
        return {}

    def ahead(self, piece: Piece) -> dict[str, Tensor]:
        """Return all that is computed ahead for a piece of an epoch, one row per image: what `frozen` returns.

        An override may add what depends on random numbers, or on the epoch, but not on the weights being trained.
        """
        return self.frozen(piece.images)

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the random numbers that the planned steps need, one row per step."""
        return {}

    def loss(self, batch: Batch) -> Terms:
        """Return the named terms whose sum is minimised."""
        raise NotImplementedError(f"{type(self).__name__} must define loss()")

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Compute what is needed after the task's images are gone.

        The network is in eval mode and gradients are off; code that learns here uses `with torch.enable_grad()`.
        """

    # -- the old network ---------------------------------------------------------------------------------------

    def keep_teacher(self) -> None:
        """Keep a frozen copy of the network, to compare with while training continues."""
        # Rebuilt, not saved, because a task always starts from a saved state; hence hidden from the module's state.
        object.__setattr__(self, "teacher", self.network.frozen_copy())

    @property
    def old_network(self) -> IncrementalNetwork:
        """The network before the task: `teacher`, which must have been kept."""
        if self.teacher is None:
            raise SettingsError(
                f"Method {self.name!r} asks for the old network, which it has not kept: call self.keep_teacher() in "
                "begin_task, before super().begin_task(task)."
            )
        return self.teacher

    def before_and_after(self, data: TaskImages, index: int = 0) -> tuple[Tensor, Tensor]:
        """Return the features of all images by the old network and by the present one, in one augmented view."""
        pairs = [(self.old_network.features(x), self.network.features(x)) for x, _ in data.augmented("drift", index)]
        before, after = zip(*pairs, strict=True)
        return torch.cat(before), torch.cat(after)

    def carry_memory(self, data: TaskImages, ridge: float, residual: bool = False) -> None:
        """Move the classes of the memory by one ridge map from old to new features of the current images.

        With `residual`, what the map leaves unexplained is added to the covariances.
        """
        self.memory.carry(transport.ridge_map(*self.before_and_after(data), ridge), residual)

    # -- classes that go ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def forget_classes(self, classes: Collection[int]) -> None:
        """Remove every row of these classes: of the heads, of the memory, and of all else that has rows per class.

        What belongs to all classes together stays. A task all of whose classes are gone has a head without rows.
        """
        seen = sum(self.network.head_sizes)
        kept = [each for each in range(seen) if each not in set(classes)]
        self._refuse_undeclared()
        for module in self.modules():
            if isinstance(module, Keeping):
                module.keep_rows(kept, seen)
        start = 0
        for index, head in enumerate(self.network.heads):
            own = [each - start for each in kept if start <= each < start + len(head)]
            self.network.heads[index] = nn.Parameter(rows_of(head, own), requires_grad=head.requires_grad)
            start += len(head)
        self.classes_changed()
        self.restored()

    @torch.no_grad()
    def merge_classes(self, classes: Sequence[int], images: Sequence[int]) -> None:
        """Make several classes one, at the place of the first of them; `images` are the numbers of images of all.

        The memory becomes what it would be if they had been one class. Rows of heads, and others that were trained or
        solved, are averaged, weighted by images.
        """
        classes, seen = sorted(classes), sum(self.network.head_sizes)
        self._refuse_undeclared()
        weights = torch.tensor([float(images[each]) for each in classes], dtype=torch.float64)
        weights /= weights.sum()
        heads = self.network.head_weight().detach().clone()
        heads[classes[0]] = weighted(heads[classes], weights)
        self.replace_heads(heads)
        for module in self.modules():
            if isinstance(module, ClassMemory):
                module.merge(classes, images)
            elif isinstance(module, Keeping):
                module.average_rows(classes, weights, seen)
        self.forget_classes(classes[1:])

    def _refuse_undeclared(self) -> None:
        """Refuse where something is stored of which nobody can say whether it has rows for every class."""
        known = self.purposes().values()
        others = [
            name
            for name in self.stored()
            if not any(each.per_class >= 0 and re.fullmatch(each.pattern, name) for each in known)
        ]
        if others:
            raise SettingsError(
                f"Method {self.name!r} stores {some(others)} and does not say whether a class has rows there. Register "
                "it with self.keep(..., why=..., per_class=...): the number of rows of each class, 0 for none."
            )

    def classes_changed(self) -> None:
        """Compute anew what is solved from the memory, and saved. Called after classes were forgotten or merged."""

    def belongs_to_all(self) -> list[str]:
        """Return the titles of what is stored about all classes together, of which no part can be removed."""
        stored = self.stored()
        return list(
            dict.fromkeys(
                each.title
                for each in self.purposes().values()
                if each.per_class == 0 and any(re.fullmatch(each.pattern, name) for name in stored)
            )
        )

    # -- inference and state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self, images: Tensor) -> Tensor:
        """Return the scores (batch, seen classes) of normalised images."""
        return self.network.logits(self.network.features(images)) / self.head_temperature

    @property
    def head_temperature(self) -> float:
        """The temperature of the softmax that the heads are trained with; the shared first task has none."""
        return self.about.temperature if len(self.network.heads) > 1 else 1.0

    def embed(self, images: Tensor) -> Tensor:
        """Return the features that the class statistics are about."""
        return self.network.features(images)

    @torch.no_grad()
    def replace_heads(self, weight: Tensor) -> None:
        """Give all heads other weights: a row for every class seen."""
        for head, rows in zip(self.network.heads, weight.split(self.network.head_sizes), strict=True):
            head.copy_(rows)

    def measured_views(self, data: TaskImages) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (input, labels) pieces of the views in which more images of known classes are measured."""
        return data.augmented("prototypes")

    def statistics(self) -> ClassStatistics | None:
        """Return the class means and covariances that the method keeps, if any."""
        memory = getattr(self, "memory", None)
        return None if memory is None else memory.statistics()

    def importance_matrix(self) -> Tensor | None:
        """Return the matrix (n, n) of how much each direction of feature space matters, if the method keeps one.

        It is symmetric, and about the features of `self.network`. A run records its eigenvalues after every task.
        """
        return None

    def stored(self) -> dict[str, Tensor]:
        """Return what the method stores besides the network itself."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith("network.")}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Load a saved state whose heads and buffers may be larger than the present ones."""
        tensors = renamed(tensors, self.state_dict().keys())
        prefix = "network."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        self.network.match_heads(own)
        for name, tensor in tensors.items():
            owner_name, _, leaf = name.rpartition(".")
            owner = self.get_submodule(owner_name)
            if leaf in owner._buffers:
                buffer = owner._buffers[leaf]
                device = buffer.device if buffer is not None else next(self.network.backbone.parameters()).device
                owner._buffers[leaf] = tensor.to(device, copy=True)
        self.load_state_dict(tensors)
        for module in self.modules():
            if isinstance(module, ClassMemory):
                module.restored()
        self.restored()

    def restored(self) -> None:
        """Rebuild what is derived from the state and not saved. Called after a state was loaded."""


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that require gradients; not the heads of tasks all of whose classes were forgotten."""
    return [parameter for parameter in parameters if parameter.requires_grad and parameter.numel()]
