"""Maps of single classes against the obvious computation, and where there are no images near a class."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from efcil.core.class_transport import class_maps, nearness
from efcil.core.classifiers import ClassStatistics
from efcil.core.gaussians import mixture_covariance
from efcil.core.transport import AffineMap, ridge_map


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_classes() -> ClassStatistics:
    """The first lies among the images below, the second far away."""
    root = 0.5 * noise(2, 4, 4, seed=1)
    means = torch.stack([torch.zeros(4).double(), torch.full((4,), 300.0).double()])
    return ClassStatistics(means, root @ root.mT + 0.5 * torch.eye(4).double())


def bent(count: int = 60) -> tuple[Tensor, Tensor]:
    """Features before and after a drift that no affine map describes."""
    before = noise(count, 4, seed=2)
    return before, before + 0.3 * before.square() + 0.1 * noise(count, 4, seed=3)


def test_nearness_by_hand() -> None:
    classes, features = two_classes(), 0.8 * noise(9, 4, seed=4)
    assert classes.covariances is not None
    covariance = classes.covariances[0]
    shrunk = 0.9 * covariance + 0.1 * covariance.diagonal().mean() * torch.eye(4).double()
    inverse = torch.linalg.inv(shrunk)
    expected = [math.exp(-max(0.0, float(x @ inverse @ x) / 4 - 1) / (2 * 0.7)) for x in features]
    found = nearness(features, classes.means[0], covariance, 0.7)
    torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=1e-4, atol=1e-5)
    assert 0 < int((found == 1.0).sum()) < len(found)


def test_nothing_but_itself_is_near_a_class_without_spread() -> None:
    found = nearness(torch.eye(3), torch.eye(3)[0], torch.zeros(3, 3), 1.0)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.0, 0.0]).double())


@pytest.mark.parametrize("only_shift", [False, True])
def test_class_maps_by_hand(only_shift: bool) -> None:
    """Against least squares with a row for every image and one for every entry that is penalised."""
    classes, (before, after), pull = two_classes(), bent(), 7.0
    common = ridge_map(before, after)
    found = next(class_maps(before, after, common, classes, temperature=0.5, pull=pull, only_shift=only_shift))
    mean, covariances = classes.means[0], classes.covariances
    assert covariances is not None
    weight = nearness(before, mean, covariances[0], 0.5)
    error = after - before @ common.matrix.T - common.shift
    variance = ((before - before.mean(dim=0)) ** 2).mean()
    columns = torch.cat([before - mean, torch.ones(60, 1).double()], dim=1)
    penalty = (pull * torch.tensor([variance] * 4 + [1.0]).double()).sqrt()
    if only_shift:
        columns, penalty = columns[:, -1:], penalty[-1:]
    rows = torch.cat([weight.sqrt()[:, None] * columns, torch.diag(penalty)])
    wanted = torch.cat([weight.sqrt()[:, None] * error, torch.zeros(len(penalty), 4).double()])
    fitted = torch.linalg.lstsq(rows, wanted).solution
    turn = fitted[:-1].T if not only_shift else torch.zeros(4, 4).double()
    points = noise(5, 4, seed=6)
    expected = points @ common.matrix.T + common.shift + (points - mean) @ turn.T + fitted[-1]
    torch.testing.assert_close(found.points(points), expected)
    left = error - columns @ fitted
    residual = sum(w * torch.outer(x, x) for w, x in zip(weight, left, strict=True)) + pull * common.residual
    torch.testing.assert_close(found.residual, residual / (weight.sum() + pull))


def test_a_class_far_from_all_images_keeps_the_common_map() -> None:
    classes, (before, after) = two_classes(), bent()
    common = ridge_map(before, after)
    near, far = class_maps(before, after, common, classes, pull=1.0)
    torch.testing.assert_close(far.matrix, common.matrix)
    torch.testing.assert_close(far.residual, common.residual)
    assert float((near.points(classes.means[:1]) - common.points(classes.means[:1])).norm()) > 0.01


def test_a_strong_pull_gives_the_common_map() -> None:
    classes, (before, after) = two_classes(), bent()
    common = ridge_map(before, after)
    distances = [
        float((next(class_maps(before, after, common, classes, pull=pull)).matrix - common.matrix).norm())
        for pull in (0.1, 10.0, 1e3, 1e8)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-6


def test_where_features_bend_a_class_is_carried_better_by_its_own_map() -> None:
    """Three clouds in a row, of which those at the ends move alike: one map for all cannot follow any."""
    clouds = [noise(200, 4, seed=seed) + 4 * side for seed, side in ((7, -1), (8, 1), (11, 0))]
    before = torch.cat(clouds)
    after = before + 0.5 * before.square()
    members = noise(300, 4, seed=9) + 4
    moved = members + 0.5 * members.square()
    classes = ClassStatistics(members.mean(dim=0)[None], members.T.cov()[None])
    common = ridge_map(before, after)

    def errors(by: AffineMap) -> tuple[float, float]:
        mean = by.points(classes.means)[0] - moved.mean(dim=0)
        assert classes.covariances is not None
        return float(mean.norm()), float((by.covariances(classes.covariances, True)[0] - moved.T.cov()).norm())

    one, shift, own = (
        errors(common),
        errors(next(class_maps(before, after, common, classes, pull=1.0, only_shift=True))),
        errors(next(class_maps(before, after, common, classes, pull=1.0))),
    )
    assert shift[0] < one[0] / 2
    assert own[0] < one[0] / 2
    assert own[1] < one[1] / 2


def test_covariance_of_a_mixture_is_that_of_its_samples() -> None:
    groups = [noise(50, 3, seed=seed) * (1 + seed) + seed for seed in range(3)]
    means = torch.stack([group.mean(dim=0) for group in groups])
    covariances = torch.stack([torch.cov(group.T, correction=0) for group in groups])
    found = mixture_covariance(means, covariances, torch.arange(3))
    torch.testing.assert_close(found, torch.cov(torch.cat(groups).T, correction=0))
    shared = mixture_covariance(means, covariances[:2], torch.tensor([0, 1, 1]))
    torch.testing.assert_close(shared, mixture_covariance(means, covariances[[0, 1, 1]], torch.arange(3)))


def test_a_ridge_in_the_whitened_space_by_hand() -> None:
    """Whiten the features with the metric, fit an ordinary ridge there, and undo the whitening."""
    before, after, root = 1.0 + noise(40, 4), noise(40, 4, seed=5), noise(4, 4, seed=10)
    metric = root @ root.T
    found = ridge_map(before, after, 0.3, metric=metric)
    factor = torch.linalg.cholesky(metric)
    x = torch.linalg.solve(factor, (before - before.mean(dim=0)).T).T
    change = (after - after.mean(dim=0)) - (before - before.mean(dim=0))
    inside = torch.linalg.solve(x.T @ x / 40 + 0.3 * torch.eye(4).double(), x.T @ change / 40)
    torch.testing.assert_close(found.matrix, torch.eye(4).double() + inside.T @ torch.linalg.inv(factor))


def test_a_metric_without_extent_leaves_directions_without_images_alone() -> None:
    before = torch.cat([noise(50, 3), torch.zeros(50, 2).double()], dim=1)
    found = ridge_map(before, 2.0 * before, 0.0, metric=torch.zeros(5, 5).double())
    torch.testing.assert_close(found.matrix, torch.diag(torch.tensor([2.0, 2, 2, 1, 1]).double()))
