"""Mixtures of classes: their numbers, and images mixed one by one."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from efcil.core.mixing import REACH, mix, mixture_labels


def test_every_pair_has_a_label_of_its_own_and_a_class_with_itself_keeps_it() -> None:
    table = mixture_labels(5)
    assert torch.equal(table, table.T)
    assert table.diagonal().tolist() == [0, 1, 2, 3, 4]
    assert sorted(int(table[pair]) for pair in combinations(range(5), 2)) == list(range(5, 15))
    assert int(mixture_labels(20).max()) == 20 + 190 - 1


def test_many_pairs_share_labels_but_those_of_one_class_are_spread() -> None:
    table = mixture_labels(50)
    others = torch.tensor([int(table[pair]) for pair in combinations(range(50), 2)]) - 50
    counts = torch.bincount(others)
    assert len(counts) == 190
    assert int(counts.max() - counts.min()) <= 1, "190 labels share 1,225 pairs equally."
    for label in range(50):
        assert len(set(table[label].tolist())) > 35


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_images_are_mixed_with_those_after_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(7, 3, 4, 4, generator=generator, dtype=dtype)
    labels = torch.tensor([0, 2, 2, 1, 0, 1, 1])
    table = mixture_labels(3)
    mixtures, targets = mix(images, labels, 2, table)
    assert mixtures.shape == (14, 3, 4, 4)
    seen = []
    for row, (mixture, target) in enumerate(zip(mixtures, targets, strict=True)):
        place, turn = row % 7, 1 + row // 7
        other = (place + turn) % 7
        assert int(target) == int(table[labels[place], labels[other]])
        change = images[place] - images[other]
        share = float(((mixture - images[other]) * change).sum() / change.square().sum())
        torch.testing.assert_close(mixture, share * images[place] + (1 - share) * images[other], rtol=1e-4, atol=1e-5)
        assert abs(share - 0.5) <= REACH + 1e-6
        seen.append(share)
    assert max(seen) - min(seen) > REACH, "shares differ"


def test_a_batch_of_one_image_is_mixed_with_itself() -> None:
    images = torch.randn(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    mixtures, targets = mix(images, torch.tensor([1]), 1, mixture_labels(2))
    torch.testing.assert_close(mixtures, images)
    assert targets.tolist() == [1]
