"""Classifiers on stored statistics against direct formulas, and which of them are possible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from efcil.core import classifiers, svm
from efcil.core.classifiers import ClassStatistics
from efcil.core.heads import fit_to_gaussians
from efcil.errors import SettingsError

SIZE, CLASSES = 5, 4


def statistics(shared: bool = False) -> ClassStatistics:
    generator = torch.Generator().manual_seed(0)
    means = 2.0 * torch.rand(CLASSES, SIZE, generator=generator, dtype=torch.float64)
    roots = torch.randn(2 if shared else CLASSES, SIZE, SIZE, generator=generator, dtype=torch.float64)
    covariances = roots @ roots.transpose(1, 2) / SIZE + 0.05 * torch.eye(SIZE, dtype=torch.float64)
    return ClassStatistics(means, covariances, torch.tensor([1, 1, 0, 1]) if shared else None)


def points() -> Tensor:
    return torch.rand(30, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2.0


def covariance_of(kept: ClassStatistics, label: int) -> Tensor:
    covariances, groups = kept.spread()
    return covariances[groups[label]]


@pytest.mark.parametrize("normalise", [False, True])
def test_nearest_mean(normalise: bool) -> None:
    kept, features = statistics(), points()
    scores = classifiers.nearest_mean(kept, normalise)(features)
    unit = torch.nn.functional.normalize if normalise else (lambda x, dim: x)
    torch.testing.assert_close(scores, -(torch.cdist(unit(features, dim=1), unit(kept.means, dim=1)) ** 2))


def test_far_from_the_origin_distances_keep_their_digits() -> None:
    # On a binary grid the shift itself loses nothing.
    means, features = ((each * 64).round() / 64 for each in (statistics().means, points()))
    near = classifiers.nearest_mean(ClassStatistics(means))(features)
    far = classifiers.nearest_mean(ClassStatistics((means + 2.0**10).float()))((features + 2.0**10).float())
    torch.testing.assert_close(far.double(), near, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_mahalanobis_by_hand(shared: bool, normalise: bool) -> None:
    kept, features = statistics(shared), points()
    scores = classifiers.mahalanobis(kept, 2.0, 0.5, normalise)(features)
    for label in range(CLASSES):
        matrix = covariance_of(kept, label).clone()
        off = ~torch.eye(SIZE, dtype=torch.bool)
        variance, rest = matrix.diagonal().mean(), matrix[off].mean()
        matrix[off] += 0.5 * rest
        matrix += 2.0 * variance * torch.eye(SIZE)
        mean = kept.means[label]
        if normalise:
            deviation = matrix.diagonal().sqrt()
            matrix = matrix / torch.outer(deviation, deviation)
            mean = mean / mean.norm()
        for row, point in enumerate(features):
            point = point / point.norm() if normalise else point
            expected = -(point - mean) @ torch.linalg.inv(matrix) @ (point - mean)
            torch.testing.assert_close(scores[row, label], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_bayes_is_the_gaussian_log_density_up_to_a_constant(shared: bool) -> None:
    kept, features = statistics(shared), points()
    scores = classifiers.bayes(kept, 0.2)(features)
    expected = []
    for label in range(CLASSES):
        matrix = covariance_of(kept, label)
        shrunk = 0.8 * matrix + 0.2 * matrix.diagonal().mean() * torch.eye(SIZE)
        expected.append(MultivariateNormal(kept.means[label], shrunk).log_prob(features))
    difference = scores - torch.stack(expected, dim=1)
    torch.testing.assert_close(difference, difference[:1, :1].expand_as(difference), rtol=0, atol=1e-3)


def test_lda_has_one_covariance_and_linear_borders() -> None:
    kept = statistics(shared=True)
    covariances, _ = kept.spread()
    pooled = ClassStatistics(kept.means, (0.25 * covariances[0] + 0.75 * covariances[1]).expand(CLASSES, -1, -1))
    features = points()
    scores = classifiers.discriminant(kept)(features)
    expected = classifiers.bayes(pooled)(features)
    torch.testing.assert_close(scores - scores[:, :1], expected - expected[:, :1], rtol=0, atol=1e-3)
    # Differences of scores are affine: they take the value of the middle in the middle.
    margin = scores[:, 0] - scores[:, 1]
    middle = classifiers.discriminant(kept)((features[:1] + features[1:2]) / 2)
    torch.testing.assert_close(middle[0, 0] - middle[0, 1], (margin[0] + margin[1]) / 2, rtol=0, atol=1e-4)


def test_ridge_is_that_of_samples_with_these_statistics() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = [1.0 + c + torch.randn(50, SIZE, generator=generator, dtype=torch.float64) for c in range(CLASSES)]
    covariances = torch.stack([torch.cov(row.T, correction=0) for row in rows])
    kept = ClassStatistics(torch.stack([row.mean(dim=0) for row in rows]), covariances)
    table, targets = torch.cat(rows), torch.eye(CLASSES).double().repeat_interleave(50, dim=0)
    gram = table.T @ table
    strength = 0.3 * gram.diagonal().mean()
    weight = torch.linalg.solve(gram + strength * torch.eye(SIZE), table.T @ targets)
    features = points()
    torch.testing.assert_close(classifiers.ridge(kept, 0.3)(features), features @ (weight / weight.norm(dim=0)))


def test_ridge_counts_a_shared_covariance_once_for_every_class() -> None:
    kept, features = statistics(shared=True), points()
    covariances, groups = kept.spread()
    apart = ClassStatistics(kept.means, covariances[groups])
    torch.testing.assert_close(classifiers.ridge(kept)(features), classifiers.ridge(apart)(features))


def test_strengths_of_the_classifiers_that_are_asked_for_by_name() -> None:
    kept, features = statistics(), points()
    for name, explicit in {
        "mahalanobis": classifiers.mahalanobis(kept, 1.0, 1.0, True),
        "bayes": classifiers.bayes(kept, 0.1),
        "lda": classifiers.discriminant(kept, 0.1),
        "ridge": classifiers.ridge(kept, 0.01),
    }.items():
        torch.testing.assert_close(classifiers.CLASSIFIERS[name][1](kept)(features), explicit(features))


def test_machines_see_equally_many_features_of_every_class_all_of_unit_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    fit = svm.fit

    def recorded(rows: Tensor, labels: Tensor, classes: int) -> svm.LinearMachines:
        seen.append((rows, labels))
        return fit(rows, labels, classes)

    monkeypatch.setattr(svm, "fit", recorded)
    classify, features = classifiers.machines(statistics()), points()
    ((rows, labels),) = seen
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)).double())
    assert torch.bincount(labels).tolist() == [200] * CLASSES
    torch.testing.assert_close(classify(3.0 * features), classify(features))


@pytest.mark.parametrize("name", classifiers.CLASSIFIERS)
def test_every_classifier_tells_well_separated_classes_apart(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    means = 4.0 * torch.eye(6)[:CLASSES] + 1.0
    labels = torch.arange(200) % CLASSES
    features = means[labels] + 0.3 * torch.randn(200, 6, generator=generator)
    kept = ClassStatistics(means, 0.09 * torch.eye(6).expand(CLASSES, -1, -1), heads=torch.zeros(CLASSES, 6))
    scores = classifiers.CLASSIFIERS[name][1](kept)(features)
    assert scores.shape == (200, CLASSES)
    assert torch.equal(scores.argmax(dim=1), labels)


@pytest.mark.parametrize("name", ["mahalanobis", "bayes"])
@pytest.mark.parametrize("rounding", [0.0, -1e-8], ids=["zero", "rounding"])
def test_a_class_of_one_image_is_as_wide_as_the_others(name: str, rounding: float) -> None:
    kept = statistics()
    covariances, _ = kept.spread()
    build, features = classifiers.CLASSIFIERS[name][1], points()
    alone = ClassStatistics(kept.means, torch.cat([covariances[:3], rounding * torch.eye(SIZE)[None].double()]))
    mean = ClassStatistics(kept.means, torch.cat([covariances[:3], covariances[:3].mean(dim=0, keepdim=True)]))
    torch.testing.assert_close(build(alone)(features), build(mean)(features))


@pytest.mark.parametrize("name", ["mahalanobis", "bayes"])
def test_classes_without_any_spread_have_finite_scores(name: str) -> None:
    kept = ClassStatistics(torch.rand(2, 4), torch.zeros(2, 4, 4))
    assert bool(torch.isfinite(classifiers.CLASSIFIERS[name][1](kept)(torch.rand(7, 4))).all())


@pytest.mark.parametrize("name", classifiers.CLASSIFIERS)
def test_one_class_is_all_there_can_be(name: str) -> None:
    kept = ClassStatistics(torch.rand(1, 4), torch.eye(4)[None], heads=torch.rand(1, 4))
    scores = classifiers.CLASSIFIERS[name][1](kept)(torch.rand(7, 4))
    assert scores.shape == (7, 1)
    assert bool(torch.isfinite(scores).all())


@pytest.mark.parametrize("diagonal", [0.0, 1.0])
def test_a_feature_that_never_varies_goes_with_nothing(diagonal: float) -> None:
    """Even where the mean covariance is added between all pairs of features."""
    covariance = torch.tensor([[1.0, 0.5, 0.0], [0.5, 2.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    correlation = classifiers.shrunk_towards_mean(covariance, diagonal, 1.0, True)
    assert bool(torch.isfinite(correlation).all())
    assert float(correlation.abs().max()) <= 1.0 + 1e-12
    kept = ClassStatistics(torch.rand(1, 3).double(), covariance[None])
    assert bool(torch.isfinite(classifiers.mahalanobis(kept, diagonal, 1.0)(torch.rand(5, 3).double())).all())


def test_rebalancing_undoes_a_preference_for_the_newest_classes() -> None:
    generator = torch.Generator().manual_seed(3)
    means = torch.rand(CLASSES, 6, generator=generator) + 2.0 * torch.eye(6)[:CLASSES]
    heads = means.clone()
    heads[-1] += 1.0  # larger weights than the others: nearly everything is taken for the last class
    labels = torch.arange(400) % CLASSES
    features = means[labels] + 0.3 * torch.randn(400, 6, generator=generator)
    biased = float(((features @ heads.T).argmax(dim=1) == labels).float().mean())
    kept = ClassStatistics(means, 0.09 * torch.eye(6).expand(CLASSES, -1, -1), heads=heads)
    scores = classifiers.rebalanced(kept)(features)
    assert biased < 0.6
    assert float((scores.argmax(dim=1) == labels).float().mean()) > biased + 0.2
    assert torch.equal(scores, classifiers.rebalanced(kept)(features))
    fitted = fit_to_gaussians(
        heads,
        means,
        kept.covariances,
        torch.arange(CLASSES),
        lambda epoch: torch.Generator().manual_seed(epoch),
        weight_decay=5e-4,
    )
    assert torch.equal(scores, features @ fitted.T)
    with pytest.raises(SettingsError, match="needs trained heads"):
        classifiers.rebalanced(ClassStatistics(means, kept.covariances))


def with_heads() -> ClassStatistics:
    kept = statistics()
    return ClassStatistics(kept.means.float(), kept.covariances.float(), heads=kept.means.float())  # type: ignore[union-attr]


def test_both_adds_log_probabilities_that_are_equally_sure() -> None:
    """The temperature against a search over a fine grid, on the same features."""
    kept, features = with_heads(), points().float()
    heads, distances = classifiers.rebalanced(kept), classifiers.mahalanobis(kept)
    factors = torch.linalg.cholesky(kept.covariances.double() + 1e-5 * torch.eye(SIZE)).float()  # type: ignore[union-attr]
    noise = torch.randn(20 * CLASSES, SIZE, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(CLASSES).repeat_interleave(20)
    drawn = kept.means[labels] + torch.stack([factors[c] @ e for c, e in zip(labels, noise, strict=True)])

    def unsure(scores: Tensor) -> float:
        return float(torch.distributions.Categorical(logits=scores.double()).entropy().mean())

    wanted, grid = unsure(heads(drawn)), torch.logspace(-4, 4, 4001).tolist()
    temperature = min(grid, key=lambda each: abs(unsure(distances(drawn) / each) - wanted))
    expected = heads(features).softmax(dim=1).log() + (distances(features) / temperature).softmax(dim=1).log()
    torch.testing.assert_close(classifiers.both(kept)(features), expected, rtol=5e-3, atol=5e-3)
    assert temperature != pytest.approx(1.0, rel=0.2)


def test_both_of_one_class_and_of_classes_that_are_all_alike() -> None:
    kept = with_heads()
    assert kept.covariances is not None
    one = ClassStatistics(kept.means[:1], kept.covariances[:1], heads=kept.means[:1])
    assert torch.equal(classifiers.both(one)(points().float()), torch.zeros(30, 1))
    assert classifiers.as_sure(torch.zeros(3, 4), 0.5) == 1.0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_a_temperature_makes_scores_as_sure_as_wanted(scale: float) -> None:
    scores = scale * torch.randn(50, 6, generator=torch.Generator().manual_seed(2))
    for wanted in (0.1, 1.0, 1.7):
        assert classifiers.entropy(scores / classifiers.as_sure(scores, wanted)) == pytest.approx(wanted, rel=1e-4)


def test_what_is_possible_follows_from_what_is_kept() -> None:
    assert classifiers.possible(("heads",)) == ("own", "heads")
    assert classifiers.possible(("means",)) == ("own", "nearest-mean")
    assert set(classifiers.possible(("heads", "means", "covariances"))) == set(classifiers.NAMES) - {"all", "auto"}
    classifiers.check("all", "ewc", ("heads",))
    with pytest.raises(SettingsError, match=r"'ewc' does not keep.*Possible with ewc: own, heads"):
        classifiers.check("bayes", "ewc", ("heads",))
    with pytest.raises(SettingsError, match="needs class heads, which method 'fecam' does not keep"):
        classifiers.check("rebalanced", "fecam", ("means", "covariances"))
    with pytest.raises(SettingsError, match="needs class heads and covariances, which"):
        classifiers.check("rebalanced", "fetril", ("means",))
    with pytest.raises(SettingsError, match="Did you mean 'mahalanobis'"):
        classifiers.check("mahalonobis", "efc", ("means",))
    with pytest.raises(SettingsError, match="covariances"):
        classifiers.bayes(ClassStatistics(torch.zeros(2, 3)))


def test_the_entropy_is_the_mean_over_features() -> None:
    scores = torch.log(torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]]).clamp(min=1e-30))
    assert classifiers.entropy(scores) == pytest.approx((2 + 1) / 2 * 0.6931471805599453)
