"""The benchmark of kernels runs on a CPU, and what it calls earlier computes the same; times are not asserted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import kernels
import speed

TINY = speed.Sizes("slim", 8, 60, 16, 2, 40)


def test_changed_images_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "PIECES", (16, 32))
    bench, table = speed.Bench(torch.device("cpu"), TINY), speed.Table()
    kernels.measure_attack(bench, table)
    variants = [row["variant"] for row in table.rows]
    assert variants.count("fused") == 2
    assert variants[-2:] == ["pieces of 16", "pieces of 32"]
    assert all(float(row["value"]) > 0 for row in table.rows)


def test_earlier_kernels_compute_the_same() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    import earlier_kernels
    from efcil.network.fast import kernels as today

    bench = speed.Bench(torch.device("cuda" if torch.cuda.is_available() else "cpu"), replace(TINY, batch=1))
    ends = []
    for module in (today, earlier_kernels.with_earlier(*earlier_kernels.CHANGED)):
        torch.manual_seed(0)
        layer = kernels.Layer(bench, 0, torch.float32)
        found = layer.sums(module)
        for case in (layer.after_a_relu, layer.after_a_sum, layer.update):
            case(module)
        ends.append((found, layer.gradient, *layer.vectors, *layer.flat, layer.turned))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-3, rtol=1e-3)


def test_changes_are_taken_back_in_the_optimiser_too() -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    bench = speed.Bench(torch.device("cpu"), TINY)
    trainer = bench.efc(bench.paths["ours"], 20)
    fused = trainer.learner.network.fast
    assert fused is not None
    kernels.take_back(trainer, list(kernels.CHANGES))
    import earlier_kernels

    assert fused.operations.adam is earlier_kernels.adam
    assert trainer.optimiser.operations is fused.operations  # type: ignore[attr-defined]
    assert fused._branch is None
