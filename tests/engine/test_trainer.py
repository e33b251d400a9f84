"""The training loop on the CPU: what a step sees, how weights move, and what stays as it is."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from efcil.core.losses import cross_entropy
from efcil.data.augment import Normalisation, make_augmentation
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.store import TaskImages
from efcil.engine import feed as feed_module
from efcil.engine.checkpoint import restore_training, training_tensors
from efcil.engine.feed import Feed
from efcil.engine.first_task import FirstTask
from efcil.engine.optimiser import TorchOptimiser, rate_factor
from efcil.engine.trainer import EpochReport, Execution, Position, Trainer
from efcil.errors import TrainingError
from efcil.methods import get, incremental
from efcil.methods.base import Batch, Method, Plan, Task, Terms
from efcil.network import fast
from efcil.network.backbones import make_backbone
from efcil.network.fast.graphs import capture
from efcil.network.incremental import IncrementalNetwork
from efcil.network.resnet import ResNet
from efcil.settings import Recipe
from efcil.testing.stream import SHORT, short_stream

BATCH = 32
PER_CLASS = 23  # two classes: 46 images, so that the last batch is short
CPU = torch.device("cpu")
PLAIN = Execution(CPU, half=False, fused=False, captured=False)
FUSED = dataclasses.replace(PLAIN, fused=True)
EXECUTIONS = pytest.mark.parametrize("execution", [PLAIN, FUSED], ids=["plain", "fused"])


def task_of(index: int, batch_size: int = BATCH) -> Task:
    return Task(index, 2 * index, 2, 0, batch_size)


def images_of(index: int, per_class: int = PER_CLASS, dtype: torch.dtype = torch.float32) -> TaskImages:
    """The images of task `index`: digits 2 * index and 2 * index + 1."""
    digits = load_dataset("digits", None, SourceOptions())
    labels = digits.train.labels
    chosen = np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in (2 * index, 2 * index + 1)])
    return TaskImages(
        digits.train.images[chosen],
        labels[chosen],
        augmentation=make_augmentation("shift"),
        normalisation=Normalisation(digits.mean, digits.std),
        device=CPU,
        seed=0,
        name=f"task{index}",
        dtype=dtype,
    )


def network() -> IncrementalNetwork:
    return IncrementalNetwork(make_backbone("slim", 0))


def first(execution: Execution = PLAIN, rotations: bool = False) -> FirstTask:
    learner = FirstTask(network(), task_of(0), rotations)
    execution.equip(learner)
    return learner


def parameters(learner: Method) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner.state_dict().items()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


# -- schedules -------------------------------------------------------------------------------------------------------


def scheduled_rates(recipe: Recipe) -> list[float]:
    """The learning rate of every epoch, as PyTorch's own schedulers have it."""
    optimiser = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=recipe.learning_rate)
    scheduler: torch.optim.lr_scheduler.LRScheduler
    if recipe.schedule == "steps":
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimiser, list(recipe.milestones), gamma=recipe.decay)
    else:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, recipe.epochs)
    rates = []
    for _ in range(recipe.epochs):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("epochs", [100, 10, 7])
@pytest.mark.parametrize("schedule", ["steps", "cosine"])
def test_schedules_are_those_of_pytorch_and_scale_with_the_epochs(schedule: str, epochs: int) -> None:
    recipe = Recipe(epochs=100, schedule=schedule, milestones=(45, 90), decay=0.1).with_epochs(epochs)
    rates = [recipe.learning_rate * rate_factor(recipe, epoch) for epoch in range(epochs)]
    assert rates == pytest.approx(scheduled_rates(recipe))
    if schedule == "steps":
        assert recipe.milestones == {100: (45, 90), 10: (4, 9), 7: (3, 6)}[epochs]
        assert rates[-1] == pytest.approx(recipe.learning_rate / 100)


@EXECUTIONS
def test_the_rate_of_an_epoch_is_reported_and_used(execution: Execution) -> None:
    recipe = Recipe(optimiser="sgd", learning_rate=0.1, weight_decay=0, epochs=4, schedule="steps", milestones=(2,))
    recipe = dataclasses.replace(recipe, decay=0.0, batch_size=BATCH)
    learner, reports, states = first(execution), [], []
    start = parameters(learner)

    def on_epoch(report: EpochReport) -> None:
        reports.append(report)
        states.append({name: value.detach().clone() for name, value in learner.named_parameters()})

    Trainer(learner, images_of(0), task_of(0), recipe, execution).run(on_epoch=on_epoch)
    assert [report.learning_rate for report in reports] == [0.1, 0.1, 0.0, 0.0]
    assert [report.epoch for report in reports] == [0, 1, 2, 3]
    assert not torch.equal(states[0]["network.heads.0"], start["network.heads.0"])
    assert not torch.equal(states[1]["network.heads.0"], states[0]["network.heads.0"])
    assert equal(states[1], states[3]), "with a rate of zero nothing moves"


# -- what a step sees ------------------------------------------------------------------------------------------------


class Watcher(Method):
    """Trains the head, and writes down what it is shown."""

    def __init__(self, repeats: int = 0, broken_at: int | None = None) -> None:
        super().__init__(network())
        self.network.add_head(2, torch.Generator().manual_seed(0))
        self.network.add_head(2, torch.Generator().manual_seed(1))
        self.repeats = repeats
        self.broken_at = broken_at
        self.batches: list[Batch] = []
        self.plans: list[list[int]] = []
        self.values: list[float] = []

    def previous_images(self, task: Task) -> int:
        return self.repeats

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        return {"brightness": images.mean(dim=(1, 2, 3))}

    def draw(self, plan: Plan, generator: torch.Generator) -> dict[str, Tensor]:
        self.plans.append(plan.previous_counts.tolist())
        # The same name as above, but a row per step: the two must not be taken for each other.
        return {"brightness": torch.rand(plan.steps, 3, generator=generator)}

    def loss(self, batch: Batch) -> Terms:
        self.batches.append(copy.deepcopy(batch))  # what it points to is written anew for the next block
        assert torch.equal(batch.frozen["brightness"], batch.images[: batch.size].mean(dim=(1, 2, 3)))
        assert batch.draws["brightness"].shape == (3,)
        loss = cross_entropy(self.network.logits(self.network.features(batch.images[: batch.size])), batch.labels)
        self.values.append(loss.item())
        factor = math.nan if len(self.batches) == self.broken_at else 1.0
        return {"current": loss * factor, "nothing": (self.network.heads[0] * 0).abs().sum()}


def watch(watcher: Watcher, epochs: int, block: int = feed_module.BLOCK) -> list[EpochReport]:
    reports: list[EpochReport] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(feed_module, "BLOCK", block)
        recipe = Recipe(epochs=epochs, batch_size=8)
        Trainer(watcher, images_of(1), task_of(1, 8), recipe, PLAIN).run(on_epoch=reports.append)
    return reports


def test_an_epoch_shows_every_image_once_and_the_last_batch_is_kept() -> None:
    watcher, data = Watcher(), images_of(1)
    reports = watch(watcher, epochs=2)
    for epoch in range(2):
        shown = watcher.batches[6 * epoch : 6 * epoch + 6]
        assert [batch.size for batch in shown] == [8, 8, 8, 8, 8, 6]
        order = data.view("epoch", epoch).order
        assert sorted(order.tolist()) == list(range(46))
        assert torch.equal(torch.cat([batch.labels for batch in shown]), data.labels[order])
        losses = watcher.values[6 * epoch : 6 * epoch + 6]
        assert reports[epoch].terms == {"current": pytest.approx(sum(losses) / 6), "nothing": 0.0}
    images = [torch.cat([batch.images for batch in watcher.batches[6 * epoch :][:6]]) for epoch in range(2)]
    assert not torch.equal(images[0].sort(dim=0).values, images[1].sort(dim=0).values), "each epoch augments anew"


def test_the_images_shown_again_are_the_first_of_the_step_before() -> None:
    watcher = Watcher(repeats=5)
    watch(watcher, epochs=3)
    batches = watcher.batches
    for before, now in itertools.pairwise(batches):
        count = min(5, before.size)
        assert len(now.images) == now.size + 5
        assert torch.equal(now.images[now.size :][:count], before.images[:count])
        assert torch.equal(now.previous_labels[:count], before.labels[:count])
    # How many there are: none in the first step of the task; after the end of an epoch, those of its short last batch.
    assert watcher.plans == [[0, 8, 8, 8, 8, 8], [6, 8, 8, 8, 8, 8], [6, 8, 8, 8, 8, 8]]
    assert not batches[0].images[8:].any()


def test_a_short_last_batch_may_have_fewer_images_than_are_wanted_again() -> None:
    watcher = Watcher(repeats=7)
    watch(watcher, epochs=2)
    last, following = watcher.batches[5], watcher.batches[6]
    assert last.size == 6
    assert torch.equal(following.images[8:14], last.images[:6])
    assert watcher.plans[1][0] == 6, "the method is told that only six of them count"


def test_a_task_that_trains_nothing_makes_no_room_for_steps() -> None:
    """A block of steps with images of 224 pixels takes 650 MB, most of what learning a folder needs."""
    for epochs in (0, 1):
        recipe = Recipe(epochs=epochs, batch_size=BATCH)
        trainer = Trainer(first(), images_of(0), task_of(0), recipe, PLAIN)
        trainer.run()
        assert ("images" in vars(trainer.feed)) is bool(epochs)


def test_nothing_is_shown_again_in_the_first_task() -> None:
    assert Feed(Watcher(repeats=5), images_of(0), task_of(0), BATCH).repeats == 0


@pytest.mark.parametrize("block", [1, 4, 6])
def test_the_borders_of_blocks_change_nothing(block: int) -> None:
    one, other = Watcher(repeats=5), Watcher(repeats=5)
    watch(one, epochs=2)
    watch(other, epochs=2, block=block)
    for left, right in zip(one.batches, other.batches, strict=True):
        assert torch.equal(left.images, right.images)
        assert torch.equal(left.labels, right.labels)
        assert torch.equal(left.previous_labels, right.previous_labels)
    assert one.values == other.values
    assert list(itertools.chain(*one.plans)) == list(itertools.chain(*other.plans))
    assert equal(parameters(one), parameters(other))


# -- how weights move ------------------------------------------------------------------------------------------------


def adam_by_hand(weight: Tensor, gradients: list[Tensor], rate: float, decay: float) -> list[Tensor]:
    """Adam with the L2 penalty in the gradient (coupled), written out."""
    first_moment, second_moment, places = torch.zeros_like(weight), torch.zeros_like(weight), []
    for step, gradient in enumerate(gradients, start=1):
        total = gradient + decay * weight
        first_moment = 0.9 * first_moment + 0.1 * total
        second_moment = 0.999 * second_moment + 0.001 * total**2
        unbiased = first_moment / (1 - 0.9**step), second_moment / (1 - 0.999**step)
        weight = weight - rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)
        places.append(weight)
    return places


def test_weight_decay_is_coupled_and_adam_is_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(40, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(40, generator=generator, dtype=torch.float64) for _ in range(6)]
    expected = adam_by_hand(start, gradients, rate=1e-2, decay=0.1)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    recipe = Recipe(learning_rate=1e-2, weight_decay=0.1)
    optimiser = TorchOptimiser([{"params": [ours], "learning_rate": 1e-2}], recipe, capturable=False)
    reference = torch.optim.Adam([theirs], lr=1e-2, weight_decay=0.1)
    optimiser.begin_block(0, 6, 1.0)
    for gradient, place in zip(gradients, expected, strict=True):
        optimiser.begin_step(None)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimiser.step()
        reference.step()
        torch.testing.assert_close(ours.detach(), place)
        torch.testing.assert_close(ours.detach(), theirs.detach())


class Frozen(Method):
    """Cross-entropy with BatchNorm frozen, or learning; heads and backbone at rates of their own."""

    def __init__(self, trains_normalisation: bool, *reads: Callable[[Frozen, Batch], Terms]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            backbone = ResNet((8, 16), (1, 1)).double().to(memory_format=torch.channels_last)
        super().__init__(IncrementalNetwork(backbone))
        self.normalisation = "trained" if trains_normalisation else "frozen"
        self.reads = reads
        self.steps = 0
        self.begin_task(task_of(0))
        self.network.double()

    def loss(self, batch: Batch) -> Terms:
        self.steps += 1
        terms = {"current": cross_entropy(self.network.logits(self.network.features(batch.images)), batch.labels)}
        for reads in self.reads:
            terms |= reads(self, batch)
        return terms


def penalised(learner: Frozen, batch: Batch) -> Terms:
    return {"size": 3 * sum_of_squares(learner.network.backbone)}


def called(learner: Frozen, batch: Batch) -> Terms:
    return {"module": learner.network.backbone(batch.images).square().mean()}


def hooked(learner: Frozen, batch: Batch) -> Terms:
    """What a layer inside returns, for which `features` has to run layer by layer."""
    seen: list[Tensor] = []
    with learner.network.backbone.blocks[0].register_forward_hook(lambda *given: seen.append(given[2])):
        learner.network.features(batch.images)
    return {"inside": seen[0].square().mean()}


def replaced(learner: Frozen, batch: Batch) -> Terms:
    """Features by other weights than the parameters, made of them."""
    doubled = {f"backbone.{name}": 2 * value for name, value in learner.network.backbone.named_parameters()}
    module = Features(learner.network)
    return {"other": functional_call(module, {f"network.{n}": v for n, v in doubled.items()}, batch.images).mean()}


def checkpointed(learner: Frozen, batch: Batch) -> Terms:
    return {"again": checkpoint(learner.network.backbone, batch.images, use_reentrant=False).square().mean()}


def called_before(learner: Frozen, batch: Batch) -> Terms:
    """A gradient of its own, computed while the loss is."""
    (0.1 * sum_of_squares(learner.network.backbone)).backward()
    return {}


def differentiated_before(learner: Frozen, batch: Batch) -> Terms:
    learner.network.features(batch.images).mean().backward()
    return {}


def later(learner: Frozen, batch: Batch) -> Terms:
    """A penalty that comes after some steps."""
    return penalised(learner, batch) if learner.steps in (3, 4) else {}


READS = (called, hooked, replaced, checkpointed, called_before, differentiated_before, later)


class Features(nn.Module):
    def __init__(self, network: IncrementalNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        return self.network.features(images)


def sum_of_squares(module: nn.Module) -> Tensor:
    return torch.stack([parameter.square().sum() for parameter in module.parameters()]).sum()


class AlwaysGoesOn:
    """A keeper that nobody asks to stop."""

    def asked(self) -> bool:
        return False

    def hold(self, trainer: Trainer, position: Position) -> None:
        pass


class Places(AlwaysGoesOn):
    """Keeps the state after every step."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []

    def due(self) -> bool:
        return True

    def save(self, trainer: Trainer, position: Position) -> None:
        self.states.append(parameters(trainer.learner))


def trajectory(learner: Frozen, recipe: Recipe, fused: bool) -> list[dict[str, Tensor]]:
    """The state after every step on either path."""
    if fused:
        fast.install(learner.network, torch.float64)
        assert learner.network.path == "fused"
    places = Places()
    recipe = dataclasses.replace(recipe, normalisation=learner.normalisation)
    Trainer(learner, images_of(0, dtype=torch.float64), task_of(0), recipe, PLAIN).run(keeper=places)
    return places.states


def assert_same_trajectory(
    plain: list[dict[str, Tensor]], fused: list[dict[str, Tensor]], moving: str = "conv1.weight"
) -> None:
    assert len(plain) == len(fused) == 6
    for step, (expected, found) in enumerate(zip(plain, fused, strict=True), start=1):
        for name, value in expected.items():
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(found[name], value, atol=1e-9, rtol=1e-9, msg=f"{name} after step {step}")
    moved = plain[0][f"network.backbone.{moving}"] - plain[-1][f"network.backbone.{moving}"]
    assert moved.abs().max() > 1e-4


def stepped_recipe(optimiser: str, limit: float | None = None) -> Recipe:
    return Recipe(
        optimiser=optimiser,
        learning_rate=1e-2,
        backbone_learning_rate=3e-3,
        momentum=0.9,
        weight_decay=0.05,
        epochs=3,
        schedule="steps",
        milestones=(1, 2),
        decay=0.5,
        batch_size=BATCH,
        gradient_clip=limit,
    )


@pytest.mark.parametrize("trains_normalisation", [True, False], ids=["BatchNorm trains", "BatchNorm folded"])
@pytest.mark.parametrize(
    ("reads", "optimiser", "limit"),
    [
        *itertools.product([(), (penalised,)], ["adam", "sgd"], [None, 0.1]),
        *[((read,), "sgd", None) for read in READS],
    ],
)
def test_the_flat_optimiser_is_the_one_of_pytorch(
    reads: tuple[Callable[[Frozen, Batch], Terms], ...],
    optimiser: str,
    limit: float | None,
    trains_normalisation: bool,
) -> None:
    """Gradients count however they reach the backbone: through features, or from a loss that reads its parameters."""
    recipe = stepped_recipe(optimiser, limit)
    plain, fused = (trajectory(Frozen(trains_normalisation, *reads), recipe, fused) for fused in (False, True))
    assert_same_trajectory(plain, fused)


class Hidden(Frozen):
    """A gradient that autograd's graph does not show: the checkpoint makes a graph of its own in the backward pass."""

    def loss(self, batch: Batch) -> Terms:
        again = checkpoint(self.network.backbone, batch.images.clone().requires_grad_(), use_reentrant=True)
        return {"hidden": again.square().mean(), **super().loss(batch)}


class ReadByOthers(Frozen):
    """A gradient of something else that is computed with the backbone's weights, and is not theirs."""

    def loss(self, batch: Batch) -> Terms:
        fixed = {name: value.detach() for name, value in self.network.backbone.named_parameters()}
        images = batch.images * self.network.heads[0].mean()
        return {"other": functional_call(self.network.backbone, fixed, images).mean(), **super().loss(batch)}


@pytest.mark.parametrize("trains_normalisation", [True, False], ids=["BatchNorm trains", "BatchNorm folded"])
@pytest.mark.parametrize("kind", [Hidden, ReadByOthers])
def test_what_is_seen_too_late_is_never_silent(kind: type[Frozen], trains_normalisation: bool) -> None:
    recipe = stepped_recipe("sgd")
    with pytest.raises(TrainingError, match=r"only during the backward pass.*--path plain"):
        trajectory(kind(trains_normalisation), recipe, fused=True)
    assert len(trajectory(kind(trains_normalisation), recipe, fused=False)) == 6


class Lazy(Frozen):
    """Its backbone takes part in every other step only."""

    def loss(self, batch: Batch) -> Terms:
        self.steps += 1
        with torch.set_grad_enabled(self.steps % 2 == 0):
            features = self.network.features(batch.images)
        return {"current": cross_entropy(self.network.logits(features), batch.labels)}


class Alone(Frozen):
    """Calls the backbone itself, and nothing but that."""

    def loss(self, batch: Batch) -> Terms:
        return {"current": cross_entropy(self.network.logits(self.network.backbone(batch.images)), batch.labels)}


class OnlyNormalisation(Frozen):
    """Trains the BatchNorm layers and the heads, the convolutions not."""

    def training_mode(self, recipe: Recipe) -> None:
        super().training_mode(recipe)
        for module in self.network.backbone.modules():
            if isinstance(module, nn.Conv2d):
                module.requires_grad_(False)


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("kind", [Lazy, Alone, OnlyNormalisation])
@pytest.mark.parametrize("trains_normalisation", [True, False], ids=["BatchNorm trains", "BatchNorm folded"])
def test_backbones_that_train_in_part_or_at_times(
    optimiser: str, kind: type[Frozen], trains_normalisation: bool
) -> None:
    if kind is OnlyNormalisation and not trains_normalisation:
        pytest.skip("Nothing of the backbone trains.")
    if kind is Lazy and optimiser == "adam":
        pytest.skip("Adam of PyTorch counts the steps of every parameter, ours those of the task.")
    recipe = stepped_recipe(optimiser)
    plain, fused = (trajectory(kind(trains_normalisation), recipe, fused) for fused in (False, True))
    assert_same_trajectory(plain, fused, "norm1.weight" if kind is OnlyNormalisation else "conv1.weight")


# -- what stays as it is ---------------------------------------------------------------------------------------------


def normalisation_state(learner: Method) -> dict[str, Tensor]:
    parts = {name for name, m in learner.network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    return {n: v for n, v in learner.network.state_dict().items() if n.rpartition(".")[0] in parts}


@EXECUTIONS
def test_batch_normalisation_of_efc_never_changes_after_the_first_task(execution: Execution) -> None:
    learner = first(execution, rotations=True)
    recipe = Recipe(epochs=1, batch_size=BATCH)
    data = images_of(0)
    before = parameters(learner)
    Trainer(learner, data, task_of(0), recipe, execution).run()
    assert not torch.equal(
        before["network.backbone.norm1.running_mean"], learner.state_dict()["network.backbone.norm1.running_mean"]
    )
    method = get("efc")(learner.network)
    method.eval()
    with torch.no_grad():
        method.end_task(task_of(0), data)
    kept = {name: value.clone() for name, value in normalisation_state(method).items()}
    assert len(kept) == 5 * 9, "scale, shift, mean, variance and count of nine layers"
    for index in (1, 2):
        data = images_of(index)
        method.begin_task(task_of(index))
        weights = parameters(method)
        later = dataclasses.replace(recipe, epochs=2, weight_decay=0.1, normalisation="frozen")
        Trainer(method, data, task_of(index), later, execution).run()
        method.eval()
        with torch.no_grad():
            method.end_task(task_of(index), data)
        after = method.state_dict()
        assert not torch.equal(weights["network.backbone.conv1.weight"], after["network.backbone.conv1.weight"])
        assert equal(normalisation_state(method), kept)


# -- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken_at", "place"), [(1, "epoch 1, step 1"), (6, "epoch 1, step 6"), (9, "epoch 2, step 3")]
)
@pytest.mark.parametrize("block", [1, 4, 128])
def test_a_loss_that_is_not_finite_is_named(broken_at: int, place: str, block: int) -> None:
    with pytest.raises(TrainingError, match=rf"The loss is not finite in task 2, {place} \(current nan, nothing 0\)"):
        watch(Watcher(broken_at=broken_at), epochs=2, block=block)


class Collector(AlwaysGoesOn):
    """Keeps the positions at which it was asked to save."""

    def __init__(self) -> None:
        self.saved: list[tuple[int, int]] = []

    def due(self) -> bool:
        return True

    def save(self, trainer: Trainer, position: Position) -> None:
        assert all(torch.isfinite(parameter).all() for parameter in trainer.learner.parameters())
        self.saved.append((position.epoch, position.step))


def test_a_broken_state_is_never_saved() -> None:
    collector = Collector()
    trainer = Trainer(Watcher(broken_at=3), images_of(1), task_of(1, 8), Recipe(epochs=2, batch_size=8), PLAIN)
    with pytest.raises(TrainingError):
        trainer.run(keeper=collector)
    assert collector.saved == [(0, 1), (0, 2)]


class Steep(Watcher):
    """Its loss is finite, but in the end its gradient is not."""

    def loss(self, batch: Batch) -> Terms:
        terms = super().loss(batch)
        if len(self.batches) == 12:
            terms["nothing"] = terms["nothing"].sqrt()
        return terms


@pytest.mark.parametrize("collector", [Collector(), None], ids=["saving every step", "saving nothing"])
def test_weights_that_the_last_step_has_broken_are_noticed(collector: Collector | None) -> None:
    trainer = Trainer(Steep(), images_of(1), task_of(1, 8), Recipe(epochs=2, batch_size=8), PLAIN)
    with pytest.raises(TrainingError, match="A weight is not finite in task 2, epoch 2, step 6"):
        trainer.run(keeper=collector)
    if collector is not None:
        assert collector.saved[-1] == (1, 5)


class Unnamed(Watcher):
    """Returns its loss as PyTorch's functions do."""

    def loss(self, batch: Batch) -> Terms:
        return sum(super().loss(batch).values())  # type: ignore[return-value]


def test_a_loss_without_names_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"returned a tensor. Return terms by name"):
        watch(Unnamed(), epochs=1)


class PretendedGraph:
    """A graph of nothing, which notes what happens to it and to the memory that PyTorch holds."""

    calls: ClassVar[list[str]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, int], list[str]]:
    """Return what sets bytes of a GPU (free, held, most in use ever), and returns the list of what happens there."""

    class Stream:
        def synchronize(self) -> None:
            pass

    def has(free: int, held: int, most: int) -> list[str]:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: held)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most)
        return PretendedGraph.calls

    monkeypatch.setattr(PretendedGraph, "calls", [])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", PretendedGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: PretendedGraph.calls.append("give back"))
    return has


def test_a_capture_that_fails_is_ended(memory: Callable[[int, int, int], list[str]]) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    calls = memory(100, 20, 10)
    with pytest.raises(torch.OutOfMemoryError):
        capture(fail)
    assert calls == ["begin", "end"]
    assert gc.isenabled()


@pytest.mark.parametrize(("free", "held"), [(5, 10), (900, 31)], ids=["hardly any is free", "much is not used"])
def test_memory_is_given_back_before_a_capture(
    memory: Callable[[int, int, int], list[str]], free: int, held: int
) -> None:
    calls = memory(free, held, 10)
    capture(lambda: None)
    assert calls == ["give back", "begin", "end"]


def test_a_trainer_is_let_go_at_once() -> None:
    """Without waiting for the collector: its moments and graphs are as large as the network."""
    trainer = Trainer(first(FUSED), images_of(0), task_of(0), Recipe(batch_size=BATCH), FUSED)
    optimiser, backbone = weakref.ref(trainer.optimiser), weakref.ref(trainer.learner.network.fast)
    gc.collect()
    gc.disable()
    try:
        del trainer
        assert optimiser() is None
        assert backbone() is None
    finally:
        gc.enable()


# -- averaged weights and smoothed labels ----------------------------------------------------------------------------


class Remembering(FirstTask):
    """Remembers its weights before every step."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(network(), task_of(0), rotations=False)
        execution.equip(self)
        self.before: list[dict[str, Tensor]] = []

    def loss(self, batch: Batch) -> Terms:
        self.before.append(parameters(self))
        return super().loss(batch)


@EXECUTIONS
def test_averaged_weights_are_those_of_a_loop_over_the_steps(execution: Execution) -> None:
    recipe = Recipe(learning_rate=1e-2, epochs=3, batch_size=BATCH)
    plain = Remembering(execution)
    Trainer(plain, images_of(0), task_of(0), recipe, execution).run()
    steps = [*plain.before[1:], parameters(plain)]
    expected = {name: value.double() for name, value in plain.before[0].items()}
    for weights in steps:
        expected = {name: 0.7 * value + 0.3 * weights[name].double() for name, value in expected.items()}
    averaged = Remembering(execution)
    Trainer(averaged, images_of(0), task_of(0), dataclasses.replace(recipe, ema=0.7), execution).run()
    assert all(equal(*pair) for pair in zip(plain.before, averaged.before, strict=True)), "steps do not see it"
    found, last = parameters(averaged), parameters(plain)
    changed = 0
    for name, value in found.items():
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-5)
            changed += not torch.equal(value, last[name])
    assert changed > 10
    assert any("running_mean" in name and not torch.equal(found[name], last[name]) for name in found)
    # What the network answers is what a new one with these weights does.
    fresh = first()
    fresh.load_state_dict(found)
    images = next(images_of(0).plain())[0]
    torch.testing.assert_close(averaged.eval().scores(images), fresh.eval().scores(images), atol=1e-4, rtol=1e-4)


class StopsAfter(AlwaysGoesOn):
    """Takes what a checkpoint has after some steps, and stops."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def due(self) -> bool:
        self.steps -= 1
        return self.steps == 0

    def save(self, trainer: Trainer, position: Position) -> None:
        self.position = position
        self.tensors = {name: value.detach().clone() for name, value in training_tensors(trainer).items()}
        raise KeyboardInterrupt


@EXECUTIONS
def test_averaging_resumes_to_the_bit(execution: Execution) -> None:
    recipe = Recipe(learning_rate=1e-2, epochs=3, batch_size=BATCH, ema=0.8)
    whole, half, rest = first(execution), first(execution), first(execution)
    Trainer(whole, images_of(0), task_of(0), recipe, execution).run()
    keeper = StopsAfter(3)
    with pytest.raises(KeyboardInterrupt):
        Trainer(half, images_of(0), task_of(0), recipe, execution).run(keeper=keeper)
    trainer = Trainer(rest, images_of(0), task_of(0), recipe, execution)
    restore_training(trainer, keeper.tensors)
    trainer.run(keeper.position)
    assert equal(parameters(whole), parameters(rest))


def test_an_average_that_forgets_at_once_is_the_last_weights() -> None:
    recipe = Recipe(learning_rate=1e-2, epochs=2, batch_size=BATCH)
    results = []
    for ema in (None, 0.0):
        learner = first()
        trainer = Trainer(learner, images_of(0), task_of(0), dataclasses.replace(recipe, ema=ema), PLAIN)
        assert (trainer.average is None) == (ema is None)
        trainer.run()
        results.append(parameters(learner))
    assert equal(*results)


@pytest.mark.parametrize("name", sorted(incremental()))
def test_losses_of_later_tasks_smooth_labels_where_traits_say_so(name: str) -> None:
    """The term `current` changes, and no other term does."""
    stream = short_stream()
    method = stream.start(name)
    if not method.about.trains_later:
        pytest.skip("it trains nothing by gradient after the first task")
    stream.learn(method, 1, dataclasses.replace(SHORT, epochs=1))  # its single class has no error to smooth
    method.begin_task(stream.tasks[2])
    batch = stream.batch(method, 2)
    sharp = method.loss(batch)
    soft = method.loss(dataclasses.replace(batch, label_smoothing=0.2))
    changed = {term for term, value in sharp.items() if not torch.allclose(value, soft[term], rtol=1e-5)}
    assert changed == ({"current"} if method.about.smooths_labels else set())


@pytest.mark.parametrize("rotations", [False, True])
def test_the_first_task_smooths_labels_by_the_recipe(rotations: bool) -> None:
    recipe = Recipe(learning_rate=0.0, weight_decay=0.0, epochs=1, batch_size=BATCH, label_smoothing=0.3)
    learner = first(rotations=rotations)
    trainer = Trainer(learner, images_of(0), task_of(0), recipe, PLAIN)
    trainer.feed.load(0, 0)
    batch = trainer.feed.batch(0, BATCH)
    assert batch.label_smoothing == 0.3
    (found,) = learner.loss(batch).values()
    (sharp,) = learner.loss(dataclasses.replace(batch, label_smoothing=0.0)).values()
    assert found != sharp
