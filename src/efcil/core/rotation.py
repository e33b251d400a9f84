"""Label augmentation by rotation, as used in the first task: four views of every image, four labels per class."""

from __future__ import annotations

import torch
from torch import Tensor

from efcil.compiled import compiled
from efcil.errors import TrainingError

QUARTER_TURNS = 3


def rotate_batch(images: Tensor) -> Tensor:
    """Add the quarter turns of square images: (B, C, H, H) -> (4B, C, H, H).

    The B originals come first, then for image 0 its turns by 90, 180 and 270 degrees counter-clockwise, then those of
    image 1, and so on. An input in channels-last memory format gives an output in that format.
    """
    if images.dim() != 4 or images.shape[2] != images.shape[3]:
        raise TrainingError(
            f"Rotations need a batch of square images (B, C, H, H), but the shape is {tuple(images.shape)}; "
            "resize the images to squares or switch rotations off."
        )
    count = images.shape[0]
    if compiled(images.device) and images.is_contiguous(memory_format=torch.channels_last):
        from efcil.core.rotation_kernel import rotate_batch as fast

        return fast(images)
    channels_last = images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
    rotated = torch.empty(
        ((1 + QUARTER_TURNS) * count, *images.shape[1:]),
        dtype=images.dtype,
        device=images.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    rotated[:count] = images
    for turn in range(1, QUARTER_TURNS + 1):
        rotated[count + turn - 1 :: QUARTER_TURNS] = torch.rot90(images, turn, dims=(2, 3))
    return rotated


def rotation_labels(labels: Tensor, classes: int) -> Tensor:
    """Labels of `rotate_batch`: (B) -> (4B), for `classes` real classes 0..classes-1.

    Originals keep their label y; turn k = 1, 2, 3 of class y is the extra class `classes + 3 y + (k - 1)`, so that
    the labels fill 0..4*classes-1.
    """
    turns = torch.arange(QUARTER_TURNS, device=labels.device, dtype=labels.dtype)
    extra = classes + QUARTER_TURNS * labels.unsqueeze(1) + turns
    return torch.cat((labels, extra.flatten()))
