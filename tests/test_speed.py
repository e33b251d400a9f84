"""The benchmark of speed runs on a CPU; what it measures is not asserted."""

from __future__ import annotations

import dataclasses
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
    assert {"ours", "plain bf16"} <= bench.paths.keys()
    for execution in bench.paths.values():
        assert bench.step_ms(bench.first(execution), 2) > 0
        assert bench.step_ms(bench.efc(execution, 20), 2) > 0
    speed.measure_end_of_task(bench, table)
    assert [row["what"] for row in table.rows] == ["end-of-task statistics", "evaluation"]
    assert all(float(row["value"]) > 0 for row in table.rows)


def test_other_numbers_of_features_can_be_measured() -> None:
    bench = speed.Bench(torch.device("cpu"), TINY)
    trainer = bench.efc(bench.paths["ours"], 10, features=24)
    assert trainer.learner.network.feature_size == 24
    assert trainer.learner.memory.means.shape == (10, 24)
    NETWORKS.pop("slim, 24 features")


def test_a_compiled_network_is_timed_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    bench, table = speed.Bench(torch.device("cpu"), TINY), speed.Table()
    speed.measure_compiled(bench, table, 60, 1e9, dict.fromkeys(speed.KINDS, 1.0), backend="eager")
    found = {(row["what"], row["variant"]): float(row["value"]) for row in table.rows}
    for what in speed.KINDS:
        assert found[what, "torch.compile, max-autotune, channels-last, fp32"] > 0
        assert found[what, "torch.compile / ours"] > 0
        assert found[what, "torch.compile, time to compile"] > 0


def test_a_network_that_does_not_compile_is_a_row_that_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    bench, table = speed.Bench(torch.device("cpu"), TINY), speed.Table()
    speed.measure_compiled(bench, table, 60, 1e9, dict.fromkeys(speed.KINDS, 1.0), backend="no-such-compiler")
    assert len(table.rows) == len(speed.KINDS)
    for row in table.rows:
        assert row["value"] == "nan"
        assert "not measured (InvalidBackend" in row["variant"]


def test_compiling_is_given_up_in_time() -> None:
    def swallows() -> None:
        try:
            while True:
                pass
        except Exception:
            pytest.fail("a compiler that catches every Exception has caught it")

    with pytest.raises(speed.TooLong, match="not compiled after"), speed.at_most(0.05):
        swallows()


def test_the_sizes_of_imagenet_run_the_usual_resnet_on_the_fused_path() -> None:
    sizes = dataclasses.replace(speed.BY_PIXELS[224], pixels=32, images=8, batch=4, steps=1)
    bench = speed.Bench(torch.device("cpu"), sizes)
    first, later = bench.first(bench.fused), bench.efc(bench.fused, 10)
    for trainer in (first, later):
        assert trainer.learner.network.backbone.large_images
        assert trainer.learner.network.path == "fused"
    assert first.recipe.optimiser == "sgd"
    assert later.recipe.optimiser == "adam"
    assert bench.step_ms(later, 1) > 0
