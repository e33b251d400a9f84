"""A short stream of digits whose first task is trained once and shared by all tests."""

from __future__ import annotations

import pytest
from checks import Stream, make_stream


@pytest.fixture(scope="session")
def stream() -> Stream:
    """Five tasks of two digits each."""
    return make_stream((2, 2, 2, 2, 2))
