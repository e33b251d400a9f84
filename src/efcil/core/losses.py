"""Loss terms as pure functions. Logits of half precision are promoted to float32; other types are kept.

Every batch term takes optional weights per row, so that a step can keep a fixed shape: rows that only pad the batch get
weight 0. Such rows must hold finite numbers, because zero times infinity is not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def weighted_mean(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean of `values` (B): sum_i w_i v_i / sum_i w_i. If the weights sum to 0, it is 0 and has zero gradient."""
    if weights is None:
        return values.mean()
    weights = weights.to(values.dtype)
    total = weights.sum()
    # A tensor condition instead of a Python one: no copy to the host, so a captured step can contain it.
    return (weights * values).sum() / torch.where(total > 0, total, torch.ones_like(total))


def cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """Softmax cross-entropy of `logits` (B, m) and `targets` (B), averaged with `weights` (B) or plainly.

    With `smoothing`, that share of a target's probability is spread evenly over all m classes.
    """
    errors = functional.cross_entropy(_promoted(logits), targets, reduction="none", label_smoothing=smoothing)
    return weighted_mean(errors, weights)


def distillation(
    student_logits: Tensor,
    teacher_logits: Tensor,
    temperature: float = 2.0,
    smoothing: float = 1e-5,
    weights: Tensor | None = None,
) -> Tensor:
    """Knowledge distillation in cross-entropy form: - mean_x sum_c q_c log p_c over the s old classes.

    `q` and `p` are the softmax of teacher and student logits (B, s) divided by the temperature, one softmax over all
    old classes. The student's probabilities get `smoothing / s` each and are renormalised, which bounds the loss of a
    student that is sure of the wrong class. There is no factor temperature^2. The teacher receives no gradient.
    """
    teacher = torch.softmax(_promoted(teacher_logits.detach()) / temperature, dim=1)
    scaled = _promoted(student_logits) / temperature
    if smoothing == 0.0:
        logs = torch.log_softmax(scaled, dim=1)  # finite, also where a probability is too small to write
    else:
        student = torch.softmax(scaled, dim=1)
        logs = ((student + smoothing / student.shape[1]) / (1.0 + smoothing)).log()
    return weighted_mean(-(teacher * logs).sum(dim=1), weights)


def supervised_contrast(projections: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss of `projections` (B, n), compared by their cosines over the temperature.

    For every row: - mean over the other rows p of its label of log(exp(s_p) / sum over all other rows a of exp(s_a)),
    averaged over the rows that share their label with another. If there is none, it is 0 and has zero gradient.
    """
    scaled = functional.normalize(_promoted(projections), dim=1)
    similar = scaled @ scaled.T / temperature
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    alike = ((labels[:, None] == labels) & ~itself).to(similar.dtype)
    count = alike.sum(dim=1)
    # Finite, because a row may have nothing to be compared with, and zero times infinity is not zero.
    total = similar.masked_fill(itself, torch.finfo(similar.dtype).min).logsumexp(dim=1)
    return weighted_mean(total - (alike * similar).sum(dim=1) / count.clamp(min=1), count > 0)


def _promoted(logits: Tensor) -> Tensor:
    """Logits with at least the precision of float32: a sum of exponentials needs more than eight bits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
