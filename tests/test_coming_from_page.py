"""docs/coming-from.md: its commands are accepted, and its class order is the one it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from efcil.cli import main
from efcil.data.scenario import class_order

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "coming-from.md").read_text(encoding="utf-8")
ORDER, PANDAS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
BLOCKS = re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]


@pytest.fixture(autouse=True)
def _a_folder_with_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(ORDER, "coming-from.md", "exec"), {})


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command.replace("--data DATA ", ""))
    assert program == "efcil"
    assert main([*arguments, "--print-commands"]) == 0
    assert "efcil run" in capsys.readouterr().out


def test_class_order() -> None:
    order = class_order("order.txt", 100, 0)
    shuffled = list(range(100))
    np.random.RandomState(1994).shuffle(shuffled)  # FACIL shuffles a list, PyCIL asks for a permutation
    assert list(order) == shuffled
    assert list(class_order("icarl", 100, 0)) == np.random.RandomState(1993).permutation(100).tolist()
    for name, begins in (("icarl", "68, 56, 78"), ("icarl-cifar100", "87, 0, 52")):
        assert begins in TEXT
        assert ", ".join(map(str, class_order(name, 100, 0)[:3])) == begins


def test_code_for_pandas_compiles() -> None:
    compile(PANDAS, "coming-from.md", "exec")  # pandas is none of our dependencies
