"""EFC++: old heads rest while the backbone trains and are re-balanced afterwards, in this order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import FUSED, PLAIN, SHORT, Stream, assert_equal, clone, short_stream
from torch.nn import functional

from efcil.core import drift
from efcil.engine.execution import Execution
from efcil.errors import TrainingError
from efcil.methods import efc_plus_plus
from efcil.methods.base import Method


def head_states(method: Method) -> list[torch.Tensor]:
    return [head.detach().clone() for head in method.network.heads]


def test_loss_by_hand() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("efc++", efm_weight=4.0, damping=0.3), 1, SHORT)
    stream.train(method, 2, SHORT)
    batch = stream.batch(method, 2)
    assert len(batch.images) == batch.size, "No image is shown twice."
    terms = method.loss(batch)
    features = method.network.features(batch.images)
    delta = features - batch.frozen["features"]
    penalty = [d @ (4.0 * method.feature_matrix + 0.3 * torch.eye(64)) @ d for d in delta]
    torch.testing.assert_close(terms["drift"], torch.stack(penalty).mean(), rtol=1e-4, atol=1e-6)
    logits = features @ method.network.heads[2].T
    torch.testing.assert_close(terms["current"], functional.cross_entropy(logits, batch.labels - 5))


@pytest.mark.parametrize("execution", [PLAIN, FUSED])
def test_old_heads_change_by_rebalancing_only_and_the_backbone_not_at_all(execution: Execution) -> None:
    stream = short_stream()
    method = stream.make("efc++", rebalance_epochs=3)
    before = head_states(method)
    stream.end(method, 0)
    assert torch.equal(method.network.heads[0], before[0]), "There is nothing to balance after the first task."
    stream.train(method, 1, replace(SHORT, weight_decay=0.1), execution)
    assert torch.equal(method.network.heads[0], before[0]), "Weight decay must not reach the old heads."
    after_training, backbone = head_states(method), clone(method.network.backbone.state_dict())
    stream.end(method, 1)
    assert all(not torch.equal(a, b) for a, b in zip(head_states(method), after_training, strict=True))
    assert_equal(clone(method.network.backbone.state_dict()), backbone)


class Recorder:
    """Stands in for the head training: keeps what every epoch was given, and leaves a mark on the heads."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.epochs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.means: torch.Tensor | None = None
        self.options: dict[str, Any] = {}

    def __call__(self, weight: torch.Tensor, velocity: torch.Tensor, features: Any, labels: Any, **others: Any) -> None:
        self.options = others
        self.means = self.method.memory.means.clone()
        self.epochs.append((features.clone(), labels.clone()))
        weight += 1.0


@pytest.mark.parametrize("fresh", [True, False])
def test_rebalancing_is_balanced_and_in_its_place(fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = short_stream()
    method = stream.start("efc++", rebalance_epochs=40, rebalance_fresh=fresh)
    stream.train(method, 1, SHORT)
    pairs = [(method.teacher.features(x), method.network.features(x)) for x, _ in stream.data[1].augmented("drift")]
    old, new = (torch.cat(side).detach() for side in zip(*pairs, strict=True))
    moved = drift.compensate(method.memory.means, old, new, method.feature_matrix, 0.2)
    heads = torch.cat(head_states(method))
    recorder = Recorder(method)
    monkeypatch.setattr(efc_plus_plus, "softmax_epoch", recorder)
    stream.end(method, 1)

    assert recorder.options.pop("scale") is None  # heads are linear
    assert recorder.options == {"batch_size": 256, "learning_rate": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}
    assert len(recorder.epochs) == 40
    images = [21 + label for label in range(5)]
    for _, labels in recorder.epochs:
        assert torch.bincount(labels).tolist() == images
        assert not torch.equal(labels, labels.sort().values), "Features are shown in random order."
    assert recorder.means is not None
    torch.testing.assert_close(recorder.means, moved)  # the means had moved already, and new ones were not there yet
    features, labels = (torch.cat(side) for side in zip(*recorder.epochs, strict=True))
    for label in range(4):
        drawn = features[labels == label]
        error = (drawn.mean(dim=0) - moved[label]).abs().max()
        assert float(error) < 5 * float(drawn.std(dim=0).max()) / len(drawn) ** 0.5
        assert float((drawn.T.cov() - method.memory.covariances[label]).norm()) < 0.3 * float(
            method.memory.covariances[label].norm()
        )
        assert len(drawn.unique(dim=0)) == len(drawn), "Every epoch draws anew."
    real = [rows[labels == 4] for rows, labels in recorder.epochs[:2]]
    assert (len(torch.cat(real).unique(dim=0)) > len(real[0])) == fresh
    # The feature matrix is measured with the heads as re-balancing left them.
    torch.testing.assert_close(torch.cat(head_states(method)), heads + 40.0)
    assert torch.equal(method.feature_matrix, method._measure_feature_matrix(stream.tasks[1], stream.data[1]))
    assert method.memory.counts.tolist() == images


def test_rebalancing_has_the_settings_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"batch_size": 7, "learning_rate": 0.5, "momentum": 0.25, "weight_decay": 0.125}
    stream = short_stream()
    settings = {f"rebalance_{key}": value for key, value in asked.items()}
    method = stream.start("efc++", rebalance_epochs=20, jitter=4.0, **settings)
    stream.train(method, 1, SHORT)
    recorder = Recorder(method)
    monkeypatch.setattr(efc_plus_plus, "softmax_epoch", recorder)
    stream.end(method, 1)
    assert recorder.options == {**asked, "scale": None}
    features, labels = (torch.cat(side) for side in zip(*recorder.epochs, strict=True))
    expected = method.memory.covariances[2].trace() + 64 * 4.0
    assert float(features[labels == 2].T.cov().trace()) == pytest.approx(float(expected), rel=0.05)


def test_rebalancing_that_diverges_is_told() -> None:
    stream = short_stream()
    method = stream.start("efc++", rebalance_epochs=2, rebalance_learning_rate=1e30, rebalance_weight_decay=1e30)
    stream.train(method, 1, SHORT)
    before = head_states(method)
    with pytest.raises(TrainingError, match="rebalance_learning_rate"):
        stream.end(method, 1)
    assert all(torch.equal(a, b) for a, b in zip(head_states(method), before, strict=True))


def test_rebalancing_is_what_makes_old_and_new_classes_comparable(stream: Stream) -> None:
    balanced, not_balanced = (
        stream.accuracy(stream.learn(stream.start("efc++", rebalance_epochs=epochs), 1), 1) for epochs in (50, 0)
    )
    assert balanced > not_balanced + 0.05
