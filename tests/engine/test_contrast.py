"""The contrastive term, in the first task and in later ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from efcil import methods
from efcil.core.losses import supervised_contrast
from efcil.core.rotation import rotate_batch
from efcil.engine import contrast, lifecycle, mixed, rotated
from efcil.engine.checkpoint import training_tensors
from efcil.methods.base import Batch, Method, Terms
from efcil.methods.finetune import FineTune
from efcil.testing.compare import assert_equal, clone
from efcil.testing.stream import FUSED, PLAIN, SHORT, Stream, blueprint, fitting, short_stream
from efcil.testing.trial import LAST, QUICK, resumed

CONTRAST = replace(SHORT, contrast=0.5)
ALLOWING = sorted(name for name, method in methods.bundled().items() if method.extra_terms)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return short_stream()


def begun(stream: Stream, name: str) -> Method:
    """Return a method at the beginning of the last task; nothing was trained in the second one."""
    method = stream.start(name, **QUICK.get(name, {}))
    stream.learn(method, 1, replace(SHORT, epochs=0))
    method.begin_task(stream.tasks[LAST])
    return method


@pytest.mark.parametrize("name", ALLOWING)
def test_losses_hand_on_the_features_of_current_images_and_no_others(stream: Stream, name: str) -> None:
    method = begun(stream, name)
    batch = stream.batch(method, LAST, step=1)
    method.network.eval()
    method.loss(batch)
    ((features, labels),) = batch.compared
    assert torch.equal(labels, batch.labels - stream.tasks[LAST].first_class)
    expected = method.network.features(batch.images[: batch.size])
    torch.testing.assert_close(features, expected, rtol=1e-4, atol=1e-5)
    assert features.requires_grad


class Silent(FineTune):
    """Fine-tuning that hands nothing on."""

    name = "silent"

    def loss(self, batch: Batch) -> Terms:
        terms = super().loss(batch)
        batch.compared.clear()
        return terms


def first_step(stream: Stream, method: Any, **values: Any) -> dict[str, float]:
    """Return the terms of the first step of the last task, BatchNorm being frozen."""
    recipe = replace(CONTRAST, normalisation="frozen", **values)
    trainer = lifecycle.begin_later(method, stream.tasks[LAST], stream.data[LAST], recipe, PLAIN)
    trainer.feed.load(0, 0)
    trainer.optimiser.begin_block(0, 1, 1.0)
    trainer.step(0, trainer.feed.batch_length(0))
    return dict(zip(trainer.names, trainer.losses[0].tolist(), strict=False))


def test_a_method_that_hands_nothing_on_has_it_too(stream: Stream) -> None:
    found = [
        first_step(stream, stream.learn(stream.start(each), 1, replace(SHORT, epochs=0)))
        for each in ("finetune", Silent)
    ]
    assert found[0]["contrast"] > 0
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("term", [contrast, mixed, rotated])
def test_a_later_task_has_a_term_only_where_the_method_allows_it(stream: Stream, term: Any) -> None:
    recipe = replace(CONTRAST, rotations=True, mixing=1)
    for allowed in (True, False):
        method = stream.start("finetune")
        method.extra_terms = allowed
        assert (term.attach(method, stream.tasks[LAST], recipe) is not None) == allowed
    assert term.attach(stream.start("finetune"), stream.tasks[LAST], SHORT) is None, "nobody asked"


def test_its_layers_begin_as_linear_layers_do(stream: Stream) -> None:
    task = stream.tasks[LAST]
    made, again, other = (
        contrast.Contrast(stream.start("finetune"), each, 0.1) for each in (task, task, replace(task, seed=1))
    )
    first, last = made.layers[0], made.layers[-1]
    assert (tuple(first.weight.shape), tuple(last.weight.shape)) == ((64, 64), (contrast.WIDTH, 64))
    for name, value in made.named_parameters():
        assert 0.9 / 8 < float(value.detach().abs().max()) <= 1 / 8, name
        assert torch.equal(value, again.get_parameter(name))
        assert not torch.equal(value, other.get_parameter(name))


def test_the_weight_and_the_temperature_count(stream: Stream) -> None:
    def term(**values: Any) -> float:
        method = stream.learn(stream.start("finetune"), 1, replace(SHORT, epochs=0))
        return first_step(stream, method, **values)["contrast"]

    assert term(contrast=1.0) == pytest.approx(2 * term())
    assert term(contrast_temperature=1.0) != pytest.approx(term(), rel=1e-3)


def test_turned_images_and_mixtures_have_labels_of_their_own(stream: Stream) -> None:
    method, task = begun(stream, "finetune"), stream.tasks[LAST]
    recipe = replace(CONTRAST, rotations=True, mixing=1, normalisation="frozen")
    trainer = lifecycle.Trainer(method, stream.data[LAST], task, recipe, PLAIN)
    trainer.feed.load(0, 0)
    batch = trainer.feed.batch(0, trainer.feed.batch_length(0))
    assert trainer.rotated is not None
    assert trainer.mixed is not None
    assert trainer.contrast is not None
    method.loss(batch)
    trainer.rotated.loss(method, batch)
    trainer.mixed.loss(method, batch)
    features, labels = (torch.cat(each) for each in zip(*batch.compared, strict=True))
    own, names = (batch.labels - task.first_class).tolist(), []
    names += [("class", label) for label in own]
    names += [("turned", label, turn) for label in own for turn in (1, 2, 3)]
    for place, label in enumerate(own):
        pair = tuple(sorted((label, own[(place + 1) % len(own)])))
        names.append(("class", label) if pair[0] == pair[1] else ("pair", *pair))
    assert len(names) == len(features) == 5 * batch.size
    assert len(set(names)) == len(set(labels.tolist())) > 3 + 9
    assert len(set(zip(names, labels.tolist(), strict=True))) == len(set(names))
    expected = supervised_contrast(trainer.contrast.layers(features), labels, recipe.contrast_temperature)
    assert torch.equal(trainer.contrast.loss(batch), expected)


@pytest.mark.parametrize("rotations", [False, True])
def test_the_first_task_is_learned_with_it_and_nothing_of_it_stays(stream: Stream, rotations: bool) -> None:
    task, data, plan = stream.tasks[0], stream.data[0], blueprint("finetune")
    found: dict[float, Any] = {}
    for weight in (0.0, 0.5):
        recipe = replace(SHORT, epochs=4, contrast=weight, rotations=rotations)
        trainer, terms = lifecycle.begin_first(plan, task, data, recipe), []
        assert any("contrast." in name for name in training_tensors(trainer)) is bool(weight)
        trainer.run(on_epoch=lambda report, terms=terms: terms.append(report.terms))
        found[weight] = trainer.learner.network.state_dict(), terms
        assert contrast.NAME not in trainer.learner._modules
    assert all("contrast" not in terms for terms in found[0.0][1])
    assert found[0.5][1][-1]["contrast"] < 0.9 * found[0.5][1][0]["contrast"]
    assert found[0.0][0].keys() == found[0.5][0].keys()
    convolution = next(name for name in found[0.0][0] if name.startswith("backbone.") and name.endswith("weight"))
    assert not torch.equal(found[0.0][0][convolution], found[0.5][0][convolution]), "The network is trained by it."


def test_the_first_task_compares_all_turns(stream: Stream) -> None:
    task, data = stream.tasks[0], stream.data[0]
    trainer = lifecycle.begin_first(blueprint("finetune"), task, data, replace(CONTRAST, rotations=True))
    trainer.feed.load(0, 0)
    batch = trainer.feed.batch(0, trainer.feed.batch_length(0))
    trainer.learner.eval()
    trainer.learner.loss(batch)
    ((features, labels),) = batch.compared
    torch.testing.assert_close(features, trainer.learner.network.features(rotate_batch(batch.images)))
    turns = torch.arange(3)
    assert torch.equal(labels[batch.size :], (4 + 3 * batch.labels[:, None] + turns).flatten())


@pytest.mark.parametrize("name", ["finetune", "cedar"])
def test_a_later_task_is_learned_with_it(stream: Stream, name: str) -> None:
    method = stream.start(name, **QUICK.get(name, {}))
    assert "contrast" not in stream.train(method, 1, CONTRAST)[-1], "One class cannot be told from another."
    stream.end(method, 1)
    terms = stream.train(method, LAST, replace(CONTRAST, epochs=4))
    assert terms[-1]["contrast"] < 0.9 * terms[0]["contrast"]
    assert not any(key.startswith(contrast.NAME) for key in method.state_dict())


def test_methods_that_cannot_have_it_do_not(stream: Stream) -> None:
    method = stream.start("pass")
    stream.learn(method, 1, replace(SHORT, epochs=0))
    assert "contrast" not in stream.train(method, LAST, CONTRAST)[-1]


def test_an_interrupted_task_is_resumed(stream: Stream) -> None:
    """The layers are part of the checkpoint."""
    plan, method = blueprint("lwf"), stream.start("lwf")
    stream.learn(method, 1, SHORT)
    before = clone(method.state_dict())
    whole = plan.load(before)
    lifecycle.learn_task(plan, whole, stream.tasks[LAST], stream.images(LAST), fitting(whole, CONTRAST))
    again = resumed(stream, plan.load(before), plan.load(before), LAST, steps=2, recipe=CONTRAST)
    assert_equal(clone(again.state_dict()), clone(whole.state_dict()))


@pytest.mark.parametrize("limit", [None, 0.5])
def test_plain_and_fused_paths_agree(stream: Stream, limit: float | None) -> None:
    recipe = replace(CONTRAST, optimiser="sgd", learning_rate=1e-3, epochs=1, gradient_clip=limit)
    found = []
    for execution in (PLAIN, FUSED):
        method = stream.start("finetune")
        stream.learn(method, 1, replace(SHORT, epochs=0))
        execution.equip(method)
        trainer = lifecycle.begin_later(method, stream.tasks[LAST], stream.data[LAST], recipe, execution)
        start = clone(method.state_dict())
        trainer.run()
        found.append(clone(method.state_dict()))
        layers = trainer.contrast.layers[0].weight  # type: ignore[union-attr]
        assert not torch.equal(layers, start["contrast.layers.0.weight"])
    for key, value in found[0].items():
        if value.is_floating_point():
            torch.testing.assert_close(found[1][key], value, rtol=2e-3, atol=2e-4, msg=key)
