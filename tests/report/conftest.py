"""Tables and pages are tested with invented summaries, which no accuracy matrix stands behind."""

from __future__ import annotations

import pytest

from efcil.runfolder import RunFolder


@pytest.fixture(autouse=True)
def _invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunFolder, "verified_summary", RunFolder.read_summary)
