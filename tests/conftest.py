"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton decides when it is imported whether kernels run on a GPU or in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# One thread per worker: the tests run side by side.
torch.set_num_threads(1)
# What is printed depends on the terminal, and on what the surroundings say of it.
os.environ |= {"COLUMNS": "80", "TERM": "xterm"}
for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)
# The same examples every time, however busy the machine is.
settings.register_profile("repeating", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeating")


class Crash(BaseException):
    """Stands for a process that dies: nothing may catch it."""


@pytest.fixture
def crash_at_rename(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return a context that must end with a crash just before or just after the given call of os.replace."""

    @contextmanager
    def dying(call: int, before: bool) -> Iterator[None]:
        calls, replace = 0, os.replace

        def fatal(source: Path, target: Path) -> None:
            nonlocal calls
            calls += 1
            if calls == call and before:
                raise Crash
            replace(source, target)
            if calls == call:
                raise Crash

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fatal)
            with pytest.raises(Crash):
                yield

    return dying
