"""Mixed classes as a term of the loss, in the first task and in later ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from efcil.core.mixing import mix, mixture_labels
from efcil.engine import lifecycle, mixed
from efcil.testing.compare import assert_equal, clone
from efcil.testing.stream import FUSED, PLAIN, SHORT, Stream, blueprint, fitting, short_stream
from efcil.testing.trial import LAST, resumed

MIXED = replace(SHORT, mixing=2)


@pytest.fixture(scope="module")
def stream() -> Stream:
    return short_stream()


def test_the_term_is_a_softmax_over_classes_and_pairs(stream: Stream) -> None:
    method, task = stream.start("lwf"), stream.tasks[LAST]
    method.begin_task(replace(task, first_class=4))
    made = mixed.attach(method, replace(task, first_class=4), MIXED)
    assert made is not None
    assert len(made.rows) == 3
    batch = stream.batch(method, LAST)
    batch = replace(batch, labels=batch.labels - 1)  # the second task, of a single class, was left out
    network = method.network.eval()
    weight = torch.cat([network.heads[-1], made.rows])
    images, targets = mix(batch.images, batch.labels - 4, 2, mixture_labels(3))
    errors = [
        functional.cross_entropy(network.features(image[None]) @ weight.T, target[None])
        for image, target in zip(images, targets, strict=True)
    ]
    assert len(errors) == 2 * batch.size
    torch.testing.assert_close(made.loss(method, batch), torch.stack(errors).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rotations", [False, True])
def test_the_first_task_is_learned_with_them_and_nothing_of_them_stays(stream: Stream, rotations: bool) -> None:
    task, data, plan = stream.tasks[0], stream.data[0], blueprint("finetune")
    found: dict[int, Any] = {}
    for count in (0, 1):
        recipe = replace(SHORT, epochs=4, mixing=count, rotations=rotations)
        trainer, terms = lifecycle.begin_first(plan, task, data, recipe), []
        trainer.run(on_epoch=lambda report, terms=terms: terms.append(report.terms))
        found[count] = trainer.learner.network.state_dict(), terms
        assert mixed.NAME not in trainer.learner._modules
    assert all("mixing" not in terms for terms in found[0][1])
    assert found[1][1][-1]["mixing"] < found[1][1][0]["mixing"]
    assert found[0][0].keys() == found[1][0].keys()
    assert not torch.equal(found[0][0]["heads.0"], found[1][0]["heads.0"])


@pytest.mark.parametrize("name", ["finetune", "cedar"])
def test_a_later_task_is_learned_with_them(stream: Stream, name: str) -> None:
    method = stream.start(name, **({"rebalance_epochs": 2} if name == "cedar" else {}))
    assert "mixing" not in stream.train(method, 1, MIXED)[-1], "One class cannot be mixed with another."
    stream.end(method, 1)
    terms = stream.train(method, LAST, replace(MIXED, epochs=4))
    assert terms[-1]["mixing"] < terms[0]["mixing"]
    assert not any(key.startswith(mixed.NAME) for key in method.state_dict())


def test_the_weight_counts(stream: Stream) -> None:
    found = {}
    for weight in (0.0, 1.0, 2.0):
        trainer = lifecycle.begin_first(
            blueprint("finetune"), stream.tasks[0], stream.data[0], replace(MIXED, mixing_weight=weight)
        )
        trainer.feed.load(0, 0)
        trainer.optimiser.begin_block(0, 1, 1.0)
        trainer.step(0, trainer.feed.batch_length(0))
        found[weight] = float(trainer.losses[0, trainer.names.index("mixing")])
    assert found[0.0] == 0.0
    assert found[2.0] == pytest.approx(2 * found[1.0])


def test_an_interrupted_task_is_resumed(stream: Stream) -> None:
    """The rows of mixed classes are part of the checkpoint."""
    plan, method = blueprint("lwf"), stream.start("lwf")
    stream.learn(method, 1, SHORT)
    before = clone(method.state_dict())
    whole = plan.load(before)
    lifecycle.learn_task(plan, whole, stream.tasks[LAST], stream.images(LAST), fitting(whole, MIXED))
    again = resumed(stream, plan.load(before), plan.load(before), LAST, steps=2, recipe=MIXED)
    assert_equal(clone(again.state_dict()), clone(whole.state_dict()))


def test_plain_and_fused_paths_agree(stream: Stream) -> None:
    recipe = replace(MIXED, optimiser="sgd", learning_rate=1e-3, epochs=1)
    found = []
    for execution in (PLAIN, FUSED):
        method = stream.start("finetune")
        stream.learn(method, 1, replace(SHORT, epochs=0))
        stream.train(method, LAST, recipe, execution)
        found.append(clone(method.state_dict()))
    for key, value in found[0].items():
        if value.is_floating_point():
            torch.testing.assert_close(found[1][key], value, rtol=2e-3, atol=2e-4, msg=key)
