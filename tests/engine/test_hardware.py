"""What is asked of a device before a run trusts it."""

import pytest
import torch

from efcil.engine.hardware import MPS_SHARE, refuse_broken_products
from efcil.errors import TrainingError

CPU = torch.device("cpu")


def test_right_products_pass():
    refuse_broken_products(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_that_leaves_its_last_rows_unwritten_is_refused(monkeypatch, dtype):
    multiply = torch.mm

    def half_done(left, right, out):
        if out.dtype == dtype:
            out[:-1] = multiply(left[:-1], right)
        else:
            multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", half_done)
    monkeypatch.setenv(MPS_SHARE, "40")
    with pytest.raises(TrainingError, match=f"may use 40 % of it.*{MPS_SHARE}"):
        refuse_broken_products(CPU)
