"""EWC: the penalty and the Fisher matrix against loops, with FACIL's conventions."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from checks import FUSED, PLAIN, SHORT, assert_equal, clone, normalisation_state, short_stream
from torch.nn import functional

from efcil.methods.base import Method


def naive_fisher(method: Method, index: int, kind: str, learning: bool, size: int = SHORT.batch_size) -> torch.Tensor:
    """Squared gradient of every whole batch's mean cross-entropy, averaged over batches, parameter by parameter."""
    network, data = copy.deepcopy(method.network), short_stream().images(index)
    network.requires_grad_(True).train(learning)
    view = data.view("fisher")
    parameters, batches = list(network.backbone.parameters()), len(data) // size
    total = [torch.zeros_like(p) for p in parameters]
    for batch in range(batches):
        images, labels = data.render(view, batch * size, (batch + 1) * size)
        logits = network.features(images) @ torch.cat(list(network.heads)).T
        labels = logits.argmax(dim=1) if kind == "predicted" else labels
        gradients = torch.autograd.grad(functional.cross_entropy(logits, labels), parameters)
        total = [t + g.square() / batches for t, g in zip(total, gradients, strict=True)]
    return torch.cat([t.detach().reshape(-1) for t in total])


@pytest.mark.parametrize("kind", ["predicted", "true"])
@pytest.mark.parametrize("learning", [True, False])
def test_fisher_matrix(kind: str, learning: bool) -> None:
    stream = short_stream()
    method = stream.make("ewc", fisher_labels=kind, fisher_trains_statistics=learning)
    expected = naive_fisher(method, 0, kind, learning)
    before = normalisation_state(method)
    weights = clone(dict(method.network.named_parameters()))
    stream.end(method, 0)
    # Half of it: the matrix before the first task is zero.
    torch.testing.assert_close(method.fisher, 0.5 * expected, rtol=1e-4, atol=1e-12)
    moved = any(not torch.equal(before[key], value) for key, value in normalisation_state(method).items())
    assert moved == learning, "The Fisher pass moves BatchNorm's statistics in training mode and only there."
    assert all(torch.equal(weights[key], value) for key, value in method.network.named_parameters())
    assert not method.network.training


def test_every_image_may_count_by_itself() -> None:
    """Squares of single images' gradients are larger than those of batch means, where they partly cancel."""
    stream = short_stream()
    method = stream.make("ewc", fisher_batch_size=1, fisher_trains_statistics=False)
    expected = naive_fisher(method, 0, "predicted", False, size=1)
    stream.end(method, 0)
    torch.testing.assert_close(method.fisher, 0.5 * expected, rtol=1e-4, atol=1e-12)
    assert float(expected.sum()) > 2 * float(naive_fisher(method, 0, "predicted", False).sum())


@pytest.mark.parametrize("settings", [{"train_normalisation": False}, {"fisher_batch_size": 1}])
def test_the_fisher_pass_leaves_statistics_alone_where_it_must(settings: dict[str, object]) -> None:
    stream = short_stream()
    method = stream.make("ewc", fisher_trains_statistics=True, **settings)
    before = normalisation_state(method)
    expected = naive_fisher(method, 0, "predicted", False, size=settings.get("fisher_batch_size", SHORT.batch_size))
    stream.end(method, 0)
    assert_equal(normalisation_state(method), before)
    torch.testing.assert_close(method.fisher, 0.5 * expected, rtol=1e-4, atol=1e-12)


def test_a_task_smaller_than_a_batch_is_one_batch() -> None:
    stream = short_stream()
    method = stream.make("ewc", fisher_batch_size=1000, fisher_trains_statistics=False)
    expected = naive_fisher(method, 0, "predicted", False, size=len(stream.data[0]))
    stream.end(method, 0)
    torch.testing.assert_close(method.fisher, 0.5 * expected, rtol=1e-4, atol=1e-12)


def test_the_fused_backbone_knows_the_statistics_that_the_fisher_pass_moved() -> None:
    stream, images = short_stream(), short_stream().test_images[:20]
    method = stream.make("ewc")
    FUSED.equip(method)
    before = method.scores(images)
    stream.end(method, 0)
    fused = method.scores(images)
    PLAIN.equip(method)
    torch.testing.assert_close(fused, method.scores(images), rtol=1e-3, atol=1e-4)
    assert not torch.allclose(fused, before, rtol=1e-3, atol=1e-4)


def test_fisher_matrices_are_blended() -> None:
    stream = short_stream()
    method = stream.start("ewc", fisher_memory=0.75, fisher_trains_statistics=False)
    first = method.fisher.clone()
    stream.train(method, 1, SHORT)
    second = naive_fisher(method, 1, "predicted", False)
    stream.end(method, 1)
    torch.testing.assert_close(method.fisher, 0.75 * first + 0.25 * second, rtol=1e-3, atol=1e-9)


def test_loss_is_cross_entropy_of_the_new_head_plus_the_penalty() -> None:
    stream = short_stream()
    method = stream.start("ewc", weight=300.0, train_normalisation=False)
    stream.learn(method, 1, SHORT)
    anchors = [p.detach().clone() for p in method.network.backbone.parameters()]
    method.begin_task(stream.tasks[2])
    batch = stream.batch(method, 2)
    assert method.loss(batch)["penalty"].item() == 0.0
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in method.network.backbone.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    terms = method.loss(batch)
    penalty, place = 0.0, 0
    for parameter, anchor in zip(method.network.backbone.parameters(), anchors, strict=True):
        information = method.fisher[place : place + parameter.numel()].view(parameter.shape)
        penalty += float((information * (parameter - anchor).detach().square()).sum())
        place += parameter.numel()
    assert terms["penalty"].item() == pytest.approx(300.0 / 2 * penalty, rel=1e-4)
    logits = method.network.features(batch.images) @ method.network.heads[2].T
    torch.testing.assert_close(terms["current"], functional.cross_entropy(logits, batch.labels - 5))


def test_old_heads_stay_and_a_strong_penalty_holds_the_backbone() -> None:
    stream = short_stream()
    distances = []
    for weight in (0.0, 1e7):
        method = stream.start("ewc", weight=weight)
        old, before = method.network.heads[0].detach().clone(), method.fisher.sqrt()
        start = torch.cat([p.detach().reshape(-1) for p in method.network.backbone.parameters()])
        stream.train(method, 1, SHORT)
        stream.train(method, 2, SHORT)
        assert torch.equal(method.network.heads[0], old)
        end = torch.cat([p.detach().reshape(-1) for p in method.network.backbone.parameters()])
        distances.append(float(((end - start) * before).norm()))
    assert distances[1] < 0.5 * distances[0]


@pytest.mark.parametrize("train_normalisation", [True, False])
def test_the_penalty_reaches_the_parameters_of_the_fused_backbone(train_normalisation: bool) -> None:
    stream = short_stream()
    recipe = replace(SHORT, optimiser="sgd", learning_rate=1e-2, momentum=0.5, epochs=2)
    ends, penalties = [], []
    for execution in (PLAIN, FUSED):
        method = stream.start("ewc", weight=10.0, train_normalisation=train_normalisation)
        stream.train(method, 1, SHORT)
        method.fisher.fill_(1.0)  # so that the penalty weighs as much as the loss
        terms = stream.train(method, 2, recipe, execution)
        assert method.network.path == ("fused" if execution.fused else "plain")
        ends.append(torch.cat([p.detach().reshape(-1) for p in method.network.backbone.parameters()]))
        penalties.append([term["penalty"] for term in terms])
    assert penalties[0][-1] > 0.01
    assert penalties[1] == pytest.approx(penalties[0], rel=0.02)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
