"""The first task by hand: its loss with rotated images, its own layer, what trains at which rate, the average."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from efcil.engine.average import WeightAverage
from efcil.engine.first_task import FirstTask
from efcil.methods.base import Batch, Task
from efcil.network.backbones import make_backbone
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe

CLASSES = 3
TASK = Task(0, 0, CLASSES, 7, 8)


def first(rotations: bool = True, weight: float = 1.0, task: Task = TASK, cosine: float | None = None) -> FirstTask:
    network = IncrementalNetwork(make_backbone("slim", 0)).requires_grad_(False)  # as one that was frozen before
    if cosine is not None:
        network.use_cosine_heads(cosine)
    return FirstTask(network, task, rotations, weight).eval()


def batch(**others: Any) -> Batch:
    images = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return Batch(images, torch.tensor([0, 2, 1, 1, 0]), torch.empty(0), **others)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("cosine", [None, 4.0])
def test_the_loss_of_one_image_and_turn_at_a_time(cosine: float | None, weight: float, smoothing: float) -> None:
    learner, given = first(weight=weight, cosine=cosine), batch(label_smoothing=smoothing)
    layer = learner.auxiliary
    assert layer is not None
    assert (layer.bias is None) == (cosine is not None)
    rows = torch.cat([learner.network.heads[0].detach(), layer.weight.detach()])
    bias = torch.zeros(4 * CLASSES)
    if cosine is None:
        bias[CLASSES:] = layer.bias.detach()
    total, weights, labels, features = 0.0, 0.0, [], []
    for turn in range(4):
        for image, label in zip(given.images, given.labels.tolist(), strict=True):
            with torch.no_grad():
                feature = learner.network.features(torch.rot90(image, turn, (1, 2))[None])[0]
            logits = rows @ feature + bias
            if cosine is not None:
                logits = cosine * functional.normalize(rows, dim=1) @ functional.normalize(feature, dim=0)
            target = label if turn == 0 else CLASSES + 3 * label + turn - 1
            chances = logits.log_softmax(dim=0)
            error = -(1 - smoothing) * chances[target] - smoothing * chances.mean()
            share = 1.0 if turn == 0 else weight
            total, weights = total + share * float(error), weights + share
            labels.append(target)
            features.append(feature)
    found = learner.loss(given)
    assert list(found) == ["current"]
    assert found["current"].item() == pytest.approx(total / weights, rel=1e-4)
    ((compared, of),) = given.compared
    assert sorted(of.tolist()) == sorted(labels)
    torch.testing.assert_close(compared[:5], torch.stack(features[:5]), rtol=1e-4, atol=1e-5)


def test_the_loss_without_rotations() -> None:
    learner, given = first(rotations=False), batch(label_smoothing=0.2)
    assert learner.auxiliary is None
    with torch.no_grad():
        features = learner.network.features(given.images)
        logits = features @ learner.network.heads[0].T
    expected = functional.cross_entropy(logits, given.labels, label_smoothing=0.2)
    torch.testing.assert_close(learner.loss(given)["current"], expected)
    ((compared, of),) = given.compared
    torch.testing.assert_close(compared, features)
    assert torch.equal(of, given.labels)


def test_its_layer_follows_from_the_seed_and_the_task() -> None:
    one, same, other = first(), first(), first(task=replace(TASK, seed=8))
    layers = [each.auxiliary for each in (one, same, other)]
    for name in ("weight", "bias"):
        values = [getattr(layer, name).detach() for layer in layers]
        assert torch.equal(values[0], values[1])
        assert not torch.equal(values[0], values[2])
        limit = 1 / math.sqrt(one.network.feature_size)
        assert limit / 3 < float(values[0].abs().max()) <= limit
        assert float(values[0].min()) < 0 < float(values[0].max())
    assert torch.equal(one.network.heads[0], same.network.heads[0])
    assert not torch.equal(one.network.heads[0], other.network.heads[0])
    assert layers[0] is not None
    assert tuple(layers[0].weight.shape) == (3 * CLASSES, one.network.feature_size)


@pytest.mark.parametrize("rotations", [True, False])
@pytest.mark.parametrize("backbone", [None, 1e-4])
def test_everything_trains_once_and_at_its_rate(backbone: float | None, rotations: bool) -> None:
    learner = first(rotations)
    groups = learner.parameter_groups(Recipe(learning_rate=0.1, backbone_learning_rate=backbone))
    rates = {id(each): group["learning_rate"] for group in groups for each in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates), "nothing twice"
    slow = {id(each) for each in learner.network.backbone.parameters()}
    assert rates == {
        id(each): backbone if backbone is not None and id(each) in slow else 0.1 for each in learner.parameters()
    }
    assert all(each.requires_grad for each in learner.parameters())


def test_the_average_of_what_trains_by_hand() -> None:
    """Parameters that train and statistics of BatchNorm move; the rest is not averaged."""
    learner = first()
    fixed = next(learner.network.backbone.parameters()).requires_grad_(False)
    learner.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    average = WeightAverage(learner, 0.75)
    tensors = dict(learner.named_parameters()) | dict(learner.named_buffers())
    names = {
        name
        for name, value in tensors.items()
        if value is not fixed and name != "empty" and not name.endswith("num_batches_tracked")
    }
    assert set(average.state()) == names
    places = {name: value.data_ptr() for name, value in average.state().items()}
    expected = {name: tensors[name].detach().clone() for name in names}
    with torch.no_grad():
        for step in (1.0, 2.0):
            for name in names:
                tensors[name].add_(step)
                expected[name] = 0.75 * expected[name] + 0.25 * tensors[name]
            average.update()
    for name, value in average.state().items():
        torch.testing.assert_close(value, expected[name])
        assert not torch.equal(value, tensors[name]), name
        assert value.data_ptr() == places[name]
    later = WeightAverage(learner, 0.75)
    later.load_state({name: value.clone() for name, value in average.state().items()})
    assert all(torch.equal(later.state()[name], value) for name, value in average.state().items())
    with pytest.raises(KeyError):
        later.load_state({})
    later.replace()
    assert all(torch.equal(tensors[name], value) for name, value in average.state().items())
