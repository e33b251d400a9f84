"""Classes as Gaussians: moments of what is drawn, and the closed form against sampling."""

from __future__ import annotations

import torch

from efcil.core import gaussians
from efcil.core.prototypes import cholesky_factors


def covariances(classes: int, size: int) -> torch.Tensor:
    root = torch.randn(classes, size, size, generator=torch.Generator().manual_seed(3))
    return root @ root.transpose(1, 2) / size


def test_features_are_gathered_in_order() -> None:
    pieces = [(torch.ones(2, 3), torch.tensor([0, 1])), (torch.full((1, 3), 2.0), torch.tensor([5]))]
    features, labels = gaussians.collect(lambda images: 10 * images, pieces)
    assert features[:, 0].tolist() == [10, 10, 20]
    assert labels.tolist() == [0, 1, 5]


def test_radius_is_the_mean_standard_deviation_of_one_feature() -> None:
    two = torch.stack([torch.diag(torch.tensor([1.0, 3.0])), torch.diag(torch.tensor([5.0, 7.0]))])
    # Off the diagonal nothing counts: mean of traces / 2 = (4 + 12) / 4.
    two[:, 0, 1] = two[:, 1, 0] = 100.0
    assert gaussians.perturbation_radius(two).item() == 2.0
    factors = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        gaussians.perturbation_radius(factors), gaussians.perturbation_radius(factors @ factors.mT)
    )


def test_whole_classes_are_drawn_with_their_moments() -> None:
    means = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0], [-9.0, 0.0, 0.0]])
    shared = covariances(2, 3)
    factor_of, counts = torch.tensor([1, 0, 1]), [4000, 7, 3000]
    generator = torch.Generator().manual_seed(0)
    features, labels = gaussians.sample_classes(means, cholesky_factors(shared, 0.0), factor_of, counts, generator)
    assert torch.bincount(labels).tolist() == counts
    assert torch.equal(labels, labels.sort().values)
    for label in (0, 2):
        rows = features[labels == label]
        torch.testing.assert_close(rows.mean(dim=0), means[label], rtol=0, atol=0.12)
        torch.testing.assert_close(rows.T.cov(), shared[1], rtol=0, atol=0.25)


def test_a_class_without_images_is_not_drawn() -> None:
    generator = torch.Generator().manual_seed(0)
    factors = cholesky_factors(covariances(2, 3), 0.0)
    _, labels = gaussians.sample_classes(torch.zeros(2, 3), factors, torch.arange(2), [0, 5], generator)
    assert labels.tolist() == [1] * 5


def test_semantic_logits_by_hand() -> None:
    weight, means = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 1.0]])
    spread = torch.tensor([[[2.0, 1.0], [1.0, 4.0]]])
    # w_1 - w_0 = (-1, 2): the form is 2 - 4 + 16 = 14; times 2.5 / 2.
    logits = gaussians.semantic_logits(weight, means, spread, torch.tensor([0]), 2.5)
    torch.testing.assert_close(logits, torch.tensor([[3.0, 2.0 + 1.25 * 14.0]]))


def test_semantic_logits_bound_the_loss_of_samples_from_above() -> None:
    """E[CE(W f, c)] over f ~ N(p, gamma S) is at most the closed form, and above the loss of the mean alone."""
    generator = torch.Generator().manual_seed(0)
    weight, means, shared = (
        torch.randn(5, 4, generator=generator),
        torch.randn(3, 4, generator=generator),
        covariances(3, 4),
    )
    labels, gamma = torch.tensor([0, 1, 2, 1]), 0.6
    bound = torch.nn.functional.cross_entropy(gaussians.semantic_logits(weight, means, shared, labels, gamma), labels)
    noise = torch.randn(20_000, len(labels), 4, generator=generator)
    factors = cholesky_factors(gamma * shared, 0.0)[labels]
    samples = means[labels] + torch.einsum("kij,skj->ski", factors, noise)
    logits = (samples @ weight.T).flatten(0, 1)
    sampled = torch.nn.functional.cross_entropy(logits, labels.repeat(len(noise)))
    at_the_mean = torch.nn.functional.cross_entropy(means[labels] @ weight.T, labels)
    assert at_the_mean < sampled < bound
