"""The benchmark of speed runs on a CPU; what it measures is not asserted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import speed
from efcil.network.backbones import NETWORKS

TINY = speed.Sizes("slim", 8, 60, 16, 2, 40)


def test_steps_and_ends_of_tasks_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    bench, table = speed.Bench(torch.device("cpu"), TINY), speed.Table()
    for execution in bench.paths.values():
        assert bench.step_ms(bench.first(execution), 2) > 0
        assert bench.step_ms(bench.efc(execution, 20), 2) > 0
    speed.measure_end_of_task(bench, table)
    assert [row["what"] for row in table.rows] == ["end-of-task statistics", "evaluation"]
    assert all(float(row["value"]) > 0 for row in table.rows)


def test_other_numbers_of_features_can_be_measured() -> None:
    bench = speed.Bench(torch.device("cpu"), TINY)
    trainer = bench.efc(bench.paths["eager fp32"], 10, features=24)
    assert trainer.learner.network.feature_size == 24
    assert trainer.learner.memory.means.shape == (10, 24)
    NETWORKS.pop("slim, 24 features")
