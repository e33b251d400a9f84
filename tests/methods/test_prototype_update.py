"""How the Gaussians of EFC and its relatives follow the drift: by the map that current images give, or not at all."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, short_stream
from torch import Tensor

from efcil.core import drift
from efcil.core.transport import AffineMap, ridge_map
from efcil.methods.base import Method


def around_the_second_task(name: str, **settings: object) -> tuple[Method, Tensor, Tensor, Tensor, Tensor]:
    """The method after its second task, and before that: its means and covariances, old and new features."""
    stream = short_stream()
    method = stream.start(name, **settings)
    stream.train(method, 1, SHORT)
    means, covariances = method.memory.means.clone(), method.memory.covariances.clone()
    pieces = [images for images, _ in stream.data[1].augmented("drift")]
    with torch.no_grad():
        before = torch.cat([method.teacher.features(images) for images in pieces])
        after = torch.cat([method.network.features(images) for images in pieces])
    assert float((after - before).abs().max()) > 1e-3
    stream.end(method, 1)
    return method, means, covariances, before, after


@pytest.mark.parametrize("name", ["efc", "efc++", "fd", "il2a"])
@pytest.mark.parametrize("update", ["linear", "linear-residual"])
def test_a_linear_update_moves_means_and_covariances(name: str, update: str) -> None:
    method, means, covariances, before, after = around_the_second_task(name, prototype_update=update, drift_ridge=0.3)
    expected: AffineMap = ridge_map(before, after, 0.3)
    torch.testing.assert_close(method.memory.means[:4], expected.points(means))
    moved = expected.matrix @ covariances.double() @ expected.matrix.T
    if update == "linear-residual":
        moved = moved + expected.residual
    torch.testing.assert_close(method.memory.covariances[:4].double(), moved, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(method.memory.covariances[:4], covariances, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["efc", "efc++"])
@pytest.mark.parametrize(("settings", "sigma"), [({}, 0.2), ({"drift_sigma": 0.7}, 0.7)])
def test_the_default_moves_means_alone(name: str, settings: dict[str, float], sigma: float) -> None:
    stream = short_stream()
    matrix = stream.start(name).feature_matrix
    method, means, covariances, before, after = around_the_second_task(name, **settings)
    torch.testing.assert_close(method.memory.means[:4], drift.compensate(means, before, after, matrix, sigma))
    assert not torch.equal(method.memory.means[:4], means)
    assert torch.equal(method.memory.covariances[:4], covariances)


@pytest.mark.parametrize("name", ["efc", "efc++", "il2a"])
def test_none_moves_nothing(name: str) -> None:
    method, means, covariances, _, _ = around_the_second_task(name, prototype_update="none")
    assert torch.equal(method.memory.means[:4], means)
    assert torch.equal(method.memory.covariances[:4], covariances)


def test_a_shared_covariance_is_moved_once() -> None:
    method, _, covariances, before, after = around_the_second_task("efc", prototype_update="linear", covariance="task")
    expected = ridge_map(before, after, 0.01).covariances(covariances)
    assert method.memory.covariances.shape[0] == 2
    torch.testing.assert_close(method.memory.covariances[:1], expected)
