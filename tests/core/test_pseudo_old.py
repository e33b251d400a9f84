"""Pseudo-old images: which image becomes which class, and the steps towards it, against one image at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from efcil.core import pseudo_old


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_distances_are_standardised_class_by_class() -> None:
    features, means = random(40, 6), 3.0 * random(5, 6, seed=1)
    found = pseudo_old.standardised_distances(features, means)
    for label in range(5):
        distances = [math.dist(feature.tolist(), means[label].tolist()) for feature in features]
        mean = sum(distances) / 40
        spread = math.sqrt(sum((each - mean) ** 2 for each in distances) / 40)
        expected = torch.tensor([(each - mean) / spread for each in distances], dtype=torch.float64)
        torch.testing.assert_close(found[:, label], expected)


def test_equal_distances_have_no_preference() -> None:
    one = random(1, 6).expand(7, 6)
    assert torch.equal(pseudo_old.standardised_distances(one, random(3, 6, seed=1)), torch.zeros(7, 3).double())
    assert torch.equal(pseudo_old.standardised_distances(one[:1], random(3, 6, seed=1)), torch.zeros(1, 3).double())


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e6])
def test_what_counts_as_equal_is_relative_to_the_distances(size: float) -> None:
    """Distances that differ by rounding count as equal, those that differ by a millionth do not, in any unit."""
    mean = torch.zeros(1, 3, dtype=torch.float64)
    for difference, expected in ((1e-12, 0.0), (1e-6, 1.0)):
        features = torch.tensor([[1.0 - difference, 0.0, 0.0], [1.0 + difference, 0.0, 0.0]], dtype=torch.float64)
        found = pseudo_old.standardised_distances(size * features, mean)[:, 0]
        torch.testing.assert_close(found, torch.tensor([-expected, expected]).double(), rtol=1e-4, atol=0.0)


def test_without_noise_the_nearest_is_chosen() -> None:
    distances = random(9, 4)
    labels = pseudo_old.choose_classes(distances)
    assert labels.tolist() == [min(range(4), key=row.__getitem__) for row in distances.tolist()]
    wanted = torch.tensor([3, 0, 3, 2])
    nearest = [min(range(9), key=lambda image, c=c: float(distances[image, c])) for c in wanted.tolist()]
    assert pseudo_old.choose_sources(distances, wanted).tolist() == nearest


def test_gumbel_noise_draws_by_the_exponential_of_the_distance() -> None:
    distances, draws = torch.tensor([[0.0, 1.0, -0.5]]), 40_000
    noise = pseudo_old.gumbel(draws, 3, torch.Generator().manual_seed(0))
    expected = torch.softmax(-distances[0], dim=0)
    for labels in (
        pseudo_old.choose_classes(distances.expand(draws, 3), noise),
        pseudo_old.choose_sources(distances.T, torch.zeros(draws, dtype=torch.int64), noise),
    ):
        share = torch.bincount(labels, minlength=3) / draws
        torch.testing.assert_close(share, expected, rtol=0, atol=0.012)  # five standard deviations


def test_gumbel_noise_is_finite_and_repeats() -> None:
    one, other = (pseudo_old.gumbel(500, 20, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, other)
    assert bool(one.isfinite().all())


def test_every_step_has_the_length_asked_for() -> None:
    images, matrix, targets = random(5, 3, 4, 4), random(48, 7, seed=1), random(5, 7, seed=2)

    def gradient(some: Tensor, wanted: Tensor) -> Tensor:
        return ((some.flatten(1) @ matrix - wanted) @ matrix.T).view_as(some)

    found = pseudo_old.descend(images, targets, gradient, (0.4, 0.3, 0.1))
    for number in range(5):
        x = images[number].clone()
        for length in (0.4, 0.3, 0.1):
            slope = matrix @ (matrix.T @ x.flatten() - targets[number])
            x -= length * (slope / math.sqrt(sum(each**2 for each in slope.tolist()))).view_as(x)
        torch.testing.assert_close(found[number], x)
    once = pseudo_old.descend(images, targets, gradient, [0.4])
    torch.testing.assert_close((once - images).flatten(1).norm(dim=1), torch.full((5,), 0.4, dtype=torch.float64))


def test_lengths_are_equal_or_fall_towards_zero() -> None:
    assert pseudo_old.step_lengths(3, 6.0, falling=False) == (6.0, 6.0, 6.0)
    assert pseudo_old.step_lengths(4, 8.0, falling=True) == (8.0, 6.0, 4.0, 2.0)


def test_an_image_without_a_gradient_stays() -> None:
    images = random(2, 3, 4, 4).float()
    found = pseudo_old.descend(images, random(2, 7).float(), lambda some, _: torch.zeros_like(some), [6.0] * 2)
    assert torch.equal(found, images)


def test_half_precision_keeps_its_type_and_its_length() -> None:
    images = torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16)
    slope = 1e-3 * random(2, 3, 8, 8).bfloat16()
    found = pseudo_old.descend(images, random(2, 7), lambda some, _: slope, [6.0])
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float().flatten(1).norm(dim=1), torch.full((2,), 6.0), rtol=0.01, atol=0)


def test_steps_smaller_than_half_precision_add_up() -> None:
    images = torch.full((1, 3, 8, 8), 1.5, dtype=torch.bfloat16)  # the next number is 0.0078 away
    length = 0.002 * math.sqrt(images.numel())
    found = pseudo_old.descend(images, random(1, 7), lambda some, _: torch.ones_like(some), [length] * 8)
    torch.testing.assert_close(found.float(), torch.full((1, 3, 8, 8), 1.484), rtol=0.0, atol=0.004)
