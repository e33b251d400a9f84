"""docs/python.md, run from top to bottom in one process; the Hub is a server on this machine."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_hub import TOKEN, Hub

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


class Mnist:
    """A few digits in the form of a Dataset of the package `datasets`, which is not installed here."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.features, self.column_names = {"image": None, "label": None}, ["image", "label"]
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, key: Any) -> Any:
        if key == "label":
            return self._labels.tolist()
        return {"image": self._images[key], "label": int(self._labels[key])}


def blocks() -> list[tuple[str, str]]:
    """Return the page's blocks of Python, and what each is said to print."""
    found = re.findall(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", PAGE.read_text("utf-8"), re.M | re.S)
    assert len(found) == PAGE.read_text("utf-8").count("```python")
    return found


def test_python_page(
    digits: Any, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tables = types.ModuleType("datasets")
    tables.load_dataset = lambda name, split: Mnist(*digits.train(0, 1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", tables)
    names: dict[str, Any] = {}
    for code, shown in blocks():
        exec(compile(code, str(PAGE), "exec"), names)
        assert capsys.readouterr().out == shown, code
    assert set(hub.repositories) == {"YOUR-NAME/digits"}
