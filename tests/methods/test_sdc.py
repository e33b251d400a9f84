"""SDC: means that follow the drift, whichever method trains the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks import SHORT, assert_equal, check_round_trip, clone, short_stream
from torch.nn import functional

from efcil.resolution import resolve
from efcil.settings import Settings

BASES = ("finetune", "lwf", "efc")


@pytest.mark.parametrize("base", BASES)
def test_training_is_that_of_the_base(base: str) -> None:
    stream = short_stream()
    method = stream.start("sdc", base=base)
    alone = stream.start(base)
    alone.recipe = lambda _, preset: replace(preset, normalisation="frozen")  # SDC's default; EFC has no other
    stream.learn(method, 2, SHORT)
    stream.learn(alone, 2, SHORT)
    assert_equal(clone(method.network.state_dict()), clone(alone.network.state_dict()))
    assert not any(key.startswith("base.network") for key in method.state_dict()), "The network is saved twice."
    check_round_trip(stream, method)


def test_recipe_is_that_of_the_base() -> None:
    for base in BASES:
        ours, theirs = (resolve(each).later for each in (Settings("sdc", overrides={"base": base}), Settings(base)))
        assert replace(ours, normalisation=theirs.normalisation) == theirs
        assert ours.normalisation == "frozen"


@pytest.mark.parametrize("normalise", [True, False])
def test_means_move_as_a_loop_says(normalise: bool) -> None:
    stream = short_stream()
    sigma = 0.3 if normalise else 2.0
    method = stream.start("sdc", normalise=normalise, sigma=sigma, train_normalisation=True)
    before, old = method.memory.means.clone(), method.network.frozen_copy()
    stream.train(method, 1, replace(SHORT, learning_rate=5e-3))
    stream.end(method, 1)
    moved = torch.zeros_like(before)
    total = torch.zeros(len(before))
    for images, _ in stream.data[1].augmented("drift"):
        first, second = old.features(images), method.network.features(images).detach()
        if normalise:
            first, second = functional.normalize(first), functional.normalize(second)
        for one, other in zip(first, second, strict=True):
            for label, mean in enumerate(before):
                weight = torch.exp(-(one - mean).square().sum() / (2 * sigma**2))
                moved[label] += weight * (other - one)
                total[label] += weight
    expected = before + moved / total[:, None]
    assert float((expected - before).norm()) > 1e-3
    torch.testing.assert_close(method.memory.means[:4], expected, rtol=1e-3, atol=1e-5)


def test_without_drift_or_update_means_stay_bit_for_bit() -> None:
    stream = short_stream()
    for settings, recipe in (({}, replace(SHORT, learning_rate=0.0)), ({"update": False}, SHORT)):
        method = stream.start("sdc", **settings)
        before = method.memory.means.clone()
        stream.learn(method, 1, recipe)
        assert torch.equal(method.memory.means[:4], before)


def test_scores_are_negated_squared_distances() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("sdc"), 1, SHORT)
    images = stream.test_images[:20]
    embedded = functional.normalize(method.network.features(images)).detach()
    torch.testing.assert_close(
        method.scores(images), -torch.cdist(embedded, method.memory.means).square(), rtol=1e-3, atol=1e-4
    )
