"""Mixtures of images of two classes, as classes of their own: numbers for pairs of classes, and images mixed."""

from __future__ import annotations

import torch
from torch import Tensor

#: Up to so many pairs each have a class of their own: those of 20 classes.
MOST_PAIRS = 190
#: How far from one half the share of an image in a mixture may be.
REACH = 0.1
#: Multiples of it, less their whole part, are spread evenly over 0 to 1.
_GOLDEN = 0.6180339887498949


def pair_numbers(classes: int) -> Tensor:
    """Table (q, q) of the number 0..q(q-1)/2-1 of every unordered pair of different classes; 0 on the diagonal."""
    table = torch.zeros(classes, classes, dtype=torch.int64)
    first, second = torch.triu_indices(classes, classes, offset=1)
    table[first, second] = table[second, first] = torch.arange(len(first))
    return table


def mixture_labels(classes: int, most: int = MOST_PAIRS) -> Tensor:
    """Table (q, q) of the label of a mixture of two of q classes: q plus the number of the pair, q at least.

    Within one class the mixture has the label of the class. If there are more than `most` pairs, several share a label:
    pairs are numbered by their remainder, so that those of one class are spread over all labels.
    """
    table = classes + pair_numbers(classes) % most
    table.diagonal().copy_(torch.arange(classes))
    return table


def mix(images: Tensor, labels: Tensor, rounds: int, table: Tensor) -> tuple[Tensor, Tensor]:
    """Mix every image (B, 3, h, w) with the next one, in round r with the r-th after it: (B r) mixtures and labels.

    `table` is that of `mixture_labels`. Shares lie within REACH of one half. They depend on the place in the batch, and
    so at random on images, whose order is drawn for every epoch: nothing has to be drawn here.
    """
    mixtures, found = [], []
    place = torch.arange(len(images), device=images.device, dtype=torch.float32)
    for turn in range(1, rounds + 1):
        part = ((place + turn * 0.5) * _GOLDEN) % 1.0
        share = (0.5 + REACH * (2.0 * part - 1.0)).to(images.dtype)[:, None, None, None]
        mixtures.append(torch.lerp(images.roll(-turn, 0), images, share))
        found.append(table[labels, labels.roll(-turn, 0)])
    return torch.cat(mixtures), torch.cat(found)
