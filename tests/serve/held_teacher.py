"""The teaching process, which waits after the first epoch that it reports, until it is asked to stop or let go.

Tests ask it to stop in the middle of a task: without this, a fast teaching has ended by then on a slow day.
It waits as long as the file exists that HOLD names.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from efcil.serve import teacher

HOLD = "EFCIL_TEST_HOLD"
_progress = teacher._progress


def asked_to_stop() -> bool:
    """Return whether the teaching was asked to stop."""
    request = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return request is not None and request.requested


def held(report: Callable[..., None]) -> Any:
    """Return a kind of progress that waits when it has reported an epoch."""

    def reported(**event: Any) -> None:
        report(**event)
        while event.get("epoch") and Path(os.environ[HOLD]).exists() and not asked_to_stop():
            time.sleep(0.01)

    return _progress(reported)


if __name__ == "__main__":
    teacher._progress = held
    sys.exit(teacher.main())
