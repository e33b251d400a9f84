"""The scripts that make the published tables: what they gather, what they find missing."""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from efcil import presets, studies
from efcil.cli import main
from efcil.runfolder import AGNOSTIC, AWARE, RunFolder
from efcil.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import collect  # noqa: E402
import other_images  # noqa: E402
import reproduce  # noqa: E402

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
        "--reproduce",
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
    table = (tmp_path / "variants.md").read_text(encoding="utf-8")
    assert "| digits | cs5 | fetril+epochs=1 | 0 1 |" in table


def test_a_row_has_what_the_accuracies_of_its_run_give(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = gather(runs, tmp_path, monkeypatch)["variants"][1]
    (file,) = runs.glob("**/fetril+epochs=1/seed1/accuracy.csv")
    with open(file, newline="", encoding="utf-8") as stream:
        lines = list(csv.reader(stream))
    seen, told = (
        [[float(v) for v in values if v] for kind, _, *values in lines if kind == each] for each in (AGNOSTIC, AWARE)
    )
    steps, alone = ([sum(each) / len(each) for each in matrix] for matrix in (seen, told))  # tasks of equal size
    lost = [max(line[task] for line in seen[task:-1]) - seen[-1][task] for task in range(4)]
    expected = {
        "A_step": steps[-1],
        "A_inc": sum(steps) / 5,
        "task_mean": steps[-1],
        "forgetting": sum(lost) / 4,
        "task_aware_A_step": alone[-1],
    }
    assert {name: row[name] for name in expected} == {name: f"{value:.2f}" for name, value in expected.items()}
    assert row["A_step_per_task"] == " ".join(f"{value:.2f}" for value in steps)


def test_a_run_whose_files_do_not_agree_is_left_out(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(runs, tmp_path / "runs")
    (file,) = copy.glob("**/fetril+epochs=1/seed1/summary.json")
    run = RunFolder(file.parent)
    summary = run.read_summary()
    run.write_summary({**summary, "A_inc": summary["A_inc"] + 1})
    found = gather(copy, tmp_path, monkeypatch)["variants"]
    assert [(row["method"], row["seed"]) for row in found] == [
        ("fetril+epochs=1", "0"), ("fetril+similarity=cosine+epochs=1", "0"),
    ]  # fmt: skip
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert len(said) == 1
    assert "its A_inc is not what accuracy.csv gives" in said[0]


def test_a_row_has_all_commits_that_made_it(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copytree(runs, tmp_path / "runs")
    for file in copy.rglob("summary.json"):
        run = RunFolder(file.parent)
        commits = {"commit": "two", "uncommitted_changes": True, "earlier_commits": ["one"]}
        run.write_summary({**run.read_summary(), **commits})
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
    for name in collect.TITLES.values():
        collect.fill_pages(tmp_path, collect.read(collect.RESULTS / f"{name}.csv"))
    for page in collect.PAGES.glob("*.md"):
        assert (tmp_path / page.name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    for name in [name for name in (*collect.TITLES.values(), "variants") if (collect.RESULTS / f"{name}.csv").exists()]:
        expected = collect.markdown(collect.read(collect.RESULTS / f"{name}.csv"))
        assert (collect.RESULTS / f"{name}.md").read_text(encoding="utf-8") == expected


@pytest.mark.parametrize("name", ["cifar100", "variants"])
def test_published_rows_agree_with_themselves(name: str) -> None:
    """The accuracy after the last task is A_step, and the mean over tasks A_inc; both have two digits."""
    rows = collect.read(collect.RESULTS / f"{name}.csv")
    whole = [row for row in rows if row["A_inc"] and row["A_step_per_task"]]
    assert len(whole) > len(rows) / 2
    for row in whole:
        steps = [float(word) for word in row["A_step_per_task"].split()]
        found = (float(row["A_step"]), float(row["A_inc"]))
        assert found == pytest.approx((steps[-1], sum(steps) / len(steps)), abs=0.0101), row
        assert float(row["task_aware_A_step"]) >= float(row["A_step"]), row
    keys = [tuple(row[column] for column in collect.KEY) for row in rows]
    assert len(set(keys)) == len(keys)


def test_the_readme_shows_six_rows() -> None:
    lines = collect.README.read_text(encoding="utf-8").splitlines()
    start = lines.index(collect.HEAD) + 2
    assert [line.startswith("|") for line in lines[start : start + 7]] == [True] * 6 + [False]


def test_the_table_has_the_best_first(tmp_path: Path) -> None:
    table = tmp_path / "results.md"
    table.write_text(f"# x\n\n{collect.HEAD}\n|---|\n| old |\n\nafter\n", encoding="utf-8")
    joint = [{**row, "A_step": "90", "A_inc": ""} for row in rows("joint", 0)]
    collect.fill_table(table, rows("ewc", 0) + joint + rows("efc++", 10, 9))
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[4:] == [
        "| cs10 | joint training | 0 | 90.00 | | - | |",
        "| cs10 | EFC++ | 9 10 | 49.50 ± 0.71 | 47.52 ± 0.68 | 50.00 ± 0.00 | 61.57 |",
        "| cs10 | EWC | 0 | 40.00 | 31.17 ± 2.94 | 50.00 | 49.14 ± 1.28 |",
        "",
        "after",
    ]


def test_new_rows_reach_the_results_and_all_pages(tmp_path: Path) -> None:
    table = f"# x\n\n{collect.HEAD}\n|---|\n| old |\n\nafter\n"
    for name, text in (("readme.md", table), ("table.md", table), ("pages/lwf.md", PAGE)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    options = argparse.Namespace(
        results=tmp_path / "results", pages=tmp_path / "pages", table=tmp_path / "table.md",
        readme=tmp_path / "readme.md", replace=False,
    )  # fmt: skip
    for seed in (1, 0):
        collect.fill_all({"cifar100": [full(row) for row in rows("lwf", seed) + rows("efc", seed)]}, options)
    assert [(row["method"], row["seed"]) for row in collect.read(options.results / "cifar100.csv")] == [
        ("efc", "0"), ("efc", "1"), ("lwf", "0"), ("lwf", "1"),
    ]  # fmt: skip
    reached = "40.50 ± 0.71"
    assert f"| CIFAR-100 | cs10 | 1.00 ± 0.50 | {reached} (2 seeds) |" in (options.pages / "lwf.md").read_text("utf-8")
    assert options.table.read_text("utf-8").count(f"| 0 1 | {reached} |") == 2
    assert options.readme.read_text("utf-8").count(f"| 0 1 | {reached} |") == 1, "it shows EFC, not LwF"
    assert (options.results / "cifar100.md").read_text("utf-8").count(f"| 0 1 | {reached} |") == 2


def test_what_was_not_measured_is_no_number() -> None:
    assert [collect.number(value) for value in (None, float("nan"), 0.0, 12.345678)] == ["", "", "0.00", "12.35"]


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
            "efcil paper table1 --data /a --jobs-per-gpu 5",
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


def test_what_the_results_have_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What complete.py did before: the table of the paper, without the runs that results files hold."""
    collect.write(tmp_path / "cifar100.csv", [full(row) for row in rows("pass", 0) + rows("fetril", 0, 1, 2, 3, 4)])
    command = f"paper table1 --scenario cs10 --results {tmp_path} --output {tmp_path / 'runs'} --dry-run"
    assert main(command.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    planned = [line.partition("  ")[0].removeprefix("cifar100 cs10: ") for line in lines if "to do" in line]
    assert planned == ["EWC, seeds 0-4", "LwF, seeds 0-4", "PASS, seeds 1-4", "SSRE, seeds 0-4", "EFC, seeds 0-4"]
    assert "30 runs: 6 done, 24 to train." in " ".join(lines)


def full(row: dict[str, str]) -> dict[str, str]:
    return {**dict.fromkeys(collect.COLUMNS, ""), **row}


@pytest.mark.parametrize(
    ("dataset", "method", "file"),
    [
        ("tiny-imagenet", "efc", "tiny-imagenet"),
        ("tiny-imagenet", "efc++", "tiny-imagenet"),
        ("tiny-imagenet", "efc+network=efficientnet-lite0+epochs=3", "variants"),
        ("cifar100", "efc+prototype_update=none", "variants"),
    ],
)
def test_every_dataset_has_a_file(dataset: str, method: str, file: str) -> None:
    assert collect.file_of({"dataset": dataset, "method": method}) == file


def test_ablations_are_compared_with_their_own_numbers() -> None:
    for method, step, average in (
        ("efc+prototype_update=none", "39.28 ± 0.97", ""),
        ("efc+covariance=task", "45.26 ± 0.62", "60.11 ± 0.85"),
        ("efc+covariance=last-task", "43.72 ± 0.38", "59.46 ± 0.99"),
        ("efc+loss=symmetric", "", ""),
        ("efc+regulariser=features", "", ""),
        ("efc+loss=symmetric+regulariser=features", "", ""),
        # Another path and another reading are compared with the plain method.
        ("efc+precision=tf32+path=plain", "43.62 ± 0.70", "58.58 ± 0.91"),
        ("ewc+weight=5000", "31.17 ± 2.94", "49.14 ± 1.28"),
        ("efc+network=efficientnet-lite0+epochs=3", "", ""),
    ):
        cells = collect.markdown(rows(method, 0)).splitlines()[2].split(" | ")
        assert (cells[5], cells[7]) == (step, average), method


def test_held_out_results_have_a_table_of_their_own() -> None:
    text = collect.markdown([*rows("efc+epochs=3", 0), *rows("efc+held_out=0.1", 0), *rows("lwf+epochs=3", 0)])
    tested, _, held_out = text.partition("On held-out training images")
    assert "| efc+epochs=3 |" in tested
    assert "| lwf+epochs=3 |" in tested
    assert "held_out=" not in tested
    lines = [line for line in held_out.splitlines() if line.startswith("| cifar100")]
    assert [line.split(" | ")[2] for line in lines] == ["efc+held_out=0.1"]
    assert "held-out" not in collect.markdown(rows("efc", 0))


def test_all_ablations_of_the_paper_have_labels_that_are_known() -> None:
    labels = {cell.label for name in studies.names() for cell in studies.load(name).cells(None)}
    assert {name for name in labels if name.startswith("efc+") and "class_order" not in name} <= collect.ablations()
    assert "efc+covariance=low-rank+covariance_share=0.9" in collect.ablations()


def test_what_studies_read_gets_files_of_its_own(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("digits", "cs5", "fetril+epochs=1", 1)
    monkeypatch.setattr(collect, "wanted_measures", lambda: {"timing": {key}, "spectrum": {key}, "perturbation": {key}})
    noise = "dataset,scenario,method,seed,directions,sigma,change,accuracy,unperturbed,commit\n"
    folder = tmp_path / "runs" / "paper" / "perturbation"
    folder.mkdir(parents=True)
    line = ",".join([*map(str, key), "principal", "0.5", "0.3", "40.0", "60.0", "abc"])
    (folder / "measured-perturbation.csv").write_text(noise + line + "\n", encoding="utf-8")
    shutil.copytree(runs, tmp_path / "runs", dirs_exist_ok=True)
    found = gather(tmp_path / "runs", tmp_path, monkeypatch)
    assert [row["seed"] for row in found["timing"]] == ["1"]
    assert found["timing"][0]["at_a_time"] == "1"
    assert [row["directions"] for row in found["perturbation"]] == ["principal"]
    assert "spectrum" not in found, "that method has no feature matrix"
    assert "added to timing.csv: cs5 fetril+epochs=1 1" in capsys.readouterr().out
    before = (tmp_path / "timing.csv").read_bytes()
    gather(tmp_path / "runs", tmp_path, monkeypatch)
    assert (tmp_path / "timing.csv").read_bytes() == before


def test_classifiers_beside_the_methods_own_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ["run", "--scenario", "cs5", "--epochs", "1", "--device", "cpu", "--quiet", "--output", str(tmp_path / "a")]
    assert main([*short, "--method", "fetril", "--classifier", "all"]) == 0
    assert main([*short, "--method", "fetril"]) == 0
    summary = json.loads(next((tmp_path / "a").glob("**/*all*/seed0/summary.json")).read_text())
    found = gather(tmp_path / "a", tmp_path / "results", monkeypatch)
    kept = found["classifiers"]
    assert {row["method"] for row in kept} == {"fetril+classifier=all+epochs=1"}
    assert {row["classifier"]: row["A_step"] for row in kept} == {
        name: f"{each['A_step']:.4f}".rstrip("0").rstrip(".") for name, each in summary["classifiers"].items()
    }
    assert len(found["variants"]) == 2, "a row for every run, as before"
    before = (tmp_path / "results" / "classifiers.csv").read_bytes()
    gather(tmp_path / "a", tmp_path / "results", monkeypatch)
    assert (tmp_path / "results" / "classifiers.csv").read_bytes() == before


def test_the_page_of_the_paper_is_up_to_date() -> None:
    """`python benchmarks/collect.py` fills it."""
    page = reproduce.PAGE.read_text(encoding="utf-8")
    text, figures = reproduce.filled(page)
    assert text == page
    for name, figure in figures.items():
        assert reproduce.drawn_from(reproduce.PAGE.parent / name) == reproduce.digest(figure), name
    drawn = {f"{reproduce.IMAGES}/{file.name}" for file in (reproduce.PAGE.parent / reproduce.IMAGES).iterdir()}
    assert drawn == set(figures)


def test_the_page_of_the_paper_grows_with_the_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "docs" / "reproduce.md"
    page.parent.mkdir()
    parts = [(f"<!-- {each} -->", f"<!-- end of {each} -->") for each in (reproduce.MISSING, reproduce.SECTIONS)]
    page.write_text("# x\n\n" + "\n".join(line for pair in parts for line in pair) + "\nafter\n", encoding="utf-8")
    results = tmp_path / "results"
    known = [{**full(row), "A_step_per_task": "80 40"} for row in rows("efc", 0, 1)]
    collect.write(results / "cifar100.csv", known)
    reproduce.fill(page, results)
    first = page.read_text(encoding="utf-8")
    assert "CIFAR-100 ws10 ws20 cs20 of EFC" in first
    compared_with_the_paper = "| cs10 | EFC | 0 1 | 40.50 ± 0.71 | 43.62 ± 0.70 | -3.12 | no |"
    assert compared_with_the_paper in first, "one row is enough beside the paper's numbers"
    assert "| cs10 | EFC | 0 1 | 80.00" not in first, "one curve is no comparison"
    assert "with update (EFC)" not in first.split(reproduce.SECTIONS)[1], "nor is one row of an ablation"
    assert "Fusion is a reconstruction" not in first, "it is not in the table"
    lwf = [{**full(row), "A_step_per_task": "80 40"} for row in rows("lwf", 0)]
    collect.write(results / "cifar100.csv", known + lwf)
    reproduce.fill(page, results)
    second = page.read_text(encoding="utf-8")
    assert compared_with_the_paper in second
    assert "| cs10 | EFC | 0 1 | 80.00" in second
    assert "| cs10 | LwF | 0 | 40.00 | 32.80 ± 3.08 | +7.20 | no |" in second
    assert second.startswith("# x\n")
    assert second.endswith("after\n")
    figure = page.parent / reproduce.IMAGES / "curves-cifar100-cs10.svg"
    assert figure.exists()
    before = figure.stat().st_mtime_ns
    reproduce.fill(page, results)
    assert figure.stat().st_mtime_ns == before
    collect.write(results / "cifar100.csv", known)
    reproduce.fill(page, results)
    assert not figure.exists()
    assert page.read_text(encoding="utf-8") == first


def test_images_that_are_tested_are_not_learned() -> None:
    ((_, *visits),) = other_images.cases(None)
    assert [sorted(set(each.labels))[0] for each in visits] == ["digit-0", "digit-5"]
    images = other_images.Images(range(25), ["a"] * 10 + ["b"] * 15)
    learned, tested = images.split(0)
    assert sorted([*learned.images, *tested.images]) == list(images.images)
    assert [tested.labels.count(label) for label in "ab"] == [2, 3]
    assert images.split(0)[1] == tested != images.split(1)[1]


def test_two_visits_are_measured_apart() -> None:
    found = other_images.digits()
    visits = [found.of(["digit-0", "digit-1"]), found.of(["digit-7"])]
    way = {"method": "fecam", "network": "slim", "weights": "none", "epochs": 2, "image_size": 8, "device": "cpu"}
    first, second, seconds = other_images.measure(visits, 0, way)
    assert first > 50
    assert 0 <= second <= 100
    assert seconds > 0
