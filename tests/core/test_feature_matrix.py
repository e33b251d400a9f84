from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efcil.core.feature_matrix import (
    FeatureMatrixSum,
    accumulate,
    accumulate_cosine,
    feature_matrix,
    quadratic_drift,
)
from efcil.core.heads import cosine_logits
from efcil.errors import EfcilError


def head_and_features(classes: int, size: int, samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(classes, size, generator=generator, dtype=torch.float64)
    return weight, torch.randn(samples, size, generator=generator, dtype=torch.float64)


def of_one(weight: Tensor, feature: Tensor) -> Tensor:
    """The feature matrix of a single feature, in closed form."""
    probability = torch.softmax(weight.double() @ feature.double(), dim=0)
    return feature_matrix(weight, probability, torch.outer(probability, probability))


def sum_over_classes(weight: Tensor, feature: Tensor) -> Tensor:
    """The definition: expected outer product of the gradient W^T(e_y - p), one class at a time."""
    probability = torch.softmax(weight @ feature, dim=0)
    total = torch.zeros(weight.shape[1], weight.shape[1], dtype=weight.dtype)
    for label in range(len(weight)):
        gradient = weight.T @ (torch.eye(len(weight), dtype=weight.dtype)[label] - probability)
        total += probability[label] * torch.outer(gradient, gradient)
    return total


def from_jacobian(weight: Tensor, feature: Tensor) -> Tensor:
    """The same from automatic differentiation of log softmax(W f)."""

    def log_probability(point: Tensor) -> Tensor:
        return torch.log_softmax(weight @ point, dim=0)

    jacobian = torch.autograd.functional.jacobian(log_probability, feature)
    probability = log_probability(feature).exp()
    return jacobian.T @ torch.diag(probability) @ jacobian


@settings(deadline=None, derandomize=True, max_examples=25)
@given(classes=st.integers(1, 9), size=st.integers(1, 12), seed=st.integers(0, 10_000))
def test_closed_form_is_the_definition(classes: int, size: int, seed: int) -> None:
    weight, features = head_and_features(classes, size, 1, seed)
    closed = of_one(weight, features[0])
    torch.testing.assert_close(closed, sum_over_classes(weight, features[0]), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(closed, from_jacobian(weight, features[0]), rtol=1e-9, atol=1e-10)


def test_confident_predictions_keep_their_digits() -> None:
    """A probability that float32 takes for 1 still leaves the others a little: p (1 - p) is not zero."""
    logits = torch.tensor([[25.0, 0.0]])
    matrix = accumulate(FeatureMatrixSum.empty(2), logits).matrix(torch.eye(2))
    torch.testing.assert_close(matrix[0, 0], torch.exp(-logits[0, 0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("chunks", [[23], [8, 8, 7], [1] * 23])
def test_accumulated_matrix_is_the_mean_of_local_ones(chunks: list[int]) -> None:
    weight, features = head_and_features(6, 10, 23)
    total = FeatureMatrixSum.empty(6)
    for chunk in features.split(chunks):
        total = accumulate(total, chunk @ weight.T)
    expected = torch.stack([sum_over_classes(weight, feature) for feature in features]).mean(dim=0)
    assert total.count == 23
    torch.testing.assert_close(total.matrix(weight), expected, rtol=1e-10, atol=1e-12)


def test_accumulating_leaves_the_given_sum_alone() -> None:
    start = FeatureMatrixSum.empty(3)
    accumulate(start, torch.randn(4, 3))
    assert start.count == 0
    assert not start.outer.any()
    assert not start.probability.any()


def test_matrix_of_no_sample_is_an_error() -> None:
    with pytest.raises(EfcilError, match="no image"):
        FeatureMatrixSum.empty(3).matrix(torch.randn(3, 5))


@pytest.mark.parametrize(("classes", "size"), [(5, 12), (12, 5), (2, 8), (1, 4)])
def test_symmetric_positive_and_of_bounded_rank(classes: int, size: int) -> None:
    weight, features = head_and_features(classes, size, 40, seed=3)
    matrix = accumulate(FeatureMatrixSum.empty(classes), features @ weight.T).matrix(weight)
    assert torch.equal(matrix, matrix.T)
    eigenvalues = torch.linalg.eigvalsh(matrix)
    largest = eigenvalues.abs().max().clamp_min(1e-12)
    assert eigenvalues.min() >= -1e-12 * largest
    # With 40 random samples the bound is reached, so this is an equality and not only a bound.
    assert int((eigenvalues > 1e-10 * largest).sum()) == min(size, classes - 1)


def test_blind_to_moves_orthogonal_to_all_differences_of_head_rows() -> None:
    weight, features = head_and_features(4, 9, 30, seed=5)
    matrix = accumulate(FeatureMatrixSum.empty(4), features @ weight.T).matrix(weight)
    differences = weight[1:] - weight[0]
    move = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    blind = move - torch.linalg.pinv(differences) @ (differences @ move)
    assert blind.norm() > 0.5
    assert torch.allclose(differences @ blind, torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert (matrix @ blind).abs().max() < 1e-12
    # The head rows themselves see this direction: only their differences matter.
    assert (weight @ blind).abs().min() > 1e-3
    assert (matrix @ move).abs().max() > 1e-3


def test_divergence_of_predictions_tends_to_half_the_quadratic_form() -> None:
    weight, features = head_and_features(6, 8, 1, seed=7)
    feature = features[0]
    direction = torch.randn(8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    matrix = of_one(weight, feature)
    errors = []
    for scale in (1e-1, 1e-2, 1e-3):
        delta = scale * direction
        moved = torch.log_softmax(weight @ (feature + delta), dim=0)
        divergence = (moved.exp() * (moved - torch.log_softmax(weight @ feature, dim=0))).sum()
        errors.append(abs(float(divergence / (delta @ matrix @ delta)) - 0.5))
    assert errors[2] < 1e-3
    assert errors[2] < errors[1] < errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_type_is_kept(dtype: torch.dtype) -> None:
    weight, features = head_and_features(4, 6, 5)
    weight, features = weight.to(dtype), features.to(dtype)
    assert of_one(weight, features[0]).dtype == dtype
    assert accumulate(FeatureMatrixSum.empty(4), features @ weight.T).matrix(weight).dtype == dtype
    assert feature_matrix(weight, torch.full((4,), 0.25), torch.eye(4) / 16).dtype == dtype


def test_float32_stays_positive_for_confident_predictions() -> None:
    weight, features = head_and_features(8, 16, 20, seed=11)
    weight, features = 10 * weight.float(), features.float()
    matrix = accumulate(FeatureMatrixSum.empty(8), features @ weight.T).matrix(weight)
    eigenvalues = torch.linalg.eigvalsh(matrix.double())
    assert eigenvalues.min() > -1e-6 * eigenvalues.max()


def test_quadratic_drift_against_a_loop() -> None:
    weight, features = head_and_features(5, 7, 6)
    matrix = of_one(weight, features[0])
    full = 10.0 * matrix + 0.1 * torch.eye(7, dtype=torch.float64)
    expected = sum(float(delta @ full @ delta) for delta in features) / 6
    assert float(quadratic_drift(features, matrix, 10.0, 0.1)) == pytest.approx(expected, rel=1e-12)


def test_no_drift_no_loss_and_no_gradient() -> None:
    weight, features = head_and_features(5, 7, 6)
    matrix = of_one(weight, features[0])
    current = features.clone().requires_grad_()
    loss = quadratic_drift(current - features, matrix, 10.0, 0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert current.grad is not None
    assert not current.grad.any()


def test_quadratic_drift_gradient() -> None:
    weight, features = head_and_features(5, 7, 6)
    matrix = of_one(weight, features[0])
    delta = features.clone().requires_grad_()
    quadratic_drift(delta, matrix, 10.0, 0.1).backward()
    full = 10.0 * matrix + 0.1 * torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(delta.grad, 2 * features @ full / 6)


def test_cosine_heads_have_the_matrix_that_autograd_gives() -> None:
    """The mean over features of sum_y p_y g_y g_y^T, with g_y the gradient of log p_y with respect to the feature."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    scale = torch.tensor([6.0], dtype=torch.float64)
    expected = torch.zeros(5, 5, dtype=torch.float64)
    for feature in features:
        point = feature.clone().requires_grad_(True)
        logs = torch.log_softmax(cosine_logits(point[None], weight, scale)[0], dim=0)
        for log in logs:
            (slope,) = torch.autograd.grad(log, point, retain_graph=True)
            expected += log.exp().detach() * torch.outer(slope, slope) / len(features)
    total = FeatureMatrixSum.empty(4)
    for piece in features.split(3):
        total = accumulate_cosine(total, piece, weight, scale)
    torch.testing.assert_close(total.matrix(weight), expected)
    # Along a feature its direction does not change, and neither do its scores.
    alone = accumulate_cosine(FeatureMatrixSum.empty(4), features[:1], weight, scale).matrix(weight)
    torch.testing.assert_close(alone @ features[0], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("classes", [5, 6, 40])
def test_the_smaller_sum_gives_the_same_matrix(classes: int) -> None:
    """With more classes than features, n x n numbers are summed and not m x m."""
    weight, features = head_and_features(classes, 6, 30)
    logits = features @ weight.T
    both = [FeatureMatrixSum.empty(classes), FeatureMatrixSum.of_head(weight)]
    for part in logits.split(7):
        both = [accumulate(each, part) for each in both]
    assert both[1].outer.shape == (min(classes, 6), min(classes, 6))
    torch.testing.assert_close(both[1].matrix(weight), both[0].matrix(weight), rtol=1e-10, atol=1e-12)
