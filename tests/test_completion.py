"""The completion scripts: what the shells think of them, and what bash completes with its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from efcil import methods
from efcil.cli import main
from efcil.commands.build import build_parser
from efcil.commands.completion import SHELLS, script

NEEDED = 'needs the extra: pip install "efcil[completion]"'
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
eval "$(complete -p efcil | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" efcil "${COMP_WORDS[COMP_CWORD]}" > /dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="session")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab", reason=NEEDED)
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    file = tmp_path_factory.mktemp("completion") / "efcil.bash"
    file.write_text(script("bash"))
    return file


def complete(file: Path, folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    command = ["bash", "--norc", "-c", COMPLETE, "bash", str(file), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return sorted(word.strip() for word in done.stdout.splitlines() if word.strip())


def test_bash_accepts_its_script(bash_script: Path) -> None:
    subprocess.run(["bash", "-n", bash_script], check=True, timeout=60)


def test_bash_completes_commands_flags_and_names(bash_script: Path, tmp_path: Path) -> None:
    _, commands = build_parser()
    assert set(commands) <= set(complete(bash_script, tmp_path, "efcil", ""))
    assert complete(bash_script, tmp_path, "efcil", "pred") == ["predict"]
    assert complete(bash_script, tmp_path, "efcil", "learn", "--skip") == ["--skip-broken"]
    offered = complete(bash_script, tmp_path, "efcil", "learn", "things", "--method", "ef")
    assert offered == sorted(name for name in methods.available() if name.startswith("ef"))
    assert complete(bash_script, tmp_path, "efcil", "predict", "--format", "") == ["csv", "json", "text"]
    assert complete(bash_script, tmp_path, "efcil", "export", "--to", "o") == ["onnx"]
    assert complete(bash_script, tmp_path, "efcil", "learn", "--precision", "b") == ["bf16"]
    assert complete(bash_script, tmp_path, "efcil", "completion", "z") == ["zsh"]


def test_bash_completes_files_and_folders(bash_script: Path, tmp_path: Path) -> None:
    (tmp_path / "visits").mkdir()
    (tmp_path / "photo.jpg").touch()
    (tmp_path / "vacation.jpg").touch()
    # A model is a folder, an image is a file.
    assert complete(bash_script, tmp_path, "efcil", "predict", "v") == ["visits"]
    assert complete(bash_script, tmp_path, "efcil", "predict", "visits", "ph") == ["photo.jpg"]
    assert complete(bash_script, tmp_path, "efcil", "learn", "--data", "v") == ["visits"]


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script_with_every_command(shell: str, capsys: Any) -> None:
    pytest.importorskip("shtab", reason=NEEDED)
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in build_parser()[1])
    assert "efc++" in text
    checker = {"zsh": ["zsh", "-n"], "tcsh": ["tcsh", "-n"], "bash": ["bash", "-n"]}[shell]
    if shutil.which(checker[0]) is not None:
        subprocess.run(checker, input=text, text=True, check=True, timeout=60, env=dict(os.environ, ZDOTDIR="/"))


def test_mistakes_are_sentences(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert main(["completion", "fish"]) == 2
    assert "fish" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "efcil[completion]"' in capsys.readouterr().err
