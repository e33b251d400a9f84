"""FeCAM: statistics of transformed features, and scores by hand."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, Stream, short_stream

from efcil.core.classifiers import ClassStatistics, mahalanobis
from efcil.methods.base import Method


def learned(**settings: object) -> tuple[Stream, Method]:
    stream = short_stream()
    return stream, stream.learn(stream.start("fecam", **settings), 1, SHORT)


def transformed(stream: Stream, index: int, power: float) -> tuple[torch.Tensor, torch.Tensor]:
    data = stream.data[index]
    with torch.no_grad():
        return stream.network().features(data.normalisation(data.images, torch.float32)) ** power, data.labels


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_means_and_covariances_are_those_of_transformed_features(power: float) -> None:
    stream, method = learned(tukey=power)
    for index, classes in ((0, range(4)), (1, range(4, 5))):
        features, labels = transformed(stream, index, power)
        for label in classes:
            rows = features[labels == label]
            torch.testing.assert_close(method.memory.means[label], rows.mean(dim=0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(method.memory.covariances[label], torch.cov(rows.T), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_scores_by_hand(normalise: bool) -> None:
    stream, method = learned(shrink_diagonal=2.0, shrink_rest=0.5, normalise=normalise)
    images = stream.test_images[:10]
    with torch.no_grad():
        features = stream.network().features(images).double().sqrt()
    if normalise:
        features = features / features.norm(dim=1, keepdim=True)
    scores = method.scores(images)
    size = features.shape[1]
    for label in range(5):
        matrix = method.memory.covariances[label].double()
        rest = (matrix.sum() - matrix.trace()) / (size * (size - 1))
        identity = torch.eye(size).double()
        matrix = matrix + 2.0 * matrix.diagonal().mean() * identity + 0.5 * rest * (1 - identity)
        mean = method.memory.means[label].double()
        if normalise:
            matrix = matrix / torch.outer(matrix.diagonal().sqrt(), matrix.diagonal().sqrt())
            mean = mean / mean.norm()
        away = features - mean
        expected = -(away @ torch.linalg.inv(matrix) * away).sum(dim=1)
        torch.testing.assert_close(scores[:, label].double(), expected, rtol=1e-3, atol=1e-4)


def test_a_common_covariance_is_the_average_over_all_classes_seen() -> None:
    _, apart = learned()
    _, common = learned(covariance="common")
    assert common.memory.covariances.shape[0] == 1
    torch.testing.assert_close(common.memory.covariances[0], apart.memory.covariances.mean(dim=0))
    assert common.memory.covariance_of.tolist() == [0] * 5
    images = short_stream().test_images[:10]
    expected = mahalanobis(ClassStatistics(common.memory.means, common.memory.covariances.expand(5, -1, -1)), 3.0, 3.0)
    torch.testing.assert_close(common.scores(images), expected(common.embed(images).detach()), rtol=1e-4, atol=1e-4)
