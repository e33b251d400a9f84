"""Statistics carried from one feature space to another: exact where the drift is affine, close to samples elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efcil.core.transport import learned_map, relational_update, ridge_map
from efcil.errors import TrainingError


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def affine(size: int = 6) -> tuple[Tensor, Tensor]:
    return torch.eye(size, dtype=torch.float64) + 0.3 * noise(size, size, seed=1), noise(size, seed=2)


def test_an_affine_drift_is_found_and_moves_gaussians_as_it_moves_samples() -> None:
    matrix, shift = affine()
    before = 2.0 + noise(400, 6)
    after = before @ matrix.T + shift
    found = ridge_map(before, after, 0.0)
    torch.testing.assert_close(found.matrix, matrix)
    torch.testing.assert_close(found.shift, shift)
    torch.testing.assert_close(found.residual, torch.zeros(6, 6, dtype=torch.float64))
    other = 5.0 - 3.0 * noise(50, 6, seed=3)
    moved = other @ matrix.T + shift
    torch.testing.assert_close(found.points(other.mean(dim=0)[None])[0], moved.mean(dim=0))
    torch.testing.assert_close(found.covariances(torch.cov(other.T)[None])[0], torch.cov(moved.T))


def test_the_residual_is_what_the_map_does_not_explain() -> None:
    matrix, shift = affine()
    before, error = noise(5000, 6), 0.5 * noise(5000, 6, seed=4)
    found = ridge_map(before, before @ matrix.T + shift + error, 0.0)
    torch.testing.assert_close(found.residual, torch.cov(error.T), rtol=0, atol=0.01)
    still = torch.zeros(1, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(found.covariances(still, residual=True)[0], found.residual)
    assert float(found.covariances(still).abs().max()) == 0.0


def test_the_penalty_pulls_towards_the_identity() -> None:
    matrix, shift = affine()
    before = 1.0 + noise(300, 6)
    after = before @ matrix.T + shift
    identity = torch.eye(6, dtype=torch.float64)
    distances = [float((ridge_map(before, after, s).matrix - identity).norm()) for s in (0.0, 0.1, 10.0, 1e6)]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-4
    # However strong the pull, the mean of the images still goes where it went.
    stiff = ridge_map(before, after, 1e6)
    torch.testing.assert_close(stiff.points(before.mean(dim=0)[None])[0], after.mean(dim=0))


def test_ridge_by_hand() -> None:
    before, after = 1.0 + noise(40, 4), noise(40, 4, seed=5)
    found = ridge_map(before, after, 0.3)
    x, y = before - before.mean(dim=0), after - after.mean(dim=0)
    strength = 0.3 * x.square().mean()
    gram = x.T @ x / 40 + strength * torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(
        found.matrix.T, torch.linalg.solve(gram, x.T @ y / 40 + strength * torch.eye(4).double())
    )


def test_the_penalty_is_a_hundredth_of_a_variance_unless_said_otherwise() -> None:
    before, after = noise(40, 4), noise(40, 4, seed=5)
    torch.testing.assert_close(ridge_map(before, after).matrix, ridge_map(before, after, 0.01).matrix)


def test_directions_without_images_are_left_alone() -> None:
    before = torch.cat([noise(50, 3), torch.zeros(50, 2, dtype=torch.float64)], dim=1)
    found = ridge_map(before, 2.0 * before, 0.0)
    torch.testing.assert_close(found.matrix, torch.diag(torch.tensor([2.0, 2, 2, 1, 1], dtype=torch.float64)))


def test_with_fewer_images_than_features_only_the_directions_that_they_have_change() -> None:
    matrix, shift = affine(12)
    before = 2.0 + noise(5, 12)
    found = ridge_map(before, before @ matrix.T + shift, 0.0)
    inside = torch.linalg.qr((before - before.mean(dim=0)).T)[0][:, :4]
    torch.testing.assert_close(found.matrix @ inside, matrix @ inside)
    outside = noise(12, 3, seed=6)
    outside = outside - inside @ (inside.T @ outside)
    torch.testing.assert_close(found.matrix @ outside, outside)


def test_without_intercept_the_origin_stays() -> None:
    matrix, _ = affine()
    before = 3.0 + noise(200, 6)
    found = ridge_map(before, before @ matrix.T, 0.0, intercept=False)
    torch.testing.assert_close(found.matrix, matrix)
    assert float(found.shift.abs().max()) == 0.0


def test_the_type_of_the_statistics_is_kept() -> None:
    found = ridge_map(noise(20, 3), noise(20, 3, seed=1))
    assert found.points(torch.zeros(2, 3)).dtype == torch.float32
    assert found.covariances(torch.zeros(2, 3, 3)).dtype == torch.float32


def test_unpaired_features_are_refused() -> None:
    with pytest.raises(TrainingError, match="same images"):
        ridge_map(noise(3, 2), noise(4, 2))


def test_learned_map_approaches_least_squares_and_starts_as_the_identity() -> None:
    matrix, _ = affine()
    before = noise(256, 6).float()
    after = before @ matrix.T.float()
    views = [(before, after)] * 300
    found = learned_map(views, 6, learning_rate=0.01, batch_size=64)
    torch.testing.assert_close(found.matrix, matrix, rtol=0, atol=0.02)
    still = learned_map([(before, before)] * 5, 6)
    torch.testing.assert_close(still.matrix, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-6)
    first = learned_map(views[:1], 6, learning_rate=0.01, batch_size=256)
    # Adam's first step moves every entry by the learning rate, against the sign of its gradient.
    gradient = (before - after).T @ before
    torch.testing.assert_close(first.matrix, torch.eye(6).double() - 0.01 * gradient.sign(), rtol=0, atol=1e-5)


def test_the_residual_of_a_learned_map_is_what_it_leaves_of_the_last_view() -> None:
    matrix, _ = affine()
    before = noise(64, 6).float()
    after = before @ matrix.T.float()
    found = learned_map([(before, 0.0 * before), (before, after)], 6, learning_rate=0.05, batch_size=16)
    error = after.double() - found.points(before.double())
    torch.testing.assert_close(found.residual, error.T @ error / 64)


def test_relation_reproduces_old_means_that_new_ones_span() -> None:
    before, after = noise(4, 8), noise(4, 8, seed=6)
    mix = torch.tensor([[0.2, 0.3, 0.4, 0.1], [1.5, -0.5, 0.0, 0.0]], dtype=torch.float64)
    moved = relational_update(mix @ before, before, after, 1e-10)
    torch.testing.assert_close(moved, mix @ after, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("classes", [1, 3])
def test_relation_follows_a_uniform_drift_and_stands_still_without_any(classes: int) -> None:
    prototypes, before, drift = noise(5, 8), noise(classes, 8, seed=7), noise(8, seed=8)
    torch.testing.assert_close(relational_update(prototypes, before, before + drift), prototypes + drift)
    torch.testing.assert_close(relational_update(prototypes, before, before), prototypes)
