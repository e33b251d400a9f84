"""What recipes add to a step, and what methods prepare for it, in steps that a GPU replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from efcil.methods import get
from efcil.testing import Trial, on_trial
from efcil.testing.methods import require_same_captured
from efcil.testing.stream import SHORT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EVERYTHING = replace(SHORT, optimiser="sgd", rotations=True, mixing=1, contrast=0.3, ema=0.9, label_smoothing=0.1)
FALLING = {"attack_schedule": "falling", "pseudo_old_copies": 2, "pseudo_old_every": 2}


@pytest.mark.parametrize(
    ("name", "settings"),
    [("efc", {}), ("cedar", FALLING), ("cedar", {"pseudo_old_sources": "near", "pseudo_old_targets": "gaussian"})],
)
def test_they_are_the_eager_ones(name: str, settings: dict[str, Any]) -> None:
    trial = on_trial(get(name))
    require_same_captured(Trial(trial.method, replace(trial.settings, **settings)), EVERYTHING)
