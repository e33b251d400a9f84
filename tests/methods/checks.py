"""What tests of single methods need beside efcil.testing: one import for all of it."""

from __future__ import annotations

import torch

from efcil.methods import get
from efcil.methods.base import Method
from efcil.testing import on_trial
from efcil.testing.compare import State, assert_equal, clone, normalisation_state
from efcil.testing.stream import FIRST, FUSED, LATER, PLAIN, SHORT, Stream, make_stream, short_stream
from efcil.testing.trial import QUICK, Trial, run

__all__ = [
    "FIRST",
    "FUSED",
    "LATER",
    "PLAIN",
    "QUICK",
    "SHORT",
    "State",
    "Stream",
    "assert_equal",
    "check_round_trip",
    "clone",
    "make_stream",
    "normalisation_state",
    "quick",
    "run",
    "short_stream",
]


def quick(stream: Stream, name: str) -> Method:
    """The method before the end of the first task, with the settings that all checks use."""
    return on_trial(get(name)).make(stream)


def check_round_trip(stream: Stream, method: Method) -> None:
    """A fresh method that loads the state predicts the same, and its state is the same."""
    state = clone(method.state_dict())
    twin = Trial(type(method), method.settings).reload(state)
    seen = sum(method.network.head_sizes)
    assert torch.equal(stream.scores(twin, seen), stream.scores(method, seen))
    assert_equal(clone(twin.state_dict()), state)
