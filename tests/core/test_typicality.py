"""Closeness to class means, and the share of known images that are no closer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from efcil.core import typicality
from efcil.core.typicality import Spread


def features(count: int, *, near: torch.Tensor, noise: float = 0.5, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    which = torch.arange(count) % len(near)
    return near[which] + noise * torch.randn(count, near.shape[1], generator=generator)


@pytest.fixture
def means() -> torch.Tensor:
    return 3.0 + 2.0 * torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def test_images_of_other_classes_are_less_close(means: torch.Tensor) -> None:
    close = typicality.closeness(means[:4])
    known, other = close(features(200, near=means[:4])), close(features(200, near=means[4:]))
    assert float(known.min()) > float(other.max())
    assert float(known.max()) <= 1.0 + 1e-6


def test_closeness_has_no_unit(means: torch.Tensor) -> None:
    images = features(20, near=means)
    first, scaled = typicality.closeness(means)(images), typicality.closeness(7.0 * means)(7.0 * images)
    torch.testing.assert_close(first, scaled)


def test_a_single_class_can_be_told_from_others(means: torch.Tensor) -> None:
    close = typicality.closeness(means[:1])
    assert float(close(features(50, near=means[:1])).min()) > float(close(features(50, near=means[1:])).max())


def test_about_the_wanted_share_of_known_images_is_rejected(means: torch.Tensor) -> None:
    close = typicality.closeness(means)
    held_out = close(features(300, near=means, noise=2.0, seed=2)).double().numpy()
    fresh = close(features(4000, near=means, noise=2.0, seed=3)).double().numpy()
    known = typicality.spread_of(held_out)
    assert known is not None
    for share in (0.05, 0.2):
        rejected = (typicality.share_as_untypical(fresh, known) < share).mean()
        assert rejected == pytest.approx(share, rel=0.5)


def test_few_images_reject_more_carefully() -> None:
    few, many = Spread(3, 0.8, 0.01), Spread(300, 0.8, 0.01)
    low = np.array([0.5])
    assert typicality.share_as_untypical(low, few)[0] > 0.05 > typicality.share_as_untypical(low, many)[0]


def test_the_share_is_that_of_the_prediction_interval_in_a_textbook() -> None:
    # One in twenty lies below -2.353363 in Student's distribution with three degrees of freedom.
    low = 0.7 - 2.353363 * 0.1 * (1 + 1 / 4) ** 0.5
    shares = typicality.share_as_untypical(np.array([low, 0.7]), Spread(4, 0.7, 0.01))
    assert shares == pytest.approx([0.05, 0.5])


def test_spreads_pool_to_that_of_all_images() -> None:
    values = np.random.default_rng(0).normal(0.6, 0.1, 90)
    parts = [typicality.spread_of(part) for part in (values[:10], values[10:40], values[40:])]
    whole, pooled = typicality.spread_of(values), typicality.pooled([part for part in parts if part is not None])
    assert whole is not None
    assert pooled is not None
    assert (pooled.images, pooled.mean, pooled.variance) == pytest.approx((90, whole.mean, whole.variance))


def test_single_images_count_together() -> None:
    values = np.array([0.5, 0.6, 0.9])
    parts = [typicality.spread_of(values[place : place + 1]) for place in range(3)]
    pooled, whole = typicality.pooled([part for part in parts if part is not None]), typicality.spread_of(values)
    assert pooled is not None
    assert whole is not None
    assert (pooled.images, pooled.mean, pooled.variance) == pytest.approx((3, whole.mean, whole.variance))


def test_nothing_is_said_where_no_image_was_held_out() -> None:
    assert typicality.spread_of(np.array([])) is None
    assert typicality.spread_of(np.array([0.5, np.nan, 0.2])) is None
    assert typicality.pooled([]) is None


def test_equal_values_are_no_division_by_zero() -> None:
    known = typicality.spread_of(np.full(5, 0.7))
    assert known is not None
    assert np.isfinite(typicality.share_as_untypical(np.array([0.1, 0.7, 0.9]), known)).all()
