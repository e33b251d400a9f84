"""Checks for methods and backbones of one's own; `efcil check` runs them from the command line, and pytest can, too.

import pytest
from efcil.testing import LeftOut, METHOD_CHECKS, on_trial

@pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda check: check.name)
def test_anchor(check):
    try:
        check(on_trial(Anchor))
    except LeftOut as reason:
        pytest.skip(str(reason))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from efcil.methods.base import Method
from efcil.testing.backbones import CHECKS as BACKBONE_CHECKS
from efcil.testing.backbones import Candidate
from efcil.testing.methods import CHECKS as METHOD_CHECKS
from efcil.testing.trial import Trial, on_trial
from efcil.testing.verdicts import Check, LeftOut, Verdict, verdicts

__all__ = [
    "BACKBONE_CHECKS",
    "METHOD_CHECKS",
    "Candidate",
    "Check",
    "LeftOut",
    "Trial",
    "Verdict",
    "check_backbone",
    "check_method",
    "on_trial",
]


def check_method(method: type[Method], settings: Any = None) -> Iterator[Verdict]:
    """Run every check on a method, with these settings or its defaults, and yield what each found."""
    return verdicts(METHOD_CHECKS, on_trial(method, settings))


def check_backbone(make: Callable[[], nn.Module], pixels: int = 32) -> Iterator[Verdict]:
    """Run every check on the backbone that `make` returns, with square images of so many pixels a side."""
    return verdicts(BACKBONE_CHECKS, Candidate(make, pixels))
