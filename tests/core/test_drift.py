from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efcil.core.drift import compensate, euclidean_weights, move
from efcil.errors import EfcilError


def problem(classes: int = 4, samples: int = 30, size: int = 6, seed: int = 0) -> tuple[Tensor, ...]:
    """Prototypes, old features, new features and a singular feature matrix."""
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.randn(classes, size, generator=generator, dtype=torch.float64)
    old = torch.randn(samples, size, generator=generator, dtype=torch.float64)
    new = old + 0.3 * torch.randn(samples, size, generator=generator, dtype=torch.float64)
    root = torch.randn(size - 1, size, generator=generator, dtype=torch.float64)
    return prototypes, old, new, root.T @ root


def naive_weights(old: Tensor, prototypes: Tensor, matrix: Tensor, sigma: float) -> list[list[float]]:
    distances = [[float((f - p) @ matrix @ (f - p)) for f in old] for p in prototypes]
    lowest = min(min(row) for row in distances)
    highest = max(max(row) for row in distances)
    return [[math.exp(-(d - lowest) / (highest - lowest) / (2 * sigma**2)) for d in row] for row in distances]


@settings(deadline=None, derandomize=True, max_examples=20)
@given(classes=st.integers(1, 5), samples=st.integers(2, 20), seed=st.integers(0, 1000), sigma=st.floats(0.1, 2.0))
def test_update_against_loops(classes: int, samples: int, seed: int, sigma: float) -> None:
    prototypes, old, new, matrix = problem(classes, samples, seed=seed)
    expected = naive_weights(old, prototypes, matrix, sigma)
    moved = compensate(prototypes, old, new, matrix, sigma)
    for label in range(classes):
        shift = sum(w * (new[i] - old[i]) for i, w in enumerate(expected[label])) / sum(expected[label])
        torch.testing.assert_close(moved[label], prototypes[label] + shift, rtol=1e-8, atol=1e-10)
    weights = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(move(prototypes, weights, new - old), moved, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rows", [1, 7, 30, 1000])
def test_chunks_do_not_change_the_result(rows: int) -> None:
    prototypes, old, new, matrix = problem()
    whole = compensate(prototypes, old, new, matrix)
    torch.testing.assert_close(compensate(prototypes, old, new, matrix, rows=rows), whole, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_same_features_leave_prototypes_bit_equal(dtype: torch.dtype) -> None:
    prototypes, old, _, matrix = (part.to(dtype) for part in problem())
    assert torch.equal(compensate(prototypes, old, old.clone(), matrix), prototypes)


def test_uniform_drift_moves_every_prototype_by_it() -> None:
    prototypes, old, _, matrix = problem()
    # Values on a binary grid: adding and taking them apart is exact, so only the weighted mean could go wrong.
    prototypes, old = (prototypes * 64).round() / 64, (old * 64).round() / 64
    drift = torch.tensor([0.5, -1.25, 3.0, 0.0, 0.25, -8.0], dtype=torch.float64)
    moved = compensate(prototypes, old, old + drift, matrix)
    torch.testing.assert_close(moved, prototypes + drift, rtol=1e-14, atol=1e-14)
    single = compensate(prototypes.float(), old.float(), (old + drift).float(), matrix.float())
    assert single.dtype == torch.float32
    assert torch.equal(single, (prototypes + drift).float())


@pytest.mark.parametrize("offset", [0.0, 3.7])
def test_equal_distances_give_equal_weights(offset: float) -> None:
    prototypes, _, _, matrix = problem(classes=1)
    old = (prototypes + offset).repeat(50, 1)
    new = old + torch.arange(50, dtype=torch.float64)[:, None]
    torch.testing.assert_close(compensate(prototypes, old, new, matrix), prototypes + 24.5)


def test_distances_equal_up_to_rounding_give_equal_weights() -> None:
    # Samples on a sphere around the one prototype: what differs between their distances is rounding alone.
    prototypes, old, _, _ = problem(classes=1)
    sphere = prototypes + 2.5 * torch.nn.functional.normalize(old, dim=1)
    assert (sphere - prototypes).square().sum(dim=1).unique().numel() > 1
    new = sphere + torch.arange(30, dtype=torch.float64)[:, None]
    moved = compensate(prototypes, sphere, new, torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(moved, prototypes + 14.5)


def test_a_direction_that_hardly_counts_still_tells_samples_apart() -> None:
    samples = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    matrix = torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64))
    moved = compensate(samples[:1], samples, samples + torch.tensor([[0.0], [1.0]]), matrix, 0.2)
    share = math.exp(-12.5) / (1.0 + math.exp(-12.5))
    torch.testing.assert_close(moved, torch.full((1, 2), share, dtype=torch.float64))


def test_a_class_far_from_everything_moves_too() -> None:
    prototypes, old, new, matrix = problem(classes=1)
    far = prototypes + 1e4
    weights = torch.tensor(naive_weights(old, far, matrix, 0.2), dtype=torch.float64)
    torch.testing.assert_close(compensate(far, old, new, matrix), move(far, weights, new - old))


def test_weights_of_a_far_class_do_not_vanish_under_a_narrow_kernel() -> None:
    prototypes, old, new, matrix = problem(classes=2)
    prototypes[1] += 50.0
    moved = compensate(prototypes, old, new, matrix, sigma=0.01)
    assert bool(torch.isfinite(moved).all())
    # Under so narrow a kernel a class near the samples follows its nearest one.
    distances = [float((f - prototypes[0]) @ matrix @ (f - prototypes[0])) for f in old]
    widest = max(float((f - prototypes[1]) @ matrix @ (f - prototypes[1])) for f in old) - min(distances)
    weights = torch.tensor([math.exp(-(d - min(distances)) / widest / (2 * 0.01**2)) for d in distances])
    expected = prototypes[0] + weights.double() @ (new - old) / weights.sum()
    torch.testing.assert_close(moved[0], expected, rtol=1e-5, atol=1e-6)


def test_zero_matrix_gives_the_plain_mean_drift() -> None:
    prototypes, old, new, matrix = problem()
    moved = compensate(prototypes, old, new, torch.zeros_like(matrix))
    torch.testing.assert_close(moved, prototypes + (new - old).mean(dim=0))


@pytest.mark.parametrize(
    ("dtype", "shift", "tolerance"), [(torch.float32, 2.0**9, 1e-4), (torch.float64, 2.0**20, 1e-9)]
)
def test_far_from_the_origin_distances_keep_their_digits(dtype: torch.dtype, shift: float, tolerance: float) -> None:
    # On a binary grid the shift itself loses nothing.
    prototypes, old, new, matrix = ((part * 64).round() / 64 for part in problem())
    near = compensate(prototypes, old, new, matrix)
    far = compensate(*((part + shift).to(dtype) for part in (prototypes, old, new)), matrix.to(dtype))
    assert far.dtype == dtype
    torch.testing.assert_close(far.double() - shift, near, rtol=0.0, atol=tolerance)


def test_euclidean_weights_against_a_loop() -> None:
    prototypes, old, _, _ = problem()
    raw = torch.tensor(
        [[math.exp(-float((f - p).square().sum()) / (2 * 0.8**2)) for f in old] for p in prototypes],
        dtype=torch.float64,
    )
    weights = euclidean_weights(old, prototypes, sigma=0.8)
    torch.testing.assert_close(weights, raw / raw.max(dim=1, keepdim=True).values, rtol=1e-10, atol=1e-14)


def test_euclidean_weights_of_a_class_far_from_everything_do_not_vanish() -> None:
    prototypes, old, new, _ = problem()
    weights = euclidean_weights(old, prototypes + 1000.0, sigma=0.2)
    assert torch.equal(weights.max(dim=1).values, torch.ones(4, dtype=torch.float64))
    assert torch.isfinite(move(prototypes + 1000.0, weights, new - old)).all()


def test_what_cannot_be_averaged_is_refused() -> None:
    prototypes, old, new, matrix = problem()
    with pytest.raises(EfcilError, match="0 samples"):
        compensate(prototypes, old[:0], new[:0], matrix)
    with pytest.raises(EfcilError, match="0 prototypes"):
        compensate(prototypes[:0], old, new, matrix)
    with pytest.raises(EfcilError, match="positive"):
        euclidean_weights(old, prototypes, sigma=0.0)
