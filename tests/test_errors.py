"""Sentences for the user."""

from __future__ import annotations

import pytest

from efcil.errors import some


@pytest.mark.parametrize(("count", "words"), [(1, "1"), (2, "1, 2"), (3, "1, 2 and 1 other"), (4, "1, 2 and 2 others")])
def test_names_beyond_the_most_are_counted(count: int, words: str) -> None:
    assert some(range(1, count + 1), most=2) == words
