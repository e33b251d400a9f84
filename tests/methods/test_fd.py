"""Feature distillation: EFC whose penalty is the same in all directions."""

from __future__ import annotations

import torch
from checks import SHORT, assert_equal, clone, short_stream


def test_drift_term_is_ten_times_the_mean_squared_distance() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("fd"), 1, SHORT)
    stream.train(method, 2, SHORT)
    batch = stream.batch(method, 2)
    features = method.network.features(batch.images[: batch.size])
    distances = [(new - old).square().sum() for new, old in zip(features, batch.frozen["features"], strict=True)]
    torch.testing.assert_close(method.loss(batch)["drift"], 10.0 * torch.stack(distances).mean(), rtol=1e-4, atol=1e-6)


def test_it_is_efc_with_the_identity_alone() -> None:
    stream = short_stream()
    alone = stream.learn(stream.start("fd"), 2, SHORT)
    same = stream.learn(stream.start("efc", efm_weight=0.0, damping=10.0), 2, SHORT)
    assert_equal(clone(alone.state_dict()), clone(same.state_dict()))
