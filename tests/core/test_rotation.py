from __future__ import annotations

import numpy as np
import pytest
import torch

from efcil.core.rotation import rotate_batch, rotation_labels
from efcil.errors import EfcilError


def test_first_quarter_turn_is_counter_clockwise() -> None:
    # 1 2      2 4
    # 3 4  ->  1 3
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 1, 2, 2)
    turned = rotate_batch(image)
    assert turned.shape == (4, 1, 2, 2)
    assert turned[1, 0].tolist() == [[2.0, 4.0], [1.0, 3.0]]


def test_originals_first_then_the_turns_of_each_image() -> None:
    images = torch.randn(5, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    turned = rotate_batch(images)
    assert torch.equal(turned[:5], images)
    for sample in range(5):
        for turn in (1, 2, 3):
            expected = np.rot90(images[sample].numpy(), turn, axes=(1, 2))
            np.testing.assert_array_equal(turned[5 + 3 * sample + turn - 1].numpy(), expected)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_memory_format_and_type_are_kept(memory_format: torch.memory_format) -> None:
    images = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = rotate_batch(images.contiguous(memory_format=memory_format))
    assert turned.is_contiguous(memory_format=memory_format)
    assert turned.dtype == torch.float64
    assert torch.equal(turned, rotate_batch(images))


@pytest.mark.parametrize("classes", [1, 2, 10, 50])
def test_labels_cover_all_extra_classes_exactly_once(classes: int) -> None:
    labels = torch.arange(classes)
    augmented = rotation_labels(labels, classes)
    assert torch.equal(augmented[:classes], labels)
    assert sorted(augmented[classes:].tolist()) == list(range(classes, 4 * classes))


def test_labels_stand_where_their_images_stand() -> None:
    labels = torch.tensor([4, 0, 4])
    augmented = rotation_labels(labels, 5)
    assert augmented.dtype == torch.int64
    assert augmented.tolist() == [4, 0, 4, 17, 18, 19, 5, 6, 7, 17, 18, 19]


def test_images_that_are_not_square_are_refused() -> None:
    with pytest.raises(EfcilError, match="square"):
        rotate_batch(torch.zeros(1, 3, 4, 5))


@pytest.mark.parametrize("shape", [(1, 3, 5, 5), (4, 3, 32, 32), (7, 1, 8, 8)])
def test_the_kernel_turns_as_the_plain_operations_do(shape):
    kernel = pytest.importorskip("efcil.core.rotation_kernel", reason="Triton is not installed here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.randn(*shape).contiguous(memory_format=torch.channels_last)
    turned = kernel.rotate_batch(images.to(device))
    assert torch.equal(turned.cpu(), rotate_batch(images))
    assert turned.is_contiguous(memory_format=torch.channels_last)
