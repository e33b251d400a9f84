from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efcil.core import prototypes
from efcil.core.prototypes import (
    cholesky_factors,
    class_statistics,
    coloured_noise,
    draw_composition,
    draw_prototype_labels,
    largest_new_count,
    total_count,
)
from efcil.errors import EfcilError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- statistics and factors ---


def test_statistics_match_numpy_in_the_order_asked_for() -> None:
    features = torch.randn(60, 5, generator=generator(), dtype=torch.float64)
    labels = torch.randint(0, 4, (60,), generator=generator(1))
    means, covariances = class_statistics(features, labels, [3, 1])
    for row, label in enumerate([3, 1]):
        members = features[labels == label].numpy()
        np.testing.assert_allclose(means[row].numpy(), members.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(covariances[row].numpy(), np.cov(members, rowvar=False), rtol=1e-10, atol=1e-14)


def test_statistics_of_one_sample_and_of_none() -> None:
    features = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])
    means, covariances = class_statistics(features, torch.tensor([0, 1, 1]), range(2))
    assert torch.equal(means, torch.tensor([[1.0, 2.0], [4.0, 5.5]]))
    assert torch.equal(covariances[0], torch.zeros(2, 2))
    torch.testing.assert_close(covariances[1], torch.tensor([[2.0, 3.0], [3.0, 4.5]]))
    with pytest.raises(EfcilError, match="Class 2 has no feature"):
        class_statistics(features, torch.tensor([0, 1, 1]), range(3))


def test_statistics_far_from_the_origin_keep_their_digits() -> None:
    spread = torch.randn(500, 3, generator=generator())
    features = spread + 2.0**20  # where float32 has steps of 1/8, so that a mean rounded to it would show
    _, covariances = class_statistics(features, torch.zeros(500, dtype=torch.int64), [0])
    assert covariances.dtype == torch.float32
    expected = np.cov(features.double().numpy(), rowvar=False)
    np.testing.assert_allclose(covariances[0].numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_multiply_back_and_keep_the_type(dtype: torch.dtype) -> None:
    # Fewer samples than dimensions, as in practice: singular covariances. More classes than one block.
    features = torch.randn(70 * 4, 6, generator=generator(), dtype=dtype)
    _, covariances = class_statistics(features, torch.arange(70).repeat(4), range(70))
    factors = cholesky_factors(covariances)
    assert factors.dtype == dtype
    assert torch.equal(factors, factors.tril())
    expected = covariances + 1e-5 * torch.eye(6, dtype=dtype)
    torch.testing.assert_close(factors @ factors.transpose(1, 2), expected, rtol=1e-5, atol=1e-6)


def test_growing_jitter_touches_only_the_matrix_that_needs_it() -> None:
    good = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    indefinite = torch.diag(torch.tensor([1.0, -3e-3], dtype=torch.float64))
    factors = cholesky_factors(torch.stack([good, indefinite, good]))
    eye = torch.eye(2, dtype=torch.float64)
    product = factors @ factors.transpose(1, 2)
    torch.testing.assert_close(product[0], good + 1e-5 * eye, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(product[2], product[0], rtol=0, atol=0)
    torch.testing.assert_close(product[1], indefinite + 1e-2 * eye, rtol=1e-12, atol=1e-12)


def test_zero_covariance_gives_the_jitter_alone() -> None:
    factors = cholesky_factors(torch.zeros(1, 3, 3, dtype=torch.float64), jitter=4e-6)
    torch.testing.assert_close(factors[0], 2e-3 * torch.eye(3, dtype=torch.float64))


def test_jitter_grows_as_far_as_it_must() -> None:
    factors = cholesky_factors(-3.0 * torch.eye(2, dtype=torch.float64)[None])
    torch.testing.assert_close(factors[0].square(), (10.0 - 3.0) * torch.eye(2, dtype=torch.float64))


def test_without_jitter_a_singular_covariance_gets_very_little() -> None:
    singular = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    regular = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    factors = cholesky_factors(torch.stack([singular, regular, torch.zeros(2, 2)]), jitter=0.0)
    torch.testing.assert_close(factors @ factors.transpose(1, 2), torch.stack([singular, regular, 0 * singular]))


def test_hopeless_covariances_are_refused() -> None:
    with pytest.raises(EfcilError, match=r"classes \[1\]"):
        cholesky_factors(torch.stack([torch.eye(2), -1e9 * torch.eye(2)]))
    many = torch.eye(2).repeat(70, 1, 1)  # more than are factorised together
    many[66] = -1e9 * torch.eye(2)
    with pytest.raises(EfcilError, match=r"classes \[66\]"):
        cholesky_factors(many)
    with pytest.raises(EfcilError, match="not finite"):
        cholesky_factors(torch.full((1, 2, 2), math.nan))


# --- labels ---


@settings(deadline=None, derandomize=True, max_examples=30)
@given(classes=st.integers(1, 90), count=st.integers(1, 80), seed=st.integers(0, 1000))
def test_prototype_labels_are_balanced_in_every_step(classes: int, count: int, seed: int) -> None:
    labels = draw_prototype_labels(classes, count, 5, generator(seed))
    assert labels.shape == (5, count)
    for row in labels:
        counts = torch.bincount(row, minlength=classes)
        assert len(counts) == classes
        assert int(counts.max() - counts.min()) <= 1


def test_prototype_labels_are_shuffled_uniform_and_different_between_steps() -> None:
    labels = draw_prototype_labels(10, 64, 4000, generator())
    assert len(torch.unique(labels, dim=0)) == 4000
    # At every place every class appears equally often; five standard deviations of a binomial share.
    shares = torch.stack([(labels == label).double().mean(dim=0) for label in range(10)])
    assert (shares - 0.1).abs().max() < 5 * math.sqrt(0.1 * 0.9 / 4000)
    # Shuffled, not one permutation repeated.
    assert (labels[:, 10:20] == labels[:, :10]).all(dim=1).sum() == 0


def test_draws_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    first = draw_prototype_labels(7, 12, 3, generator(5)), draw_composition(30, 10, 64, 3, generator(5)).new_count
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = draw_prototype_labels(7, 12, 3, generator(5)), draw_composition(30, 10, 64, 3, generator(5)).new_count
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first[0], draw_prototype_labels(7, 12, 3, generator(6)))


def test_labels_need_an_old_class() -> None:
    with pytest.raises(EfcilError, match="at least one old class"):
        draw_prototype_labels(0, 4, 1, generator())


# --- sampling ---


def gaussians(classes: int, size: int, width: int | None = None) -> tuple[Tensor, Tensor]:
    means = torch.randn(classes, size, generator=generator(1), dtype=torch.float64)
    return means, torch.randn(classes, size, width or size, generator=generator(2), dtype=torch.float64)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(classes=st.integers(1, 6), count=st.integers(0, 40), width=st.integers(1, 5), seed=st.integers(0, 1000))
def test_sampling_is_the_affine_map_row_by_row(classes: int, count: int, width: int, seed: int) -> None:
    means, factors = gaussians(classes, 4, width)
    labels = torch.randint(0, classes, (count,), generator=generator(seed))
    noise = torch.randn(count, width, generator=generator(seed), dtype=torch.float64)
    expected = torch.empty(count, 4, dtype=torch.float64)
    for row in range(count):
        expected[row] = means[labels[row]] + factors[labels[row]] @ noise[row]
    bound = int(torch.bincount(labels, minlength=1).max())
    torch.testing.assert_close(means[labels] + coloured_noise(factors, labels, noise), expected)
    torch.testing.assert_close(means[labels] + coloured_noise(factors, labels, noise, bound), expected)
    torch.testing.assert_close(means[labels] + coloured_noise(factors, labels, noise, bound + 3), expected)


@pytest.mark.parametrize("largest_count", [None, 8])
def test_sampling_follows_its_rows_wherever_they_stand(largest_count: int | None) -> None:
    means, factors = gaussians(5, 6)
    labels = torch.arange(40) % 5
    noise = torch.randn(40, 6, generator=generator(3), dtype=torch.float64)
    order = torch.randperm(40, generator=generator(4))
    straight = means[labels] + coloured_noise(factors, labels, noise, largest_count)
    permuted = means[labels[order]] + coloured_noise(factors, labels[order], noise[order], largest_count)
    torch.testing.assert_close(permuted, straight[order], rtol=1e-12, atol=1e-12)


def test_a_bound_that_is_too_small_is_not_silent() -> None:
    _, factors = gaussians(2, 3)
    with pytest.raises(IndexError):
        coloured_noise(factors, torch.zeros(4, dtype=torch.int64), torch.randn(4, 3, dtype=torch.float64), 3)


def test_samples_have_the_moments_asked_for() -> None:
    means, raw = gaussians(3, 4)
    covariances = raw @ raw.transpose(1, 2)
    count = 30_000
    labels = torch.arange(3 * count) % 3
    noise = torch.randn(3 * count, 4, generator=generator(8), dtype=torch.float64)
    drawn = means[labels] + coloured_noise(cholesky_factors(covariances), labels, noise, count)
    sampled_means, sampled_covariances = class_statistics(drawn, labels, range(3))
    # Five standard errors of a mean and of a covariance entry of normal samples.
    variances = covariances.diagonal(dim1=1, dim2=2)
    assert ((sampled_means - means).abs() < 5 * (variances / count).sqrt()).all()
    error = ((covariances.square() + variances[:, :, None] * variances[:, None, :]) / count).sqrt()
    assert ((sampled_covariances - covariances).abs() < 5 * error + 1e-5).all()


# --- composition of the rehearsal batch ---

# (first task, later tasks, last number of seen classes, then total and mean of new for 2nd, 3rd and last task).
COMPOSITIONS = {
    "cifar ws 5": (50, 10, 100, (64, 10.7), (64, 9.1), (64, 6.4)),
    "cifar ws 10": (50, 5, 100, (64, 5.8), (64, 5.3), (64, 3.2)),
    "cifar ws 20": (40, 3, 100, (64, 4.5), (64, 4.2), (64, 1.9)),
    "cifar cs 10": (10, 10, 100, (40, 20.0), (60, 20.0), (64, 6.4)),
    "cifar cs 20": (5, 5, 100, (20, 10.0), (30, 10.0), (64, 3.2)),
    "tiny ws 10": (100, 10, 200, (64, 5.8), (64, 5.3), (64, 3.2)),
    "tiny ws 20": (100, 5, 200, (64, 3.0), (64, 2.9), (64, 1.6)),
    "tiny cs 10": (20, 20, 200, (64, 32.0), (64, 21.3), (64, 6.4)),
    "tiny cs 20": (10, 10, 200, (40, 20.0), (60, 20.0), (64, 3.2)),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_composition_of_the_protocols(name: str) -> None:
    first, later, seen_at_last, *expected = COMPOSITIONS[name]
    steps = 20_000
    for old, (total, mean_new) in zip((first, first + later, seen_at_last - later), expected, strict=True):
        assert total_count(old, later, 64) == total
        drawn = draw_composition(old, later, 64, steps, generator(old))
        assert torch.equal(drawn.new_count + drawn.old_count, torch.full((steps,), total))
        exact = total * later / (old + later)
        assert exact == pytest.approx(mean_new, abs=0.051)
        # Five standard errors, from the draws themselves; exactly constant where every class has two places.
        error = 5 * float(drawn.new_count.double().std()) / math.sqrt(steps)
        assert abs(float(drawn.new_count.double().mean()) - exact) <= error + 1e-12
        if total < 64:
            assert error == 0.0


@settings(deadline=None, derandomize=True, max_examples=80)
@given(old=st.integers(1, 80), new=st.integers(1, 40), batch=st.integers(1, 70), seed=st.integers(0, 1000))
def test_composition_against_slots_drawn_one_step_at_a_time(old: int, new: int, batch: int, seed: int) -> None:
    steps = 4
    drawn = draw_composition(old, new, batch, steps, generator(seed))
    noise = torch.rand(steps, old + new, generator=generator(seed), dtype=torch.float64).tolist()
    for step in range(steps):
        order = sorted(range(old + new), key=noise[step].__getitem__)
        slots = order[:batch] if len(order) >= batch else order + order[: batch - len(order)]
        on_new = len([slot for slot in slots if slot >= old])
        assert int(drawn.new_count[step]) == on_new
        assert int(drawn.old_count[step]) == len(slots) - on_new
        assert total_count(old, new, batch) == len(slots)
        assert on_new <= largest_new_count(old, new, batch) <= len(slots)


@pytest.mark.parametrize(("old", "new", "batch"), [(3, 2, 4), (3, 2, 7), (3, 2, 30), (2, 3, 5), (1, 1, 3)])
def test_largest_counts_are_reached(old: int, new: int, batch: int) -> None:
    drawn = draw_composition(old, new, batch, 500, generator())
    assert int(drawn.new_count.max()) == largest_new_count(old, new, batch)
    assert drawn.new_count.dtype == drawn.old_count.dtype == torch.int64


def test_few_rows_of_many_classes_are_coloured_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    factors, noise = torch.randn(50, 6, 4, generator=generator), torch.randn(20, 4, generator=generator)
    labels = torch.randint(50, (20,), generator=generator)
    expected = torch.stack([factors[label] @ row for label, row in zip(labels.tolist(), noise, strict=True)])
    padded: list[bool] = []
    monkeypatch.setattr(torch, "searchsorted", lambda *given: padded.append(True))
    torch.testing.assert_close(prototypes.coloured_noise(factors, labels, noise, 20), expected)
    assert not padded
    # What a GPU does, in pieces of three rows.
    monkeypatch.setattr(prototypes, "_GATHERED_TOGETHER", 3 * 6 * 4 * 4)
    torch.testing.assert_close(prototypes._coloured_by_row(factors, labels, noise), expected)
