"""One-vs-rest linear support vector machines with squared hinge loss, for all classes together.

For every class k, with targets y = +1 for its rows and -1 for all others, this minimises

    1/2 ||w||^2 + 1/2 b^2 + C sum_i max(0, 1 - y_i (w . x_i + b))^2

which is what scikit-learn's LinearSVC (liblinear, primal) minimises with its default intercept scaling of 1: the
intercept is the weight of one more feature that is always 1, and is penalised like the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from efcil.activity import next_piece
from efcil.errors import TrainingError

SOLVERS = ("torch", "sklearn")
# Margins held at a time (rows times classes); with more classes, they are solved in several rounds.
_TABLE_ENTRIES = 1 << 27
_NEWTON_STEPS = 100
_GRADIENT_STEPS = 200
_HALVINGS = 12


@dataclass(frozen=True)
class LinearMachines:
    """Weights (K, n) and intercepts (K) of one machine per class."""

    weight: Tensor
    intercept: Tensor

    def decision(self, features: Tensor) -> Tensor:
        """Decision values (N, K) of features (N, n); the largest one names the class."""
        return torch.addmm(self.intercept, features, self.weight.T)


def fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    cost: float = 1.0,
    tolerance: float = 1e-4,
    solver: str = "torch",
) -> LinearMachines:
    """Fit one machine for each class 0..classes-1 to features (N, n) and labels (N).

    `torch` works on the device of the features; `sklearn` on the CPU, with liblinear. Both stop by liblinear's rule:
    a machine is done when ||gradient|| <= tolerance * (fewer of its positives and negatives) / N * ||gradient at 0||.
    """
    _check(labels, classes)
    if solver == "sklearn":
        return _fit_liblinear(features, labels, classes, cost, tolerance)
    rows = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    together = max(1, _TABLE_ENTRIES // len(rows))
    parts = [
        _newton(
            rows, labels, torch.arange(first, min(first + together, classes), device=labels.device), cost, tolerance
        )
        for first in range(0, classes, together)
    ]
    solution = torch.cat(parts)
    return LinearMachines(solution[:, :-1].contiguous(), solution[:, -1].contiguous())


def _newton(rows: Tensor, labels: Tensor, classes: Tensor, cost: float, tolerance: float) -> Tensor:
    """Weights (K, n + 1) of the machines of `classes`, by Newton's method with conjugate gradients and a line search.

    The objective is piecewise quadratic and strongly convex: once the set of rows inside the margin no longer changes,
    a Newton step is exact, so a few steps are enough. All machines take their steps together; one that is done no
    longer changes.
    """
    next_piece()
    targets = torch.where(labels[:, None] == classes, 1.0, -1.0).to(rows.dtype)
    positives = (targets > 0).sum(dim=0)
    share = torch.minimum(positives, len(rows) - positives).clamp(min=1).to(rows.dtype) / len(rows)
    weight = rows.new_zeros(len(classes), rows.shape[1])
    slack = torch.ones_like(targets)  # 1 - y f(x), for f = 0
    goal = tolerance * share * (2.0 * cost * (targets.T @ rows)).norm(dim=1)
    for _ in range(_NEWTON_STEPS):
        inside = (slack > 0).to(rows.dtype)
        gradient = weight - 2.0 * cost * (inside * slack * targets).T @ rows
        size = gradient.norm(dim=1)
        pending = size > goal
        if not bool(pending.any()):
            break
        curvature = 1.0 + 2.0 * cost * inside.T @ rows.square()

        def hessian(direction: Tensor, inside: Tensor = inside) -> Tensor:
            return direction + 2.0 * cost * (inside * (rows @ direction.T)).T @ rows

        step = _conjugate_gradients(hessian, -gradient, 1.0 / curvature, torch.where(pending, 0.1 * size, torch.inf))
        change = -targets * (rows @ step.T)
        length = _line_search(weight, step, gradient, slack, change, cost)
        if not bool((pending & (length > 0)).any()):
            break  # no further improvement: the limit of the number format is reached
        weight = weight + length[:, None] * step
        slack = slack + length * change
    return weight


def _conjugate_gradients(
    hessian: Callable[[Tensor], Tensor], right: Tensor, preconditioner: Tensor, goal: Tensor
) -> Tensor:
    """Solve hessian(x) = right for every row to a residual norm of `goal` (K); rows with an infinite goal get zero."""
    solution = torch.zeros_like(right)
    residual = right.clone()
    scaled = preconditioner * residual
    direction = scaled.clone()
    product = (residual * scaled).sum(dim=1)
    for _ in range(_GRADIENT_STEPS):
        active = residual.norm(dim=1) > goal
        if not bool(active.any()):
            break
        image = hessian(direction)
        # Rows that are done keep a zero step; the divisor is positive for all others.
        length = torch.where(active, product / (direction * image).sum(dim=1).clamp(min=1e-30), 0.0)
        solution += length[:, None] * direction
        residual -= length[:, None] * image
        scaled = preconditioner * residual
        following = (residual * scaled).sum(dim=1)
        direction = scaled + (following / product.clamp(min=1e-30))[:, None] * direction
        product = following
    return solution


def _line_search(weight: Tensor, step: Tensor, gradient: Tensor, slack: Tensor, change: Tensor, cost: float) -> Tensor:
    """The longest of 1, 1/2, 1/4, ... per machine (K) that lowers the objective enough; 0 if none does."""

    def rise(length: Tensor) -> Tensor:
        """How much the objective changes, summed from differences so that small changes are not lost."""
        before, after = slack.clamp(min=0), (slack + length * change).clamp(min=0)
        loss = ((after - before) * (after + before)).sum(dim=0)
        return length * (weight * step).sum(dim=1) + 0.5 * length.square() * step.square().sum(dim=1) + cost * loss

    slope = (gradient * step).sum(dim=1)
    length = torch.ones_like(slope)
    for _ in range(_HALVINGS):
        enough = rise(length) <= 1e-4 * length * slope
        if bool(enough.all()):
            return length
        length = torch.where(enough, length, 0.5 * length)
    return torch.where(rise(length) <= 1e-4 * length * slope, length, 0.0)


def _fit_liblinear(features: Tensor, labels: Tensor, classes: int, cost: float, tolerance: float) -> LinearMachines:
    from sklearn.svm import LinearSVC

    # For two classes scikit-learn fits one machine; fitting each class separately always gives all of them.
    table, answers = features.double().cpu().numpy(), labels.cpu().numpy()
    weight, intercept = features.new_zeros(classes, features.shape[1]), features.new_zeros(classes)
    for label in range(classes):
        machine = LinearSVC(penalty="l2", loss="squared_hinge", dual=False, C=cost, tol=tolerance, max_iter=10_000)
        machine.fit(table, answers == label)
        weight[label] = torch.from_numpy(machine.coef_[0]).to(features)
        intercept[label] = float(machine.intercept_[0])
    return LinearMachines(weight, intercept)


def _check(labels: Tensor, classes: int) -> None:
    counts = torch.bincount(labels, minlength=classes)
    if classes < 2 or len(counts) > classes or bool((counts == 0).any()):
        raise TrainingError(
            f"Support vector machines need at least two classes and rows of every class, but the numbers of rows of "
            f"the {classes} classes are {counts.tolist()}."
        )
