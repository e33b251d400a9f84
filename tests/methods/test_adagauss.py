"""AdaGauss: the bottleneck, the loss, how Gaussians are carried over, and the classifier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import SHORT, clone, short_stream
from torch.nn import functional

from efcil import seeds
from efcil.core import classifiers, transport
from efcil.data.augment import make_augmentation
from efcil.methods.adagauss import collapse, factor_by_columns, principal_components, two_layers
from efcil.resolution import resolve
from efcil.settings import Settings

SMALL: dict[str, Any] = {"bottleneck": 6, "width": 32, "adapter": "mlp", "adapter_epochs": 5, "adapter_samples": 500}


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


def test_features_that_are_all_alike_leave_a_finite_bottleneck() -> None:
    weight, bias = principal_components(torch.full((9, 4), 2.0), 3, least=1.0)
    assert bool(torch.isfinite(weight).all())
    assert bool(torch.isfinite(bias).all())


def test_components_of_little_spread_are_scaled_up_and_dead_ones_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    spreads = torch.tensor([5.0, 2.0, 0.1, 0.01, 0.0])
    features = torch.randn(300, 5, generator=generator) * spreads
    weight, bias = principal_components(features, 5, least=1.0)
    plain, _ = principal_components(features, 5)
    spread = (features @ weight.T + bias).std(dim=0, correction=0)
    assert bool(torch.isfinite(weight).all())
    torch.testing.assert_close(weight[0], plain[0])  # more spread than asked for: left alone
    torch.testing.assert_close(spread[1:4], torch.ones(3), rtol=1e-3, atol=0)
    assert float(spread[4]) < 1e-3
    assert float(weight[4].norm()) < 1.0


def test_the_first_task_leaves_no_direction_that_the_adapter_would_have_to_widen() -> None:
    """Where features have less spread than the term against collapse asks for, carried Gaussians would swell."""
    stream = short_stream()
    least = []
    for weight in (1.0, 0.0):
        method = stream.start("adagauss", collapse_weight=weight, **SMALL)
        with torch.no_grad():
            embedded = torch.cat([method.embed(images) for images, _ in stream.images(0).plain()])
        least.append(float(embedded.std(dim=0).min()))
    assert least[0] > 0.99
    assert least[1] < 0.9


def test_the_bottleneck_is_not_wider_than_the_features() -> None:
    assert short_stream().start("adagauss", bottleneck=1000).memory.means.shape == (4, 64)


def test_collapse_is_the_clipped_cholesky_diagonal() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(50, 4, generator=generator) * torch.tensor([3.0, 0.5, 0.2, 2.0])
    covariance = torch.cov(features.T)
    factor = torch.linalg.cholesky(covariance + 1e-4 * covariance.diagonal().mean() * torch.eye(4))
    assert float(covariance.diagonal().mean()) > 2.0, "so that it counts"
    torch.testing.assert_close(collapse(features, 1.0), -factor.diagonal().clamp(max=1.0).mean())
    assert float(collapse(features[:4], 1.0)) == 0.0
    # A direction that others explain counts as collapsed, and its gradient is finite.
    features = torch.cat([features, features[:, :1]], dim=1).requires_grad_()
    collapse(features, 1.0).backward()
    assert bool(torch.isfinite(features.grad).all())


@pytest.mark.parametrize("by_columns", [False, True])
def test_collapse_of_features_that_vary_much_in_one_direction(by_columns: bool) -> None:
    """Their covariance in single precision is not positive definite without something of its own size added."""
    generator = torch.Generator().manual_seed(2)
    features = 20.0 * torch.randn(256, 1, generator=generator) * torch.ones(64) + 0.01 * torch.randn(
        256, 64, generator=generator
    )
    features.requires_grad_()
    loss = collapse(features, 1.0, by_columns)
    loss.backward()
    factor = torch.linalg.cholesky(torch.cov(features.detach().double().T) + 0.04 * torch.eye(64))
    torch.testing.assert_close(loss.detach().double(), -factor.diagonal().clamp(max=1.0).mean(), rtol=0.2, atol=0.0)
    assert float(features.grad.abs().max()) < 1.0


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
    logits = features @ method.network.heads[2][:, :6].T
    torch.testing.assert_close(terms["current"], functional.cross_entropy(logits, batch.labels - 5))
    torch.testing.assert_close(terms["distillation"], 3.0 * (method.distiller(features) - old).square().mean())
    torch.testing.assert_close(terms["collapse"], 2.0 * collapse(features, 1.0))
    assert float(terms["collapse"].detach()) < 0


def test_the_limit_of_collapse_is_that_of_the_settings() -> None:
    stream = short_stream()
    method = stream.start("adagauss", collapse_limit=0.1, **SMALL)
    method.begin_task(stream.tasks[1])
    batch = stream.batch(method, 1)
    method.eval()
    assert float(method.loss(batch)["collapse"].detach()) >= -0.1 - 1e-6


def test_the_gradient_is_clipped_as_the_settings_say() -> None:
    for overrides, expected in (
        ({}, 1.0),
        ({"gradient_limit": 0.25}, 0.25),
        ({"gradient_limit": None}, None),
        ({"later.gradient_clip": 2.0}, 2.0),
    ):
        assert resolve(Settings(method="adagauss", overrides=overrides)).later.gradient_clip == expected


def test_the_distiller_goes_with_its_task() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("adagauss", **SMALL), 1, SHORT)
    assert sorted(method.stored()) == ["bottleneck.bias", "bottleneck.weight", "memory.covariances", "memory.means"]


def test_gaussians_are_carried_as_the_adapter_carries_their_samples(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """With a known linear adapter the moments are known; sampling finds them up to chance."""
    stream = short_stream()
    method = stream.start("adagauss", **{**SMALL, "adapter_samples": 40_000})
    method.begin_task(stream.tasks[1])
    means, covariances = method.memory.means.clone(), method.memory.covariances.clone()
    generator = torch.Generator().manual_seed(2)
    matrix, shift = torch.eye(6) + 0.2 * torch.randn(6, 6, generator=generator), torch.ones(6)

    def adapter(points: torch.Tensor) -> torch.Tensor:
        assert len(points) == 40_000
        return points @ matrix.T + shift

    monkeypatch.setattr(method, "_learn_adapter", lambda task, data: adapter)
    method.eval()
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.means[:4], means @ matrix.T + shift, rtol=0, atol=0.05)
    torch.testing.assert_close(method.memory.covariances[:4], matrix @ covariances @ matrix.T, rtol=0, atol=0.1)


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


def test_the_recipe_of_the_adapter() -> None:
    """SGD with momentum, weight decay, gradients of unit length at most, and three tenfold falls of the rate."""
    stream = short_stream()
    settings = {"adapter_epochs": 10, "adapter_learning_rate": 0.05, "adapter_batch_size": 16, "collapse_limit": 2.0}
    method = stream.start("adagauss", **{**SMALL, **settings, "collapse_weight": 3.0})
    stream.train(method, 1, SHORT)
    with torch.no_grad():
        found = method._learn_adapter(stream.tasks[1], stream.data[1])
    expected = two_layers(6, 32, seeds.generator("cpu", 0, "adapter", 1))
    velocity, longest = [torch.zeros_like(p) for p in expected.parameters()], 0.0
    for epoch in range(10):
        before, after = (side.detach() for side in method._pairs(stream.data[1], epoch))
        for rows, targets in zip(before.split(16), after.split(16), strict=True):
            adapted = expected(rows)
            loss = (adapted - targets).square().mean() + 3.0 * collapse(adapted, 2.0)
            gradients = torch.autograd.grad(loss, list(expected.parameters()))
            length = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
            longest = max(longest, length)
            with torch.no_grad():
                for parameter, gradient, speed in zip(expected.parameters(), gradients, velocity, strict=True):
                    speed.mul_(0.9).add_(gradient / max(1.0, length) + 5e-4 * parameter)
                    parameter.sub_(0.05 * 0.1 ** sum(epoch >= fall for fall in (3, 6, 9)) * speed)
    assert longest > 1.0
    torch.testing.assert_close(list(found.parameters()), list(expected.parameters()), rtol=1e-3, atol=1e-5)


def test_ridge_adapter_carries_means_and_covariances() -> None:
    stream = short_stream()
    method = stream.start("adagauss", **SMALL | {"adapter": "ridge"})
    stream.train(method, 1, SHORT)
    means, covariances = method.memory.means.clone(), method.memory.covariances.clone()
    carried = transport.ridge_map(*method._pairs(stream.data[1], 0))
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.means[:4], carried.points(means))
    torch.testing.assert_close(method.memory.covariances[:4], carried.covariances(covariances))
    assert not torch.allclose(method.memory.covariances[:4], covariances, rtol=1e-3)


def test_ridge_adapter_without_drift_changes_nothing() -> None:
    stream = short_stream()
    method = stream.start("adagauss", **SMALL | {"adapter": "ridge"})
    before = clone(method.state_dict())
    method.begin_task(stream.tasks[1])
    method.eval()
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.means[:4], before["memory.means"], rtol=0, atol=1e-4)
    torch.testing.assert_close(method.memory.covariances[:4], before["memory.covariances"], rtol=0, atol=1e-4)


def test_scores_are_mahalanobis_distances_in_the_bottleneck() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("adagauss", **SMALL), 1, SHORT)
    images = stream.test_images[:20]
    with torch.no_grad():
        features = method.bottleneck(method.network.features(images))
    kept = classifiers.ClassStatistics(method.memory.means, method.memory.covariances)
    expected = classifiers.mahalanobis(kept, 3.0, 0.0, True)(features)
    torch.testing.assert_close(method.scores(images), expected)


def test_statistics_include_mirror_images_where_training_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = short_stream()
    never = stream.start("adagauss", **SMALL)  # the stream's images are shifted alone
    monkeypatch.setattr(stream.data[0], "augmentation", make_augmentation("crop-flip"))
    method, plain = stream.start("adagauss", **SMALL), stream.start("adagauss", mirrored=False, **SMALL)
    data = stream.data[0]
    images = data.normalisation(data.images, torch.float32)[data.labels == 1]
    with torch.no_grad():
        rows, mirror = method.embed(images), method.embed(images.flip(3))
    torch.testing.assert_close(plain.memory.means[1], rows.mean(dim=0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(never.memory.means[1], plain.memory.means[1])
    torch.testing.assert_close(method.memory.means[1], torch.cat([rows, mirror]).mean(dim=0), rtol=1e-4, atol=1e-5)


def test_weights_of_new_layers_come_from_the_generator_alone() -> None:
    torch.manual_seed(0)
    first = two_layers(4, 8, torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    second = two_layers(4, 8, torch.Generator().manual_seed(3))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_weights_of_new_layers_are_as_small_as_their_inputs_are_many() -> None:
    for parameter, bound in zip(
        two_layers(25, 400, torch.Generator().manual_seed(0)).parameters(), (0.2, 0.2, 0.05, 0.05), strict=True
    ):
        assert 0.8 * bound < float(parameter.detach().abs().max()) <= bound
