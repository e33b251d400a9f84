"""Studies as data: those of the paper are complete and valid, mistakes in one's own are sentences."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from efcil import methods, studies
from efcil.core import classifiers
from efcil.data.scenario import SCENARIOS
from efcil.errors import SettingsError
from efcil.presets import presets
from efcil.report.paper import published
from efcil.resolution import resolve
from efcil.resolution.unused import refuse_unused
from efcil.studies.study import parse

MINIMAL = {
    "title": "T",
    "about": "a",
    "datasets": ["digits"],
    "scenarios": ["cs5"],
    "runs": [{"name": "EFC", "method": "efc"}],
    "read": [{"reader": "table"}],
}
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "studies"
NUMBER = {"dataset": "digits", "scenario": "cs5", "run": "EFC", "metric": "A_step", "mean": 80, "std": 1.5}


@pytest.mark.parametrize("name", studies.names())
def test_studies_of_the_paper_are_valid(name: str) -> None:
    study = studies.load(name)
    assert set(study.datasets) <= set(presets())
    assert set(study.scenarios) <= set(SCENARIOS)
    cells = study.cells()
    assert len({(cell.dataset, cell.scenario, cell.label) for cell in cells}) == len(cells), "a run is listed twice"
    for cell in cells:
        refuse_unused([cell.settings], cell.settings.overrides)  # every setting exists, and has an effect
        fast = study.cells([cell.dataset], [cell.scenario], [cell.variant.name], fast=True)
        assert all(each.label != cell.label for each in fast), "a short schedule has a folder of its own"


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.yaml")), ids=lambda file: file.stem)
def test_studies_of_the_benchmarks_are_valid(file: Path) -> None:
    study = studies.load(str(file))
    cells = study.cells()
    read = [(cell.dataset, cell.scenario, cell.label, cell.variant.classifier) for cell in cells]
    assert len(set(read)) == len(read), "a row is listed twice"
    for cell in cells:
        refuse_unused([cell.settings], cell.settings.overrides)
        keeps = methods.get(cell.settings.method).traits(resolve(cell.settings).method).keeps
        classifiers.check(cell.variant.classifier or "own", cell.settings.method, keeps)


def test_every_number_of_the_paper_is_in_a_study() -> None:
    cells = [cell for name in studies.names() for cell in studies.load(name).cells()]
    shown = {(cell.dataset, cell.scenario, cell.plain) for cell in cells}
    assert {key[:3] for key in published()} - shown == set()
    by_table = {studies.load(name).table for name in studies.names()}
    assert {value.table for value in published().values()} <= by_table


def test_numbers_of_a_study_are_those_of_its_table() -> None:
    study = studies.load("low-rank")
    (cell,) = study.cells(["cifar100"], ["ws5"], ["90 % of the variance"])
    assert cell.label == "efc+covariance=low-rank+covariance_share=0.9"
    value = cell.published("components")
    assert value is not None
    assert (value.mean, value.std) == (11, 2)
    assert cell.published("A_inc") is None


def test_the_order_of_imagenet_is_not_part_of_what_the_paper_calls_it() -> None:
    (cell,) = studies.load("imagenet-1k").cells(None, ["cs10"], ["efc"])
    assert (cell.label, cell.plain) == ("efc", "efc")
    value = cell.published("A_step")
    assert value is not None
    assert value.mean == 42.62


def test_a_study_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    content = {**MINIMAL, "settings": {"epochs": 2}, "seeds": [3, 1], "published": [NUMBER]}
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    study = studies.load(str(file))
    assert (study.name, study.seeds, study.fast_epochs) == ("mine", (3, 1), 2), "a short one is not longer"
    (cell,) = study.cells()
    assert cell.label == "efc+epochs=2"
    value = cell.published("A_step")
    assert value is not None
    assert (value.mean, value.std) == (80.0, 1.5)


def test_a_short_schedule_is_short_whatever_the_study_says_of_epochs() -> None:
    run = {"method": "efc", "overrides": {"first_task.epochs": 2, "later.epochs": 20, "efm_weight": 3}}
    study = parse({**MINIMAL, "settings": {"first_task_epochs": 30}, "runs": [run]}, "mine", "mine.yaml")
    (cell,), (fast,) = study.cells(), study.cells(fast=True)
    assert (resolve(cell.settings).first_task.epochs, resolve(cell.settings).later.epochs) == (2, 20)
    assert (resolve(fast.settings).first_task.epochs, resolve(fast.settings).later.epochs) == (2, 5)
    assert fast.label == "efc+efm_weight=3+first_task.epochs=2+epochs=5"


def test_the_study_of_the_documentation_is_valid() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.S)
    study = parse(yaml.safe_load(example), "mine", "the page")
    labels = [cell.label for cell in study.cells()]
    assert labels == ["efc+efm_weight=1+epochs=10", "efc+epochs=10", "efc+efm_weight=100+epochs=10"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"titel": "x"}, "Unknown part 'titel'. Did you mean 'title'"),
        ({"runs": []}, "'runs' is missing"),
        ({"runs": [{"name": "x"}]}, "must name its method"),
        ({"runs": [{"method": "efc", "name": "x"}, {"method": "lwf", "name": "x"}]}, "two runs are called 'x'"),
        ({"runs": [{"method": "efc", "set": {}}]}, "Unknown part of a run 'set'"),
        ({"read": [{"reader": "tabel"}]}, "Did you mean 'table'"),
        ({"read": [{"reader": "table", "metric": "A_step"}]}, "Unknown option of table 'metric'"),
        ({"read": [{"reader": "table", "metrics": ["Astep"]}]}, "Unknown metric 'Astep'. Did you mean 'A_step'"),
        ({"read": [{"reader": "table", "metrics": "A_step"}]}, "'metrics' must be a list"),
        ({"read": [{"reader": "table", "metrics": []}]}, "'metrics' must name at least one metric"),
        ({"read": [{"reader": "table", "reconstructed": ["EFCC"]}]}, "Unknown run of the study mine: 'EFCC'"),
        ({"runs": [{"method": "efc", "scenarios": ["cs10"]}]}, "Unknown scenario of the study mine: 'cs10'"),
        ({"runs": [{"method": "efc", "datasets": ["cifar10"]}]}, "Unknown dataset of the study mine: 'cifar10'"),
        ({"runs": [{"method": "efc", "classifier": "baies"}]}, "Unknown classifier 'baies'. Did you mean 'bayes'"),
        ({"runs": [{"method": "efc", "classifier": "all"}]}, "Unknown classifier 'all'"),
        (
            {
                "runs": [{"method": "efc", "classifier": "bayes"}],
                "settings": {"classifier": "all"},
                "read": [{"reader": "table", "metrics": ["forgetting"]}],
            },
            "forgetting is recorded for a method's own classifier alone",
        ),
        ({"runs": [{"method": "efc", "classifier": "bayes"}]}, "Add 'classifier: all' to 'settings'"),
        ({"reference": "efc"}, "Unknown run of the study mine: 'efc'"),
        ({"seeds": [0, "1"]}, "'seeds' must be a list of whole numbers"),
        ({"seeds": []}, "'seeds' must be a list of whole numbers"),
        ({"settings": {"epoch": 2}}, "Unknown setting 'epoch'"),
        ({"settings": {"seed": 2}}, "must not name 'seed'"),
        ({"datasets": "digits"}, "'datasets' must be a list"),
        ({"fast_epochs": 0}, "at least 1"),
        ({"published": [{"mean": "high"}]}, "must be numbers"),
        ({"published": [{"average": 1}]}, "Unknown part of a published number 'average'"),
        ({"published": [{**NUMBER, "run": "efc"}]}, "Unknown run of the study mine: 'efc'"),
        ({"published": [{**NUMBER, "scenario": "cs10"}]}, "Unknown scenario of the study mine: 'cs10'"),
        ({"published": [{**NUMBER, "dataset": "cifar10"}]}, "Unknown dataset of the study mine: 'cifar10'"),
        ({"published": [{**NUMBER, "metric": "accuracy"}]}, "Unknown metric 'accuracy'"),
        ({"published": [NUMBER, NUMBER]}, "two numbers are published for digits cs5 EFC A_step"),
        ({"published": [{**NUMBER, "std": -1}]}, "must not be negative"),
    ],
)
def test_mistakes_in_a_study_are_named(change: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=r"The study mine\.yaml cannot be used") as caught:
        parse({**MINIMAL, **change}, "mine", "mine.yaml")
    assert words in str(caught.value)


def test_a_file_that_is_no_study(tmp_path: Path) -> None:
    for content, words in (("- a", "'name: value' lines"), ("a: [", "not valid YAML")):
        (tmp_path / "x.yaml").write_text(content, encoding="utf-8")
        with pytest.raises(SettingsError, match=words):
            studies.load(str(tmp_path / "x.yaml"))
    with pytest.raises(SettingsError, match="There is no study"):
        studies.load(str(tmp_path / "absent.yaml"))
    with pytest.raises(SettingsError, match="Did you mean 'table1'"):
        studies.load("tabel1")


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (("imagenet-1k", None, None), "dataset of the study table1"),
        ((None, "cs5", None), "scenario of the study table1"),
        ((None, None, "efc++"), "method of the study table1"),
    ],
)
def test_a_selection_must_be_part_of_the_study(chosen: tuple[str | None, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        studies.load("table1").cells(*([each] if each else None for each in chosen))


def test_fusion_is_in_the_paper_for_warm_starts_alone() -> None:
    cells = studies.load("table1").cells(["cifar100"], methods=["fusion"])
    assert [cell.scenario for cell in cells] == ["ws10", "ws20"]
