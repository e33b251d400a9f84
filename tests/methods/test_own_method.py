"""Methods that are not part of the package: the documented example, and what can go wrong with a file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from efcil import methods
from efcil.errors import SettingsError

PAGE = Path(__file__).parents[2] / "docs" / "your-own-method.md"
NAMED = """
from efcil.methods.base import Method
class Mine(Method):
    name = "{name}"
    summary = "a method"
"""


def found() -> dict[str, type[methods.Method]]:
    """All methods, looked for anew."""
    return methods.available.__wrapped__()


def write(file: Path, name: str) -> Path:
    file.write_text(NAMED.format(name=name))
    return file


def test_the_documented_example_runs(tmp_path: Path) -> None:
    example = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "anchor.py").write_text(example.group(1))
    surroundings = {**os.environ, methods.VARIABLE: str(tmp_path / "anchor.py")}
    arguments = ["run", "--method", "anchor", "--set", "weight=3", "--tasks", "2", "--epochs", "1", "--quiet"]
    command = [sys.executable, "-m", "efcil", *arguments, "--output", str(tmp_path / "runs")]
    subprocess.run(command, env=surroundings, check=True, capture_output=True)
    summary = next((tmp_path / "runs").rglob("summary.json"))
    assert json.loads(summary.read_text())["method"] == "anchor"
    assert '"pull"' in (summary.parent / "metrics.jsonl").read_text()


def test_files_and_folders_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    places = [write(tmp_path / "one.py", "one"), write(tmp_path / "folder" / "two.py", "two").parent]
    before = set(found())
    monkeypatch.setenv(methods.VARIABLE, os.pathsep.join(map(str, places)))
    assert set(found()) - before == {"one", "two"}


def test_installed_packages_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "efcil_test_package.py", "packed")
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.metadata.EntryPoint("packed", "efcil_test_package", methods.ENTRY_POINTS)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry])
    assert "packed" in found()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("raise RuntimeError('boom')", r"mine\.py failed: RuntimeError: boom"),
        (NAMED.format(name="efc"), "Two methods are called 'efc'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv(methods.VARIABLE, str(file))
    with pytest.raises(SettingsError, match=message):
        found()
