"""Every method learns from images in bfloat16, as they are on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from efcil.engine import lifecycle
from efcil.engine.execution import Execution
from efcil.methods import bundled
from efcil.testing import on_trial
from efcil.testing.stream import PLAIN, SHORT, blueprint, fitting, short_stream

METHODS = sorted(name for name, method in bundled().items() if method.traits(method.Settings()).images == "task")


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", METHODS)
def test_images_may_have_half_precision(monkeypatch: pytest.MonkeyPatch, name: str, fused: bool) -> None:
    stream, execution, recipe = short_stream(), replace(PLAIN, half=True, fused=fused), replace(SHORT, epochs=1)
    monkeypatch.setattr(Execution, "dtype", torch.bfloat16)  # after the stream, whose first task all tests share
    trial = on_trial(bundled()[name])
    plan = blueprint(trial.method, trial.settings, execution)
    method = plan.around(stream.network_state)
    lifecycle.end(method, stream.tasks[0], stream.images(0, execution))
    for index in range(1, len(stream.tasks)):
        data = stream.images(index, execution)
        lifecycle.learn_task(plan, method, stream.tasks[index], data, fitting(method, recipe))
    scores = method.scores(stream.test_images[:8].to(torch.bfloat16))
    assert scores.dtype == torch.float32
    assert bool(scores.isfinite().all())
    assert all(value.dtype != torch.bfloat16 for value in method.state_dict().values())
