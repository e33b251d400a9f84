"""docs/walk-through.md, run from top to bottom: its commands in this process, its Python as it stands."""

from __future__ import annotations

import csv
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from efcil.cli import main
from efcil.model import Model

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walk-through.md"
IMAGES = ROOT.parent / "shared" / "data" / "tiny-imagenet-slice" / "tiny-imagenet-200"


def steps() -> list[tuple[str, str]]:
    """Return the page's blocks of Python, and its commands one by one, in order."""
    found = []
    for kind, text in re.findall(r"^```(python|console)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        if kind == "python":
            found.append((kind, text))
        else:
            lines = text.splitlines()
            assert all(line.startswith("$ efcil ") for line in lines), "a console block shows commands alone"
            found += [(kind, line.removeprefix("$ efcil ")) for line in lines]
    return found


@pytest.mark.skipif(not IMAGES.is_dir(), reason="the slice of Tiny-ImageNet is not here")
def test_walk_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-imagenet-200").symlink_to(IMAGES)
    printed: dict[str, str] = {}
    for kind, text in steps():
        if kind == "python":
            exec(compile(text, str(PAGE), "exec"), {})
            printed["python"] = capsys.readouterr().out
            continue
        command, _, comment = text.partition("#")
        expected = int(comment.removeprefix(" exit code ")) if comment else 0
        if "--to onnx" in command:
            pytest.importorskip("onnxscript", reason="needs the onnx extra")
        assert main(shlex.split(command)) == expected, f"{command}\n{capsys.readouterr().err}"
        printed[command.strip()] = capsys.readouterr().out

    card = Model.load("things", "cpu").card
    assert card.task_sizes == [2] * 5
    assert [each.images for each in card.classes] == [20, 20, 40, 40, 20, 20, 20, 20, 20, 20]
    rows = list(csv.DictReader(io.StringIO(printed["predict things 'new-pictures/*/*.JPEG' --format csv"])))
    assert len(rows) == 100
    right = sum(Path(row["image"]).parent.name == row["class"] for row in rows)
    assert right >= 13, "guessing gives 10 on average"
    assert float(printed["python"].split()[-1]) == right / 100
    assert "10 classes in 5 tasks" in printed["inspect things"]
    audited = printed["audit things --data all-visits --held-out new-pictures"]
    assert "compared with images of 10 of 10 classes, 200 of 240 images; only in part: " in audited
    assert "Passed for these images: none of them is stored." in audited
    assert Path("things.pt2").is_file()
    assert Path("things.onnx").is_file()
    assert not list(Path("things").glob("**/*.JPEG"))
