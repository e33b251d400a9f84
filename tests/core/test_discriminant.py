"""Linear classifiers of classes with one covariance: by hand, with few images, and with classes of unequal size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efcil.core import discriminant, gaussians
from efcil.core.discriminant import SharedGaussians

SIZE = 40


def measured(features: Tensor, labels: Tensor) -> SharedGaussians:
    classes = int(labels.max()) + 1
    within = gaussians.within_classes(features, labels, range(classes))
    return SharedGaussians(within.means, within.covariance, len(labels) - classes, within.counts)


def drawn(counts: list[int], seed: int, distance: float = 1.0) -> tuple[Tensor, Tensor]:
    """Features around class centres that are the same for every seed, with directions of unequal variance."""
    centres = torch.randn(len(counts), SIZE, generator=torch.Generator().manual_seed(99)).double() * distance
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    noise = torch.randn(len(labels), SIZE, generator=generator).double() * torch.linspace(0.5, 3.0, SIZE).double()
    return centres[labels] + noise, labels


def naive(classes: SharedGaussians, prior: float) -> tuple[Tensor, Tensor, Tensor]:
    """Whitened class means about their centre, the whitening, and the length of a deviation that was left out."""
    size = classes.means.shape[1]
    share = prior * size / (prior * size + classes.freedom)
    covariance = (1 - share) * classes.covariance + share * classes.covariance.trace() / size * torch.eye(size).double()
    values, vectors = torch.linalg.eigh(covariance)
    whitening = vectors / values.sqrt()
    length = (torch.linalg.inv(covariance) @ classes.covariance).trace()
    left_out = length / (1 - (1 - share) * length / classes.freedom)
    return (classes.means - classes.means.mean(dim=0)) @ whitening, whitening, left_out


def test_bayes_by_hand() -> None:
    classes, points = measured(*drawn([5, 9, 30], 0)), drawn([4, 4, 4], 1)[0]
    means, whitening, length = naive(classes, 0.7)
    away = (points - classes.means.mean(dim=0)) @ whitening
    expected = -0.5 * (away[:, None] - means).square().sum(dim=2) + 0.5 * length / classes.counts
    scores = discriminant.bayes(classes, 0.7)(points)
    torch.testing.assert_close(scores - scores[:, :1], expected - expected[:, :1])


@pytest.mark.parametrize("seed", range(3))
def test_no_class_of_few_images_draws_those_of_many_others(seed: int) -> None:
    counts, tested = [2, 2, 5, 50] * 15, [20] * 60
    classes, (points, answers) = measured(*drawn(counts, seed, 0.7)), drawn(tested, 100 + seed, 0.7)
    found = discriminant.cosine(classes)(points).argmax(dim=1)
    nearest = torch.cdist(points, classes.means).argmin(dim=1)
    assert (found == answers).double().mean() > (nearest == answers).double().mean()
    assert torch.bincount(found).max() < 4 * 20


def test_cosine_by_hand_for_classes_of_equal_size() -> None:
    classes, points = measured(*drawn([8, 8, 8, 8], 0)), drawn([4, 4, 4, 4], 1)[0]
    means, whitening, _ = naive(classes, 1.0)
    away = (points - classes.means.mean(dim=0)) @ whitening
    noise = naive(classes, 1.0)[2] / 8 * (1 - 1 / 4)
    squared = means.square().sum(dim=1)
    length = torch.maximum(squared - noise, 0.4 * squared).sqrt()
    torch.testing.assert_close(discriminant.cosine(classes, 1.0)(points), away @ means.T / length * length.mean())


def test_the_noise_is_about_the_length_of_images_that_were_not_measured() -> None:
    features, labels = drawn([30, 30, 30], 0)
    classes = measured(features, labels)
    _, whitening, left_out = naive(classes, 1.0)
    fresh, of = drawn([400, 400, 400], 1)
    # Deviations from the true centres, which the mean of many images nearly is.
    centres = gaussians.within_classes(fresh, of, range(3)).means
    true = ((fresh - centres[of]) @ whitening).square().sum(dim=1).mean()
    seen = ((features - classes.means[labels]) @ whitening).square().sum(dim=1).sum() / classes.freedom
    assert abs(left_out / true - 1) < 0.1
    assert seen / true < 0.85


@pytest.mark.parametrize("rule", [discriminant.cosine, discriminant.bayes])
def test_a_class_of_few_images_is_found_beside_large_ones(rule: object) -> None:
    found = []
    for seed in range(5):
        classes = measured(*drawn([3, 200, 200, 200], seed, 0.8))
        points, labels = drawn([100] * 4, 50 + seed, 0.8)
        answers = rule(classes, 1.0)(points).argmax(dim=1)  # type: ignore[operator]
        found.append((answers[labels == 0] == 0).double().mean())
        assert (answers == labels).double().mean() > 0.6
    nearest = torch.stack(found).mean()
    assert nearest > 0.5, nearest


@pytest.mark.parametrize("rule", [discriminant.cosine, discriminant.bayes])
@pytest.mark.parametrize("prior", [0.0, 1.0])
def test_one_image_per_class_one_class_and_identical_images(rule: object, prior: float) -> None:
    points = drawn([5, 5], 3)[0].float()
    for counts, spread in (([1, 1], 1.0), ([1], 1.0), ([6], 1.0), ([1, 7], 1.0), ([4, 4], 0.0)):
        features, labels = drawn(counts, 0)
        features = (features if spread else gaussians.within_classes(features, labels, range(2)).means[labels]).float()
        scores = rule(measured(features, labels), prior)(points.double())  # type: ignore[operator]
        assert scores.shape == (10, len(counts))
        assert torch.isfinite(scores).all()


def test_one_image_per_class_is_the_nearest_by_cosine() -> None:
    features, labels = drawn([1, 1, 1], 0, 5.0)
    points, where = drawn([20, 20, 20], 1, 5.0)
    answers = discriminant.cosine(measured(features, labels))(points).argmax(dim=1)
    centred = features - features.mean(dim=0)
    cosines = (points - features.mean(dim=0)) @ (centred / centred.norm(dim=1, keepdim=True)).T
    assert torch.equal(answers, cosines.argmax(dim=1))
    assert (answers == where).all()


def test_the_prior_is_worth_so_many_images_per_feature() -> None:
    assert discriminant.amount(0, 10, 1.0) == 1.0
    assert discriminant.amount(20, 10, 2.0) == 0.5
    assert discriminant.amount(20, 10, 0.0) == 0.0
