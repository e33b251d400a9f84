"""FeTrIL: pseudo-features, the machines fitted to them, and a backbone that never changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import SHORT, Stream, assert_equal, clone, short_stream
from torch.nn import functional

from efcil.core import svm
from efcil.methods import fetril


def features_of(stream: Stream, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a task's images as they are, in stored order."""
    network = stream.network()
    data = stream.data[index]
    with torch.no_grad():
        return network.features(data.normalisation(data.images, torch.float32)), data.labels


@pytest.mark.parametrize("similarity", ["euclidean", "cosine"])
def test_pseudo_features_have_the_old_classes_means(similarity: str) -> None:
    """Each old class has as many as its donor has images; their mean is its own (section 20 of the fact sheet)."""
    stream = short_stream()
    method = stream.start("fetril", similarity=similarity)
    features, labels = features_of(stream, 2)
    new = torch.stack([features[labels == label].mean(dim=0) for label in (5, 6, 7)])
    imitated, targets = method.imitate(features, labels, new, 5)
    for old in range(4):
        rows = imitated[targets == old]
        torch.testing.assert_close(rows.mean(dim=0), method.memory.means[old], rtol=1e-4, atol=1e-5)
        if similarity == "euclidean":
            donor = min(range(3), key=lambda j: float((method.memory.means[old] - new[j]).norm()))
        else:
            donor = max(range(3), key=lambda j: float(torch.cosine_similarity(method.memory.means[old], new[j], dim=0)))
        lent = features[labels == 5 + donor]
        torch.testing.assert_close(rows, lent + method.memory.means[old] - new[donor])


@pytest.mark.parametrize("solver", svm.SOLVERS)
def test_scores_are_those_of_machines_on_real_and_pseudo_features(solver: str) -> None:
    stream = short_stream()
    method = stream.learn(stream.start("fetril", solver=solver), 1, SHORT)
    (old, old_labels), (features, labels) = features_of(stream, 0), features_of(stream, 1)
    # The second task has one class, so it lends its features to all four old ones.
    means = [old[old_labels == label].mean(dim=0) for label in range(4)]
    own = features.mean(dim=0)
    rows = torch.cat([features, *[features - own + mean for mean in means]])
    targets = torch.cat([labels, *[torch.full_like(labels, label) for label in range(4)]])
    fitted = svm.fit(functional.normalize(rows, dim=1), targets, 5, solver="sklearn")
    images = stream.test_images[:100]
    with torch.no_grad():
        expected = fitted.decision(functional.normalize(stream.network().features(images), dim=1))
    torch.testing.assert_close(method.scores(images), expected, rtol=0, atol=0.02)


def test_first_step_is_the_common_head_or_machines() -> None:
    stream = short_stream()
    head, machines = stream.start("fetril"), stream.start("fetril", first_step="svm")
    images, network = stream.test_images[:50], stream.network()
    with torch.no_grad():
        assert torch.equal(head.scores(images), network.logits(network.features(images)))
    assert len(machines.intercepts) == 4
    features, labels = features_of(stream, 0)
    decisions = functional.normalize(features, dim=1) @ machines.network.head_weight().T + machines.intercepts
    assert float((decisions.argmax(dim=1) == labels).float().mean()) > 0.9


def test_nothing_of_the_backbone_changes() -> None:
    stream = short_stream()
    method = stream.start("fetril")
    before = clone(method.network.backbone.state_dict())
    assert stream.train(method, 1) == []
    stream.end(method, 1)
    assert_equal(clone(method.network.backbone.state_dict()), before)


def test_the_softmax_layer_learns_real_and_pseudo_features() -> None:
    """What it minimises falls below that of the layer it began with, and its scores use features as they are."""
    stream = short_stream()
    method = stream.start("fetril", linear="softmax", similarity="cosine")
    method.begin_task(stream.tasks[1])
    features, labels = features_of(stream, 1)
    new = features.mean(dim=0, keepdim=True)
    imitated, old_labels = method.imitate(features, labels, new, 4)
    rows, targets = torch.cat([imitated, features]), torch.cat([old_labels, labels])
    before = functional.cross_entropy(rows @ method.network.head_weight().T, targets)
    stream.end(method, 1)
    assert len(method.intercepts) == 5
    after = functional.cross_entropy(rows @ method.network.head_weight().T + method.intercepts, targets)
    assert float(after) < 0.8 * float(before)
    images = stream.test_images[:20]
    with torch.no_grad():
        plain = stream.network().features(images)
    expected = functional.linear(plain, method.network.head_weight(), method.intercepts)
    torch.testing.assert_close(method.scores(images), expected)


def test_the_recipe_of_the_softmax_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty epochs of SGD with a cosine schedule, from the heads and intercepts there are; the new class has none."""
    stream = short_stream()
    method = stream.start("fetril", linear="softmax", first_step="svm")
    method.begin_task(stream.tasks[1])
    heads, intercepts = method.network.head_weight().clone(), method.intercepts.clone()
    assert bool((intercepts != 0).all())
    rates, orders = [], set()

    def record(weight: torch.Tensor, velocity: torch.Tensor, rows: Any, labels: Any, **others: Any) -> None:
        rates.append(others.pop("learning_rate"))
        orders.add(tuple(labels.tolist()))
        assert others == {"batch_size": 128, "momentum": 0.9, "weight_decay": 5e-4}
        assert bool((rows[:, -1] == 1).all())
        assert torch.equal(weight, torch.cat([heads, torch.cat([intercepts, torch.zeros(1)])[:, None]], dim=1))
        assert len(rates) > 1 or not bool(velocity.any())
        velocity += 1.0

    monkeypatch.setattr(fetril, "softmax_epoch", record)
    stream.end(method, 1)
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * epoch / 50)) / 2 for epoch in range(50)])
    assert len(orders) == 50


def test_machines_are_fitted_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"cost": 0.5, "tolerance": 1e-2, "solver": "sklearn"}
    stream, given = short_stream(), []
    method = stream.start("fetril", **asked)
    method.begin_task(stream.tasks[1])

    def record(rows: torch.Tensor, labels: torch.Tensor, classes: int, **others: Any) -> svm.LinearMachines:
        given.append(others)
        return svm.LinearMachines(torch.zeros(classes, rows.shape[1]), torch.zeros(classes))

    monkeypatch.setattr(svm, "fit", record)
    stream.end(method, 1)
    assert given == [asked]


def test_a_first_task_of_one_class_needs_no_machine() -> None:
    stream = short_stream()
    method = stream.make("fetril", first_step="svm")
    data = stream.images(1)
    method.network.heads[0].data = method.network.heads[0].data[:1]
    with torch.no_grad():
        method.end_task(replace(stream.tasks[1], index=0), data)
    assert len(method.intercepts) == 0


def test_the_softmax_layer_is_the_same_every_time() -> None:
    first, second = (short_stream().learn(short_stream().start("fetril", linear="softmax"), 1, SHORT) for _ in range(2))
    assert torch.equal(first.network.head_weight(), second.network.head_weight())
    assert torch.equal(first.intercepts, second.intercepts)


def test_features_may_be_those_of_augmented_images() -> None:
    stream = short_stream()
    method = stream.start("fetril", views="augmented")
    pieces = list(stream.data[0].augmented("prototypes"))
    with torch.no_grad():
        features = torch.cat([stream.network().features(images) for images, _ in pieces])
    labels = torch.cat([labels for _, labels in pieces])
    for label in range(4):
        torch.testing.assert_close(
            method.memory.means[label], features[labels == label].mean(dim=0), rtol=1e-4, atol=1e-5
        )
