"""DS-AL: two ridge regressions on random features, each equal to a recursion over tasks, and merged classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import SHORT, Stream, short_stream
from torch import Tensor
from torch.nn import functional

from efcil.methods import ds_al
from efcil.methods.ds_al import DualStream

WIDTH = {"expansion": 3}


@pytest.fixture(scope="module")
def stream() -> Stream:
    return short_stream()


def learned(stream: Stream, last: int, **settings: Any) -> DualStream:
    method = stream.start("ds-al", **{**WIDTH, **settings})
    assert isinstance(method, DualStream)
    return stream.learn(method, last, SHORT) if last else method  # type: ignore[return-value]


def expanded(method: DualStream, stream: Stream, index: int) -> tuple[Tensor, Tensor]:
    """Random features of the images of a task, in float64, and their one-hot labels."""
    pairs = list(stream.data[index].plain())
    with torch.no_grad():
        features = torch.cat([method.network.features(images) for images, _ in pairs]).double()
    labels = torch.cat([own for _, own in pairs])
    return features @ method.projection.double(), functional.one_hot(labels, stream.tasks[index].seen).double()


class Recursion:
    """Recursive least squares as the paper has it: an inverse that is updated, and weights that follow errors."""

    def __init__(self, width: int, ridge: float) -> None:
        self.inverse = torch.eye(width, dtype=torch.float64) / ridge
        self.weights = torch.zeros(width, 0, dtype=torch.float64)

    def add(self, rows: Tensor, targets: Tensor) -> None:
        new = targets.shape[1] - self.weights.shape[1]
        self.weights = torch.cat([self.weights, self.weights.new_zeros(len(self.weights), new)], dim=1)
        gain = torch.linalg.inv(torch.eye(len(rows), dtype=torch.float64) + rows @ self.inverse @ rows.T)
        self.inverse = self.inverse - self.inverse @ rows.T @ gain @ rows @ self.inverse
        self.weights = self.weights + self.inverse @ rows.T @ (targets - rows @ self.weights)


def test_both_regressions_are_those_of_the_recursion(stream: Stream) -> None:
    settings = {"ridge": 0.3, "compensation_ridge": 0.2, "compensation": 0.7}
    method = learned(stream, 2, **settings)
    width = method.projection.shape[1]
    main, second = Recursion(width, 0.3), Recursion(width, 0.2)
    for index, task in enumerate(stream.tasks):
        rows, targets = expanded(method, stream, index)
        main.add(rows.relu(), targets)
        left = targets - rows.relu() @ main.weights
        left[:, : task.first_class] = 0
        second.add(rows.tanh(), left)
    assert method.compensation is not None
    torch.testing.assert_close(method.main.weights, main.weights.T, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(method.compensation.weights, second.weights.T, rtol=1e-6, atol=1e-8)
    images = stream.test_images[:50]
    with torch.no_grad():
        rows = method.network.features(images).double() @ method.projection.double()
    expected = rows.relu() @ main.weights + 0.7 * rows.tanh() @ second.weights
    torch.testing.assert_close(method.scores(images).double(), expected, rtol=1e-4, atol=1e-5)


def test_the_first_is_that_of_all_images_at_once(stream: Stream) -> None:
    method = learned(stream, 2, compensation=0.0)
    assert method.compensation is None
    parts = [expanded(method, stream, index) for index in range(3)]
    rows = torch.cat([part.relu() for part, _ in parts])
    classes = stream.tasks[2].seen
    targets = torch.cat([functional.pad(labels, (0, classes - labels.shape[1])) for _, labels in parts])
    raised = rows.T @ rows + 0.1 * torch.eye(rows.shape[1], dtype=torch.float64)
    torch.testing.assert_close(
        method.main.weights.T, torch.linalg.solve(raised, rows.T @ targets), rtol=1e-6, atol=1e-8
    )


def test_images_in_any_pieces(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = learned(stream, 1)
    monkeypatch.setattr(ds_al, "_LARGEST", 7 * whole.projection.shape[1])
    parts = learned(stream, 1)
    torch.testing.assert_close(parts.main.weights, whole.main.weights, rtol=1e-7, atol=1e-9)
    assert parts.compensation is not None
    assert whole.compensation is not None
    torch.testing.assert_close(parts.compensation.weights, whole.compensation.weights, rtol=1e-7, atol=1e-9)


def test_another_seed_has_other_random_features(stream: Stream) -> None:
    method = learned(stream, 0)
    limit = method.network.feature_size**-0.5
    assert 0.9 * limit < float(method.projection.abs().max()) <= limit
    again, other = DualStream(method.network, method.settings), DualStream(method.network, method.settings)
    again.end_task(stream.tasks[0], stream.data[0])
    other.end_task(replace(stream.tasks[0], seed=1), stream.data[0])
    assert torch.equal(again.projection, method.projection)
    assert not torch.equal(other.projection, method.projection)


def test_a_merged_class_is_what_its_images_as_one_class_give(stream: Stream) -> None:
    """Targets add up, and with them sums and weights, as if the classes had been one."""
    method = learned(stream, 1, compensation=0.0)
    before = method.scores(stream.test_images[:20])
    method.merge_classes([0, 2], [5] * 5)
    after = method.scores(stream.test_images[:20])
    torch.testing.assert_close(after[:, 0], before[:, 0] + before[:, 2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(after[:, 1:], before[:, [1, 3, 4]], rtol=1e-4, atol=1e-5)
    sums = method.main.weights.clone()
    method.main.solve(method.settings.ridge)
    torch.testing.assert_close(method.main.weights, sums, rtol=1e-6, atol=1e-8)
