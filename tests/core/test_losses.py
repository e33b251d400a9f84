from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from efcil.core.losses import (
    cross_entropy,
    distillation,
    supervised_contrast,
    weighted_mean,
)


def batch(rows: int = 6, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, classes, (rows,), generator=generator)


def row_losses(logits: Tensor, targets: Tensor) -> list[float]:
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        losses.append(math.log(sum(math.exp(value) for value in row)) - row[target])
    return losses


def test_smoothed_labels_are_spread_over_all_classes() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([0, 3, 1, 1, 2])
    log, expected = logits.log_softmax(dim=1), []
    for row, target in enumerate(targets.tolist()):
        wanted = [0.3 / 4 + (0.7 if place == target else 0.0) for place in range(4)]
        expected.append(-sum(share * float(log[row, place]) for place, share in enumerate(wanted)))
    assert float(cross_entropy(logits, targets, smoothing=0.3)) == pytest.approx(sum(expected) / 5, rel=1e-12)
    alone = cross_entropy(logits, targets, torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), smoothing=0.3)
    assert float(alone) == pytest.approx(expected[1], rel=1e-12)


def test_cross_entropy_plain_and_weighted() -> None:
    logits, targets = batch()
    losses = row_losses(logits, targets)
    assert float(cross_entropy(logits, targets)) == pytest.approx(sum(losses) / 6, rel=1e-12)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 0.0, 0.0])
    expected = (losses[0] + 2 * losses[2] + 0.5 * losses[3]) / 3.5
    assert float(cross_entropy(logits, targets, weights)) == pytest.approx(expected, rel=1e-12)


def test_padding_rows_change_neither_value_nor_gradient() -> None:
    logits, targets = batch()
    short = logits[:4].clone().requires_grad_()
    padded = logits.clone().requires_grad_()
    plain = cross_entropy(short, targets[:4])
    masked = cross_entropy(padded, targets, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    plain.backward()
    masked.backward()
    assert short.grad is not None
    assert padded.grad is not None
    torch.testing.assert_close(masked, plain)
    torch.testing.assert_close(padded.grad[:4], short.grad)
    assert not padded.grad[4:].any()


def test_no_weight_at_all_is_zero_with_zero_gradient() -> None:
    logits, targets = batch()
    logits.requires_grad_()
    loss = cross_entropy(logits, targets, torch.zeros(6))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_weighted_mean_keeps_the_type_of_the_values() -> None:
    values = torch.tensor([1.0, 4.0])
    for dtype in (torch.bool, torch.float64):
        assert weighted_mean(values, torch.tensor([1, 0]).to(dtype)).dtype == torch.float32
    assert weighted_mean(values, torch.tensor([True, False])) == 1.0
    assert weighted_mean(values) == 2.5


def test_half_precision_is_promoted() -> None:
    logits, targets = batch()
    low = logits.bfloat16()
    loss = cross_entropy(low, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, cross_entropy(low.float(), targets))


def powered(logits: Tensor, temperature: float) -> Tensor:
    """Softmax raised to 1/T and renormalised, the other way to write a softmax with temperature."""
    powers = torch.softmax(logits, dim=1) ** (1 / temperature)
    return powers / powers.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_distillation_against_powers_of_probabilities(temperature: float) -> None:
    student, _ = batch(6, 7)
    teacher, _ = batch(6, 7, seed=3)
    smoothed = powered(student, temperature) + 1e-5 / 7
    smoothed = smoothed / smoothed.sum(dim=1, keepdim=True)
    expected = -(powered(teacher, temperature) * smoothed.log()).sum(dim=1).mean()
    torch.testing.assert_close(distillation(student, teacher, temperature), expected)


def test_distillation_is_stationary_at_the_teacher_and_spares_it() -> None:
    teacher, _ = batch(6, 7)
    student = teacher.clone().requires_grad_()
    leader = teacher.clone().requires_grad_()
    distillation(student, leader, 2.0, smoothing=0.0).backward()
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-15
    assert leader.grad is None


def test_distillation_leaves_out_rows_without_weight_and_has_the_temperature_two() -> None:
    student, _ = batch(6, 7)
    teacher, _ = batch(6, 7, seed=3)
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    kept = weights > 0
    expected = distillation(student[kept], teacher[kept], 2.0)
    torch.testing.assert_close(distillation(student, teacher, weights=weights), expected)


def test_distillation_of_a_student_sure_of_the_wrong_class_is_bounded() -> None:
    student = torch.tensor([[2000.0, 0.0]])
    loss = distillation(student, -student, 2.0)
    assert float(loss) == pytest.approx(-math.log(5e-6 / (1 + 1e-5)), rel=1e-3)


def contrast_by_loops(projections: Tensor, labels: list[int], temperature: float) -> Tensor:
    unit = [row / row.norm() for row in projections]
    losses = []
    for one, label in enumerate(labels):
        others = [other for other in range(len(labels)) if other != one]
        alike = [other for other in others if labels[other] == label]
        if not alike:
            continue
        total = sum((unit[one] @ unit[other] / temperature).exp() for other in others)
        shares = [((unit[one] @ unit[other] / temperature).exp() / total).log() for other in alike]
        losses.append(-sum(shares) / len(alike))
    return sum(losses) / len(losses)  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_supervised_contrast_is_what_two_loops_compute(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    projections = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    labels = [0, 2, 0, 1, 2, 0, 5, 1, 0]  # one row is alone
    found, expected = (projections.clone().requires_grad_() for _ in range(2))
    ours = supervised_contrast(found, torch.tensor(labels), temperature)
    loops = contrast_by_loops(expected, labels, temperature)
    torch.testing.assert_close(ours, loops)
    ours.backward()
    loops.backward()
    torch.testing.assert_close(found.grad, expected.grad)
    assert float(found.grad[6].abs().sum()) > 0, "A row that is alone still pushes others apart."  # type: ignore[index]


@pytest.mark.parametrize("labels", [[3], [0, 1, 2]])
def test_rows_without_any_other_of_their_label_say_nothing(labels: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    projections = torch.randn(len(labels), 4, generator=generator).requires_grad_()
    loss = supervised_contrast(projections, torch.tensor(labels), 0.1)
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(projections.grad, torch.zeros_like(projections))  # type: ignore[arg-type]


def test_supervised_contrast_is_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(40, 16, generator=generator).bfloat16()
    labels = torch.arange(40) % 5
    found = supervised_contrast(half, labels, 0.05)
    assert found.dtype == torch.float32
    assert torch.equal(found, supervised_contrast(half.float(), labels, 0.05))


def test_supervised_contrast_never_waits_for_values() -> None:
    """Tensors without values have shapes only: what works with them can be captured in a graph."""
    projections = torch.empty(6, 4, device="meta", requires_grad=True)
    loss = supervised_contrast(projections, torch.empty(6, dtype=torch.int64, device="meta"), 0.1)
    loss.backward()
    assert loss.shape == ()
    assert projections.grad is not None
