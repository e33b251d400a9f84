"""Linear support vector machines: the solver against liblinear and against the conditions of optimality."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from efcil.core import svm
from efcil.errors import TrainingError

Case = tuple[Tensor, Tensor, Tensor, int]


def digits() -> Case:
    """Pixels of the digits, of unit length."""
    table = load_digits()
    rows = torch.nn.functional.normalize(torch.from_numpy(table.data).float(), dim=1)
    return rows[:1000], torch.from_numpy(table.target)[:1000], rows[1000:], 10


def overlapping(classes: int, size: int, rows: int) -> Case:
    """Non-negative features of unit length whose classes overlap."""
    generator = torch.Generator().manual_seed(classes)
    means = 0.3 * torch.randn(classes, size, generator=generator)
    labels = torch.arange(rows + 2000) % classes
    features = (0.5 + means[labels] + torch.randn(len(labels), size, generator=generator)).relu()
    features = torch.nn.functional.normalize(features, dim=1)
    return features[:rows], labels[:rows], features[rows:], classes


CASES = {"digits": digits, "20 x 64": lambda: overlapping(20, 64, 1200), "25 x 256": lambda: overlapping(25, 256, 1500)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decisions_are_those_of_liblinear(name: str, dtype: torch.dtype) -> None:
    features, labels, others, classes = CASES[name]()
    ours = svm.fit(features.to(dtype), labels, classes).decision(others.to(dtype))
    theirs = svm.fit(features.to(dtype), labels, classes, solver="sklearn").decision(others.to(dtype))
    same = (ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean()
    assert same >= 0.995
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02)
    # Otherwise agreement would say little: the decisions are neither trivial nor all alike.
    assert len(ours.argmax(dim=1).unique()) == classes


@pytest.mark.parametrize("cost", [0.1, 1.0, 10.0])
def test_the_gradient_of_the_objective_vanishes(cost: float) -> None:
    features, labels, _, classes = overlapping(5, 16, 200)
    fitted = svm.fit(features.double(), labels, classes, cost=cost, tolerance=1e-10)
    for label in range(classes):
        weight = fitted.weight[label].clone().requires_grad_()
        intercept = fitted.intercept[label].clone().requires_grad_()
        signs = torch.where(labels == label, 1.0, -1.0).double()
        hinge = (1 - signs * (features.double() @ weight + intercept)).relu()
        (0.5 * weight.square().sum() + 0.5 * intercept.square() + cost * hinge.square().sum()).backward()
        assert float(weight.grad.norm()) < 1e-6
        assert float(intercept.grad.abs()) < 1e-6


def test_classes_in_several_goes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, _, classes = overlapping(7, 16, 210)
    together = svm.fit(features.double(), labels, classes, tolerance=1e-8)
    monkeypatch.setattr(svm, "_TABLE_ENTRIES", 3 * len(features))
    apart = svm.fit(features.double(), labels, classes, tolerance=1e-8)
    torch.testing.assert_close(apart.weight, together.weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(apart.intercept, together.intercept, rtol=0, atol=1e-6)


def test_one_machine_per_class_even_for_two() -> None:
    features, labels, others, _ = overlapping(2, 8, 60)
    for solver in svm.SOLVERS:
        fitted = svm.fit(features.double(), labels, 2, solver=solver)
        decision = fitted.decision(others.double())
        assert decision.shape == (len(others), 2)
        torch.testing.assert_close(decision[:, 0], -decision[:, 1], rtol=0, atol=1e-2)


@pytest.mark.parametrize(("labels", "classes"), [([0, 0, 0], 1), ([0, 2, 2], 3), ([0, 1, 5], 3)])
def test_classes_without_rows_are_refused(labels: list[int], classes: int) -> None:
    with pytest.raises(TrainingError, match="rows of every class"):
        svm.fit(torch.randn(3, 4), torch.tensor(labels), classes)
