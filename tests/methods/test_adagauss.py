"""AdaGauss: the bottleneck, the loss, how Gaussians are carried over, and the classifier."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, clone, short_stream
from torch.nn import functional

from efcil.core import classifiers
from efcil.methods.adagauss import collapse, factor_by_columns, principal_components, two_layers

SMALL = {"bottleneck": 6, "width": 32, "adapter_epochs": 5, "adapter_samples": 500}


def test_the_bottleneck_begins_as_scaled_principal_components() -> None:
    generator = torch.Generator().manual_seed(0)
    features = 3.0 + torch.randn(200, 10, generator=generator) @ torch.randn(10, 10, generator=generator)
    weight, bias = principal_components(features, 4)
    components = features @ weight.T + bias
    covariance = torch.cov(components.T, correction=0)
    assert float(components.mean(dim=0).abs().max()) < 1e-4
    torch.testing.assert_close(covariance, torch.diag(covariance.diagonal()), rtol=0, atol=1e-4)
    torch.testing.assert_close(covariance.trace() / 4, torch.tensor(1.0))
    singular = torch.linalg.svdvals(features - features.mean(dim=0)) ** 2
    torch.testing.assert_close(covariance.diagonal() / covariance.trace(), singular[:4] / singular[:4].sum())


def test_collapse_is_the_clipped_cholesky_diagonal() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(50, 4, generator=generator) * torch.tensor([3.0, 0.5, 0.2, 2.0])
    factor = torch.linalg.cholesky(torch.cov(features.T) + 1e-4 * torch.eye(4))
    torch.testing.assert_close(collapse(features, 1.0), -factor.diagonal().clamp(max=1.0).mean())
    assert float(collapse(features[:4], 1.0)) == 0.0
    # A direction that others explain counts as collapsed, and its gradient is finite.
    features = torch.cat([features, features[:, :1]], dim=1).requires_grad_()
    collapse(features, 1.0).backward()
    assert bool(torch.isfinite(features.grad).all())


def test_cholesky_by_columns_is_cholesky() -> None:
    rows = torch.randn(80, 20, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    matrix = rows.T @ rows / 80
    torch.testing.assert_close(factor_by_columns(matrix), torch.linalg.cholesky(matrix))


@pytest.mark.parametrize("by_columns", [False, True])
def test_gradient_of_collapse(by_columns: bool) -> None:
    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(5)) * 0.5
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    collapse(ours, 0.4, by_columns).backward()
    factor = torch.linalg.cholesky(torch.cov(theirs.T) + 1e-4 * torch.eye(5))
    (-factor.diagonal().clamp(max=0.4).mean()).backward()
    assert float(theirs.grad.norm()) > 0.01
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_loss_by_hand() -> None:
    stream = short_stream()
    method = stream.start("adagauss", distillation_weight=3.0, collapse_weight=2.0, **SMALL)
    stream.train(method, 1, SHORT)
    stream.end(method, 1)
    stream.train(method, 2, SHORT)
    batch = stream.batch(method, 2)
    method.eval()
    terms = method.loss(batch)
    features = method.bottleneck(method.network.features(batch.images))
    old = method.teacher_bottleneck(method.teacher.features(batch.images))
    assert not torch.allclose(features, old)
    # (P h) . z is what the head says of the features taken back by P^T.
    logits = (features @ method.bottleneck.weight) @ method.network.heads[2].T
    torch.testing.assert_close(terms["current"], functional.cross_entropy(logits, batch.labels - 5))
    torch.testing.assert_close(terms["distillation"], 3.0 * (method.distiller(features) - old).square().mean())
    torch.testing.assert_close(terms["collapse"], 2.0 * collapse(features, 1.0))
    assert float(terms["collapse"].detach()) < 0


def test_the_distiller_goes_with_its_task() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("adagauss", **SMALL), 1, SHORT)
    assert sorted(method.stored()) == ["bottleneck.bias", "bottleneck.weight", "covariances", "means"]


def test_gaussians_are_carried_as_the_adapter_carries_their_samples(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """With a known linear adapter the moments are known; sampling finds them up to chance."""
    stream = short_stream()
    method = stream.start("adagauss", **{**SMALL, "adapter_samples": 40_000})
    method.begin_task(stream.tasks[1])
    means, covariances = method.means.clone(), method.covariances.clone()
    generator = torch.Generator().manual_seed(2)
    matrix, shift = torch.eye(6) + 0.2 * torch.randn(6, 6, generator=generator), torch.ones(6)
    monkeypatch.setattr(method, "_learn_adapter", lambda task, data: lambda x: x @ matrix.T + shift)
    method.eval()
    stream.end(method, 1)
    torch.testing.assert_close(method.means[:4], means @ matrix.T + shift, rtol=0, atol=0.05)
    torch.testing.assert_close(method.covariances[:4], matrix @ covariances @ matrix.T, rtol=0, atol=0.1)


def test_the_adapter_learns_the_drift() -> None:
    stream = short_stream()
    method = stream.start("adagauss", **{**SMALL, "adapter_epochs": 200, "collapse_weight": 0.0})
    stream.train(method, 1, SHORT)
    method.eval()
    adapter = method._learn_adapter(stream.tasks[1], stream.data[1])
    with torch.no_grad():
        before, after = method._pairs(stream.data[1], 999)
        explained = functional.mse_loss(adapter(before), after) / functional.mse_loss(before, after)
    assert float(explained) < 0.5


def test_ridge_adapter_without_drift_changes_nothing() -> None:
    stream = short_stream()
    method = stream.start("adagauss", adapter="ridge", **SMALL)
    before = clone(method.state_dict())
    method.begin_task(stream.tasks[1])
    method.eval()
    stream.end(method, 1)
    torch.testing.assert_close(method.means[:4], before["means"], rtol=0, atol=1e-4)
    torch.testing.assert_close(method.covariances[:4], before["covariances"], rtol=0, atol=1e-4)


def test_scores_are_mahalanobis_distances_in_the_bottleneck() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("adagauss", **SMALL), 1, SHORT)
    images = stream.test_images[:20]
    with torch.no_grad():
        features = method.bottleneck(method.network.features(images))
    kept = classifiers.ClassStatistics(method.means, method.covariances)
    expected = classifiers.mahalanobis(kept, 3.0, 0.0, True)(features)
    torch.testing.assert_close(method.scores(images), expected)


def test_statistics_include_mirror_images() -> None:
    stream = short_stream()
    method, plain = stream.start("adagauss", **SMALL), stream.start("adagauss", mirrored=False, **SMALL)
    data = stream.data[0]
    images = data.normalisation(data.images, torch.float32)[data.labels == 1]
    with torch.no_grad():
        rows, mirror = method.embed(images), method.embed(images.flip(3))
    torch.testing.assert_close(plain.means[1], rows.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(method.means[1], torch.cat([rows, mirror]).mean(dim=0), rtol=1e-4, atol=1e-5)


def test_weights_of_new_layers_come_from_the_generator_alone() -> None:
    torch.manual_seed(0)
    first = two_layers(4, 8, torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    second = two_layers(4, 8, torch.Generator().manual_seed(3))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
