"""LDC: class means pass through a map that fits the drift of the current images; the nearest one wins."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, short_stream

from efcil.core import transport
from efcil.data.store import VIEWS


def drifted(scale: float, **settings: object):  # type: ignore[no-untyped-def]
    """The method after a second task that did nothing but multiply all features by `scale`."""
    stream = short_stream()
    method = stream.start("ldc", **settings)
    before = method.memory.means.clone()
    method.begin_task(stream.tasks[1])
    with torch.no_grad():
        last = method.network.backbone.blocks[-1]
        for norm in (last.norm2, last.shortcut_norm):
            norm.weight.mul_(scale)
            norm.bias.mul_(scale)
    method.eval()
    stream.end(method, 1)
    return method, before


@pytest.mark.parametrize("kind", ["learned", "ridge"])
def test_without_drift_old_means_stay(kind: str) -> None:
    method, before = drifted(1.0, map=kind)
    torch.testing.assert_close(method.memory.means[:4], before, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["learned", "ridge"])
def test_old_means_follow_a_drift_that_the_current_images_show(kind: str) -> None:
    """The images of one class show only some directions; there, old means must grow with the features."""
    method, before = drifted(1.5, map=kind, map_epochs=60, map_learning_rate=3e-3)
    error_before = (before - 1.5 * before).norm()
    error_after = (method.memory.means[:4] - 1.5 * before).norm()
    assert float(error_after) < 0.6 * float(error_before)


def test_the_map_is_learned_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the features before and after the task, in another view of the images every epoch."""
    stream = short_stream()
    method = stream.start("ldc", map_epochs=4, map_learning_rate=0.5, map_batch_size=7)
    stream.train(method, 1, SHORT)
    expected = [method.before_and_after(stream.data[1], epoch) for epoch in range(4)]
    assert not torch.equal(expected[0][0], expected[1][0])
    given, learned = [], transport.learned_map

    def record(views, size, **others):  # type: ignore[no-untyped-def]
        given.append((list(views), others))
        return learned(given[0][0], size, **others)

    monkeypatch.setattr(transport, "learned_map", record)
    stream.end(method, 1)
    ((views, others),) = given
    assert others == {"learning_rate": 0.5, "batch_size": 7, "device": torch.device("cpu")}
    torch.testing.assert_close(views, expected)
    assert not torch.allclose(*views[0], atol=1e-3)


def test_a_ridge_map_has_the_penalty_of_the_settings() -> None:
    stream = short_stream()
    method = stream.start("ldc", map="ridge", map_ridge=0.3)
    stream.train(method, 1, SHORT)
    expected = transport.ridge_map(*method.before_and_after(stream.data[1]), 0.3).points(method.memory.means)
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.means[:4], expected)


def test_the_nearest_mean_wins() -> None:
    stream = short_stream()
    images = stream.test_images[:60]
    for normalise in (True, False):
        method = stream.learn(stream.start("ldc", normalise=normalise), 1, SHORT)
        with torch.no_grad():
            features = method.network.features(images)
        means = method.memory.means
        if normalise:
            features, means = features / features.norm(dim=1, keepdim=True), means / means.norm(dim=1, keepdim=True)
        assert torch.equal(method.scores(images).argmax(dim=1), torch.cdist(features, means).argmin(dim=1))


@pytest.mark.parametrize("views", VIEWS)
def test_new_means_are_those_of_the_new_network(views: str) -> None:
    stream = short_stream()
    method = stream.learn(stream.start("ldc", views=views), 1, SHORT)
    data = stream.data[1]
    pieces = data.plain() if views == "plain" else data.augmented("prototypes")
    with torch.no_grad():
        rows = torch.cat([method.network.features(images) for images, _ in pieces])
    torch.testing.assert_close(method.memory.means[4], rows.mean(dim=0), rtol=1e-4, atol=1e-5)
