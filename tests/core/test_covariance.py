from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efcil.core.covariance import average, join, low_rank, ranks, shrink
from efcil.core.prototypes import class_statistics
from efcil.errors import EfcilError


def covariances(count: int = 4, size: int = 5, seed: int = 0) -> Tensor:
    root = torch.randn(count, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.transpose(1, 2)


def test_shrinking_keeps_the_trace_and_ends_at_a_sphere() -> None:
    given = covariances()
    assert torch.equal(shrink(given, 0.0), given)
    half = shrink(given, 0.5)
    torch.testing.assert_close(half.diagonal(dim1=1, dim2=2).sum(1), given.diagonal(dim1=1, dim2=2).sum(1))
    off_diagonal = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(half[:, off_diagonal], given[:, off_diagonal] / 2)
    sphere = given[1].trace() / 5 * torch.eye(5, dtype=torch.float64)
    torch.testing.assert_close(shrink(given[1], 1.0), sphere)
    with pytest.raises(EfcilError, match="between 0 and 1"):
        shrink(given, 1.5)


def test_the_average_is_the_pooled_class_centred_covariance() -> None:
    features = torch.randn(40, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.arange(4).repeat(10)
    means, by_class = class_statistics(features, labels, range(4))
    centred = features - means[labels]
    pooled = centred.T @ centred / (40 - 4)
    torch.testing.assert_close(average(by_class), pooled[None])


def with_spectrum(values: list[float], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))
    return basis @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ basis.T


@pytest.mark.parametrize(
    ("explained", "expected"),
    [(0.5, [1, 1]), (0.85, [2, 1]), (0.94, [2, 1]), (0.96, [3, 1]), (0.985, [3, 2]), (1.0, [4, 2])],
)
def test_low_rank_keeps_the_fewest_directions(explained: float, expected: list[int]) -> None:
    first, second = with_spectrum([60.0, 35.0, 4.0, 1.0]), with_spectrum([98.0, 2.0, 0.0, 0.0], seed=1)
    factors = low_rank(torch.stack([first, second]), explained)
    assert factors.shape == (2, 4, max(expected))
    assert ranks(factors).tolist() == expected
    kept = factors.square().sum(dim=(1, 2)) / 100.0
    assert (kept >= explained - 1e-9).all()


def test_low_rank_keeps_no_direction_beyond_the_share() -> None:
    assert ranks(low_rank(torch.eye(4)[None], 0.5)).tolist() == [2]


def test_low_rank_is_the_leading_part_of_the_spectrum() -> None:
    given = with_spectrum([60.0, 35.0, 4.0, 1.0])
    factors = low_rank(given.unsqueeze(0), 0.9)[0]
    values, vectors = torch.linalg.eigh(given)
    expected = vectors[:, 2:] @ torch.diag(values[2:]) @ vectors[:, 2:].T
    torch.testing.assert_close(factors @ factors.T, expected)
    everything = low_rank(given.unsqueeze(0), 1.0)[0]
    torch.testing.assert_close(everything @ everything.T, given)


def test_low_rank_of_few_samples_and_of_none() -> None:
    features = torch.randn(6, 20, generator=torch.Generator().manual_seed(2))
    _, given = class_statistics(features, torch.tensor([0, 0, 0, 0, 0, 1]), range(2))
    factors = low_rank(given, 1.0)
    assert factors.dtype == torch.float32
    assert ranks(factors).tolist() == [4, 0]
    torch.testing.assert_close(factors @ factors.transpose(1, 2), given, rtol=1e-5, atol=1e-5)
    with pytest.raises(EfcilError, match="share of variance"):
        low_rank(given, 0.0)


def test_factors_are_joined_whatever_their_ranks() -> None:
    first, second = torch.rand(2, 4, 3), torch.rand(1, 4, 1)
    for one, other in ((first, second), (second, first)):
        joined = join(one, other)
        assert joined.shape == (3, 4, 3)
        torch.testing.assert_close(joined @ joined.mT, torch.cat([one @ one.mT, other @ other.mT]))
    assert join(torch.zeros(0, 4, 0), second).shape == (1, 4, 1)
