"""The written-out loss of EFC against autograd on the formulas."""

import pytest
import torch
from torch.nn import functional

from efcil.core import elastic
from efcil.core.elastic import elastic_loss


def problem(dtype=torch.float64, size=5, previous=3, prototypes=6, old=4, new=3, features=7, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    root = normal(features, features)
    weights = torch.rand(previous + prototypes, generator=generator, dtype=dtype)
    weights[[0, -1]] = 0
    targets = torch.randint(0, old + new, (size + previous + prototypes,), generator=generator)
    targets[:size] = old + targets[:size] % new
    return {
        "features": normal(size + previous, features).requires_grad_(),
        "weight": normal(old + new, features).requires_grad_(),
        "old_features": normal(size, features),
        "penalty": root @ root.T,
        "prototypes": normal(prototypes, features),
        "targets": targets,
        "replay_weights": weights / weights.sum(),
        "old_classes": old,
    }


def by_formula(features, weight, old_features, penalty, prototypes, targets, replay_weights, old_classes):
    size = len(old_features)
    delta = features[:size] - old_features
    drift = torch.stack([d @ penalty @ d for d in delta]).mean()
    current = functional.cross_entropy(
        (features[:size] @ weight.T)[:, old_classes:], targets[:size] - old_classes, reduction="mean"
    )
    rows = torch.cat([features[size:], prototypes]) @ weight.T
    replay = (functional.cross_entropy(rows, targets[size:], reduction="none") * replay_weights).sum()
    return drift, current, replay


@pytest.mark.parametrize("factors", [(1, 1, 1), (0.5, 2, 3), (0, 0, 1)])
def test_terms_and_gradients_are_those_of_the_formulas(factors):
    ours, theirs = problem(), problem()
    for arguments, function in ((ours, elastic_loss), (theirs, by_formula)):
        terms = function(**arguments)
        sum(f * t for f, t in zip(factors, terms, strict=True)).backward()
        arguments["terms"] = torch.stack(terms)
    torch.testing.assert_close(ours["terms"], theirs["terms"])
    torch.testing.assert_close(ours["features"].grad, theirs["features"].grad)
    torch.testing.assert_close(ours["weight"].grad, theirs["weight"].grad)


def test_without_previous_images():
    arguments = problem(previous=0)
    torch.testing.assert_close(elastic_loss(**arguments), by_formula(**arguments))


def test_no_drift_no_penalty():
    arguments = problem()
    arguments["old_features"] = arguments["features"].detach()[:5].clone()
    assert elastic_loss(**arguments)[0] == 0


@pytest.mark.parametrize(("replayed", "features"), [(9, 7), (300, 64)])
def test_kernels_agree_with_the_plain_version(replayed, features):
    pytest.importorskip("triton", reason="Triton is not installed here; the plain version is used instead")
    from efcil.core import elastic_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5 + replayed, 9, generator=generator) * 3
    targets = torch.randint(0, 9, (5 + replayed,), generator=generator)
    targets[:5] = 4 + targets[:5] % 5
    weights = torch.rand(replayed, generator=generator)
    delta, pulled = torch.randn(2, 5, features, generator=generator)
    plain = elastic.terms(logits, targets, weights, 4, 5, delta, pulled)
    moved = [t.to(device) for t in (logits, targets, weights)]
    fast = elastic_kernel.terms(*moved, 4, 5, delta.to(device), pulled.to(device))
    torch.testing.assert_close([t.cpu() for t in fast], list(plain))
    assert (fast[1][:5, :4] == 0).all()
    factors = torch.tensor([0.5, 3.0])
    expected = elastic.scaled(plain[1], *factors, 5)
    found = elastic_kernel.scaled(plain[1].to(device), *factors.to(device), 5)
    torch.testing.assert_close(found.cpu(), expected)


def test_the_loss_with_kernels_is_the_loss_without(monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed here; the plain version is used instead")
    ends = []
    for compiled in (False, True):
        monkeypatch.setattr(elastic, "compiled", lambda _, compiled=compiled: compiled)
        arguments = problem(torch.float32)
        if torch.cuda.is_available():
            arguments = {
                name: value.detach().cuda().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value
                for name, value in arguments.items()
            }
        terms = elastic_loss(**arguments)
        sum(f * t for f, t in zip((0.5, 2, 3), terms, strict=True)).backward()
        ends.append((torch.stack(terms).detach(), arguments["features"].grad, arguments["weight"].grad))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-4, rtol=1e-4)
