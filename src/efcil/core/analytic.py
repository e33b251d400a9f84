"""Ridge regression onto classes, from sums over images: it is the same in however many parts the images come."""

from __future__ import annotations

import torch
from torch import Tensor


def solve(gram: Tensor, sums: Tensor, ridge: float) -> Tensor:
    """Rows w_c = (G + ridge I)^-1 s_c (C, m), for the Gram matrix (m, m) of all rows and sums by class (C, m)."""
    raised = gram.clone()
    raised.diagonal().add_(ridge)
    return torch.cholesky_solve(sums.T, torch.linalg.cholesky(raised)).T.contiguous()
