"""Fusion-style rehearsal: PASS whose means move to a mix of two predictions."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, short_stream

from efcil.core import transport


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_old_means_move_to_the_mix_of_both_predictions(share: float) -> None:
    stream = short_stream()
    method = stream.start("fusion", feature_share=share, feature_ridge=0.1, semantic_ridge=0.2)
    stream.learn(method, 1, SHORT)
    means = method.memory.means.clone()
    stream.train(method, 2, SHORT)
    pieces = list(stream.data[2].augmented("drift"))
    labels = torch.cat([y for _, y in pieces])
    with torch.no_grad():
        before = torch.cat([method.teacher.features(x) for x, _ in pieces])
        after = torch.cat([method.network.features(x) for x, _ in pieces])
    stream.end(method, 2)
    old, new = (torch.stack([side[labels == c].mean(dim=0) for c in (5, 6, 7)]) for side in (before, after))
    features = transport.ridge_map(before, after, 0.1).points(means)
    relation = transport.relational_update(means, old, new, 0.2)
    assert float((features - relation).abs().max()) > 1e-4
    torch.testing.assert_close(method.memory.means[:5], share * features + (1 - share) * relation, rtol=1e-4, atol=1e-5)


def test_without_drift_old_means_stay_and_training_is_that_of_pass() -> None:
    stream = short_stream()
    methods = [stream.start(name) for name in ("fusion", "pass")]
    terms = []
    for method in methods:
        method.begin_task(stream.tasks[1])
        terms.append(method.loss(stream.batch(method, 1)))
        method.eval()
    assert {k: float(v.detach()) for k, v in terms[0].items()} == {k: float(v.detach()) for k, v in terms[1].items()}
    before = methods[0].memory.means.clone()
    for (_, buffer), (_, other) in zip(
        methods[0].network.named_buffers(), methods[0].teacher.named_buffers(), strict=True
    ):
        buffer.copy_(other)  # the loss above let BatchNorm see a batch
    stream.end(methods[0], 1)
    torch.testing.assert_close(methods[0].memory.means[:4], before, rtol=0, atol=1e-4)
