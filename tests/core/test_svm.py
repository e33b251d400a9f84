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


def assert_no_gradient(
    fitted: svm.LinearMachines, features: Tensor, labels: Tensor, cost: float, most: float = 1e-6
) -> None:
    """The gradient of the objective vanishes for every machine."""
    for label in range(len(fitted.weight)):
        weight = fitted.weight[label].clone().requires_grad_()
        intercept = fitted.intercept[label].clone().requires_grad_()
        signs = torch.where(labels == label, 1.0, -1.0).double()
        hinge = (1 - signs * (features @ weight + intercept)).relu()
        (0.5 * weight.square().sum() + 0.5 * intercept.square() + cost * hinge.square().sum()).backward()
        assert float(weight.grad.norm()) < most
        assert float(intercept.grad.abs()) < most


@pytest.mark.parametrize("solver", svm.SOLVERS)
@pytest.mark.parametrize("cost", [0.1, 1.0, 10.0])
def test_the_gradient_of_the_objective_vanishes(cost: float, solver: str) -> None:
    features, labels, _, classes = overlapping(5, 16, 200)
    fitted = svm.fit(features.double(), labels, classes, cost=cost, tolerance=1e-10, solver=solver)
    # Liblinear stops earlier, where the objective no longer falls.
    assert_no_gradient(fitted, features.double(), labels, cost, 1e-6 if solver == "torch" else 1e-4)


def test_whole_newton_steps_would_go_round_in_circles_here() -> None:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(5)).double()
    labels = torch.arange(6) % 2
    assert_no_gradient(svm.fit(rows, labels, 2, cost=100.0, tolerance=1e-10), rows, labels, 100.0)


def test_every_machine_has_the_longest_step_that_lowers_its_own_objective() -> None:
    """The second machine has a row outside its margin that whole steps would bring far inside."""
    slack = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
    change = torch.tensor([[-1.0, -1.0], [0.0, 10.0]])
    weight, step, slope = torch.zeros(2, 1), torch.full((2, 1), 0.1), torch.full((2, 1), -20.0)
    assert svm._line_search(weight, step, slope, slack, change, 1.0).tolist() == [1.0, 0.125]


def test_conjugate_gradients_need_as_many_steps_as_there_are_unknowns() -> None:
    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    matrix, right, calls = root @ root.T + 0.01 * torch.eye(5), torch.ones(1, 5).double(), 0

    def hessian(direction: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return direction @ matrix

    solution = svm._conjugate_gradients(hessian, right, torch.ones_like(right), torch.tensor([1e-8]).double())
    torch.testing.assert_close(solution @ matrix, right)
    assert calls <= 6


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


@pytest.mark.parametrize(("labels", "classes"), [([0, 0, 0], 1), ([0, 2, 2], 3), ([0, 1, 5], 3), ([0, 1, 2], 2)])
def test_classes_without_rows_are_refused(labels: list[int], classes: int) -> None:
    with pytest.raises(TrainingError, match="rows of every class"):
        svm.fit(torch.randn(3, 4), torch.tensor(labels), classes)
