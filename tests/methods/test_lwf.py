"""LwF: its loss against FACIL's way of writing it, and what stays as it was."""

from __future__ import annotations

import torch
from checks import FUSED, SHORT, assert_equal, clone, normalisation_state, short_stream
from torch.nn import functional


def test_loss_by_hand() -> None:
    """Softmax raised to 1/T and renormalised, one softmax over all old heads, smoothed, cross-entropy form."""
    stream = short_stream()
    method = stream.learn(stream.start("lwf", weight=7.0, temperature=3.0, smoothing=1e-2), 1, SHORT)
    stream.train(method, 2, SHORT)
    batch, teacher = stream.batch(method, 2), method.teacher
    method.eval()  # with the statistics of a batch, every pass would change them
    terms = method.loss(batch)
    features = method.network.features(batch.images)
    heads = list(method.network.heads)
    p = (features @ torch.cat(heads[:2]).T).softmax(dim=1) ** (1 / 3)
    q = (teacher.features(batch.images) @ torch.cat(list(teacher.heads)).T).softmax(dim=1) ** (1 / 3)
    p, q = p / p.sum(dim=1, keepdim=True), q / q.sum(dim=1, keepdim=True)
    p = p + 1e-2 / 5
    p = p / p.sum(dim=1, keepdim=True)
    torch.testing.assert_close(terms["distillation"], -7.0 * (q * p.log()).sum(dim=1).mean())
    torch.testing.assert_close(terms["current"], functional.cross_entropy(features @ heads[2].T, batch.labels - 5))


def test_old_heads_and_teacher_stay_and_the_teacher_goes_with_its_task() -> None:
    stream = short_stream()
    method = stream.start("lwf")
    before = clone(method.network.state_dict())
    stream.train(method, 1, SHORT)
    assert_equal(clone(method.teacher.state_dict()), before)
    assert torch.equal(method.network.heads[0], before["heads.0"])
    stream.end(method, 1)
    assert method.teacher is None
    assert method.stored() == {}


def test_a_teacher_neither_trains_nor_learns_statistics() -> None:
    """Whatever mode the network is in when it is copied."""
    network = short_stream().network().train()
    teacher = network.frozen_copy()
    assert network.training
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_a_fused_backbone_forgets_what_it_was_when_a_state_is_loaded() -> None:
    stream, images = short_stream(), short_stream().test_images[:20]
    method = stream.make("lwf")
    FUSED.equip(method)
    before = method.scores(images)
    trained = stream.learn(stream.start("lwf"), 1, SHORT)
    method.load_tensors(clone(trained.state_dict()))
    torch.testing.assert_close(method.scores(images), trained.scores(images), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(method.scores(images)[:, :4], before, atol=1e-2)


def test_normalisation_is_frozen_on_request() -> None:
    stream = short_stream()
    method = stream.start("lwf", train_normalisation=False)
    before = normalisation_state(method)
    stream.train(method, 1, SHORT)
    assert_equal(normalisation_state(method), before)


def test_distillation_keeps_what_the_old_heads_say() -> None:
    stream, changes = short_stream(), []
    images = stream.test_images[:64]
    for weight in (0.0, 100.0):
        method = stream.start("lwf", weight=weight)
        before = method.scores(images).softmax(dim=1)
        stream.train(method, 1, SHORT)
        stream.train(method, 2, SHORT)
        changes.append(float((method.scores(images)[:, :4].softmax(dim=1) - before).norm()))
    assert changes[1] < changes[0]
