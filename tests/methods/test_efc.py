"""EFC: its loss against loops, and what a task leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import SHORT, check_round_trip, short_stream
from torch.nn import functional

from efcil.core import transport
from efcil.core.covariance import low_rank, ranks
from efcil.core.feature_matrix import feature_matrix
from efcil.core.prototypes import cholesky_factors
from efcil.methods.base import Method, Plan


def begun(**settings: object) -> Method:
    """EFC at the end of the last task's training."""
    stream = short_stream()
    method = stream.learn(stream.start("efc", **settings), 1, SHORT)
    stream.train(method, 2, SHORT)
    return method


def test_loss_row_by_row() -> None:
    method = begun(efm_weight=4.0, damping=0.3)
    batch = short_stream().batch(method, 2, step=2)
    terms = method.loss(batch)
    features = method.network.features(batch.images)
    head = torch.cat(list(method.network.heads))
    matrix = 4.0 * method.feature_matrix + 0.3 * torch.eye(64)
    new, again = features[: batch.size], features[batch.size :]
    drift = [(a - b) @ matrix @ (a - b) for a, b in zip(new, batch.frozen["features"], strict=True)]
    torch.testing.assert_close(terms["drift"], torch.stack(drift).mean(), rtol=1e-4, atol=1e-6)
    current = functional.cross_entropy(new @ method.network.heads[2].T, batch.labels - 5)
    torch.testing.assert_close(terms["current"], current)
    rows = torch.cat([again, batch.draws["prototypes"]]) @ head.T
    labels = torch.cat([batch.previous_labels, batch.draws["prototype_labels"]])
    counted = batch.draws["replay_weights"] > 0
    assert 0 < int(counted.sum()) <= 16
    torch.testing.assert_close(terms["replay"], functional.cross_entropy(rows[counted], labels[counted]))


@pytest.mark.parametrize("loss", ["prace", "symmetric"])
def test_plain_feature_distillation_has_a_weight_of_its_own(loss: str) -> None:
    method = begun(regulariser="features", feature_weight=2.5, efm_weight=4.0, damping=0.3, loss=loss)
    batch = short_stream().batch(method, 2, step=2)
    features = method.network.features(batch.images[: batch.size])
    moved = (features - batch.frozen["features"][: batch.size]).square().sum(dim=1).mean()
    assert float(moved.detach()) > 0
    torch.testing.assert_close(method.loss(batch)["drift"], 2.5 * moved, rtol=1e-4, atol=1e-6)


def test_symmetric_loss_row_by_row() -> None:
    method = begun(loss="symmetric", symmetric_weight=2.5, efm_weight=4.0, damping=0.3)
    batch = short_stream().batch(method, 2)
    terms = method.loss(batch)
    head, features = torch.cat(list(method.network.heads)), method.network.features(batch.images)
    torch.testing.assert_close(terms["current"], functional.cross_entropy(features @ head.T, batch.labels))
    matrix = 4.0 * method.feature_matrix + 0.3 * torch.eye(64)
    drift = [(a - b) @ matrix @ (a - b) for a, b in zip(features, batch.frozen["features"], strict=True)]
    torch.testing.assert_close(terms["drift"], torch.stack(drift).mean(), rtol=1e-4, atol=1e-6)
    replay = functional.cross_entropy(batch.draws["prototypes"] @ head.T, batch.draws["prototype_labels"])
    torch.testing.assert_close(terms["replay"], 2.5 * replay)


def test_the_first_step_of_a_task_has_prototypes_only() -> None:
    stream = short_stream()
    method = stream.start("efc")
    method.begin_task(stream.tasks[1])
    weights = stream.batch(method, 1).draws["replay_weights"]
    again = method.previous_images(stream.tasks[1])
    assert again > 0
    assert bool((weights[:again] == 0).all())
    torch.testing.assert_close(weights[again:], torch.full((16,), 1 / 16))


def test_a_rehearsal_batch_has_two_places_per_class() -> None:
    """Five old and three new classes share sixteen places; new ones stay empty where the step before had no images."""
    stream = short_stream()
    method = stream.learn(stream.start("efc"), 1, SHORT)
    method.begin_task(stream.tasks[2])
    again = method.previous_images(stream.tasks[2])
    plan = Plan(3, 16, torch.tensor([0, 16, 2]))
    weights = method.draw(plan, torch.Generator().manual_seed(0))["replay_weights"]
    counted = weights > 0
    assert counted[:, :again].sum(dim=1).tolist() == [0, 6, 2]
    assert counted[:, again:].sum(dim=1).tolist() == [16, 10, 10]
    torch.testing.assert_close(weights, counted / counted.sum(dim=1, keepdim=True))
    # Places for six of the eight classes: what new ones do not take goes to old ones.
    few = method.draw(Plan(50, 6, torch.full((50,), 6)), torch.Generator().manual_seed(0))["replay_weights"] > 0
    assert few[:, :again].sum(dim=1).unique().tolist() == [1, 2, 3]
    assert few.sum(dim=1).tolist() == [6] * 50


@pytest.mark.parametrize("kind", ["class", "task"])
def test_prototypes_have_the_moments_of_their_classes(kind: str) -> None:
    stream = short_stream()
    method = stream.learn(stream.start("efc", covariance=kind), 1, SHORT)
    method.begin_task(stream.tasks[2])
    draws = method.draw(Plan(2000, 16, torch.zeros(2000)), torch.Generator().manual_seed(0))
    for label in range(5):
        drawn = draws["prototypes"][draws["prototype_labels"] == label]
        covariance = method.memory.covariances[method.memory.covariance_of[label]]
        error = (drawn.mean(dim=0) - method.memory.means[label]).norm()
        assert float(error) < 2 * float(covariance.trace() / len(drawn)) ** 0.5
        assert float((drawn.T.cov() - covariance).norm()) < 0.15 * float(covariance.norm())


def test_without_drift_there_is_no_penalty_and_no_mean_moves() -> None:
    stream = short_stream()
    method = stream.start("efc")
    before = method.memory.means.clone()
    terms = stream.train(method, 1, replace(SHORT, learning_rate=0.0))
    assert terms[-1]["drift"] == pytest.approx(0.0, abs=1e-9)
    stream.end(method, 1)
    assert torch.equal(method.memory.means[:4], before)


@pytest.mark.parametrize("batch_size", [16, 1000])
def test_the_feature_matrix_is_a_mean_over_whole_batches_or_over_everything(batch_size: int) -> None:
    stream = short_stream()
    method, data = stream.make("efc"), stream.images(0)
    counted = len(data) // batch_size * batch_size or len(data)
    assert (counted < len(data)) == (batch_size == 16)
    with torch.no_grad():
        features = torch.cat([method.network.features(images) for images, _ in data.augmented("feature-matrix")])
        weight = method.network.head_weight()
        certain = (features[:counted].double() @ weight.double().T).softmax(dim=1)
        expected = [feature_matrix(weight, each, torch.outer(each, each)) for each in certain]
        data.chunk_size = lambda: 30  # type: ignore[method-assign]  # several pieces, as larger tasks have
        method.end_task(replace(stream.tasks[0], batch_size=batch_size), data)
    torch.testing.assert_close(method.feature_matrix, torch.stack(expected).mean(dim=0), rtol=1e-3, atol=1e-6)


def test_the_jitter_is_that_of_the_settings() -> None:
    stream = short_stream()
    method = stream.start("efc", jitter=0.25)
    method.begin_task(stream.tasks[1])
    torch.testing.assert_close(method._sampler.factors, cholesky_factors(method.memory.covariances, 0.25))


def test_means_follow_the_drift_and_covariances_stay() -> None:
    stream = short_stream()
    for update, moves in (("efm", True), ("none", False)):
        method = stream.start("efc", prototype_update=update)
        means, covariances = method.memory.means.clone(), method.memory.covariances.clone()
        stream.learn(method, 1, SHORT)
        assert torch.equal(method.memory.means[:4], means) != moves
        assert torch.equal(method.memory.covariances[:4], covariances)


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        ("class", list(range(8))),
        ("task", [0, 0, 0, 0, 1, 2, 2, 2]),
        ("last-task", [0] * 8),
        ("low-rank", list(range(8))),
        ("diagonal", list(range(8))),
    ],
)
def test_covariances_kept(kind: str, groups: list[int]) -> None:
    stream = short_stream()
    method = stream.learn(stream.start("efc", covariance=kind), 2, SHORT)
    assert method.memory.covariance_of.tolist() == groups
    assert len(method.memory.covariances) == max(groups) + 1
    check_round_trip(stream, method)


@pytest.mark.parametrize("name", ["efc", "efc++"])
@pytest.mark.parametrize("kind", ["low-rank", "diagonal"])
def test_covariances_in_short(kind: str, name: str) -> None:
    """They are those of the plain run (training does not reach the first task's), shortened; only that is stored."""
    stream = short_stream()
    full, short = stream.start(name), stream.start(name, covariance=kind, covariance_share=0.9)
    stored = short.stored()
    assert "memory.covariances" not in stored
    assert stored["memory.compact"].numel() < 0.7 * full.stored()["memory.covariances"].numel()
    if kind == "diagonal":
        expected = torch.diag_embed(full.memory.covariances.diagonal(dim1=1, dim2=2))
    else:
        factors = low_rank(full.memory.covariances, 0.9)
        expected = factors @ factors.mT
        kept = short.memory.covariances.diagonal(dim1=1, dim2=2).sum(dim=1)
        assert bool((kept / full.memory.covariances.diagonal(dim1=1, dim2=2).sum(dim=1) >= 0.9 - 1e-4).all())
    torch.testing.assert_close(short.memory.covariances, expected)
    stream.learn(short, 1, SHORT)
    torch.testing.assert_close(short.memory.covariances[:4], expected, rtol=1e-4, atol=1e-6)
    assert len(short.memory.covariances) == len(short.memory.means) == 5
    again = stream.make(name, covariance=kind, covariance_share=0.9)
    again.load_tensors({key: value.clone() for key, value in short.state_dict().items()})
    torch.testing.assert_close(again.memory.covariances, short.memory.covariances)


def test_a_map_carries_low_rank_covariances_without_loss() -> None:
    stream = short_stream()
    settings = {"covariance": "low-rank", "covariance_share": 0.9, "prototype_update": "linear"}
    method = stream.start("efc", **settings)
    before, width = method.memory.covariances.clone(), method.memory.compact.shape[2]
    stream.train(method, 1, SHORT)
    carried = transport.ridge_map(*method.before_and_after(stream.data[1]), 0.01)
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.covariances[:4], carried.covariances(before), rtol=1e-3, atol=1e-4)
    assert int(ranks(method.memory.compact[:4]).max()) <= width


def test_what_a_map_does_not_explain_is_shortened_with_the_rest() -> None:
    stream = short_stream()
    settings = {"covariance": "low-rank", "covariance_share": 0.8, "prototype_update": "linear-residual"}
    method = stream.start("efc", **settings)
    before = method.memory.covariances.clone()
    stream.train(method, 1, SHORT)
    carried = transport.ridge_map(*method.before_and_after(stream.data[1]), 0.01)
    stream.end(method, 1)
    factors = low_rank(carried.covariances(before, residual=True), 0.8)
    assert torch.equal(ranks(method.memory.compact[:4]), ranks(factors))
    torch.testing.assert_close(method.memory.covariances[:4], factors @ factors.mT, rtol=1e-3, atol=1e-4)
