"""DPCR: moments, how they are carried, and the classifier as ridge regression on actual rows."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, Stream, short_stream

from efcil.data.store import VIEWS
from efcil.methods.base import Method
from efcil.methods.dpcr import DualProjection, span


def features_of(method: Method, stream: Stream, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    pieces = list(stream.data[index].plain())
    with torch.no_grad():
        rows = torch.cat([method.network.features(images) for images, _ in pieces]).double()
    return rows, torch.cat([labels for _, labels in pieces])


def test_after_the_first_task_it_is_ridge_regression_on_one_hot_targets() -> None:
    stream = short_stream()
    method = stream.start("dpcr", ridge=3.0)
    rows, labels = features_of(method, stream, 0)
    targets = torch.nn.functional.one_hot(labels, 4).double()
    weight = torch.linalg.solve(rows.T @ rows + 3.0 * torch.eye(rows.shape[1]), rows.T @ targets)
    expected = (weight / weight.norm(dim=0)).T
    torch.testing.assert_close(method.classifier.double(), expected, rtol=0, atol=2e-3)
    for label in range(4):
        own = rows[labels == label]
        torch.testing.assert_close(method.memory.means[label].double(), own.mean(dim=0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(method.memory.moments[label].double(), own.T @ own / len(own), rtol=1e-4, atol=1e-4)
        assert int(method.memory.counts[label]) == len(own)
        covariance = method.statistics().covariances[label].double()
        torch.testing.assert_close(covariance, torch.cov(own.T, correction=0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("views", VIEWS)
def test_moments_are_those_of_the_views_asked_for(views: str) -> None:
    stream = short_stream()
    method = stream.start("dpcr", views=views)
    with torch.no_grad():
        pieces = [(method.network.features(images), labels) for images, labels in stream.data[0].seen(views)]
    features, labels = (torch.cat(side) for side in zip(*pieces, strict=True))
    torch.testing.assert_close(method.memory.means[1], features[labels == 1].mean(dim=0), rtol=1e-4, atol=1e-5)


def test_moments_are_carried_by_the_map_and_kept_in_the_classes_span() -> None:
    stream = short_stream()
    results = {}
    for projection in (False, True):
        method = stream.start("dpcr", projection=projection, map_ridge=0.01, projection_threshold=1e-2)
        means, moments = method.memory.means.double(), method.memory.moments.double()
        stream.train(method, 1, SHORT)
        pieces = list(stream.data[1].augmented("drift"))
        with torch.no_grad():
            before = torch.cat([method.teacher.features(images) for images, _ in pieces]).double()
            after = torch.cat([method.network.features(images) for images, _ in pieces]).double()
        size = before.shape[1]
        pull = 0.01 * len(before) * before.square().mean() * torch.eye(size).double()
        # Rows times this matrix; as the identity is what the penalty pulls towards, it is also on the right.
        matrix = torch.linalg.solve(before.T @ before + pull, before.T @ after + pull)
        stream.end(method, 1)
        for label in range(4):
            own = matrix @ span(moments[label], 1e-2) if projection else matrix
            torch.testing.assert_close(method.memory.means[label].double(), means[label] @ own, rtol=0, atol=1e-2)
            torch.testing.assert_close(
                method.memory.moments[label].double(), own.T @ moments[label] @ own, rtol=0, atol=5e-2
            )
        results[projection] = method.memory.means[:4].clone()
    assert float((results[True] - results[False]).abs().max()) > 0.02


def test_span_is_the_projection_onto_the_directions_that_count() -> None:
    basis = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()).Q
    moment = basis @ torch.diag(torch.tensor([4.0, 1.0, 0.1, 1e-9, 0.0]).double()) @ basis.T
    for threshold, rank in ((1e-6, 3), (0.1, 2), (0.5, 1)):
        projection = span(moment, threshold)
        torch.testing.assert_close(projection, basis[:, :rank] @ basis[:, :rank].T, rtol=0, atol=1e-8)


def test_without_a_threshold_only_features_that_no_image_has_are_left_out() -> None:
    """Fewer images than features: which of a moment's zeros come out as positive must not matter."""
    features = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)).double()
    features[:, 4] = 0
    projection = span(features.T @ features / 3, 0.0)
    torch.testing.assert_close(projection, torch.diag(torch.tensor([1, 1, 1, 1, 0, 1]).double()), rtol=0, atol=0)


def test_classes_of_fewer_images_than_features_are_carried_whole() -> None:
    """A turned feature space is not the span of the old features, and a class must not lose what turned out of it."""
    stream, few = short_stream(), 20
    method = stream.start("dpcr", map_ridge=0.0)
    assert isinstance(method, DualProjection)
    generator = torch.Generator().manual_seed(0)
    size = method.memory.means.shape[1]
    turn = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    images, current = torch.rand(few, size, generator=generator), torch.rand(500, size, generator=generator)
    method.memory.means, method.memory.moments = images.mean(dim=0)[None], (images.T @ images / few)[None]
    method.before_and_after = lambda data, index=0: (current, current @ turn.T)  # type: ignore[method-assign]
    method._carry(stream.data[1])
    torch.testing.assert_close(method.memory.means[0], turn @ images.mean(dim=0), rtol=0, atol=1e-4)
    torch.testing.assert_close(method.memory.moments[0], turn @ (images.T @ images / few) @ turn.T, rtol=0, atol=1e-4)
