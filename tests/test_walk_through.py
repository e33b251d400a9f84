"""docs/walk-through.md, run from top to bottom: its commands in this process, its Python as it stands."""

from __future__ import annotations

import csv
import io
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from efcil.cli import main
from efcil.model import Model

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "walk-through.md"
IMAGES = ROOT.parent / "shared" / "data" / "tiny-imagenet-slice" / "tiny-imagenet-200"


@dataclass
class Step:
    """A block of Python or a command, and the output that the page shows under it."""

    kind: str
    text: str
    shown: list[str] = field(default_factory=list)


def steps() -> list[Step]:
    """Return the page's blocks of Python, and its commands one by one, in order."""
    found: list[Step] = []
    blocks = re.findall(r"^```(python|console|text)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    for kind, text in blocks:
        if kind == "python":
            found.append(Step(kind, text))
        elif kind == "text":
            assert found[-1].kind == "python", "a text block shows what the Python above it prints"
            found[-1].shown += text.splitlines()
        else:
            assert text.startswith("$ efcil "), "a console block begins with a command"
            for line in text.splitlines():
                if line.startswith("$ efcil "):
                    found.append(Step(kind, line.removeprefix("$ efcil ")))
                else:
                    found[-1].shown.append(line)
    return found


def without_digits(line: str) -> str:
    """Return a line in which every number is alike: they depend on threads and on the clock."""
    return re.sub(r"\s+", " ", re.sub(r"[\d.,]*\d", "0", line)).strip()


def appears(shown: list[str], printed: list[str]) -> bool:
    """Say whether what the page shows was printed, but for digits; a line of three dots stands for any lines."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(appears(shown[1:], printed[start:]) for start in range(len(printed) + 1))
    same = bool(printed) and without_digits(shown[0]) == without_digits(printed[0])
    return same and appears(shown[1:], printed[1:])


def test_shown_output_is_compared_but_for_digits() -> None:
    printed = ["task 1 of 5", "epoch 3", "epoch 6", "A_step 83.96 %"]
    assert appears(["task 2 of 5", "...", "A_step 7.1 %"], printed)
    assert appears(["...", "epoch 9", "..."], printed)
    assert not appears(["task 2 of 5", "A_step 7.1 %"], printed)
    assert not appears(["...", "A_inc 83.96 %"], printed)
    assert not appears(["task 1 of 5"], printed)
    assert not appears(["...", "epoch 3", "...", "epoch 6", "...", "epoch 6", "..."], printed)


@pytest.mark.skipif(not IMAGES.is_dir(), reason="the slice of Tiny-ImageNet is not here")
def test_walk_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-imagenet-200").symlink_to(IMAGES)
    printed: dict[str, str] = {}
    for step in steps():
        if step.kind == "python":
            exec(compile(step.text, str(PAGE), "exec"), {})
            printed["python"] = capsys.readouterr().out
            assert appears(step.shown, printed["python"].splitlines()), printed["python"]
            continue
        command, _, comment = step.text.partition("#")
        expected = int(comment.removeprefix(" exit code ")) if comment else 0
        if "--to onnx" in command:
            pytest.importorskip("onnxscript", reason="needs the onnx extra")
        assert main(shlex.split(command)) == expected, f"{command}\n{capsys.readouterr().err}"
        output = capsys.readouterr()
        printed[command.strip()] = output.out
        seen = (output.out + output.err).replace(f"{Path.cwd()}/", "").splitlines()
        assert appears(step.shown, seen), "\n".join(["The page shows another output of", command, *seen])

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
