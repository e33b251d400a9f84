"""APR: what pseudo-old images are made of and how, the loss on them, and how classes follow the drift."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import SHORT, Stream, short_stream
from torch import Tensor, nn

from efcil.core import transport
from efcil.core.pseudo_old import descend
from efcil.methods.apr import AdversarialPseudoReplay
from efcil.methods.attacked import nearest
from efcil.methods.base import Plan
from efcil.network import attack
from efcil.resolution import resolve
from efcil.settings import Settings

QUICK = {"map_epochs": 3, "drift_steps": 3, "sources": 12, "pseudo_batch": 16, "drift_images": 20}


def begun(stream: Stream, **settings: object) -> AdversarialPseudoReplay:
    """Return the method at the beginning of the second task, its images looked at."""
    method = stream.start("apr", **{**QUICK, **settings})
    assert isinstance(method, AdversarialPseudoReplay)
    method.begin_task(stream.tasks[1])
    with torch.no_grad():
        method.prepare(stream.tasks[1], stream.data[1])
    return method


@pytest.fixture(scope="module")
def stream() -> Stream:
    return short_stream()


def test_sources_are_the_nearest_of_every_class() -> None:
    generator = torch.Generator().manual_seed(0)
    features, means = torch.randn(30, 4, generator=generator), torch.randn(3, 4, generator=generator)
    rows = nearest(features, means, 7)
    for number, mean in enumerate(means):
        order = (features - mean).square().sum(dim=1).argsort()
        assert rows[number].tolist() == order[:7].tolist()
    assert nearest(features, means, 100).shape == (3, 30)


def test_rows_of_a_view_are_rendered_as_they_were(stream: Stream) -> None:
    data = stream.data[1]
    view = data.view("drift")
    whole, _ = data.render(view, 0, len(data))
    rows = torch.tensor([5, 0, 5, 11])
    assert torch.equal(data.render(view.of(rows), 0, 4)[0], whole[rows])


def test_a_group_shares_the_length_of_a_step() -> None:
    """As if every batch was attacked alone, with the gradient of its mean error scaled to one length."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Linear(3 * 4 * 4, 5)
    images, targets = torch.randn(11, 3, 4, 4, generator=generator), torch.randn(11, 5, generator=generator)

    def gradient(moved: Tensor, wanted: Tensor) -> Tensor:
        leaf = moved.detach().requires_grad_(True)
        (found,) = torch.autograd.grad((layer(leaf.flatten(1)) - wanted).square().sum(), leaf)
        return found

    expected = []
    for batch, wanted in zip(images.split(4), targets.split(4), strict=True):
        for _ in range(3):
            leaf = batch.detach().requires_grad_(True)
            nn.functional.mse_loss(layer(leaf.flatten(1)), wanted).backward()
            assert leaf.grad is not None
            length = 2.0 * len(batch) ** 0.5
            batch = (batch - length * leaf.grad / leaf.grad.norm()).clamp(-1.5, 1.5)
        expected.append(batch)
    limits = torch.tensor(-1.5), torch.tensor(1.5)
    found = descend(images, targets, gradient, [2.0] * 3, group=4, limits=limits)
    torch.testing.assert_close(found, torch.cat(expected))


def test_groups_stay_together_in_any_pieces(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    method = begun(stream)
    images = stream.test_images[:22]
    targets = method.memory.means[torch.arange(22) % 4]
    whole = attack.towards(method.old_network, images, targets, [1.0] * 2, group=8)
    monkeypatch.setattr(attack, "LARGEST_PIECE", 10 * images[0, 0].numel())
    parts = attack.towards(method.old_network, images, targets, [1.0] * 2, group=8)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_pseudo_old_images_are_where_old_classes_were(stream: Stream) -> None:
    """They are nearer to their class than the images they are made of, and the old network says what they are."""
    method = begun(stream, attack_length=1.0, noise=0.0)
    plan = Plan(3, SHORT.batch_size, torch.full((3,), SHORT.batch_size))
    still = method.draw(plan, torch.Generator().manual_seed(0))
    method.settings = replace(method.settings, attack_steps=0)
    with torch.no_grad():
        before = method.draw(plan, torch.Generator().manual_seed(0))
    distances = []
    for draws in (before, still):
        images = draws["images"].flatten(0, 1).permute(0, 3, 1, 2)
        features = method.old_network.features(images)
        torch.testing.assert_close(method.old_network.logits(features), draws["logits"].flatten(0, 1))
        distances.append(torch.cdist(features, method.memory.means).amin(dim=1).mean())
    assert distances[1] < 0.8 * distances[0]
    assert still["images"].shape == (3, 16, 8, 8, 3)


def test_targets_are_means_with_noise_of_the_mean_deviation_of_all_classes(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, seen = begun(stream, noise=1e-3, pseudo_batch=64), []
    towards = attack.towards
    monkeypatch.setattr(attack, "towards", lambda *given, **named: (seen.append(given[2]), towards(*given, **named))[1])
    with torch.no_grad():
        method.draw(Plan(8, SHORT.batch_size, torch.full((8,), SHORT.batch_size)), torch.Generator().manual_seed(0))
    (targets,) = seen
    means = method.memory.means
    nearest = torch.cdist(targets, means).argmin(dim=1)
    assert len(nearest.unique()) == len(means)
    noise = targets.double() - means[nearest].double()
    deviation = 1e-3 * torch.stack([each.diagonal() for each in method.memory.covariances]).mean().sqrt()
    assert float(noise.square().mean().sqrt()) == pytest.approx(float(deviation), rel=0.05)
    assert float(noise.abs().max()) < 6 * float(deviation)


def test_every_source_is_used_before_one_is_used_again(stream: Stream) -> None:
    method = begun(stream, attack_steps=0, pseudo_batch=12)
    assert method._sources is not None
    pairs = len(method._sources.rows)
    assert pairs == 4 * 12
    plan = Plan(4, SHORT.batch_size, torch.full((4,), SHORT.batch_size))
    with torch.no_grad():
        images = method.draw(plan, torch.Generator().manual_seed(0))["images"].flatten(0, 1)
        rows = method._sources.rows
        data, view = method._sources.data, method._sources.view
        expected, _ = data.render(view.of(rows), 0, pairs)
    one, other = images.flatten(1).sum(dim=1).sort().values, expected.flatten(1).sum(dim=1).sort().values
    torch.testing.assert_close(one, other)


def test_the_loss_is_lwf_on_both_kinds_of_images(stream: Stream) -> None:
    method = begun(stream)
    batch = stream.batch(method, 1)
    terms = method.loss(batch)
    images = torch.cat([batch.images, batch.draws["images"].permute(0, 3, 1, 2)])
    logits = method.network.logits(method.network.features(images))
    taught = torch.softmax(method.old_network.logits(method.old_network.features(images)) / 2, dim=1)
    retained = -(taught * torch.log_softmax(logits[:, :4] / 2, dim=1)).sum(dim=1).mean()
    torch.testing.assert_close(terms["distillation"], 10 * retained)
    current = nn.functional.cross_entropy(logits[: batch.size, 4:], batch.labels - 4)
    torch.testing.assert_close(terms["current"], current)
    assert all(head.requires_grad for head in method.network.heads), "Old heads keep training."


def test_maps_are_those_of_torch_adam() -> None:
    """Every class alone: its own rows, an order of its own in every epoch, short batches at the end."""
    generator = torch.Generator().manual_seed(4)
    before = torch.randn(3, 9, 4, generator=generator)
    after = before + 0.3 * torch.randn(3, 9, 4, generator=generator)
    counts = torch.tensor([9, 4, 1])
    random = torch.Generator().manual_seed(5)
    found = transport.learned_maps(
        before, after, counts, epochs=5, learning_rate=1e-2, batch_size=4, generator=torch.Generator().manual_seed(5)
    )
    chances = [torch.rand(3, 9, generator=random) for _ in range(5)]
    for number, count in enumerate(counts.tolist()):
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(4))
            layer.bias.zero_()
        optimiser = torch.optim.Adam(layer.parameters(), lr=1e-2)
        for chance in chances:
            for rows in chance[number, :count].argsort().split(4):
                optimiser.zero_grad()
                (layer(before[number, rows]) - after[number, rows]).norm(dim=1).mean().backward()
                optimiser.step()
        torch.testing.assert_close(found[number], layer.weight.detach(), rtol=1e-4, atol=1e-5)


def test_classes_follow_the_drift_of_their_own_images(stream: Stream) -> None:
    """Means move by the mean shift of the images that reached the class; covariances by a map learned on these."""
    method = begun(stream, map_epochs=0)
    means, covariances = method.memory.means.clone(), method.memory.covariances.clone()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in method.network.backbone.parameters():
            parameter.mul_(1.0 + 0.05 * torch.randn(parameter.shape, generator=generator))
    view = stream.data[1].view("drift")
    data = stream.data[1]
    method.eval()
    with torch.no_grad():
        whole, _ = data.render(view, 0, len(data))
        limits = whole.amin(), whole.amax()
        rows = nearest(method.old_network.features(whole), means, 20)
        expected = []
        for number, mean in enumerate(means):
            made = attack.towards(
                method.old_network, whole[rows[number]], mean.expand(20, -1),
                [method.settings.drift_length] * 3, group=64, limits=limits,
            )  # fmt: skip
            assert made.amin() >= limits[0]
            old, new = method.old_network.features(made), method.network.features(made)
            there = torch.cdist(old, means).argmin(dim=1) == number
            there = there if bool(there.any()) else torch.ones_like(there)
            expected.append(mean + (new - old)[there].mean(dim=0))
    stream.end(method, 1)
    torch.testing.assert_close(method.memory.means[:4], torch.stack(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(method.memory.covariances[:4], covariances)  # the map was not learned: the identity
    assert method.memory.means.shape[0] == 5


def test_covariances_follow_too(stream: Stream) -> None:
    method = stream.start("apr", **{**QUICK, "map_epochs": 20, "map_learning_rate": 1e-2})
    before = method.memory.covariances.clone()
    stream.train(method, 1, SHORT)
    stream.end(method, 1)
    after = method.memory.covariances[:4]
    assert not torch.allclose(after, before, rtol=1e-2)
    torch.testing.assert_close(after, after.transpose(1, 2), rtol=1e-4, atol=1e-6)


def test_the_published_recipe_is_its_own() -> None:
    run = Settings(method="apr", dataset="cifar100", scenario="cs10")
    found = resolve(run)
    assert found.augmentation == "crop-flip-jitter-auto"
    assert (found.first_task.epochs, found.first_task.learning_rate, found.first_task.head) == (200, 0.1, "cosine")
    assert not found.first_task.rotations
    assert (found.later.epochs, found.later.batch_size, found.later.learning_rate) == (100, 32, 0.01)
    assert found.later.schedule == found.first_task.schedule == "cosine"
    assert resolve(replace(run, method="lwf")).augmentation == "padded-resized-crop"
    assert resolve(replace(run, recipe="modern")).augmentation == "crop-flip-trivial"
    tiny = resolve(replace(run, dataset="tiny-imagenet"))
    assert (tiny.method.attack_steps, tiny.method.drift_steps, tiny.method.shrink) == (6, 6, 40)
    assert tiny.later.batch_size == 64
