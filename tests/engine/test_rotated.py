"""Rotated classes in later tasks, and their weight in all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from efcil import methods
from efcil.engine import lifecycle, rotated
from efcil.engine.first_task import FirstTask
from efcil.methods.base import Batch
from efcil.testing.compare import assert_equal, clone
from efcil.testing.stream import FUSED, PLAIN, SHORT, Stream, blueprint, fitting, short_stream
from efcil.testing.trial import resumed

ROTATED = replace(SHORT, rotations=True)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return short_stream()


def test_the_term_is_a_softmax_over_classes_and_turns(stream: Stream) -> None:
    method = stream.start("lwf")
    method.begin_task(stream.tasks[1])
    made = rotated.attach(method, stream.tasks[1], ROTATED)
    assert made is not None
    batch = stream.batch(method, 1)
    network, count = method.network.eval(), batch.size
    weight = torch.cat([network.heads[-1], made.rows])
    assert len(weight) == 4 * stream.tasks[1].classes
    found = made.loss(method, batch)
    errors = []
    for image, label in zip(batch.images, batch.labels - stream.tasks[1].first_class, strict=True):
        for turn in (1, 2, 3):
            logits = network.features(torch.rot90(image, turn, (1, 2))[None]) @ weight.T
            target = torch.tensor([stream.tasks[1].classes + 3 * int(label) + turn - 1])
            errors.append(functional.cross_entropy(logits, target))
    assert len(errors) == 3 * count
    torch.testing.assert_close(found, torch.stack(errors).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["finetune", "efc", "efc++", "apr", "cedar"])
def test_a_task_is_learned_with_them_and_nothing_of_them_stays(stream: Stream, name: str) -> None:
    quick: dict[str, Any] = {"efc++": {"rebalance_epochs": 2}, "cedar": {"rebalance_epochs": 2}}
    quick["apr"] = {"map_epochs": 2, "pseudo_batch": 8, "sources": 8, "drift_steps": 1}
    plain, turned = (stream.start(name, **quick.get(name, {})) for _ in range(2))
    assert "rotation" not in stream.train(plain, 1, SHORT)[-1]
    terms = stream.train(turned, 1, ROTATED)
    assert terms[-1]["rotation"] < terms[0]["rotation"]
    assert plain.state_dict().keys() == turned.state_dict().keys()
    moved = [key for key, value in plain.state_dict().items() if not torch.equal(value, turned.state_dict()[key])]
    assert "network.heads.1" in moved


def test_the_weight_counts(stream: Stream) -> None:
    found = {}
    for weight in (0.0, 1.0, 2.0):
        method = stream.start("finetune")
        recipe = replace(fitting(method, ROTATED), rotation_weight=weight)
        trainer = lifecycle.begin_later(method, stream.tasks[1], stream.data[1], recipe, PLAIN)
        trainer.feed.load(0, 0)
        trainer.optimiser.begin_block(0, 1, 1.0)
        trainer.step(0, trainer.feed.batch_length(0))
        found[weight] = float(trainer.losses[0, trainer.names.index("rotation")])
    assert found[0.0] == 0.0
    assert found[2.0] == pytest.approx(2 * found[1.0])


def test_in_the_first_task_it_weighs_turned_images(stream: Stream) -> None:
    task = stream.tasks[0]
    empty = blueprint("finetune").empty_network
    batch = Batch(stream.test_images[:6], torch.arange(6) % task.classes, torch.empty(0))
    plain, same, heavy, none = (FirstTask(empty(), task, True, weight).eval() for weight in (1.0, 1.0, 3.0, 0.0))
    losses = [learner.loss(batch)["current"] for learner in (plain, same, heavy, none)]
    assert torch.equal(losses[0], losses[1])
    # Of 24 images 6 are upright: w = 1 is the mean of all, 0 that of those, 3 is (6 a + 54 b) / 60.
    upright, whole = losses[3], losses[0]
    turned = (24 * whole - 6 * upright) / 18
    torch.testing.assert_close(losses[2], (6 * upright + 54 * turned) / 60)


def test_an_interrupted_task_is_resumed(stream: Stream) -> None:
    """The rows of rotated classes are part of the checkpoint."""
    before = clone(stream.start("lwf").state_dict())
    plan = blueprint("lwf")
    whole = plan.load(before)
    lifecycle.learn_task(plan, whole, stream.tasks[1], stream.images(1), fitting(whole, ROTATED))
    again = resumed(stream, plan.load(before), plan.load(before), 1, steps=2, recipe=ROTATED)
    assert_equal(clone(again.state_dict()), clone(whole.state_dict()))


def test_plain_and_fused_paths_agree(stream: Stream) -> None:
    recipe = replace(ROTATED, optimiser="sgd", learning_rate=1e-3, epochs=1)
    found = []
    for execution in (PLAIN, FUSED):
        method = stream.start("efc++", rebalance_epochs=0)
        stream.train(method, 1, recipe, execution)
        found.append(clone(method.state_dict()))
    for key, value in found[0].items():
        if value.is_floating_point():
            torch.testing.assert_close(found[1][key], value, rtol=2e-3, atol=2e-4, msg=key)


def test_methods_that_cannot_have_them_do_not(stream: Stream) -> None:
    assert not methods.get("pass").extra_terms
    method = stream.start("pass")
    assert "rotation" not in stream.train(method, 1, ROTATED)[-1]
