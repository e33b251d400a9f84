"""What a run measures besides accuracies: from lines of metrics.jsonl to tables, and from tables back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from efcil.evaluation import probes
from efcil.evaluation.probes import ClassCount, Perturbation, Probes

COUNTS = [[3, 1], [0, 2]]
FIRST = probes.line_of(COUNTS, [3], [2], [2.5, 0.125], last=False)
LAST = probes.line_of([(0, 1, 2), (1, 1, 3)], (3, 4), (2, 4), None, last=True)
NAMES = ["=cat", "'dog"]


def measured() -> Probes:
    lines: list[dict[str, Any]] = [{"task": 2, **LAST}, {"task": 1, "loss": 3.0}, {"task": 1, **FIRST}]
    return Probes.of_lines(lines)


def test_a_line_has_what_was_measured() -> None:
    assert FIRST == {"classes": {"images": [3], "right": [2]}, "spectrum": [2.5, 0.125]}
    assert LAST == {"classes": {"images": [3, 4], "right": [2, 4]}, "confusion": [[0, 1, 2], [1, 1, 3]]}


def test_lines_become_tables() -> None:
    """In the order of the tasks, whatever that of the lines; a name that a spreadsheet would compute is quoted."""
    assert measured().files(NAMES) == {
        "classes.csv": "task,class,name,images,right\n1,0,'=cat,3,2\n2,0,'=cat,3,2\n2,1,'dog,4,4\n",
        "confusion.csv": "true,predicted,count\n0,1,2\n1,1,3\n",
        "spectrum.csv": "task,index,value\n1,1,2.5\n1,2,0.125\n",
    }
    assert Probes.of_lines([{"task": 1}]).files(NAMES) == {}
    assert list(Probes(confusion=[]).files([])) == ["confusion.csv"], "no answer at all was counted, too"


def test_tables_are_read_as_they_were_written() -> None:
    files = measured().files(NAMES)
    assert probes.read_classes(files["classes.csv"]) == [
        ClassCount(1, 0, "=cat", 3, 2),
        ClassCount(2, 0, "=cat", 3, 2),
        ClassCount(2, 1, "'dog", 4, 4),
    ]
    spectrum = probes.read_spectrum(files["spectrum.csv"])
    assert {task: values.tolist() for task, values in spectrum.items()} == {1: [2.5, 0.125]}
    confusion = probes.read_confusion("true,predicted,count\n2,0,1\n0,1,2\n0,0,5\n", 3)
    assert confusion.classes == 3
    assert confusion.pairs.tolist() == [[0, 0, 5], [0, 1, 2], [2, 0, 1]]
    assert probes.read_confusion("true,predicted,count\n", 3).pairs.shape == (0, 3)


def test_noise_is_written_and_read() -> None:
    rows = [Perturbation(1, 0.5, "principal", 0.25, 81.5, 90.0), Perturbation(2, 1.0, "other", 0.0, 80.0, 80.5)]
    text = probes.perturbation_csv(rows)
    assert text.splitlines() == [
        "task,sigma,directions,change,accuracy,unperturbed",
        "1,0.5,principal,0.25,81.5,90.0",
        "2,1.0,other,0.0,80.0,80.5",
    ]
    assert probes.read_perturbation(text) == rows


def test_the_accuracy_of_a_class() -> None:
    assert ClassCount(1, 0, "cat", 8, 6).accuracy == 75.0
    assert ClassCount(1, 0, "cat", 1, 1).accuracy == 100.0
    assert math.isnan(ClassCount(1, 0, "cat", 0, 0).accuracy)


def two_classes(text: str) -> object:
    return probes.read_confusion(text, 2)


CLASSES, CONFUSION, SPECTRUM = (",".join(probes.COLUMNS[name]) + "\n" for name in probes.COLUMNS)


@pytest.mark.parametrize("row", ["1,0,cat,3,3", "1,0,cat,0,0", "1,0,,1,0"])
def test_rows_of_classes_at_the_limits(row: str) -> None:
    assert len(probes.read_classes(CLASSES + row + "\n")) == 1


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *[
            (probes.read_classes, CLASSES + row)
            for row in ("0,0,cat,3,2", "1,-1,cat,3,2", "1,0,cat,3,4", "1,0,cat,3,-1", "1,0,cat,3", "1,0,cat,3,2,1")
        ],
        *[
            (two_classes, CONFUSION + row)
            for row in ("2,0,1", "0,2,1", "-1,0,1", "0,-1,1", "0,0,0", "0,0,-1", "0,0", "0,0,1.5")
        ],
        *[(probes.read_spectrum, SPECTRUM + row) for row in ("1,0,2.5", "1,2,2.5", "1,1,inf", "1,1,2\n1,1,1", "1,1,x")],
        (probes.read_spectrum, CONFUSION + "1,1,2"),
        (probes.read_perturbation, SPECTRUM + "1,1,2"),
        (probes.read_classes, ""),
        (probes.read_classes, CLASSES + '1,0,"' + "x" * 200_000 + '",3,2'),
    ],
)
def test_text_that_is_no_table_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(text)
