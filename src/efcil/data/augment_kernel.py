"""Random resized crops as one Triton kernel: from stored bytes to normalised network input. See data/augment.py."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weight(position, centre, support, start, length):
    inside = (position >= start) & (position < start + length)
    distance = tl.abs(position + 0.5 - centre) / support
    return tl.where(inside, tl.maximum(1.0 - distance, 0.0), 0.0)


@triton.jit
def _resized_crop(
    images, order, box, flip, scale, shift, out, size, padding,
    HAS_FLIP: tl.constexpr, TAPS: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    channel = tl.program_id(2)
    y = tl.program_id(1) * BY + tl.arange(0, BY)[:, None]
    x = tl.arange(0, BX)[None, :]
    source_x = x
    if HAS_FLIP:
        flipped = tl.load(flip + number) != 0
        source_x = tl.where(flipped, size - 1 - x, x)
    top = tl.load(box + number * 4)
    left = tl.load(box + number * 4 + 1)
    height = tl.load(box + number * 4 + 2)
    width = tl.load(box + number * 4 + 3)
    scale_y = height / size
    scale_x = width / size
    support_y = tl.maximum(scale_y, 1.0)
    support_x = tl.maximum(scale_x, 1.0)
    centre_y = top + (y.to(tl.float32) + 0.5) * scale_y
    centre_x = left + (source_x.to(tl.float32) + 0.5) * scale_x
    first_y = tl.floor(centre_y - support_y)
    first_x = tl.floor(centre_x - support_x)
    total_y = tl.zeros([BY, 1], tl.float32)
    total_x = tl.zeros([1, BX], tl.float32)
    for tap in tl.static_range(TAPS):
        total_y += _weight(first_y + tap, centre_y, support_y, top, height)
        total_x += _weight(first_x + tap, centre_x, support_x, left, width)
    image = images + (tl.load(order + number) * 3 + channel) * size * size
    value = tl.zeros([BY, BX], tl.float32)
    for tap_y in tl.static_range(TAPS):
        row = first_y + tap_y
        weight_y = _weight(row, centre_y, support_y, top, height) / total_y
        row_real = row.to(tl.int32) - padding
        line = tl.zeros([BY, BX], tl.float32)
        for tap_x in tl.static_range(TAPS):
            column = first_x + tap_x
            weight_x = _weight(column, centre_x, support_x, left, width) / total_x
            column_real = column.to(tl.int32) - padding
            there = (row_real >= 0) & (row_real < size) & (column_real >= 0) & (column_real < size)
            pixel = tl.load(image + row_real * size + column_real, there & (weight_x > 0) & (weight_y > 0), other=0)
            line += weight_x * pixel.to(tl.float32)
        value += weight_y * tl.floor(line + 0.5)
    value = tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)
    value = value * tl.load(scale + channel) + tl.load(shift + channel)
    place = ((number * size + y) * size + x) * 3 + channel
    tl.store(out + place, value.to(out.dtype.element_ty), (y < size) & (x < size))


@triton.jit
def _windowed_crop(
    pixels, places, windows, flip, scale, shift, out, size,
    HAS_FLIP: tl.constexpr, BY: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    channel = tl.program_id(2)
    y = tl.program_id(1) * BY + tl.arange(0, BY)[:, None]
    x = tl.arange(0, BX)[None, :]
    source_x = x
    if HAS_FLIP:
        flipped = tl.load(flip + number) != 0
        source_x = tl.where(flipped, size - 1 - x, x)
    start = tl.load(places + number * 2)
    width_of_image = tl.load(places + number * 2 + 1)
    top = tl.load(windows + number * 8)
    left = tl.load(windows + number * 8 + 1)
    height = tl.load(windows + number * 8 + 2)
    width = tl.load(windows + number * 8 + 3)
    scale_y = tl.load(windows + number * 8 + 6)
    scale_x = tl.load(windows + number * 8 + 7)
    support_y = tl.maximum(scale_y, 1.0)
    support_x = tl.maximum(scale_x, 1.0)
    centre_y = top + (tl.load(windows + number * 8 + 4) + y.to(tl.float32) + 0.5) * scale_y
    centre_x = left + (tl.load(windows + number * 8 + 5) + source_x.to(tl.float32) + 0.5) * scale_x
    first_y = tl.floor(centre_y - support_y)
    first_x = tl.floor(centre_x - support_x)
    # As many as this image needs: most crops are enlarged or shrunk a little, and need few.
    taps_y = (2 * support_y).to(tl.int32) + 2
    taps_x = (2 * support_x).to(tl.int32) + 2
    total_y = tl.zeros([BY, 1], tl.float32)
    total_x = tl.zeros([1, BX], tl.float32)
    for tap in range(taps_y):
        total_y += _weight(first_y + tap, centre_y, support_y, top, height)
    for tap in range(taps_x):
        total_x += _weight(first_x + tap, centre_x, support_x, left, width)
    image = pixels + start + channel
    value = tl.zeros([BY, BX], tl.float32)
    for tap_y in range(taps_y):
        row = first_y + tap_y
        weight_y = _weight(row, centre_y, support_y, top, height) / total_y
        line = tl.zeros([BY, BX], tl.float32)
        for tap_x in range(taps_x):
            column = first_x + tap_x
            weight_x = _weight(column, centre_x, support_x, left, width) / total_x
            there = (weight_x > 0) & (weight_y > 0) & (y < size) & (x < size)
            place = (row.to(tl.int64) * width_of_image + column.to(tl.int64)) * 3
            pixel = tl.load(image + place, there, other=0)
            line += weight_x * pixel.to(tl.float32)
        value += weight_y * tl.floor(line + 0.5)
    value = tl.minimum(tl.maximum(tl.floor(value + 0.5), 0.0), 255.0)
    value = value * tl.load(scale + channel) + tl.load(shift + channel)
    target = ((number.to(tl.int64) * size + y) * size + x) * 3 + channel
    tl.store(out + target, value.to(out.dtype.element_ty), (y < size) & (x < size))


def windowed_crop(
    pixels: Tensor,
    places: Tensor,
    windows: Tensor,
    flip: Tensor | None,
    size: int,
    scale: Tensor,
    shift: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Resample windows of whole images (data/whole.py), flip and normalise them.

    `places` (count, 2) are the first bytes of the images in `pixels` and their widths.
    """
    count = len(places)
    out = torch.empty(count, size, size, 3, device=pixels.device, dtype=dtype)
    columns = triton.next_power_of_2(size)
    rows = max(1, min(8, 512 // columns))
    mirrored = places if flip is None else flip.to(torch.int8)
    _windowed_crop[(count, triton.cdiv(size, rows), 3)](
        pixels, places.contiguous(), windows.contiguous(), mirrored, scale, shift, out, size, flip is not None,
        rows, columns, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def resized_crop(
    images: Tensor,
    order: Tensor,
    box: Tensor,
    flip: Tensor | None,
    padding: int,
    scale: Tensor,
    shift: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Crop, resize, flip and normalise images[order]; `scale` and `shift` (3,) map pixel values to network input."""
    count, size = len(order), images.shape[-1]
    out = torch.empty(count, size, size, 3, device=images.device, dtype=dtype)
    taps = math.ceil(2 * max(1.0, (size + 2 * padding) / size)) + 1
    columns = triton.next_power_of_2(size)
    rows = max(1, min(8, 512 // columns))
    mirrored = order if flip is None else flip.to(torch.int8)
    _resized_crop[(count, triton.cdiv(size, rows), 3)](
        images, order, box.contiguous(), mirrored, scale, shift, out, size, padding, flip is not None,
        taps, rows, columns, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
