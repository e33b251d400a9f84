"""The benchmarks of scale run on a CPU, at tiny sizes; what they measure is not asserted."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from efcil.cli import main
from efcil.testing.pretended import missing, pretended

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import covariances
import scale
from speed import Table


@pytest.fixture(autouse=True)
def networks() -> Iterator[None]:
    """The benchmark names networks of its own; other tests must not find them."""
    before = dict(scale.NETWORKS)
    yield
    scale.NETWORKS.clear()
    scale.NETWORKS.update(before)


def test_time_and_memory_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scale, "IMAGES", 80)
    monkeypatch.setattr(scale, "TEST_IMAGES", 60)
    given = ["--classes", "10", "30", "--features", "16", "--memory", "2e-5", "--output", str(tmp_path / "x.csv")]
    monkeypatch.setattr(sys, "argv", ["scale.py", *given])
    scale.main()
    rows = list(csv.DictReader((tmp_path / "x.csv").read_text().splitlines()))
    # 30 classes with 16 features take 30,720 bytes, which is more than is allowed here.
    assert {row["variant"] for row in rows} == {"10 classes, 16 features"}
    assert len(rows) == 8
    assert all(float(row["value"]) > 0 for row in rows)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
def test_it_is_measured_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "IMAGES", 80)
    monkeypatch.setattr(scale, "TEST_IMAGES", 60)
    monkeypatch.setattr(sys, "argv", ["scale.py", "--classes", "10", "--features", "16", "--device", "cuda"])
    with pretended():
        scale.main()


def test_classes_beyond_the_limit_are_measured_as_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efcil.methods.memory.ClassMemory.too_large", lambda self, classes: True)
    sizes, table = scale.Sizes(8, 16, torch.device("cpu"), 0.25), Table()
    assert sizes.kept_bytes == 4 * 8 * 16 * 4
    monkeypatch.setattr(scale, "IMAGES", 80)
    monkeypatch.setattr(scale, "TEST_IMAGES", 60)
    scale.measure(sizes, table)
    kept = next(float(row["value"]) for row in table.rows if row["what"] == "kept besides the network")
    assert kept < 1e-6 * 4 * (8 * 16 * 16 + 8 * 16 + 16 * 16 + 2 * 8)


def test_forms_of_covariances_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covariances, "EPOCHS", 2)
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(6).repeat(20)
    features = torch.randn(120, 10, generator=generator) + 3 * torch.randn(6, 10, generator=generator)[labels]
    table, forms = Table(), (covariances.FORMS[0], covariances.Form("low-rank", 0.9), covariances.Form("task"))
    covariances.measure(lambda seed: covariances.divide(features, labels, 8, 5, seed), forms, range(2), table, tasks=3)
    found = {(row["what"], row["variant"]): float(row["value"]) for row in table.rows}
    assert found["8 features, accuracy, mean of 2 seeds", "class"] > 50
    assert found["8 features, covariances", "class"] == pytest.approx(6 * 64 * 4 / 1e6, rel=1e-3)
    assert found["8 features, covariances", "task"] == pytest.approx(3 * 64 * 4 / 1e6, rel=1e-3)
    assert found["8 features, components, most", "low-rank 0.9"] <= 8


def test_images_held_out_are_not_learned() -> None:
    features, labels = torch.arange(40.0)[:, None].expand(-1, 4), torch.arange(4).repeat(10)
    data = covariances.divide(features, labels, 2, 3, 0)
    assert len(data.held_labels) == 12
    assert not set(data.features[:, 0].tolist()) & set(data.held_features[:, 0].tolist())


def test_a_run_says_what_is_kept_of_many_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path)
    given = ["--scenario", "cs5", "--epochs", "1", "--device", "cpu", "--network", "slim", "--output", output]
    assert main(["run", "--method", "efc", *given, "--set", "covariance_limit=0.0001"]) == 0
    assert "more than covariance_limit=0.0001. From class 7 on" in capsys.readouterr().out
    (summary,) = tmp_path.rglob("summary.json")
    stored = json.loads(summary.read_text())["stored"]["covariance"]
    assert (stored["form"], stored["instead_of"]) == ("low-rank", "class")
    assert stored["limit_bytes"] == 100_000
