"""Who imports whom: the drawing in docs/architecture.md is the law."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "efcil"


def floors() -> dict[str, int]:
    """Return the line of every room in the drawing, the lowest last."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawing = text.split("### Who may import whom", 1)[1].split("Data flows", 1)[0]
    lines = [line.split() for line in drawing.splitlines() if line.startswith("    ")]
    return {room: number for number, line in enumerate(lines) for room in line}


def imports(file: Path) -> Iterator[str]:
    """Yield the rooms that a file imports, inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            module = node.module or ""
            names = [f"efcil.{alias.name}" for alias in node.names] if module == "efcil" else [module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("efcil."))


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.parent != PACKAGE or not file.stem.startswith("__"))


def test_every_room_is_drawn() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir() if (path.suffix == ".py" or (path / "__init__.py").exists())}
    assert {room for room in rooms if not room.startswith("__")} == set(floors())


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_imports_go_down(file: Path) -> None:
    order = floors()
    own = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wrong = [room for room in imports(file) if room in order and room != own and order[room] <= order[own]]
    assert not wrong, f"{own} must not import {', '.join(sorted(set(wrong)))}"
