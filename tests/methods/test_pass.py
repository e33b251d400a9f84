"""PASS: its loss in the layout of its authors' code, its prototypes, and its rotation rows."""

from __future__ import annotations

import pytest
import torch
from checks import FUSED, PLAIN, SHORT, check_round_trip, clone, normalisation_state, short_stream
from torch.nn import functional

from efcil.core.prototypes import class_statistics
from efcil.engine.trainer import Execution
from efcil.methods.base import Method, Plan


def test_loss_in_the_authors_layout() -> None:
    """One matrix with four rows per class, label 4y + k for turn k; prototypes on the rows 4c; an unsquared norm."""
    stream = short_stream()
    settings = {"temperature": 0.5, "replay_weight": 3.0, "distillation_weight": 0.7}
    method = stream.learn(stream.start("pass", **settings), 1, SHORT)
    stream.train(method, 2, SHORT)
    batch = stream.batch(method, 2)
    method.eval()
    terms = method.loss(batch)
    heads, turned = torch.cat(list(method.network.heads)), torch.cat(list(method.rotations))
    assert turned.shape[0] == 3 * 8
    weight = torch.stack([torch.cat([heads[c : c + 1], turned[3 * c : 3 * c + 3]]) for c in range(8)]).flatten(0, 1)
    logits, labels, drift = [], [], 0.0
    for image, label in zip(batch.images, batch.labels, strict=True):
        for k in range(4):
            view = torch.rot90(image, k, dims=(1, 2))[None]
            feature = method.network.features(view)
            logits.append(feature @ weight.T)
            labels.append(4 * int(label) + k)
            drift += (feature - method.teacher.features(view)).square().sum().item()
    current = functional.cross_entropy(torch.cat(logits) / 0.5, torch.tensor(labels))
    torch.testing.assert_close(terms["current"], current)
    replay = functional.cross_entropy(batch.draws["prototypes"] @ weight.T / 0.5, 4 * batch.draws["prototype_labels"])
    torch.testing.assert_close(terms["replay"], 3.0 * replay)
    assert float(terms["distillation"].detach()) == pytest.approx(0.7 * drift**0.5, rel=1e-3)


def test_nothing_has_drifted_when_a_task_begins() -> None:
    """With BatchNorm frozen old and new network agree on every turned image, so the order of the turns is the same."""
    stream = short_stream()
    method = stream.start("pass", train_normalisation=False)
    method.begin_task(stream.tasks[1])
    assert float(method.loss(stream.batch(method, 1))["distillation"].detach()) < 1e-3


def test_means_and_radius_come_from_the_task_that_brought_the_class() -> None:
    stream = short_stream()
    method = stream.start("pass")
    pieces = [(method.network.features(x), y) for x, y in stream.data[0].augmented("prototypes")]
    features, labels = (torch.cat(side) for side in zip(*pieces, strict=True))
    means, covariances = class_statistics(features.detach(), labels, range(4))
    torch.testing.assert_close(method.memory.means, means)
    variance = sum(float(covariance.trace()) / 64 for covariance in covariances) / 4
    assert float(method.radius) == pytest.approx(variance**0.5, rel=1e-5)
    first, radius = method.memory.means.clone(), method.radius.clone()
    stream.learn(method, 2, SHORT)
    assert torch.equal(method.memory.means[:4], first)
    assert torch.equal(method.radius, radius)
    assert len(method.memory.means) == 8


def test_prototypes_scatter_by_the_radius_around_old_means() -> None:
    stream = short_stream()
    method = stream.start("pass")
    method.begin_task(stream.tasks[1])
    draws = method.draw(Plan(50, 16, torch.zeros(50)), torch.Generator().manual_seed(0))
    labels = draws["prototype_labels"]
    assert torch.equal(labels.unique(), torch.arange(4))
    assert torch.bincount(labels.flatten()).min() > 150
    noise = draws["prototypes"] - method.memory.means[labels]
    assert float(noise.std()) == pytest.approx(float(method.radius), rel=0.02)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.02 * float(method.radius))


@pytest.mark.parametrize(("rows", "kept"), [("all", [3 * 5, 3 * 3]), ("current", [])])
def test_rotation_rows(rows: str, kept: list[int]) -> None:
    stream = short_stream()
    method = stream.learn(stream.start("pass", rotation_rows=rows), 2, SHORT)
    assert [len(part) for part in method.rotations] == kept
    check_round_trip(stream, method)
    images = stream.test_images[:5]
    torch.testing.assert_close(method.scores(images), method.network.logits(method.network.features(images)).detach())


def test_current_rows_have_labels_of_their_own() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("pass", rotation_rows="current"), 1, SHORT)
    method.begin_task(stream.tasks[2])
    assert [len(part) for part in method.rotations] == [9]
    batch = stream.batch(method, 2)
    method.eval()
    weight = torch.cat([*method.network.heads, *method.rotations])
    total = 0.0
    for k in range(4):
        logits = method.network.features(torch.rot90(batch.images, k, dims=(2, 3))) @ weight.T
        target = batch.labels if k == 0 else 8 + 3 * (batch.labels - 5) + k - 1
        total += float(functional.cross_entropy(logits, target)) / 4
    assert float(method.loss(batch)["current"]) == pytest.approx(total, rel=1e-4)


def test_prototypes_may_compete_with_the_heads_alone() -> None:
    stream = short_stream()
    method = stream.start("pass", replay_rows="heads", replay_weight=3.0)
    method.begin_task(stream.tasks[1])
    batch = stream.batch(method, 1)
    heads = torch.cat(list(method.network.heads))
    replay = functional.cross_entropy(batch.draws["prototypes"] @ heads.T, batch.draws["prototype_labels"])
    torch.testing.assert_close(method.loss(batch)["replay"], 3.0 * replay)


def test_sizes_of_the_noise() -> None:
    stream = short_stream()

    def deviations(method: Method, index: int) -> torch.Tensor:
        """Standard deviation of every feature of every class (classes, n)."""
        pieces = [(method.network.features(x).detach(), y) for x, y in stream.data[index].augmented("prototypes")]
        features, labels = (torch.cat(side) for side in zip(*pieces, strict=True))
        return torch.stack([features[labels == label].std(dim=0) for label in labels.unique()])

    method = stream.start("pass", radius="deviation")
    first = deviations(method, 0)
    assert float(method.radius) == pytest.approx(float(first.mean()), rel=1e-5)
    radius = method.radius.clone()
    assert torch.equal(stream.learn(method, 1, SHORT).radius, radius), "It is that of the first classes for ever."
    method = stream.start("pass", radius="seen")
    variances = [first.square().mean(dim=1)]
    for index in (1, 2):
        stream.train(method, index, SHORT)
        stream.end(method, index)
        variances.append(deviations(method, index).square().mean(dim=1))
        assert float(method.radius) == pytest.approx(float(torch.cat(variances).mean().sqrt()), rel=1e-4)


@pytest.mark.parametrize("execution", [PLAIN, FUSED], ids=["plain", "fused"])
def test_statistics_may_follow_without_the_scales(execution: Execution) -> None:
    stream = short_stream()
    method = stream.start("pass", train_scales=False)
    before = normalisation_state(method)
    kernels = clone({"stem": method.network.backbone.conv1.weight})
    stream.train(method, 1, SHORT, execution)
    after = normalisation_state(method)
    scales = [key for key in before if key.endswith(("weight", "bias"))]
    assert all(torch.equal(before[key], after[key]) for key in scales)
    assert not any(torch.equal(before[key], after[key]) for key in before if key.endswith("running_mean"))
    assert not torch.equal(kernels["stem"], method.network.backbone.conv1.weight)
