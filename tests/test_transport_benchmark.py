"""The benchmark of transport: its measures, and that looking changes nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import transport
from speed import Table

RUN = ("--dataset", "digits", "--network", "slim", "--tasks", "3", "--epochs", "1", "--device", "cpu")
OPTIONS = (*RUN, "--held-out", "0.3", "--images-per-class", "40")


def test_errors_are_relative_to_the_spread_of_a_class() -> None:
    true, covariances = torch.zeros(2, 4), 9 * torch.eye(4).expand(2, 4, 4)
    means = torch.tensor([[6.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    assert transport.mean_error(true, true, covariances) == 0
    assert transport.mean_error(means, true, covariances) == pytest.approx((0.5 * 36 / 4 / 9) ** 0.5)
    assert transport.covariance_error(1.5 * covariances, covariances) == pytest.approx(0.5)


@pytest.mark.parametrize("method", ["efc++", "cedar"])
def test_looking_at_a_run_does_not_change_it(method: str) -> None:
    settings, table = transport.chosen(["--method", method, *OPTIONS, "--set", "rebalance_epochs=2"]), Table()
    states = [transport.measure(settings, each).state_dict() for each in (None, table)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    rows = {(row["what"], row["variant"]): float(row["value"]) for row in table.rows}
    assert rows["task 3, error of means", "transported"] < rows["task 3, error of means", "as before"]
    assert (("task 2, pseudo-old images", "answered as their target") in rows) is (method == "cedar")


def test_a_network_that_stands_still_leaves_nothing_to_gain() -> None:
    still = ("later.learning_rate=0", "later.weight_decay=0", "rebalance_epochs=2")
    settings, table = transport.chosen(["--method", "efc++", *OPTIONS, "--set", *still]), Table()
    transport.measure(settings, table)
    rows = {(row["what"], row["variant"]): float(row["value"]) for row in table.rows}
    # Only the augmented views differ from those that were measured.
    assert rows["task 2, error of means", "as before"] < 0.3


def test_runs_that_would_look_at_test_images_are_refused() -> None:
    with pytest.raises(SystemExit, match="--held-out"):
        transport.chosen(["--method", "cedar", *RUN])
    with pytest.raises(SystemExit, match="not at lwf"):
        transport.chosen(["--method", "lwf", *OPTIONS])
    with pytest.raises(SystemExit, match="these are 2"):
        transport.chosen(["--method", "cedar", "efc++", *OPTIONS])
