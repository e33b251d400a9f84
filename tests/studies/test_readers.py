"""Readers: what they make of measured values, and what of missing ones."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from efcil import studies
from efcil.errors import SettingsError
from efcil.report.cells import seeds_in_words
from efcil.report.paper import PaperValue, agrees
from efcil.runfolder import RunFolder
from efcil.studies import sheet
from efcil.studies.measures import MEASURES, Measured, key_of, merge_into
from efcil.studies.readers import elbow
from efcil.studies.result import Result, conclude, missing, write
from efcil.studies.sheet import Sheet


def measured(study: str, values: dict[tuple[str, str, int], dict[str, str]], measure: str = "accuracy") -> Measured:
    """Return what was measured on CIFAR-100, by scenario, name of the row and seed."""
    found = Measured()
    for (scenario, name, seed), row in values.items():
        (cell,) = studies.load(study).cells(["cifar100"], [scenario], [name])
        found.add(measure, key_of(cell, seed), [row])
    return found


def accuracy(step: float, average: float = 50.0, tasks: str = "") -> dict[str, str]:
    return {"A_step": f"{step:.2f}", "A_inc": f"{average:.2f}", "A_step_per_task": tasks}


def result_of(name: str, values: Measured, fast: bool = False) -> Result:
    study = studies.load(name)
    seeds = study.seeds[:1] if fast else study.seeds
    return conclude(study, study.cells(["cifar100"], fast=fast), seeds, values, fast)


def rows_of(result: Result, scenario: str) -> dict[str, tuple[str, ...]]:
    (table,) = result.outcomes[0][1].sheets
    return {row[2]: row[3:] for row in table.rows if row[1] == scenario}


@pytest.mark.parametrize(
    ("ours", "mean", "std", "expected"),
    [
        (43.0, 42.0, 0.1, True),
        (43.01, 42.0, 0.1, False),
        (44.9, 42.0, 3.0, True),
        (41.0, 42.0, None, True),
        (32.02, 31.02, 0.1, True),
    ],
)
def test_within_a_deviation_or_a_point(ours: float, mean: float, std: float | None, expected: bool) -> None:
    assert agrees(ours, PaperValue(mean, std, "1")) is expected


def test_ours_stands_beside_the_papers() -> None:
    values = measured(
        "table1",
        {
            ("cs10", "EFC", 0): accuracy(42.0, 58.0),
            ("cs10", "EFC", 3): accuracy(44.0, 60.0),
            ("cs10", "LwF", 1): accuracy(10.0, 53.91),
            ("ws10", "Fusion", 0): accuracy(10.0, 20.0),
        },
    )
    result = result_of("table1", values)
    cold = rows_of(result, "cs10")
    assert cold["EFC"] == (
        "0 3", "43.00 ± 1.41", "43.62 ± 0.70", "-0.62", "yes", "59.00 ± 1.41", "58.58 ± 0.91", "+0.42", "yes",
    )  # fmt: skip
    assert cold["LwF"] == ("1", "10.00", "32.80 ± 3.08", "-22.80", "no", "53.91", "53.91 ± 1.67", "+0.00", "yes")
    assert cold["SSRE"][:5] == ("none", "-", "30.40 ± 0.74", "", "")
    assert rows_of(result, "ws10")["Fusion"][4] == "", "a reconstruction is not judged"
    assert "Fusion" not in cold
    assert "CIFAR-100 cs10: EWC (all seeds), LwF (seeds 0 2 3 4), PASS (all seeds)" in " ".join(result.missing)
    assert "EFC (seeds 1 2 4)" in " ".join(result.missing)
    text = result.outcomes[0][1].latex or ""
    assert r"43.00 $\pm$ 1.41 &" in text
    assert r"10.00$^\dagger$ &" in text
    assert "a dagger marks those that do not" in text
    assert "Of 4 values that both have, 3 agree." in result.text()


def test_rows_are_compared_with_the_reference_seed_by_seed() -> None:
    steps = {
        "EFC": {0: 40.0, 1: 50.0, 2: 60.0},
        "LwF": {0: 38.0, 1: 49.0, 4: 10.0},
        "PASS": {2: 61.0},
        "SSRE": {3: 9.0},
    }
    values = measured(
        "table1", {("cs10", name, seed): accuracy(step) for name, each in steps.items() for seed, step in each.items()}
    )
    study = studies.load("table1").beside("EFC")
    result = conclude(study, study.cells(["cifar100"]), study.seeds, values, False)
    _, compared = result.outcomes[0][1].sheets
    assert compared.heading == ("dataset", "scenario", "method", "seeds", "A_step", "A_inc")
    assert compared.rows == (
        ("cifar100", "cs10", "LwF", "0 1", "-1.50 ± 0.50", "+0.00 ± 0.00"),
        ("cifar100", "cs10", "PASS", "2", "+1.00", "+0.00"),
        ("cifar100", "cs10", "SSRE", "none", "-", "-"),
    )
    assert "differences from EFC" in result.text()
    assert "standard error" in (result.outcomes[0][1].latex or "")
    assert len(result_of("table1", values).outcomes[0][1].sheets) == 1, "nobody asked"


def test_seeds_of_other_images_are_not_compared() -> None:
    steps = {(name, seed): accuracy(step + seed) for name, step in (("EFC", 40.0), ("LwF", 30.0)) for seed in (0, 1)}
    values = measured("table1", {("cs10", *key): row for key, row in steps.items()})
    study = studies.load("table1").beside("EFC")
    for name, seed, digest in (
        ("EFC", 0, "a"), ("EFC", 1, "a"), ("EFC", 2, "a"), ("LwF", 0, "a"), ("LwF", 1, "b"), ("LwF", 3, "c"),
    ):  # fmt: skip
        (cell,) = study.cells(["cifar100"], ["cs10"], [name])
        values.add("images", key_of(cell, seed), [{"images": digest}])
    result = conclude(study, study.cells(["cifar100"]), study.seeds, values, False)
    compared = result.outcomes[0][1].sheets[1]
    assert compared.rows[0][2:] == ("LwF", "0", "-10.00", "+0.00")
    assert compared.notes[1:] == ("cifar100 cs10 LwF: not paired: seed 1 (other images)",)


def test_a_short_schedule_says_so_everywhere_and_is_not_judged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    study = studies.load("losses")
    found = Measured()
    for cell in study.cells(["cifar100"], fast=True):
        found.add("accuracy", key_of(cell, 0), [accuracy(40.0, 50.0, "60.0 40.0")])
    result = conclude(study, study.cells(["cifar100"], fast=True), (0,), found, fast=True)
    assert rows_of(result, "cs10")["EFM + PR-ACE (EFC)"][:4] == ("0", "40.00", "43.62 ± 0.70", "50.00")
    files, trouble = write(result, tmp_path, found)
    assert trouble == ""
    assert {file.parent for file in files} == {tmp_path / "paper" / "losses-fast"}
    assert all("-fast" in file.name for file in files if not file.name.startswith("measured-"))
    for file in files:
        if file.suffix in (".txt", ".md", ".csv", ".tex") and not file.name.startswith("measured-"):
            assert "FAST SCHEDULE" in file.read_text(encoding="utf-8"), file
    figures = [figure for _, outcome in result.outcomes for figure in outcome.figures.values()]
    assert figures
    assert all("FAST SCHEDULE" in figure.title for figure in figures)
    assert "FAST SCHEDULE" in result.text()


def test_numbers_of_others_are_not_said_to_be_over_five_seeds() -> None:
    few = "The paper's values are over five seeds"
    values = measured("table1", {("cs10", "LwF", 0): accuracy(33.0)})
    assert few in result_of("table1", values).text()
    study = studies.load("table1")
    theirs = {("cifar100", "cs10", "LwF", "A_step"): PaperValue(32.0, None, "")}
    alone = replace(study, settings={"recipe": "modern"}, published=theirs)
    cells = alone.cells(["cifar100"], ["cs10"], ["LwF"])
    found = Measured({"accuracy": {key_of(cells[0], 0): [accuracy(33.0)]}})
    text = conclude(alone, cells, (0,), found, fast=False).text()
    assert "+1.00" in text
    assert few not in text


def test_one_epoch_is_one() -> None:
    study = replace(studies.load("spectrum"), fast_epochs=1)
    assert (
        conclude(study, study.cells(fast=True), (0,), Measured(), fast=True)
        .text()
        .startswith("FAST SCHEDULE (1 epoch a task, not")
    )


def test_full_and_short_runs_never_mix() -> None:
    full = measured("losses", {("cs10", "EFM + symmetric", 0): accuracy(40.0)})
    short = rows_of(result_of("losses", full, fast=True), "cs10")
    assert short["EFM + symmetric"][:2] == ("none", "-")


@pytest.mark.parametrize(("without", "words"), [(40.0, "Same order"), (46.0, "Another order")])
def test_ablations_say_whether_the_order_is_the_papers(without: float, words: str) -> None:
    values = {("cs10", "without update", 0): accuracy(without), ("cs10", "with update (EFC)", 0): accuracy(43.0)}
    text = result_of("prototype-update", measured("prototype-update", values)).text()
    study, fast = studies.load("prototype-update"), Measured()
    cells = study.cells(["cifar100"], ["cs10"], fast=True)
    for cell in cells:
        fast.add("accuracy", key_of(cell, 0), [values["cs10", cell.variant.name, 0]])
    short = conclude(study, cells, (0,), fast, fast=True)
    assert [row[4] for row in short.outcomes[0][1].sheets[0].rows] == [f"{without:.2f}", "43.00"]
    assert "order" not in short.text()
    assert f"{words} {'as' if without < 43 else 'than'} in the paper: CIFAR-100 cs10." in text


@pytest.mark.parametrize("deviations", [(3.0, 0.5), (0.5, 3.0), (None, 3.0)])
def test_rows_that_are_within_a_deviation_in_the_paper_have_no_order(deviations: tuple[float | None, float]) -> None:
    names, found = ("without update", "with update (EFC)"), Measured()
    for wide in (True, False):
        given = [min(each or 0.5, 3.0 if wide else 0.5) for each in deviations]
        theirs = {
            ("cifar100", "cs10", name, "A_step"): PaperValue(mean, std, "")
            for name, mean, std in zip(names, (40.0, 42.0), given, strict=True)
        }
        study = replace(studies.load("prototype-update"), published=theirs)
        cells = study.cells(["cifar100"], ["cs10"])
        for cell, step in zip(cells, (39.0, 43.0), strict=True):
            found.add("accuracy", key_of(cell, 0), [accuracy(step)])
        assert ("order" in conclude(study, cells, (0,), found, fast=False).text()) is not wide


def test_a_run_is_known_once_all_of_its_measures_are() -> None:
    found = measured("low-rank", {("ws10", "90 % of the variance", 0): accuracy(55.0)})
    (cell,) = studies.load("low-rank").cells(["cifar100"], ["ws10"], ["90 % of the variance"])
    assert found.has(["accuracy"], cell, 0)
    assert not found.has(["accuracy", "components"], cell, 0)
    assert not found.has(["accuracy"], cell, 1)


def test_components_have_the_spread_over_classes() -> None:
    values = measured("low-rank", {("ws10", "90 % of the variance", seed): accuracy(55.0 + seed) for seed in (0, 1)})
    (cell,) = studies.load("low-rank").cells(["cifar100"], ["ws10"], ["90 % of the variance"])
    for seed, mean in ((0, "11.2"), (1, "12")):
        values.add("components", key_of(cell, seed), [{"components": mean, "components_std": "2.5", "commit": ""}])
    row = rows_of(result_of("low-rank", values), "ws10")["90 % of the variance"]
    assert row[5:] == ("12 ± 2", "11 ± 2", "+1", "yes")
    # The full covariance has no components, and lacks nothing without them.
    (full,) = studies.load("low-rank").cells(["cifar100"], ["ws10"], ["full (EFC)"])
    values.add("accuracy", key_of(full, 0), [accuracy(60.0)])
    assert list(missing([full], [0], values)) == []
    assert list(missing([cell], [0, 4], values)) == ["CIFAR-100 ws10: 90 % of the variance (seed 4)"]


def test_a_mean_that_is_not_over_all_seeds_of_its_row_is_named() -> None:
    values = measured("low-rank", {("ws10", "90 % of the variance", seed): accuracy(55.0 + seed) for seed in (0, 1, 2)})
    (cell,) = studies.load("low-rank").cells(["cifar100"], ["ws10"], ["90 % of the variance"])
    for seed in (0, 2):
        values.add("components", key_of(cell, seed), [{"components": "12", "components_std": "2", "commit": ""}])
    result = result_of("low-rank", values)
    assert rows_of(result, "ws10")["90 % of the variance"][0] == "0-2"
    (table,) = result.outcomes[0][1].sheets
    note = "CIFAR-100 ws10, 90 % of the variance: components is over seeds 0 2 alone."
    assert [each for each in table.notes if "alone" in each] == [note]


def test_curves_have_a_band_over_seeds() -> None:
    values = measured(
        "curves",
        {
            ("cs10", "EFC", 0): accuracy(1, 1, "90.0 70.0 50.0"),
            ("cs10", "EFC", 1): accuracy(1, 1, "80.0 70.0 40.0"),
            ("cs10", "LwF", 1): accuracy(1, 1, "80.0 60.0 30.0"),
        },
    )
    result = result_of("curves", values)
    figure = result.outcomes[0][1].figures["cifar100-cs10"]
    lwf, efc = figure.series
    assert (efc.label, list(efc.x), list(efc.y)) == ("EFC", [1, 2, 3], [85, 70, 45])
    assert efc.low == pytest.approx([85 - 50**0.5, 70, 45 - 50**0.5])
    assert efc.high == pytest.approx([85 + 50**0.5, 70, 45 + 50**0.5])
    assert not lwf.low
    assert figure.limits == (0, 100)
    names = [variant.name for variant in studies.load("curves").runs]
    assert [names[series.style or 0] for series in figure.series] == ["LwF", "EFC"], "a row keeps its colour"
    assert rows_of(result, "cs10")["EFC"] == ("0 1", "85.00 ± 7.07 (1)", "70.00 ± 0.00 (2)", "45.00 ± 7.07 (3)")


def test_the_elbow_is_where_the_steepest_fall_comes() -> None:
    assert elbow([5.0, 4.0, 3.0, 1e-8, 1e-9]) == 3
    assert elbow([5.0, 4.0, 3.0, 1e-12, -1e-30]) == 3, "what is smaller than rounding is no fall"
    assert elbow([1.0]) == 1


def test_the_spectrum_names_elbow_and_line() -> None:
    study = studies.load("spectrum")
    (cell,) = study.cells()
    found = Measured()
    falls = {1: 49, 2: 60, 3: 40}
    rows = []
    for task, fall in falls.items():
        values = [0.02] * fall + [0.005] + [1e-9] * (90 - fall)
        values[fall] = 1e-7
        listed = " ".join(f"{value:g}" for value in values)
        rows.append({"task": str(task), "classes": str(40 + 10 * task), "values": listed, "commit": ""})
    found.add("spectrum", key_of(cell, 0), rows)
    result = conclude(study, [cell], (0,), found, fast=False)
    (table,) = result.outcomes[0][1].sheets
    # Task, seen classes, elbow, as expected, eigenvalues above damping / efm_weight = 0.01.
    assert [row[4:] for row in table.rows] == [
        ("1", "50", "49", "yes", "49"), ("2", "60", "60", "yes", "60"), ("3", "70", "40", "no", "40"),
    ]  # fmt: skip
    figure = result.outcomes[0][1].figures["cifar100-ws5-seed0"]
    assert [series.label for series in figure.series] == ["task 1", "task 2", "task 3"]
    assert figure.log_y
    lines = [(line.axis, round(line.value, 9)) for line in figure.references]
    assert lines == [("x", 50.0), ("x", 60.0), ("x", 70.0), ("y", 0.01)]


def test_without_damping_the_spectrum_has_no_line() -> None:
    loaded = studies.load("spectrum")
    (plain,) = loaded.runs
    undamped = replace(plain, name="undamped", overrides={"damping": 0})
    values = {"task": "1", "classes": "2", "values": "1 0.5 0.001", "commit": ""}
    found, shown = Measured(), {}
    for runs in ((undamped,), (plain, undamped)):
        study = replace(loaded, runs=runs)
        for cell in study.cells():
            found.add("spectrum", key_of(cell, 0), [values])
        outcome = conclude(study, study.cells(), (0,), found, fast=False).outcomes[0][1]
        shown[len(runs)] = outcome.sheets[0]
        figure = list(outcome.figures.values())[-1]
        assert [line.axis for line in figure.references] == ["x"]
    why = "Without damping there is no line: the feature matrix alone weighs the drift."
    assert shown[1].heading[-1] == "as expected"
    assert shown[1].rows[0][4:] == ("1", "2", "2", "yes")
    assert shown[1].notes[1:] == (why,)
    assert [row[-1] for row in shown[2].rows] == ["2", "-"]
    assert shown[2].notes[2:] == (why,)


def test_noise_is_averaged_over_seeds_and_begins_without() -> None:
    study = studies.load("perturbation")
    (cell,) = study.cells(["cifar100"], ["cs10"])
    found = Measured()
    for seed in (0, 1):
        rows = [
            {"directions": directions, "sigma": sigma, "change": change, "accuracy": f"{accuracy + seed}", "commit": ""}
            | {"unperturbed": f"{40 + seed}"}
            for directions, sigma, change, accuracy in (
                ("principal", "1", "0.5", 20),
                ("principal", "2", "0.75", 10),
                ("non-principal", "1", "0", 40),
            )
        ]
        found.add("perturbation", key_of(cell, seed), rows)
    result = conclude(study, [cell], (0, 1), found, fast=False)
    (table,) = result.outcomes[0][1].sheets
    assert [row[3:] for row in table.rows] == [
        ("0 1", "non-principal", "0", "0.0000 ± 0.0000", "40.50 ± 0.71"),
        ("0 1", "non-principal", "1", "0.0000 ± 0.0000", "40.50 ± 0.71"),
        ("0 1", "principal", "0", "0.0000 ± 0.0000", "40.50 ± 0.71"),
        ("0 1", "principal", "1", "0.5000 ± 0.0000", "20.50 ± 0.71"),
        ("0 1", "principal", "2", "0.7500 ± 0.0000", "10.50 ± 0.71"),
    ]
    figures = result.outcomes[0][1].figures
    curves = {series.label: (list(series.x), list(series.y)) for series in figures["cifar100-cs10-accuracy"].series}
    assert curves["principal"] == ([0.0, 1.0, 2.0], [40.5, 20.5, 10.5])
    assert figures["cifar100-cs10-change"].limits == (0.0, 1.0)


def test_figures_say_which_of_several_runs_they_show() -> None:
    loaded = studies.load("perturbation")
    weights = {"a b": 1, "c": 2}
    variants = tuple(replace(loaded.runs[0], name=name, overrides={"efm_weight": weights[name]}) for name in weights)
    study = replace(loaded, runs=variants, read=(*loaded.read, *studies.load("spectrum").read))
    cells, found = study.cells(["cifar100"], ["cs10"]), Measured()
    noise = {"sigma": "1", "change": "0.5", "accuracy": "20", "unperturbed": "40", "commit": ""}
    for cell in cells:
        both = [{"directions": directions, **noise} for directions in ("principal", "non-principal")]
        found.add("perturbation", key_of(cell, 0), both)
        found.add("spectrum", key_of(cell, 0), [{"task": "1", "classes": "2", "values": "1 0.5 0", "commit": ""}])
    outcomes = dict(conclude(study, cells, (0,), found, fast=False).outcomes)
    labels = [series.label for series in outcomes["perturbation"].figures["cifar100-cs10-change"].series]
    assert labels == ["a b, principal", "a b, non-principal", "c, principal", "c, non-principal"]
    assert {figure.title for figure in outcomes["perturbation"].figures.values()} == {"CIFAR-100 cs10"}
    spectra = outcomes["spectrum"].figures
    assert [figure.title for figure in spectra.values()] == ["CIFAR-100 cs10, a b", "CIFAR-100 cs10, c"]
    assert list(spectra) == ["cifar100-cs10-a-b-seed0", "cifar100-cs10-c-seed0"]


def test_held_out_images_and_other_epochs_are_not_compared_with_the_paper() -> None:
    table1 = studies.load("table1")
    for settings in ({"held_out": 0.1}, {"epochs": 10}):
        study = replace(table1, settings=settings)
        result = conclude(study, study.cells(["cifar100"]), (0,), Measured(), fast=False)
        assert "paper" not in result.outcomes[0][1].sheets[0].heading
        assert ("held-out training images" in result.text()) == ("held_out" in settings)


def test_times_of_runs_that_shared_a_card_are_not_averaged_with_others() -> None:
    study = studies.load("timing")
    (cell,) = study.cells(["cifar100"], ["cs10"], ["efc"])
    found = Measured()
    for seed, beside, seconds in ((0, "1", "0.1"), (1, "5", "0.3"), (2, "5", "0.5")):
        row = {"first_epoch": "0.25", "later_epoch": seconds, "end_of_task": "", "at_a_time": beside}
        found.add("timing", key_of(cell, seed), [{**row, "hardware": "H200", "commit": ""}])
    (table,) = conclude(study, [cell], (0, 1, 2), found, fast=False).outcomes[0][1].sheets
    assert [row[3:] for row in table.rows] == [
        ("H200", "1", "0", "0.250", "0.100", "-"), ("H200", "5", "1 2", "0.250", "0.400", "-"),
    ]  # fmt: skip


def test_what_is_read_of_a_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    # The first epoch of a task also prepares kernels; the end of the first task is no end of a later one.
    for task, seconds, end in ((1, (100.0, 2.0, 4.0), 90.0), (2, (50.0, 1.0), 5.0), (3, (60.0, 3.0), 7.0)):
        for epoch, each in enumerate(seconds, start=1):
            run.append_metrics({"kind": "epoch", "task": task, "epoch": epoch, "seconds": each})
        run.append_metrics({"kind": "task", "task": task, "seconds": {"statistics": end, "evaluation": 1.0}})
    summary = {
        "A_step": 41.23456, "A_inc": 50.0, "A_step_per_task": [80.0, 41.23456], "task_mean": 42.5, "forgetting": None,
        "task_aware_A_step": 70.0, "data": "d" * 16, "stored": {"components": {"mean": 12.0, "std": 2.5}},
        "hardware": {"cpu": "a processor", "gpus": ["a card, the first", "another"]}, "execution": {"device": "cuda"},
        "commit": "0123456789", "command": "efcil run --jobs-per-gpu 5 --seed 0",
    }  # fmt: skip

    def of(name: str, **changes: Any) -> Any:
        return MEASURES[name].of(run, {**summary, **changes})

    assert of("accuracy") == [{"A_step": "41.2346", "A_inc": "50", "A_step_per_task": "80 41.2346"}]
    assert of("accuracy", A_step_per_task=None)[0]["A_step_per_task"] == ""
    assert of("tasks") == [{"task_mean": "42.5", "forgetting": "", "task_aware_A_step": "70"}]
    assert of("images") == [{"images": "d" * 16}]
    assert of("components") == [{"components": "12", "components_std": "2.5", "commit": "01234567"}]
    assert of("components", stored={}) == of("images", data=None) == []
    (timing,) = of("timing")
    assert timing == {
        "first_epoch": "3", "later_epoch": "2", "end_of_task": "6", "at_a_time": "5", "hardware": "a card, the first",
        "commit": "01234567",
    }  # fmt: skip
    assert of("timing", execution={"device": "cpu"}, command="")[0] == {
        **timing, "at_a_time": "1", "hardware": "a processor",
    }  # fmt: skip
    key = ("cifar100", "cs10", "efc", 0)
    merge_into(tmp_path / "results" / "timing.csv", "timing", {key: [timing]})
    found = Measured()
    found.read_results(tmp_path / "results")
    assert found.get("timing", key) == [timing]


def test_results_files_are_recognised_by_their_columns(tmp_path: Path) -> None:
    (tmp_path / "any.csv").write_text(
        "dataset,scenario,method,seed,A_step,A_inc,A_step_per_task,more\ncifar100,cs10,efc,2,1.50,2.50,9 1.5,x\n"
    )
    (tmp_path / "speed.csv").write_text("what,value\nstep,1\n")
    found = Measured()
    found.read_results(tmp_path)
    assert found.get("accuracy", ("cifar100", "cs10", "efc", 2)) == [accuracy(1.5, 2.5, "9 1.5")]
    assert list(found.rows) == ["accuracy"]
    (tmp_path / "any.csv").write_text("dataset,scenario,method,seed,A_step,A_inc,A_step_per_task\na,b,c,first,,,\n")
    with pytest.raises(SettingsError, match=r"any.csv cannot be read"):
        Measured().read_results(tmp_path)
    with pytest.raises(SettingsError, match="is not a folder"):
        Measured().read_results(tmp_path / "absent")


def test_what_is_no_accuracy_is_read_of_every_run_once(tmp_path: Path) -> None:
    """Of a run that is there for other classifiers alone, by the first of its rows."""
    file = tmp_path / "mine.yaml"
    rows = [
        ("lda", "efc", "lda"), ("own", "efc", "own"), ("bayes", "efc", "bayes"),
        ("ridge", "fecam", "ridge"), ("svm", "fecam", "svm"),
    ]  # fmt: skip
    runs = "".join(f"  - {{name: {name}, method: {method}, classifier: {by}}}\n" for name, method, by in rows)
    file.write_text(
        "title: Mine\nabout: tests\ndatasets: [cifar100]\nscenarios: [cs10]\nsettings: {classifier: all}\n"
        f"runs:\n{runs}read:\n  - {{reader: timing}}\n",
        encoding="utf-8",
    )
    (sheet,) = result_of(str(file), Measured()).outcomes[0][1].sheets
    assert [row[2] for row in sheet.rows] == ["own", "ridge"]


def test_classifiers_are_not_taken_for_results_of_the_method(tmp_path: Path) -> None:
    key = ("cifar100", "cs10", "efc+classifier=all", 0)
    rows = [{"classifier": name, **accuracy(40.0), "commit": "abc"} for name in ("bayes", "lda")]
    assert merge_into(tmp_path / "classifiers.csv", "classifiers", {key: rows}) == [key]
    found = Measured()
    found.read_results(tmp_path)
    assert found.rows == {"classifiers": {key: rows}}
    newer = [{**rows[0], "A_step": "41.00"}]
    assert merge_into(tmp_path / "classifiers.csv", "classifiers", {key: newer}, replace=True) == [key]
    found = Measured()
    found.read_results(tmp_path)
    assert found.rows == {"classifiers": {key: newer}}


def test_a_results_file_grows_and_keeps_what_it_has(tmp_path: Path) -> None:
    file, key = tmp_path / "components.csv", ("cifar100", "ws5", "efc+covariance=low-rank", 0)
    row = {"components": "38", "components_std": "6", "commit": "abc"}
    assert merge_into(file, "components", {key: [row]}) == [key]
    other = (*key[:3], 1)
    assert merge_into(file, "components", {key: [{**row, "components": "1"}], other: [row]}) == [other]
    found = Measured()
    found.read_results(tmp_path)
    assert found.rows["components"] == {key: [row], other: [row]}
    before = file.read_bytes()
    assert merge_into(file, "components", {key: [row]}) == []
    assert file.read_bytes() == before


def test_seeds_in_few_words() -> None:
    assert [seeds_in_words(seeds) for seeds in ((2, 0, 1), (0, 1), (0, 2, 3), (), (4,))] == [
        "0-2",
        "0 1",
        "0 2 3",
        "",
        "4",
    ]


TABLE = Sheet(
    "A_title: 100 %", ("a", "name", "x", "y", "p", "q"), (("s", "<b> & |", "1", "2", "3", "4"),), 2, 1, ("n_1",)
)


def test_a_wide_table_is_cut_after_its_names() -> None:
    assert sheet.text(TABLE).splitlines()[2:6] == [
        "s",
        "name     x  y  p  q",
        "-------------------",
        "<b> & |  1  2  3  4",
    ]
    narrow = sheet.text(TABLE, 18).splitlines()
    assert "name     x  y" in narrow
    assert "name     p  q" in narrow


def test_special_characters_stay_text() -> None:
    assert "| s | &lt;b> & \\| | 1 |" in sheet.markdown(TABLE)
    text = sheet.latex(TABLE)
    assert r"s & \textless{}b\textgreater{} \& \textbar{} & 1 & 2" in text
    assert r"\caption{A\_title: 100 \%. n\_1.}" in text
    formula = replace(TABLE, rows=(("s", "=1+1", "1", "2", "3", "4"),))
    assert "'=1+1" in sheet.comma_separated(formula)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs a LaTeX compiler")
def test_latex_compiles(tmp_path: Path) -> None:
    values = measured("table1", {("cs10", "EFC", seed): accuracy(40.0 + seed) for seed in (0, 1)})
    result = result_of("table1", values)
    text = result.outcomes[0][1].latex or ""
    page = "\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + text + sheet.latex(TABLE)
    (tmp_path / "page.tex").write_text(page + "\\end{document}\n", encoding="utf-8")
    done = subprocess.run(["pdflatex", "-interaction=nonstopmode", "page.tex"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]
