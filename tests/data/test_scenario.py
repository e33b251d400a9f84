from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efcil.data.scenario import ORDERS, SCENARIOS, Scenario, class_order, make_scenario
from efcil.errors import DataError, EfcilError, SettingsError


def sizes(name: str, classes: int, **extra: int) -> tuple[int, ...]:
    return make_scenario(name, classes, order=range(classes), **extra).task_sizes  # type: ignore[arg-type]


PUBLISHED = [
    ("ws5", 100, 50, 5, 10),
    ("ws10", 100, 50, 10, 5),
    ("ws20", 100, 40, 20, 3),
    ("cs5", 100, 20, 4, 20),
    ("cs10", 100, 10, 9, 10),
    ("cs20", 100, 5, 19, 5),
    ("ws5", 200, 100, 5, 20),
    ("ws10", 200, 100, 10, 10),
    ("ws20", 200, 100, 20, 5),
    ("cs5", 200, 40, 4, 40),
    ("cs10", 200, 20, 9, 20),
    ("cs20", 200, 10, 19, 10),
    ("ws10", 1000, 500, 10, 50),
    ("ws20", 1000, 400, 20, 30),
    ("cs10", 1000, 100, 9, 100),
    ("cs20", 1000, 50, 19, 50),
    ("cs5", 10, 2, 4, 2),
    ("ws5", 10, 5, 5, 1),
    ("cs10", 10, 1, 9, 1),
]


@pytest.mark.parametrize(("name", "classes", "first", "later", "each"), PUBLISHED)
def test_tasks_of_the_published_scenarios(name: str, classes: int, first: int, later: int, each: int) -> None:
    scenario = make_scenario(name, classes, order=class_order("efc", classes, 0))
    assert scenario.name == name
    assert scenario.task_sizes == (first, *[each] * later)
    assert scenario.number_of_tasks == later + 1
    assert scenario.tasks[0] == tuple(range(first))
    assert scenario.tasks[-1][-1] == classes - 1 == scenario.number_of_classes - 1


def test_warm_start_with_other_class_counts_keeps_steps_equal_and_first_task_near_half() -> None:
    assert sizes("ws5", 7) == (2, 1, 1, 1, 1, 1)
    assert sizes("ws20", 21) == (1,) * 21
    assert sizes("ws10", 101) == (51,) + (5,) * 10
    assert sizes("ws20", 50) == (30,) + (1,) * 20


def test_cold_start_that_does_not_divide_ends_with_the_smaller_tasks() -> None:
    assert sizes("cs10", 13) == (2, 2, 2, 1, 1, 1, 1, 1, 1, 1)


@given(st.sampled_from(sorted(set(SCENARIOS) - {"custom", "domains"})), st.integers(1, 400))
@settings(max_examples=80, deadline=None)
def test_every_scenario_covers_every_class_once_or_refuses(name: str, classes: int) -> None:
    needed = int(name[2:]) + name.startswith("ws")
    if classes < needed:
        with pytest.raises(SettingsError, match=f"needs at least {needed} classes.* has {classes}"):
            sizes(name, classes)
        return
    found = sizes(name, classes)
    assert sum(found) == classes
    assert len(found) == needed
    later = found[1:] if name.startswith("ws") else found
    assert max(later) - min(later) <= (0 if name.startswith("ws") else 1)


def test_refusals_spell_out_the_arithmetic() -> None:
    with pytest.raises(SettingsError, match=r"^cs20 needs at least 20 classes, one per task; digits has 10\.$"):
        make_scenario("cs20", 10, order=range(10), dataset="digits")
    with pytest.raises(SettingsError, match=r"ws10 needs at least 11 classes, .*10 steps.*; digits has 10\."):
        make_scenario("ws10", 10, order=range(10), dataset="digits")
    with pytest.raises(SettingsError, match=r"10 - 8 = 2 for the 4 later tasks.*4 in total"):
        sizes("custom", 10, tasks=5, first_task_classes=8)
    with pytest.raises(SettingsError, match=r"10 - 11 = -1"):
        sizes("custom", 10, tasks=2, first_task_classes=11)
    with pytest.raises(SettingsError, match="no class may be left"):
        sizes("custom", 10, tasks=1, first_task_classes=4)


def test_custom_scenarios() -> None:
    assert sizes("custom", 10, tasks=3, first_task_classes=5) == (5, 3, 2)
    assert sizes("custom", 17, tasks=5, first_task_classes=7) == (7, 3, 3, 2, 2)
    assert sizes("custom", 4, tasks=4) == (1, 1, 1, 1)
    assert sizes("custom", 7, tasks=1) == (7,)
    assert sizes("custom", 7, tasks=1, first_task_classes=7) == (7,)
    assert make_scenario("custom", 9, order=range(9), tasks=3).name == "custom-3"
    assert make_scenario("custom", 9, order=range(9), tasks=3, first_task_classes=5).name == "custom-3-first-5"
    made = make_scenario("custom", 9, order=range(9), task_sizes=(3, 1, 1, 4))
    assert (made.task_sizes, made.name) == ((3, 1, 1, 4), "custom-of-3-2x1-4")
    with pytest.raises(SettingsError, match=r"^Tasks of 3,2x1 classes are 5 classes together, but digits has 9\."):
        make_scenario("custom", 9, order=range(9), task_sizes=(3, 1, 1), dataset="digits")
    with pytest.raises(SettingsError, match="cs5 has its own tasks"):
        sizes("cs5", 10, task_sizes=(5, 5))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "needs the number of tasks"),
        ({"tasks": 0}, "at least one task"),
        ({"tasks": 2, "first_task_classes": 0}, "at least one class"),
        ({"tasks": 11}, "custom with 11 tasks needs at least 11 classes"),
    ],
)
def test_custom_scenarios_that_make_no_sense(extra: dict[str, int], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        sizes("custom", 10, **extra)


def test_unknown_scenario_and_contradictions() -> None:
    with pytest.raises(SettingsError, match=r"Unknown scenario 'ws15'\. Did you mean .*'ws5'"):
        sizes("ws15", 100)
    with pytest.raises(SettingsError, match="has its own tasks"):
        sizes("cs10", 100, tasks=5)
    with pytest.raises(SettingsError, match="lists 9 classes, but tiny has 10"):
        make_scenario("cs5", 10, order=range(9), dataset="tiny")
    with pytest.raises(SettingsError, match="class 1 occurs twice"):
        make_scenario("cs5", 5, order=(0, 1, 1, 3, 4))
    with pytest.raises(SettingsError, match="class 2 is missing"):
        make_scenario("cs5", 5, order=(0, 1, 3, 4, 5))
    with pytest.raises(SettingsError, match="non-empty ranges"):
        Scenario("odd", (0, 1), ((1,), (0,)))


def test_efc_order_has_the_published_check_values() -> None:
    order = class_order("efc", 100, 0)
    assert order[:10] == (57, 6, 15, 62, 42, 96, 21, 3, 1, 74)
    labels = make_scenario("cs10", 100, order=order).relabel(np.arange(10))
    assert labels.dtype == np.int64
    assert labels.tolist() == [23, 8, 11, 7, 48, 13, 1, 91, 94, 54]


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_efc_order_is_the_global_generators_and_leaves_it_alone(seed: int) -> None:
    random.seed(seed)
    shuffled = list(range(200))
    random.shuffle(shuffled)
    state = random.getstate()
    order = class_order("efc", 200, seed)
    assert random.getstate() == state
    assert [shuffled[original] for original in order] == list(range(200))


def test_other_orders() -> None:
    assert class_order("icarl", 1000, 0)[:5] == (54, 7, 894, 512, 126)
    assert class_order("icarl", 100, 0)[:5] == (68, 56, 78, 8, 23)
    assert class_order("icarl", 100, 3) == class_order("icarl", 100, 0)
    theirs = class_order("efc-imagenet", 1000, 0)
    assert [theirs[label] for label in class_order("icarl", 1000, 0)] == list(range(1000))
    assert theirs[:5] == (342, 778, 443, 256, 601)
    assert class_order("natural", 4, 7) == (0, 1, 2, 3)
    assert class_order("efc", 100, 1) != class_order("efc", 100, 0)
    of_any_number = set(ORDERS) - {"dn4il", "icarl-cifar100"}
    assert all(sorted(class_order(kind, 37, 2)) == list(range(37)) for kind in of_any_number)


def test_order_of_the_code_of_icarl_is_not_the_permutation_of_its_seed() -> None:
    """The numbers are those of PODNet's list of classes, "taken from original iCaRL implementation"."""
    order = class_order("icarl-cifar100", 100, 0)
    assert order[:10] == (87, 0, 52, 58, 44, 91, 68, 97, 51, 15)
    assert order[-8:] == (99, 7, 34, 55, 54, 26, 35, 39)
    assert sorted(order) == list(range(100))
    assert order == class_order("icarl-cifar100", 100, 5)
    assert order != class_order("icarl", 100, 0)
    with pytest.raises(SettingsError, match="one of 100 classes, but here are 10"):
        class_order("icarl-cifar100", 10, 0)


def test_relabelling_gives_positions_in_the_order() -> None:
    scenario = make_scenario("custom", 6, order=(4, 2, 0, 5, 1, 3), tasks=3, first_task_classes=3)
    for positions in scenario.tasks:
        originals = [scenario.order[position] for position in positions]
        assert tuple(scenario.relabel(np.array(originals))) == positions
    with pytest.raises(DataError, match=r"run from 0 to 6.*made for 6 classes"):
        scenario.relabel(np.array([0, 6]))
    with pytest.raises(DataError, match="run from -1"):
        scenario.relabel(np.array([-1]))
    assert scenario.relabel(np.array([], np.int64)).shape == (0,)


NAMES = ("cat", "dog", "fox", "7")


@pytest.mark.parametrize(
    "text",
    [
        "2\n0\n\n3\n1\n",
        "fox\ncat\n7\ndog\n",
        "fox\n0\n7\n1",
        json.dumps([2, 0, 3, 1]),
        json.dumps(["fox", 0, "7", "dog"]),
    ],
)
def test_order_from_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "order.txt"
    file.write_text(text)
    assert class_order(str(file), 4, 0, NAMES) == (2, 0, 3, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0\n1\n2", r"lists 3 of 4 classes; missing: 3 \(7\)"),
        ("0\n1\n2\n1", r"Line 4 .* repeats class '1' of line 2"),
        ("cat\n0\n2\n3", r"Line 2 .* repeats class '0' of line 1"),
        ("0\n1\n2\n4", "Line 4 .* is class 4, but classes run from 0 to 3"),
        ("0\n1\n2\n-1", "is class -1"),
        ("cat\ndgo\nfox\n7", "Line 2 .* is not a class: 'dgo'. Did you mean 'dog'"),
        ("[0, 1", "starts like a JSON list"),
        ("[0, 1, 2.5, 3]", "Entry 3 .* neither"),
        ("[0, true, 2, 3]", "Entry 2 .* neither"),
        ("[0, [1], 2, 3]", "Entry 2 .* neither"),
        ("", "lists 0 of 4 classes"),
    ],
)
def test_bad_order_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "order.txt"
    file.write_text(text)
    with pytest.raises(EfcilError, match=message) as raised:
        class_order(str(file), 4, 0, NAMES)
    assert str(file) in str(raised.value)


def test_order_files_without_class_names_and_binary_ones(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("zebra\n")
    with pytest.raises(SettingsError, match="have no names"):
        class_order(str(file), 1, 0)
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match="cannot be read as text"):
        class_order(str(file), 1, 0)


def test_unknown_order_suggests() -> None:
    with pytest.raises(
        SettingsError, match=r"Unknown class order 'icral', which is not a file either\. Did you mean 'icarl'"
    ):
        class_order("icral", 10, 0)
