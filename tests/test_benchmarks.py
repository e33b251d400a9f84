"""The scripts that make the published tables: what they gather, what they find missing."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from efcil import presets
from efcil.cli import main
from efcil.resolution import label
from efcil.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import collect  # noqa: E402
import complete  # noqa: E402

PAGE = """# Fine-tuning

| dataset | scenario | published A_step | ours | published A_inc | ours |
| --- | --- | --- | --- | --- | --- |
| CIFAR-100 | cs10 | 1.00 ± 0.50 | 7.00 (1 seed) | 2.00 ± 0.50 | 8.00 (1 seed) |

After.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one row of a table, and a variant."""
    folder = tmp_path_factory.mktemp("runs")
    short = ["run", "--scenario", "cs5", "--epochs", "1", "--device", "cpu", "--quiet", "--output", str(folder)]
    assert main([*short, "--method", "fetril", "--seed", "0", "1"]) == 0
    assert main([*short, "--method", "fetril", "--set", "similarity=cosine"]) == 0
    return folder


def gather(runs: Path, results: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> dict[str, list[dict[str, str]]]:
    pages = results / "pages"
    pages.mkdir(parents=True, exist_ok=True)
    places = [
        "--results",
        str(results),
        "--pages",
        str(pages),
        "--readme",
        str(results / "README.md"),
        "--table",
        "none",
    ]
    monkeypatch.setattr(sys, "argv", ["collect.py", str(runs), *places, *flags])
    collect.main()
    found = {}
    for path in results.glob("*.csv"):
        with open(path, newline="", encoding="utf-8") as stream:
            found[path.stem] = list(csv.DictReader(stream))
    return found


def test_runs_become_rows(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = gather(runs, tmp_path, monkeypatch)
    # One epoch is not the preset's number: all three are variants.
    assert [(row["method"], row["seed"]) for row in found["variants"]] == [
        ("fetril+epochs=1", "0"), ("fetril+epochs=1", "1"), ("fetril+similarity=cosine+epochs=1", "0"),
    ]  # fmt: skip
    row = found["variants"][0]
    assert (row["dataset"], row["scenario"], row["precision"]) == ("digits", "cs5", "fp32")
    assert row["A_step_per_task"].split()[-1] == row["A_step"]
    table = (tmp_path / "variants.md").read_text(encoding="utf-8")
    assert "| digits | cs5 | fetril+epochs=1 | 0 1 |" in table


def test_a_row_has_all_commits_that_made_it(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(runs, tmp_path / "runs")
    for file in copy.rglob("summary.json"):
        summary = json.loads(file.read_text(encoding="utf-8"))
        summary |= {"commit": "two", "uncommitted_changes": True, "earlier_commits": ["one"]}
        file.write_text(json.dumps(summary), encoding="utf-8")
    assert {row["commit"] for row in gather(copy, tmp_path, monkeypatch)["variants"]} == {"one two+changes"}


def test_a_row_stays_unless_it_is_to_be_replaced(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gather(runs, tmp_path, monkeypatch)["variants"]
    older = [{**row, "A_step": "1.00"} for row in before]
    collect.write(tmp_path / "variants.csv", older)
    assert gather(runs, tmp_path, monkeypatch)["variants"] == older
    assert gather(runs, tmp_path, monkeypatch, "--replace")["variants"] == before


def test_rows_are_called_what_they_would_be_called_today(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = presets.load_preset("digits")
    changed = replace(digits, methods={"fetril": {"similarity": "cosine"}})
    monkeypatch.setattr(presets, "load_preset", lambda dataset: changed)
    found = gather(runs, tmp_path, monkeypatch)["variants"]
    assert {row["method"] for row in found} == {"fetril+similarity=euclidean+epochs=1", "fetril+epochs=1"}


def rows(method: str, *seeds: int, scenario: str = "cs10", seconds: float = 100.0) -> list[dict[str, str]]:
    fixed = {"dataset": "cifar100", "scenario": scenario, "method": method, "seconds": str(seconds)}
    return [{**fixed, "seed": str(seed), "A_step": f"{40 + seed}", "A_inc": "50"} for seed in seeds]


def test_pages_get_the_mean_of_their_method_alone(tmp_path: Path) -> None:
    page = tmp_path / "finetune.md"
    page.write_text(PAGE, encoding="utf-8")
    collect.fill_pages(tmp_path, rows("finetune", 0, 2) + rows("efc", 1))
    assert page.read_text(encoding="utf-8").splitlines()[4:] == [
        "| CIFAR-100 | cs10 | 1.00 ± 0.50 | 41.00 ± 1.41 (2 seeds) | 2.00 ± 0.50 | 50.00 ± 0.00 (2 seeds) |",
        "",
        "After.",
    ]


@pytest.mark.parametrize("end", ["\nAfter.\n", ""])
def test_pages_get_a_row_for_a_scenario_that_is_new(tmp_path: Path, end: str) -> None:
    page = tmp_path / "lwf.md"
    page.write_text(PAGE.replace("\nAfter.\n", end), encoding="utf-8")
    collect.fill_pages(tmp_path, rows("lwf", 0, scenario="ws10"))
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[4] == PAGE.splitlines()[4]
    assert lines[5] == "| CIFAR-100 | ws10 | 20.73 ± 1.47 | 40.00 (1 seed) | 41.95 ± 1.30 | 50.00 (1 seed) |"
    assert "\n".join(lines[6:]) == end.rstrip("\n")


def test_the_readme_and_the_pages_say_what_was_measured(tmp_path: Path) -> None:
    """Whoever adds a row by hand forgets one of the places that tell of it."""
    measured = collect.read(collect.RESULTS / "cifar100.csv")
    for page, shown in ((collect.README, collect.in_readme(measured)), (collect.TABLE, measured)):
        copy = tmp_path / page.name
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
        collect.fill_table(copy, shown)
        assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    for page in collect.PAGES.glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    collect.fill_pages(tmp_path, measured)
    for page in collect.PAGES.glob("*.md"):
        assert (tmp_path / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    for name in ("cifar100", "variants"):
        expected = collect.markdown(collect.read(collect.RESULTS / f"{name}.csv"))
        assert (collect.RESULTS / f"{name}.md").read_text(encoding="utf-8") == expected


def test_the_readme_shows_six_rows() -> None:
    lines = collect.README.read_text(encoding="utf-8").splitlines()
    start = lines.index(collect.HEAD) + 2
    assert [line.startswith("|") for line in lines[start : start + 7]] == [True] * 6 + [False]


def test_the_table_has_the_best_first(tmp_path: Path) -> None:
    table = tmp_path / "results.md"
    table.write_text(f"# x\n\n{collect.HEAD}\n|---|\n| old |\n\nafter\n", encoding="utf-8")
    joint = [{**row, "A_step": "90", "A_inc": ""} for row in rows("joint", 0)]
    collect.fill_table(table, rows("ewc", 0) + joint + rows("efc++", 3, 1))
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[4:] == [
        "| cs10 | joint training | 0 | 90.00 | | - | |",
        "| cs10 | EFC++ | 1 3 | 42.00 ± 1.41 | 47.52 ± 0.68 | 50.00 ± 0.00 | 61.57 |",
        "| cs10 | EWC | 0 | 40.00 | 31.17 ± 2.94 | 50.00 | 49.14 ± 1.28 |",
        "",
        "after",
    ]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("efc", "efc"), ("efc++", "efc++"), ("efc+++epochs=1", "efc++"), ("ewc+first_task.rotations=false", "ewc")],
)
def test_variants_are_told_from_methods(name: str, plain: str) -> None:
    assert collect.plain_name(name) == plain
    expected = "cifar100" if name == plain else "variants"
    assert collect.file_of({"dataset": "cifar100", "method": name}) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("efcil run --data /a --seed 0 1 --output /b --quiet", "efcil run --data DATA --seed 0 1 --output runs"),
        (
            "complete.py --data /a",
            "efcil run --method ewc --dataset cifar100 --scenario cs10 --seed 2 --data DATA --set fisher_batch_size=1",
        ),
    ],
)
def test_commands_can_be_given_elsewhere(given: str, expected: str) -> None:
    overrides = {"fisher_batch_size": 1}
    settings = Settings(
        method="ewc", dataset="cifar100", scenario="cs10", seed=2, data="/a", overrides=overrides, device="auto"
    )
    assert collect.command_of(given, settings) == expected


def test_what_is_missing_comes_longest_first() -> None:
    known = rows("pass", 0, seconds=700) + rows("lwf", 0, 1, seconds=400) + rows("fetril", 0, 1, 2, seconds=50)
    found = [(each.scenario, label(each), each.seed) for each in complete.missing(known, None)]
    assert len(found) == len(set(found)) == len(list(complete.table())) - len(known)
    assert not {("cs10", "fetril", seed) for seed in range(3)} & set(found)
    after = [each for each in found if each[1] in ("pass", "lwf", "fetril")]
    assert [name for _, name, _ in after] == ["pass"] * 11 + ["lwf"] * 10 + ["fetril"] * 9
    assert found.index(("cs10", "joint", 0)) < found.index(("cs10", "pass", 1))
