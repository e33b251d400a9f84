"""The benchmark of kernels runs on a CPU; times are not asserted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import kernels
import speed
from efcil.network.fast import operations

TINY = speed.Sizes("slim", 8, 60, 16, 2, 40)


def test_changed_images_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernels, "PIECES", (16, 32))
    bench, table = speed.Bench(torch.device("cpu"), TINY), speed.Table()
    kernels.measure_attack(bench, table)
    variants = [row["variant"] for row in table.rows]
    assert variants.count("fused") == 2
    assert variants[-2:] == ["pieces of 16", "pieces of 32"]
    assert all(float(row["value"]) > 0 for row in table.rows)


def test_kernels_are_called_as_the_plain_operations_are() -> None:
    bench = speed.Bench(torch.device("cpu"), replace(TINY, batch=1))
    layer = kernels.Layer(bench, 0)
    before = layer.flat[0].clone()
    for case in (layer.forwards, layer.after_a_sum, layer.after_a_relu, layer.update):
        case(operations)
    assert not torch.equal(layer.flat[0], before)


def test_other_ways_to_split_sums_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = pytest.importorskip("efcil.network.fast.kernels", reason="Triton is not installed here")
    used = compiled._reduction
    monkeypatch.setattr(kernels, "SPLITS", ((32, 2, 4, 1),))
    monkeypatch.setattr(kernels, "REPEATS", 1)
    monkeypatch.setattr(kernels, "in_turns", lambda _, actions: {name: run() or 1.0 for name, run in actions.items()})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # Triton's interpreter is for CPUs alone
    bench, table = speed.Bench(device, replace(TINY, batch=1)), speed.Table()
    with bench.paths["ours"].stream():
        kernels.tune(bench, table, limit=600.0)
    tried = [row["variant"] for row in table.rows if row["unit"] == "us"]
    assert tried[:2] == ["rows 64, most 256, warps 4, stages 3", "rows 32, most 2, warps 4, stages 1"]
    assert len(tried) == 8
    assert compiled._reduction is used
