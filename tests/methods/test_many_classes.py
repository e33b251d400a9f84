"""Covariances of more classes than fit into the limit: factors of low rank instead, in everything that uses them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from checks import short_stream
from torch import Tensor

from efcil.core import classifiers, gaussians
from efcil.core.classifiers import ClassStatistics
from efcil.core.covariance import is_factored, low_rank, weighted_sum, whole
from efcil.core.transport import AffineMap
from efcil.engine import checkpoint
from efcil.errors import SettingsError
from efcil.methods import efc_plus_plus
from efcil.methods.memory import LIMIT, SHARE_BEYOND, ClassMemory
from efcil.methods.storage import account

SIZE = 12
ONE = 4 * SIZE**2  # bytes of one covariance


def rows(classes: range, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of 30 images of each class, which vary much in two directions and little in the others."""
    generator = torch.Generator().manual_seed(seed + classes.start)
    labels = torch.arange(classes.start, classes.stop).repeat(30)
    scale = torch.tensor([3.0, 2.0] + [0.1] * (SIZE - 2))
    mixing = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator))[0]
    return torch.randn(len(labels), SIZE, generator=generator) * scale @ mixing + labels[:, None], labels


def filled(limit: float, **others: object) -> ClassMemory:
    """Three classes in a task, then two."""
    memory = ClassMemory(SIZE, why="tests", covariances="class", limit=limit, table=True, **others)  # type: ignore[arg-type]
    for classes in (range(3), range(3, 5)):
        memory.add(*rows(classes), classes)
    return memory


def test_covariances_are_whole_up_to_the_limit() -> None:
    free, tight = filled(math.inf), filled(5 * ONE)
    assert torch.equal(free.covariances, tight.covariances)
    assert not tight.factored
    assert tight.components() is None


def test_beyond_the_limit_all_classes_keep_the_leading_directions() -> None:
    free, memory = filled(math.inf), filled(4 * ONE)
    assert memory.factored
    assert memory.components() == [2] * 5
    assert memory.covariances.shape == (5, SIZE, 2)
    expected = low_rank(free.covariances, SHARE_BEYOND)
    torch.testing.assert_close(whole(memory.covariances), whole(expected))
    assert torch.equal(memory.means, free.means)
    assert memory.covariance_of.tolist() == list(range(5))


def test_it_does_not_matter_when_the_limit_is_reached() -> None:
    torch.testing.assert_close(whole(filled(0).covariances), whole(filled(4 * ONE).covariances))


def test_so_few_columns_remain_that_factors_are_known_as_such() -> None:
    memory = ClassMemory(SIZE, why="tests", covariances="class", limit=0)
    memory.share = 1.0
    memory.add(torch.randn(60, SIZE, generator=torch.Generator().manual_seed(0)), torch.zeros(60).long(), range(1))
    assert memory.covariances.shape == (1, SIZE, SIZE - 1)


def test_samples_are_drawn_from_factors_as_they_are() -> None:
    memory, generator = filled(0), torch.Generator().manual_seed(0)
    sampler = memory.sampler(1e-5)
    assert sampler.factors is memory.covariances  # no second copy of what is large
    labels = torch.arange(5).repeat(20_000)
    drawings = ((sampler.features(labels, generator, most=20_000), labels), sampler.classes([20_000] * 5, generator))
    for features, drawn in drawings:
        for label in range(5):
            own = features[drawn == label]
            torch.testing.assert_close(own.mean(dim=0), memory.means[label], rtol=0, atol=0.15)
            torch.testing.assert_close(own.T.cov(), whole(memory.covariances[label]), rtol=0, atol=0.3)


@pytest.mark.parametrize("residual", [False, True])
def test_a_map_carries_factors(residual: bool) -> None:
    memory = filled(0)
    matrix = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).double()
    by = AffineMap(matrix, torch.zeros(SIZE).double(), 0.5 * torch.eye(SIZE).double())
    expected = matrix @ whole(memory.covariances).double() @ matrix.T
    if residual:
        expected = whole(low_rank(expected + by.residual, SHARE_BEYOND))
    memory.carry(by, residual)
    assert memory.factored
    torch.testing.assert_close(whole(memory.covariances).double(), expected, rtol=1e-3, atol=1e-3)


def test_more_images_merging_and_forgetting() -> None:
    memory, free = filled(0, counts=True), filled(math.inf, counts=True)
    for each in (memory, free):
        each.blend(*rows(range(1, 3), seed=7), each.counts.tolist())
        each.merge([0, 3], each.counts.tolist())
        each.keep_rows([0, 1, 2, 4], 5)
    assert memory.counts.tolist() == free.counts.tolist() == [60, 60, 60, 30]
    torch.testing.assert_close(memory.means, free.means)
    traces = [float(whole(each).trace()) for each in memory.covariances]
    for kept, full in zip(traces, free.covariances, strict=True):
        assert 0.7 * float(full.trace()) < kept <= 1.01 * float(full.trace())


@pytest.mark.parametrize("name", sorted(set(classifiers.CLASSIFIERS) - {"both", "rebalanced", "svm"}))
def test_classifiers_take_factors(name: str) -> None:
    memory = filled(0)
    spelled = ClassStatistics(memory.means, whole(memory.covariances), memory.covariance_of)
    features = rows(range(5), seed=3)[0]
    build = classifiers.CLASSIFIERS[name][1]
    torch.testing.assert_close(build(memory.statistics())(features), build(spelled)(features), rtol=1e-3, atol=1e-3)


def test_a_class_of_one_image_gets_the_average_of_the_others() -> None:
    memory = filled(0)
    memory.covariances[2] = 0.0
    found, _ = classifiers._with_spread(*memory.statistics().spread())
    expected = whole(memory.covariances[[0, 1, 3, 4]]).mean(dim=0)
    leading = whole(low_rank(expected[None], 1.0)[0, :, :2])
    torch.testing.assert_close(whole(found[2]), leading, rtol=1e-4, atol=1e-4)
    assert torch.equal(found[[0, 1, 3, 4]], memory.covariances[[0, 1, 3, 4]])


def test_a_weighted_sum_by_pieces_is_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    covariances = filled(math.inf).covariances
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    expected = (weights[:, None, None] * covariances.double()).sum(dim=0)
    torch.testing.assert_close(weighted_sum(covariances, weights), expected)
    monkeypatch.setattr("efcil.core.covariance._ADDED_TOGETHER", 2 * ONE)
    torch.testing.assert_close(weighted_sum(covariances, weights), expected)


# -- low-rank covariances that the user asked for ----------------------------------------------------------------------


def test_asked_for_low_rank_is_not_multiplied_out_beyond_the_limit() -> None:
    small, large = (ClassMemory(SIZE, why="tests", covariances="low-rank", limit=limit) for limit in (math.inf, 0))
    for memory in (small, large):
        memory.add(*rows(range(3)), range(3))
    assert not is_factored(small.covariances)
    assert large.covariances is large.compact
    torch.testing.assert_close(whole(large.covariances), small.covariances)
    large.carry(AffineMap(2 * torch.eye(SIZE).double(), torch.zeros(SIZE).double(), torch.zeros(SIZE, SIZE).double()))
    torch.testing.assert_close(whole(large.compact), 4 * small.covariances)


# -- methods ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cedar", "efc", "efc++", "fd"])
def test_methods_learn_with_factors_and_are_loaded_again(name: str, tmp_path: Path) -> None:
    stream = short_stream()
    method = stream.learn(stream.start(name, covariance_limit=0.0), 1)
    assert method.memory.factored
    found = account(method)["covariance"]
    assert (found["form"], found["instead_of"], found["limit_bytes"]) == ("low-rank", "class", 0)
    assert found["bytes"] == method.memory.covariances.numel() * 4
    assert account(method)["components"]["most"] == method.memory.covariances.shape[2]
    checkpoint.write(tmp_path, method.state_dict(), {})
    again = stream.make(name, covariance_limit=0.0)
    again.load_tensors(checkpoint.read(tmp_path).tensors)
    assert torch.equal(again.memory.covariances, method.memory.covariances)
    images = stream.test_images[:9]
    assert torch.equal(again.scores(images), method.scores(images))


def test_covariances_with_more_columns_than_features_are_refused() -> None:
    stream = short_stream()
    method = stream.start("efc")
    state = method.state_dict()
    state["memory.covariances"] = torch.zeros(4, method.network.feature_size, method.network.feature_size + 1)
    with pytest.raises(SettingsError, match="more columns than"):
        stream.make("efc").load_tensors(state)


def test_what_to_expect_is_said_beyond_the_limit_only() -> None:
    memory = ClassMemory(512, why="tests", covariances="class", limit=LIMIT)
    assert memory.outlook(1000) is None  # all of ImageNet-1K
    line = memory.outlook(10_000)
    assert line is not None
    for part in ("10,000 classes", "10.5 GB", "covariance_limit=2", "class 1,908 on", "90%", "covariance_limit=11"):
        assert part in line
    free = ClassMemory(512, why="tests", covariances="class").outlook(10_000)
    assert free is not None
    assert "in every checkpoint" in free
    assert ClassMemory(512, why="tests", covariances="task").outlook(10_000) is None


def test_heads_are_rebalanced_part_by_part_if_features_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class is drawn as often as without parts, and accuracy does not suffer."""
    drawn: list[list[int]] = []
    sample = gaussians.sample_classes

    def counted(*given: object) -> tuple[Tensor, Tensor]:
        drawn.append(list(given[3]))  # type: ignore[call-overload]
        return sample(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(gaussians, "sample_classes", counted)
    stream = short_stream()
    method = stream.start("efc++", rebalance_epochs=2)
    counts = method.memory.counts.tolist()
    size = sum(counts) * method.network.feature_size * 4
    monkeypatch.setattr(efc_plus_plus, "_FEATURE_BYTES", -(-size // 3))
    stream.learn(method, 1)
    assert len(drawn) == 6
    for epoch in (drawn[:3], drawn[3:]):
        assert [sum(each) for each in zip(*epoch, strict=True)] == counts
