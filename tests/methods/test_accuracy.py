"""Accuracy of every method on a small fixed stream of digits, frozen: what is not meant to change it must not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import FIRST, LATER, Stream, make_stream

from efcil.methods import bundled, incremental

#: A_step in percent after the second and the third task, and the settings that differ from the defaults. PASS has
#: the temperature of its authors' code: with that of the EFC paper it needs more steps than a test can take.
FROZEN: dict[str, tuple[float, float, dict[str, Any]]] = {
    "adagauss": (90.4, 82.0, {"bottleneck": 16}),
    "adc": (86.8, 80.8, {}),
    "apr": (91.6, 85.6, {}),
    "bicyc": (92.4, 82.5, {"bottleneck": 16}),
    "cedar": (91.2, 73.5, {}),
    "dpcr": (88.0, 79.2, {}),
    "ds-al": (94.0, 86.2, {}),
    "efc": (78.4, 72.1, {}),
    "efc++": (90.8, 77.5, {}),
    "ewc": (70.4, 63.9, {}),
    "fd": (64.0, 56.3, {}),
    "fecam": (93.2, 79.7, {}),
    "fetril": (94.0, 85.9, {}),
    "finetune": (68.0, 57.5, {}),
    "fusion": (69.2, 54.4, {"temperature": 0.1}),
    "il2a": (68.4, 51.3, {}),
    "lda": (94.8, 85.0, {}),
    "ldc": (88.0, 74.6, {"train_normalisation": False}),
    "lwf": (70.0, 63.1, {}),
    "pass": (69.2, 54.1, {"temperature": 0.1}),
    "sdc": (87.6, 74.1, {}),
    "ssre": (67.2, 55.8, {"temperature": 0.1, "distillation_weight": 1.0}),
}
#: Another number of threads, which changes the last bits of every sum, moved values by up to 4 points.
TOLERANCE = 6.0


@pytest.fixture(scope="module")
def fixed() -> Stream:
    """Four, three and three digits, about seventy images of each."""
    first = replace(FIRST, epochs=12, learning_rate=3e-3, schedule="steps", milestones=(8,))
    return make_stream((4, 3, 3), per_class=70, first=first)


def test_first_task_is_learned(fixed: Stream) -> None:
    assert fixed.accuracy(fixed.start("finetune"), 0) > 0.95


@pytest.mark.parametrize("name", [name for name in bundled() if name in incremental()])
def test_accuracy_is_what_it_was(fixed: Stream, name: str) -> None:
    assert name in FROZEN, f"Method {name} has no frozen accuracy; run it on this stream and add what it reaches."
    *expected, settings = FROZEN[name]
    method = fixed.start(name, **settings)
    reached = []
    for index in (1, 2):
        fixed.train(method, index, LATER)
        fixed.end(method, index)
        reached.append(100 * fixed.accuracy(method, index))
    torch.testing.assert_close(reached, expected, rtol=0, atol=TOLERANCE)
