"""Run the notebook of examples/ without Jupyter, and store what its cells print.

    python tools/notebook.py examples/a-visit.ipynb [--store]

runs the cells in order in an empty folder; lines that start with `!efcil` are commands, run in the same process. With
`--store`, what was printed replaces the output in the file.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

COMMAND = re.compile(r"^!efcil (.*)$", re.M)


def code_cells(file: Path) -> list[dict[str, Any]]:
    """Return the cells of code, as they are in the file."""
    return [cell for cell in json.loads(file.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def run(file: Path, folder: Path) -> list[str]:
    """Run all cells of code in a folder, and return what each of them prints."""
    from efcil.cli import main

    def command(words: list[str]) -> None:
        code = main(words)
        if code != 0:
            raise RuntimeError(f"`efcil {shlex.join(words)}` ended with {code}")

    names: dict[str, Any] = {"_command": command}
    printed = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for cell in code_cells(file):
            text = COMMAND.sub(lambda found: f"_command({shlex.split(found[1])!r})", "".join(cell["source"]))
            output = io.StringIO()
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                exec(compile(text, str(file), "exec"), names)
            printed.append(output.getvalue())
    finally:
        os.chdir(before)
    return printed


def store(file: Path, printed: list[str]) -> None:
    """Write what was printed into the file, as the output of its cells."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Run the notebook that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--store", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        printed = run(arguments.notebook.resolve(), Path(folder))
    if arguments.store:
        store(arguments.notebook, printed)
    print("\n".join(printed))


if __name__ == "__main__":
    main()
