"""The quarter turns of a batch as one Triton kernel. See core/rotation.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _turn(x, y, count, side, C, n, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < n
    pixel = offset // C
    column = pixel % side
    row = pixel // side % side
    image = pixel // (side * side)
    turned = image >= count
    turn = tl.where(turned, (image - count) % 3 + 1, 0)
    source = tl.where(turned, (image - count) // 3, image)
    last = side - 1
    from_row = tl.where(turn == 0, row, tl.where(turn == 1, column, tl.where(turn == 2, last - row, last - column)))
    from_column = tl.where(turn == 0, column, tl.where(turn == 1, last - row, tl.where(turn == 2, last - column, row)))
    place = ((source * side + from_row) * side + from_column) * C + offset % C
    tl.store(y + offset, tl.load(x + place, inside), inside)


def rotate_batch(images: Tensor) -> Tensor:
    """See core.rotation.rotate_batch; the images are dense, channels-last and square."""
    count, channels, side, _ = images.shape
    out = torch.empty(4 * count, side, side, channels, device=images.device, dtype=images.dtype)
    _turn[(triton.cdiv(out.numel(), _BLOCK),)](images, out, count, side, channels, out.numel(), _BLOCK, num_warps=4)
    return out.permute(0, 3, 1, 2)
