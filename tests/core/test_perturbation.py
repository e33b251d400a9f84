from __future__ import annotations

import math

import pytest
import torch

from efcil.core.feature_matrix import FeatureMatrixSum, accumulate
from efcil.core.perturbation import NON_PRINCIPAL, PRINCIPAL, perturb, split
from efcil.errors import TrainingError

CLASSES, FEATURES, COUNT = 5, 12, 400


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, the labels that the heads give them, the heads, and the feature matrix of other features."""
    generator = random(0)
    heads = torch.randn(CLASSES, FEATURES, generator=generator)
    features = torch.randn(COUNT, FEATURES, generator=generator)
    others = torch.randn(50, FEATURES, generator=generator)
    matrix = accumulate(FeatureMatrixSum.empty(CLASSES), others @ heads.T).matrix(heads)
    return features, (features @ heads.T).argmax(dim=1), heads, matrix


def test_the_two_subspaces_are_all_of_it_and_orthogonal(case: tuple[torch.Tensor, ...]) -> None:
    principal, rest = split(case[3])
    assert principal.shape == (FEATURES, CLASSES - 1), "the rank of the matrix is one less than the number of classes"
    both = torch.cat([principal, rest], dim=1)
    torch.testing.assert_close(both.T @ both, torch.eye(FEATURES, dtype=torch.float64))


def test_only_noise_in_principal_directions_changes_predictions(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    features, labels, heads, matrix = case
    found = perturb(features, labels, heads, matrix, (0.0, 0.1, 1.0), random(1))
    assert [(each.directions, each.sigma) for each in found] == [
        (name, sigma) for name in (PRINCIPAL, NON_PRINCIPAL) for sigma in (0.0, 0.1, 1.0)
    ]
    assert all(each.unperturbed == 100.0 for each in found)
    nothing, little, much = found[:3]
    assert (nothing.change, nothing.accuracy) == (0.0, 100.0)
    assert 0.01 < little.change < 0.2 < much.change < 1.0
    assert much.accuracy < 80.0 < little.accuracy < 100.0
    for each in found[3:]:
        assert each.change < 1e-6
        assert each.accuracy == 100.0


def test_noise_and_change_are_those_of_a_case_worked_out() -> None:
    """Two classes along the first of two features: the probability of a feature x is 1 / (1 + exp(-2 x))."""
    heads = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    found = perturb(
        torch.tensor([[0.3, 7.0]]), torch.tensor([0]), heads, torch.diag(torch.tensor([2.0, 0.0])), [0.5], random(3)
    )
    drawn = float(torch.randn(1, 2, generator=random(3), dtype=torch.float64)[0, 0])
    before, after = (1.0 / (1.0 + math.exp(-2.0 * x)) for x in (0.3, 0.3 + 0.5 * drawn))
    assert found[0].change == pytest.approx(abs(after - before))
    assert found[1].change == 0.0


def test_classes_that_share_an_answer_count_together() -> None:
    """Scores x, -x and 0: the answer of the last class has the probability 1 / (1 + 2 cosh x)."""
    heads = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    matrix, answers = torch.diag(torch.tensor([2.0, 0.0])), torch.tensor([0, 0, 1])
    point, label = torch.tensor([[0.3, 7.0]]), torch.tensor([1])
    found = perturb(point, label, heads, matrix, [0.5], random(3), answers=answers)
    drawn = float(torch.randn(1, 2, generator=random(3), dtype=torch.float64)[0, 0])
    before, after = (1.0 / (1.0 + 2.0 * math.cosh(x)) for x in (0.3, 0.3 + 0.5 * drawn))
    assert found[0].change == pytest.approx(abs(after - before))
    assert (found[0].unperturbed, found[1].accuracy) == (100.0, 100.0), "the class beside it has the same answer"
    (alone, _) = perturb(point, label, heads, matrix, [0.5], random(3))
    assert alone.unperturbed == 0.0
    assert alone.change > found[0].change


def test_a_result_does_not_depend_on_the_others(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    alone, beside = perturb(*case, [0.5], random(1)), perturb(*case, [0.1, 0.5, 2.0], random(1))
    assert alone == [each for each in beside if each.sigma == 0.5]
    assert alone != perturb(*case, [0.5], random(2))


def test_the_cut_off_is_a_share_of_the_largest_eigenvalue() -> None:
    matrix = torch.diag(torch.tensor([0.0, 10.0, 0.2, 1e-9]))
    assert [split(matrix, cut_off)[0].shape[1] for cut_off in (0.0, 1e-6, 0.1)] == [3, 2, 1]


def test_a_matrix_without_a_direction_is_refused() -> None:
    with pytest.raises(TrainingError, match="no positive eigenvalue"):
        split(torch.zeros(3, 3))
