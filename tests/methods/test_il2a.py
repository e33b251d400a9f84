"""IL2A: mixed classes, the closed form on stored Gaussians, and what is kept."""

from __future__ import annotations

import pytest
import torch
from checks import SHORT, short_stream
from torch.nn import functional

from efcil.methods.base import Plan
from efcil.methods.il2a import pair_numbers, symmetric_beta


def test_every_pair_of_classes_has_a_number_of_its_own() -> None:
    table = pair_numbers(5)
    assert torch.equal(table, table.T)
    numbers = [int(table[first, second]) for first in range(5) for second in range(first + 1, 5)]
    assert sorted(numbers) == list(range(10))


def test_shares_have_the_moments_of_a_beta_distribution() -> None:
    shares = symmetric_beta((20_000,), 20, torch.Generator().manual_seed(0))
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.002)
    assert float(shares.var()) == pytest.approx(1 / (4 * 41), rel=0.03)


def test_shares_far_from_one_half_become_one_half() -> None:
    stream = short_stream()
    method = stream.learn(stream.start("il2a", mixing_range=0.05), 1, SHORT)
    method.begin_task(stream.tasks[2])
    shares = method.draw(Plan(20, 16, torch.zeros(20)), torch.Generator().manual_seed(0))["mixing_shares"]
    assert shares.shape == (20, 4, 16)
    assert 0.1 < float(method.pairs[0].detach().abs().max()) <= 1 / 8, "Rows begin as those of a layer with 64 inputs."
    assert float((shares - 0.5).abs().max()) <= 0.05
    # Beta(20, 20) has standard deviation 0.078: about half of its mass lies outside.
    assert 0.3 < float((shares == 0.5).float().mean()) < 0.7


def test_shares_have_the_concentration_of_the_settings() -> None:
    stream = short_stream()
    method = stream.start("il2a", mixing_concentration=1, mixing_range=0.5)
    method.begin_task(stream.tasks[2])
    shares = method.draw(Plan(50, 16, torch.zeros(50)), torch.Generator().manual_seed(0))["mixing_shares"]
    assert float(shares.std()) == pytest.approx(12**-0.5, rel=0.05)  # Beta(1, 1) is uniform


def test_loss_image_by_image() -> None:
    stream = short_stream()
    settings = {"temperature": 0.8, "replay_weight": 3.0, "distillation_weight": 0.7, "covariance_scale": 1.5}
    method = stream.learn(stream.start("il2a", mixing_rounds=2, **settings), 1, SHORT)
    stream.train(method, 2, SHORT)
    batch = stream.batch(method, 2, step=1)
    method.eval()
    terms = method.loss(batch)

    head = torch.cat(list(method.network.heads))
    weight = torch.cat([head, *method.pairs])
    assert len(weight) == 8 + 3
    pairs = {frozenset({5, 6}): 8, frozenset({5, 7}): 9, frozenset({6, 7}): 10}
    images, targets = list(batch.images), batch.labels.tolist()
    for keys, shares in zip(batch.draws["mixing_keys"], batch.draws["mixing_shares"], strict=True):
        partners = sorted(range(batch.size), key=lambda i, keys=keys: float(keys[i]))
        for place, partner in enumerate(partners):
            labels = frozenset({int(batch.labels[place]), int(batch.labels[partner])})
            if len(labels) == 2:
                share = shares[place]
                images.append(share * batch.images[place] + (1 - share) * batch.images[partner])
                targets.append(pairs[labels])
    assert len(targets) > batch.size
    features = method.network.features(torch.stack(images))
    current = functional.cross_entropy(features @ weight.T / 0.8, torch.tensor(targets))
    torch.testing.assert_close(terms["current"], current)

    rows, labels = [], batch.draws["prototype_labels"]
    for label in labels.tolist():
        bend = [(w - head[label]) @ method.memory.covariances[label] @ (w - head[label]) for w in head]
        rows.append(head @ method.memory.means[label] + 0.75 * torch.stack(bend))
    torch.testing.assert_close(terms["replay"], 3.0 * functional.cross_entropy(torch.stack(rows) / 0.8, labels))
    drift = (features - method.teacher.features(torch.stack(images))).square().sum().sqrt()
    torch.testing.assert_close(terms["distillation"], 0.7 * drift)


def test_covariances_stay_with_their_classes_and_mixed_rows_go() -> None:
    """The authors' code prepends new covariances and then looks them up by label; here class c has row c."""
    stream = short_stream()
    method = stream.start("il2a")
    first = method.memory.covariances.clone()
    stream.learn(method, 1, SHORT)
    assert len(method.pairs) == 0, "A single class has no mixtures."
    stream.train(method, 2, SHORT)
    assert [rows.shape[0] for rows in method.pairs] == [3]
    stream.end(method, 2)
    assert len(method.pairs) == 0
    assert torch.equal(method.memory.covariances[:4], first)
    pieces = [(method.network.features(x).detach(), y) for x, y in stream.data[2].augmented("prototypes")]
    features, labels = (torch.cat(side) for side in zip(*pieces, strict=True))
    torch.testing.assert_close(method.memory.covariances[6], features[labels == 6].T.cov(), rtol=1e-3, atol=1e-5)


def test_a_temperature_is_a_factor_on_rows_and_scale() -> None:
    """Rows w = T v under temperature T with scale s: rows v without a temperature with scale T s."""
    stream = short_stream()
    plain = stream.start("il2a", temperature=1.0, covariance_scale=0.25)
    plain.begin_task(stream.tasks[2])
    batch = stream.batch(plain, 2, step=0)
    theirs = stream.start("il2a")
    theirs.begin_task(stream.tasks[2])
    with torch.no_grad():
        for row, same in zip([*theirs.network.heads, *theirs.pairs], [*plain.network.heads, *plain.pairs], strict=True):
            row.copy_(0.1 * same)
    terms, expected = theirs.eval().loss(batch), plain.eval().loss(batch)
    assert float(expected["replay"].detach()) > 0.1
    for name in ("current", "replay"):
        torch.testing.assert_close(terms[name], expected[name])
    torch.testing.assert_close(theirs.scores(batch.images), plain.scores(batch.images))
