"""ADC: old means move with the images that an attack has turned into their class; the nearest mean wins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import SHORT, Stream, short_stream
from torch import Tensor, nn
from torch.nn import functional

from efcil.methods.adc import AdversarialDriftCompensation
from efcil.methods.attacked import Neighbours
from efcil.resolution import resolve
from efcil.settings import Settings

IMAGES, STEPS, LENGTH = 20, 3, 1.0


@pytest.fixture(scope="module")
def stream() -> Stream:
    return short_stream()


def trained(stream: Stream, **settings: Any) -> AdversarialDriftCompensation:
    """Return the method before the end of the second task."""
    given = {"images": IMAGES, "attack_steps": STEPS, "attack_length": LENGTH, **settings}
    method = stream.start("adc", **given)
    assert isinstance(method, AdversarialDriftCompensation)
    stream.train(method, 1, SHORT)
    method.eval()
    return method


def slowly(method: AdversarialDriftCompensation, images: Tensor, number: int) -> tuple[Tensor, int]:
    """The mean of a class after the task, step by step as the paper has it, and how many attacks succeeded."""
    old, new, means = method.old_network, method.network, method.memory.means
    with torch.no_grad():
        distances = (old.features(images) - means[number]).square().sum(dim=1)
    start = images[distances.argsort()[:IMAGES]]
    made = start
    for _ in range(STEPS):
        leaf = made.detach().requires_grad_(True)
        target = means[number].expand(len(leaf), -1)
        nn.functional.mse_loss(old.features(leaf), target).backward()
        assert leaf.grad is not None
        step = LENGTH * len(leaf) ** 0.5 * leaf.grad / leaf.grad.norm()
        made = (leaf.detach() - step).clamp(images.min(), images.max())
    with torch.no_grad():
        there = torch.stack([(old.features(made) - mean).norm(dim=1) for mean in means]).argmin(dim=0) == number
        kept = made[there] if bool(there.any()) else start
        return means[number] + (new.features(kept) - old.features(kept)).mean(dim=0), int(there.sum())


def test_means_move_with_the_attacked_images(stream: Stream) -> None:
    method = trained(stream)
    data = stream.data[1]
    images, _ = data.render(data.view("drift", training=True), 0, len(data))
    slow = [slowly(method, images, number) for number in range(4)]
    assert max(count for _, count in slow) > 0, "No attack succeeds: this test would not see their images."
    assert min(count for _, count in slow) < IMAGES, "All attacks succeed: this test would not see a choice."
    before = method.memory.means.clone()
    stream.end(method, 1)
    moved = method.memory.means[:4]
    torch.testing.assert_close(moved, torch.stack([mean for mean, _ in slow]), rtol=1e-3, atol=1e-3)
    assert float((moved - before).norm()) > 10 * 1e-3 * float(before.norm())


def test_where_no_attack_succeeds_the_images_as_they_are_count(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    method = trained(stream)
    data = stream.data[1]
    images, _ = data.render(data.view("drift", training=True), 0, len(data))
    means, plain = method.memory.means.clone(), []
    with torch.no_grad():
        old, new = method.old_network.features(images), method.network.features(images)
        for mean in means:
            rows = (old - mean).norm(dim=1).argsort()[:IMAGES]
            plain.append(mean + (new - old)[rows].mean(dim=0))
    monkeypatch.setattr(Neighbours, "arrived", lambda self, features, number: torch.zeros(len(features)).bool())
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.means[:4], torch.stack(plain), rtol=1e-4, atol=1e-4)


def test_old_heads_keep_training_and_nothing_is_smoothed(stream: Stream) -> None:
    method = stream.start("adc")
    method.begin_task(stream.tasks[1])
    assert all(head.requires_grad for head in method.network.heads)
    assert method.settings.smoothing == 0.0


def test_the_nearest_mean_by_direction_wins(stream: Stream) -> None:
    method = stream.learn(stream.start("adc", images=IMAGES), 1, SHORT)
    images = stream.test_images[:60]
    with torch.no_grad():
        features = functional.normalize(method.network.features(images), dim=1)
    means = functional.normalize(method.memory.means, dim=1)
    assert torch.equal(method.scores(images).argmax(dim=1), (features @ means.T).argmax(dim=1))


def test_the_presets_have_the_recipe_it_was_published_with() -> None:
    for dataset, rate in (("cifar100", 0.05), ("tiny-imagenet", 0.001)):
        resolved = resolve(Settings(method="adc", dataset=dataset, scenario="cs10"))
        first, later = resolved.first_task, resolved.later
        assert (first.epochs, first.milestones, first.head, first.rotations) == (200, (60, 120, 160), "cosine", False)
        assert (later.learning_rate, later.epochs, later.milestones, later.batch_size) == (rate, 100, (45, 90), 128)
