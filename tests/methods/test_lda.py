"""LDA: what is stored does not depend on how the classes come, and more images are added exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checks import SHORT, Stream, short_stream

from efcil.classifier import IncrementalClassifier
from efcil.methods.base import Method
from efcil.methods.memory import POOLED, ClassMemory


def learned(**settings: object) -> tuple[Stream, Method]:
    stream = short_stream()
    return stream, stream.learn(stream.start("lda", **settings), 1, SHORT)


def test_the_covariance_is_that_of_all_images_about_the_means_of_their_classes() -> None:
    stream, method = learned(power=1.0, normalise=False)
    centred = []
    for index, classes in ((0, range(4)), (1, range(4, 5))):
        data = stream.data[index]
        with torch.no_grad():
            features = stream.network().features(data.normalisation(data.images, torch.float32))
        for label in classes:
            rows = features[data.labels == label]
            torch.testing.assert_close(method.memory.means[label], rows.mean(dim=0), rtol=1e-4, atol=1e-5)
            centred.append(rows - rows.mean(dim=0))
    every = torch.cat(centred)
    freedom = len(every) - 5
    torch.testing.assert_close(method.memory.covariances[0], every.T @ every / freedom, rtol=1e-3, atol=1e-5)
    assert method.memory.freedom.tolist() == [freedom]
    assert method.memory.counts.tolist() == [len(each) for each in centred]


def test_features_keep_their_sign_and_have_unit_length() -> None:
    stream, method = learned()
    images = stream.test_images[:6]
    with torch.no_grad():
        plain = stream.network().features(images)
    embedded = method.embed(images)
    torch.testing.assert_close(embedded.norm(dim=1), torch.ones(6))
    root = plain.clamp(min=0).sqrt()
    torch.testing.assert_close(embedded, root / root.norm(dim=1, keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", ["cosine", "bayes"])
def test_scores_are_linear_in_the_features(rule: str) -> None:
    stream, method = learned(rule=rule)
    scores, embedded = method.scores(stream.test_images), method.embed(stream.test_images)
    constant = torch.cat([embedded, torch.ones(len(embedded), 1)], dim=1).double()
    fitted = constant @ (torch.linalg.pinv(constant) @ scores.double())
    torch.testing.assert_close(fitted, scores.double(), rtol=1e-3, atol=1e-3)


def test_neither_order_nor_grouping_matters() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {c: torch.randn(3 + 2 * c, 6, generator=generator) + c for c in range(4)}

    def memory(*groups: tuple[int, ...]) -> ClassMemory:
        made, place = ClassMemory(6, why="tests", covariances=POOLED, counts=True), 0
        for group in groups:
            features = torch.cat([rows[c] for c in group])
            labels = torch.cat([torch.full((len(rows[c]),), place + n) for n, c in enumerate(group)])
            made.add(features, labels, range(place, place + len(group)))
            place += len(group)
        return made

    together, apart = memory((0, 1, 2, 3)), memory((2,), (3, 0), (1,))
    torch.testing.assert_close(together.covariances, apart.covariances)
    torch.testing.assert_close(together.means[[2, 3, 0, 1]], apart.means)
    assert int(together.freedom) == int(apart.freedom) == sum(len(each) - 1 for each in rows.values())


def test_more_images_are_pooled_as_if_they_had_been_there() -> None:
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(30, 6, generator=generator) + 1, torch.arange(30) % 3
    features += labels[:, None]
    whole = ClassMemory(6, why="tests", covariances=POOLED, counts=True)
    whole.add(features, labels, range(3))
    parts = ClassMemory(6, why="tests", covariances=POOLED, counts=True)
    first = (torch.arange(30) < 14) | (labels == 1)
    parts.add(features[first], labels[first], range(3))
    parts.blend(features[~first], labels[~first], [99] * 3)  # its own counts are what matters
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(parts.state_dict()[name], value, msg=name)


def test_a_classifier_learns_more_of_what_it_knows() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 16, 16, 3), dtype=np.uint8)
    labels = [("cat", "dog")[number % 2] for number in range(24)]
    classifier = IncrementalClassifier(
        "lda", network="slim", first_task_epochs=1, image_size=16, device="cpu", held_out=0.0
    )
    classifier.partial_fit(pixels[:12], labels[:12])
    heads = classifier.model_.tensors()["network.heads.0"]
    classifier.partial_fit(pixels[12:], labels[12:], more=True)
    memory = classifier.model_.ready.memory
    assert memory.counts.tolist() == [12, 12]
    assert memory.freedom.tolist() == [22]
    assert torch.equal(classifier.model_.tensors()["network.heads.0"], heads), "heads do not decide, so they stay"
    data = classifier.model_.task_images(pixels, np.arange(24) % 2, "all")
    features = torch.cat([classifier.model_.ready.embed(images) for images, _ in data.plain()]).detach()
    for number in range(2):
        torch.testing.assert_close(memory.means[number], features[number::2].mean(dim=0), rtol=1e-4, atol=1e-5)
