"""Every check can fail: each broken method or backbone here is found by the check that is meant for it."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from efcil import methods
from efcil.cli import main
from efcil.core.gaussians import collect
from efcil.core.losses import cross_entropy
from efcil.methods.base import Method
from efcil.methods.finetune import FineTune
from efcil.methods.memory import ClassMemory
from efcil.network.resnet import ResNet
from efcil.settings import option
from efcil.testing import BACKBONE_CHECKS, METHOD_CHECKS, LeftOut, check_backbone, check_method, on_trial
from efcil.testing.pretended import missing
from efcil.testing.stream import blueprint, short_stream
from efcil.testing.trial import history

BROKEN: list[tuple[type[Method], str, str]] = []


def broken(check: str, sentence: str) -> Callable[[type[Method]], type[Method]]:
    """Note the class down as one that `check` must fail with a sentence that has these words."""

    def note(cls: type[Method]) -> type[Method]:
        BROKEN.append((cls, check, sentence))
        return cls

    return note


class Sound(FineTune):
    """Fine-tuning that keeps the mean of every class."""

    name = "sound"
    summary = "a sound method"

    @classmethod
    def remembers(cls, settings, size):
        return ClassMemory(size, why="tests")

    def measured(self, data):
        return collect(self.network.features, data.plain())

    def end_task(self, task, data):
        self.memory.add(*self.measured(data), range(task.first_class, task.seen))


@broken("says_what_it_is", "no `summary`")
class NoSummary(Sound):
    """No summary."""

    summary = ""


@broken("says_what_it_is", "also names folders")
class NameWithASlash(Sound):
    """A name that is two folders."""

    name = "a/b"


@broken("says_what_it_is", "no documentation")
class NoDocumentation(Sound):
    pass


@broken("says_what_it_is", "Unknown recipe")
class NoFamily(Sound):
    """A family without a recipe."""

    family = "efk"


@broken("settings_are_explained", "weight is not a sentence")
class Unexplained(Sound):
    @dataclass(frozen=True)
    class Settings:
        weight: float = option(1.0, "weight")


@broken("learns_unequal_tasks", "After 4 classes, scores have the shape")
class TooManyScores(Sound):
    def scores(self, images):
        return torch.zeros(len(images), 10)


@broken("scores_are_deterministic", "differ the second time")
class Noisy(Sound):
    @torch.no_grad()
    def scores(self, images):
        return super().scores(images) + torch.rand(())


@broken("scores_are_deterministic", "in another batch")
class Relative(Sound):
    @torch.no_grad()
    def scores(self, images):
        return super().scores(images) - super().scores(images).mean(dim=0)


@broken("scores_are_deterministic", "@torch.no_grad()")
class Differentiable(Sound):
    def scores(self, images):
        return self.network.logits(self.network.features(images))


@broken("runs_repeat", "memory.means differs")
class Random(Sound):
    def end_task(self, task, data):
        super().end_task(task, data)
        self.memory.means += torch.rand(())


class Projected(Sound):
    """Makes layers as PyTorch does, one for good, and one for every task; they have a learning rate of their own."""

    def __init__(self, network, settings=None):
        super().__init__(network, settings)
        self.keep("scale", nn.Linear(1, 1), why="tests")
        self.projector = None

    def begin_task(self, task):
        super().begin_task(task)
        self.projector = nn.Linear(self.network.feature_size, 4)

    def parameter_groups(self, recipe):
        own = (each for layer in (self.scale, self.projector) for each in layer.parameters())
        return [*super().parameter_groups(recipe), {"params": own, "learning_rate": 2 * recipe.learning_rate}]

    def loss(self, batch):
        projected = self.projector(self.network.features(batch.images)).square().mean()
        return super().loss(batch) | {"projected": self.scale(projected[None])[0]}

    def end_task(self, task, data):
        super().end_task(task, data)
        self.projector = None


def test_new_layers_follow_from_the_seed() -> None:
    """In a whole run too, where the first task is trained by the engine, whatever the global random state."""
    assert not [each for each in check_method(Projected) if each.outcome == "failed"]
    stream, made = short_stream(), []
    for state in (1, 2):
        torch.manual_seed(state)
        plan = blueprint(Projected, Projected.Settings())
        made.append(plan.around(stream.network_state).scale.weight.item())
    assert made[0] == made[1]


class Normalised(Projected):
    """Trains a BatchNorm of its own, and keeps one that does not train."""

    def __init__(self, network, settings=None):
        super().__init__(network, settings)
        self.keep("norm", nn.BatchNorm1d(network.feature_size), why="tests")
        self.keep("still", nn.BatchNorm1d(network.feature_size), why="tests")

    def parameter_groups(self, recipe):
        own = {"params": self.norm.parameters(), "learning_rate": recipe.learning_rate}
        return [*super().parameter_groups(recipe), own]

    def loss(self, batch):
        features = self.network.features(batch.images)
        normed = self.norm(features) if len(features) > 1 else features  # BatchNorm refuses a single image
        apart = (normed - self.still(features).detach()).square().mean()
        return super().loss(batch) | {"apart": apart}


def test_layers_that_are_kept_are_in_training_mode_if_they_train() -> None:
    """When a task has ended everything is in eval mode, and the next one begins so."""
    assert not [each for each in check_method(Normalised) if each.outcome == "failed"]
    method, records = history(on_trial(Normalised))
    steps = [int(record.state["norm.num_batches_tracked"]) for record in records]
    assert 0 == steps[0] < steps[1] < steps[2]
    assert int(method.still.num_batches_tracked) == 0
    assert not method.norm.training


@broken("saved_state_is_complete", "Scores differ after loading")
class Forgetful(Sound):
    bias = 0.0

    def end_task(self, task, data):
        super().end_task(task, data)
        self.bias = 1.0

    @torch.no_grad()
    def scores(self, images):
        return super().scores(images) + self.bias


@broken("loaded_state_is_a_copy", "memory.means is the very tensor")
class Aliased(Sound):
    def load_tensors(self, tensors):
        super().load_tensors(tensors)
        self.memory.means = tensors["memory.means"]


@broken("interrupted_task_is_resumed", "differs")
class Counting(Sound):
    steps = 0

    def loss(self, batch):
        self.steps += 1
        return {name: value * self.steps for name, value in super().loss(batch).items()}

    def begin_task(self, task):
        super().begin_task(task)
        self.steps = 0


@broken("no_image_is_kept", "still holds the images")
class Holding(Sound):
    def end_task(self, task, data):
        super().end_task(task, data)
        self.held = data


@broken("no_image_is_kept", "has the shape of images")
class Exemplars(Sound):
    def end_task(self, task, data):
        super().end_task(task, data)
        self.exemplars = next(iter(data.plain()))[0][:2].clone()


@broken("no_image_is_kept", "exemplars holds pixels")
class HiddenExemplars(Sound):
    def end_task(self, task, data):
        super().end_task(task, data)
        self.exemplars = next(iter(data.plain()))[0][:2].flatten().clone()


@broken("storage_does_not_grow_with_images", "memory.means, of shape")
class Hoarding(Sound):
    def end_task(self, task, data):
        self.memory.means = torch.cat([self.memory.means, self.measured(data)[0]])


@broken("training_is_announced", "`trains_later` is False")
class Unannounced(Sound):
    @classmethod
    def traits(cls, settings):
        return replace(super().traits(settings), trains_later=False)


@broken("gradients_reach_what_is_trained", "network.backbone.conv1.weight gets no gradient")
class HeadsAlone(Sound):
    def loss(self, batch):
        features = self.network.features(batch.images).detach()
        return {"current": cross_entropy(self.network.logits(features), batch.labels)}


@broken("gradients_reach_what_is_trained", "call self.freeze_old_heads() in begin_task")
class NewestAlone(Sound):
    def begin_task(self, task):
        Method.begin_task(self, task)

    def loss(self, batch):
        logits = self.network.newest_logits(self.network.features(batch.images))
        return {"current": cross_entropy(logits, batch.labels - sum(self.network.head_sizes[:-1]))}


@broken("training_is_announced", "begin as FrozenBackbone does")
class Still(Sound):
    def parameter_groups(self, recipe):
        return []


@broken("gradients_reach_what_is_trained", "is not in parameter_groups")
class HalfGiven(Sound):
    def parameter_groups(self, recipe):
        return super().parameter_groups(recipe)[1:]


@broken("gradients_reach_what_is_trained", "requires gradients")
class LivelyTeacher(Sound):
    def begin_task(self, task):
        self.keep_teacher()
        super().begin_task(task)
        self.old_network.requires_grad_(True)


@broken("backbone_has_its_own_learning_rate", "network.backbone.conv1.weight has the learning rate 0.01")
class OneRate(Sound):
    def parameter_groups(self, recipe):
        return [{**group, "learning_rate": recipe.learning_rate} for group in super().parameter_groups(recipe)]


@broken("backbone_has_its_own_learning_rate", "outside the backbone has the learning rate 1e-05, and 0.02 was expected")
class FollowsTheBackbone(Projected):
    def parameter_groups(self, recipe):
        backbone, heads, own = super().parameter_groups(recipe)
        return [backbone, heads, {**own, "learning_rate": recipe.backbone_learning_rate or own["learning_rate"]}]


@broken("learns_unequal_tasks", "a new one does not have projector.bias, projector.weight")
class KeepsWhatItBegan(Projected):
    def end_task(self, task, data):
        Sound.end_task(self, task, data)


@broken("normalisation_is_frozen_or_learns", "differs")
class Thawed(Sound):
    family = "efc"

    def training_mode(self, recipe):
        self.network.train()


@broken("normalisation_is_frozen_or_learns", "running means stay")
class NeverThawed(Sound):
    def training_mode(self, recipe):
        self.network.eval()


@broken("normalisation_may_be_chosen", "With train_normalisation=False, BatchNorm is trained")
class NoChoice(Sound):
    @dataclass(frozen=True)
    class Settings:
        train_normalisation: bool = option(True, "Says nothing.")

    @classmethod
    def recipe(cls, settings, preset):
        return preset


@broken("classifiers_fit_the_method", "`statistics` gives none")
class Unmeasured(Sound):
    def statistics(self):
        return None


@broken("probabilities_are_those_trained", "The score under temperature 0.5")
class Lukewarm(Sound):
    @dataclass(frozen=True)
    class Settings:
        temperature: float = option(1.0, "Of the heads.")

    @classmethod
    def traits(cls, settings):
        return replace(super().traits(settings), temperature=settings.temperature)

    @torch.no_grad()
    def scores(self, images):
        return self.network.logits(self.network.features(images))


@broken("draws_have_one_row_per_step", "noise is not finite")
class BrokenDraws(Sound):
    def draw(self, plan, generator):
        return {"noise": torch.rand(plan.steps, generator=generator) / 0}


@broken("frozen_is_per_image", "in another batch")
class RelativeTeacher(Sound):
    def frozen(self, images):
        features = self.network.features(images)
        return {"features": features - features.mean(dim=0)}


@broken("step_never_waits_for_the_device", "`item` is not possible")
class Waiting(Sound):
    def loss(self, batch):
        return {name: value + value.item() for name, value in super().loss(batch).items()}


@broken("step_never_waits_for_the_device", "`torch.rand` is not possible")
class Drawing(Sound):
    def loss(self, batch):
        return {name: value + torch.rand(()) for name, value in super().loss(batch).items()}


@broken("plain_and_fused_paths_agree", "from there on the fused one")
class LosesAGradient(Sound):
    """A penalty on weights whose value is the same on both paths, and whose gradient is lost on one."""

    def loss(self, batch):
        weights = self.network.backbone.blocks[0].conv1.weight
        kept = weights if self.network.path == "plain" else weights.detach()
        return {**super().loss(batch), "penalty": 0.01 * kept.square().sum()}


@broken("end_of_task_in_any_pieces", "memory.means, seen in other pieces, differs")
class MeanOfMeans(Sound):
    def end_task(self, task, data):
        super().end_task(task, data)
        pieces = [self.network.features(images).mean(dim=0) for images, _ in data.plain()]
        self.memory.means[-1] = torch.stack(pieces).sum(dim=0)


@broken("stays_on_the_device", "cuda:0 and cpu")
class Elsewhere(Sound):
    """Weights of images that are made on the CPU."""

    def loss(self, batch):
        features = self.network.features(batch.images) * torch.ones(batch.size)[:, None]
        return {"loss": cross_entropy(self.network.logits(features), batch.labels)}


@broken("stays_on_the_device", "Expected a cpu device type for generator")
class DrawsElsewhere(Sound):
    def draw(self, plan, generator):
        return {"noise": torch.rand(plan.steps, generator=generator)}


@broken("stays_on_the_device", "not on the device: offset")
class KeepsElsewhere(Sound):
    def end_task(self, task, data):
        super().end_task(task, data)
        self.offset = self.memory.means.mean(dim=0).cpu()


@broken("stays_on_the_device", "captured step")
class SelectsInAStep(Sound):
    """Of how many images a mask selects, the host knows nothing; the check of `loss` alone does not see an index."""

    def loss(self, batch):
        chosen = batch.labels >= 0
        logits = self.network.logits(self.network.features(batch.images))
        return {"loss": cross_entropy(logits[chosen], batch.labels[chosen])}


@pytest.mark.parametrize(("method", "check", "sentence"), BROKEN, ids=[cls.__name__ for cls, *_ in BROKEN])
def test_a_broken_method_is_found(method: type[Method], check: str, sentence: str) -> None:
    (chosen,) = (each for each in METHOD_CHECKS if each.name == check)
    if check == "stays_on_the_device" and (reason := missing()) is not None:
        pytest.skip(reason)
    with pytest.raises(Exception, match=re.escape(sentence)) as raised:
        chosen(on_trial(method))
    assert not isinstance(raised.value, LeftOut)


def test_nearly_every_check_is_seen_to_fail() -> None:
    """A loss of a short batch that is not finite ends the run, and two checks need a GPU; YAML is for what is named."""
    never = {each.name for each in METHOD_CHECKS} - {check for _, check, _ in BROKEN}
    assert never == {
        "settings_survive_yaml",
        "loss_takes_a_short_batch",
        "captured_steps_are_the_eager_ones",
        "bfloat16_is_about_float32",
    }


def test_a_sound_method_passes() -> None:
    found = list(check_method(Sound))
    assert [each.check for each in found] == list(METHOD_CHECKS)
    assert {each.reason for each in found if each.outcome == "failed"} == set()
    reasons = {each.check.name: each.reason for each in found if each.outcome == "left out"}
    assert "not registered" in reasons["settings_survive_yaml"]
    assert len(reasons) < 6


class Raising(Sound):
    """What it raises is said once."""

    def loss(self, batch):
        raise ValueError("no such thing")


def test_what_cannot_learn_is_not_checked_further() -> None:
    found = {each.check.name: each for each in check_method(Raising)}
    assert found["says_what_it_is"].outcome == "passed"
    assert found["learns_unequal_tasks"].outcome == "failed"
    assert found["learns_unequal_tasks"].reason == "ValueError: no such thing"
    assert "in loss" in found["learns_unequal_tasks"].trace
    assert found["runs_repeat"].outcome == "left out"
    assert sum(each.outcome == "failed" for each in found.values()) == 1


# -- backbones -------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """A backbone that passes."""

    feature_size = 8

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, images):
        return self.layer(images).relu().mean(dim=(2, 3))


class Unpooled(Small):
    def forward(self, images):
        return self.layer(images)


class WrongSize(Small):
    feature_size = 9


class Double(Small):
    def forward(self, images):
        return super().forward(images).double()


class Constant(Small):
    def forward(self, images):
        return super().forward(images) * 0


class Dropping(Small):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), training=True)


class DroppingInTraining(Small):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), training=self.training)


class Centred(Small):
    def forward(self, images):
        features = super().forward(images)
        return features - features.mean(dim=0)


class Unused(Small):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


class Normed(Small):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, images):
        return self.norm(super().forward(images))


class Scaled(Small):
    """Has a number that is not part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = random.random()

    def forward(self, images):
        return super().forward(images) * self.scale


@pytest.mark.parametrize(
    ("make", "check", "sentence"),
    [
        (Unpooled, "gives_features", "become the shape (6, 8, 30, 30)"),
        (WrongSize, "gives_features", "its `feature_size` is 9"),
        (Double, "gives_features", "torch.float64"),
        (lambda: 3, "gives_features", "a int, not a torch.nn.Module"),
        (Constant, "features_tell_images_apart", "the same features"),
        (Dropping, "eval_is_deterministic", "differ the second time"),
        (DroppingInTraining, "training_is_deterministic", "others after an interruption"),
        (Centred, "eval_is_deterministic", "in another batch"),
        (Unused, "every_parameter_gets_a_gradient", "spare.weight gets no gradient"),
        (Constant, "every_parameter_gets_a_gradient", "is zero"),
        (Normed, "trains_on_a_single_image", "more than 1 value"),
        (Scaled, "state_is_complete", "something is not part of it"),
    ],
)
def test_a_broken_backbone_is_found(make: Callable[[], Any], check: str, sentence: str) -> None:
    found = {each.check.name: each for each in check_backbone(make)}
    assert (found[check].outcome, sentence in found[check].reason) == ("failed", True), found[check]


@pytest.mark.parametrize("make", [Small, lambda: ResNet((8, 16), (1, 1))])
def test_a_sound_backbone_passes(make: Callable[[], nn.Module]) -> None:
    assert {each.outcome for each in check_backbone(make, 16)} == {"passed"}
    assert len(list(check_backbone(make, 16))) == len(BACKBONE_CHECKS)


# -- the command -----------------------------------------------------------------------------------------------------

OWN = '''
import torch
from efcil.methods.finetune import FineTune
class Mine(FineTune):
    """A method of one's own."""
    name = "mine"
    summary = "fine-tuning"
    def end_task(self, task, data):
        self.held = data
'''


def test_the_command_says_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    before = os.environ.get(methods.VARIABLE)
    assert main(["check", str(tmp_path / "mine.py")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mine"
    assert len(lines) == len(METHOD_CHECKS) + 2, "one line per check"
    (failed,) = (line for line in lines if line.startswith("  failed"))
    assert failed.endswith("-> Something still holds the images of a task that has ended.")
    assert lines[-1].startswith("  ")
    assert ", 1 failed, " in lines[-1]
    assert "mine" not in methods.available()
    assert os.environ.get(methods.VARIABLE) == before


def test_the_command_takes_names_and_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "slim", "--image-size", "8"]) == 0
    assert main(["check", "efcil.network.resnet:ResNet", "--image-size", "8"]) == 0
    (tmp_path / "own_backbone.py").write_text("from torch import nn\ndef make():\n    return nn.Flatten()\n")
    assert main(["check", f"{tmp_path / 'own_backbone.py'}:make"]) == 1
    assert "its `feature_size` is None" in capsys.readouterr().out
    assert main(["check", "joint"]) == 0
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("efk", "Did you mean 'efc'"),
        ("nowhere.py", "nowhere.py is not a file"),
        ("efcil.network.resnet:nothing", "has no function 'nothing'"),
        ("no_such_module:make", "Loading no_such_module failed"),
    ],
)
def test_the_command_says_what_it_does_not_know(what: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", what]) == 2
    assert message in capsys.readouterr().err
