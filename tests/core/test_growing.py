"""Rows that come piece by piece."""

from __future__ import annotations

import torch

from efcil.core.growing import GrowingRows


def test_rows_are_those_that_were_added_and_memory_grows_seldom() -> None:
    pieces = [torch.randn(count, 3) for count in (0, 2, 7, 1, 1, 1, 1, 30)]
    rows, places = GrowingRows(), set()
    for number, piece in enumerate(pieces):
        rows.add(piece)
        places.add(rows.tensor.data_ptr())
        assert torch.equal(rows.tensor, torch.cat(pieces[: number + 1]))
    assert rows.count == 43
    assert len(places) < 6
