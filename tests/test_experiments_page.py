"""docs/experiments-in-python.md, run from top to bottom in one process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "experiments-in-python.md"


def test_experiments_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", text, re.M | re.S)
    assert len(blocks) == text.count("```python") > 4
    names: dict[str, Any] = {}
    for code, shown in blocks:
        exec(compile(code, str(PAGE), "exec"), names)
        assert capsys.readouterr().out == shown, code
