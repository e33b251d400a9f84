"""The report in headless Chromium: sorted, switched, hovered and printed, without an error; names stay text."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from efcil.report import write_page
from efcil.runfolder import RunFolder, find_runs

sys.path.append(str(Path(__file__).resolve().parents[1] / "serve"))
from webdriver_client import Browser, missing

if (reason := missing()) is not None:
    pytest.skip(reason, allow_module_level=True)

HOSTILE = "<script>document.title = 'owned'</script>"
#: Label and the accuracies of a first seed; a second one has two points more.
RUNS = {
    "efc": [90.0, 80.0, 50.0],
    "lwf": [95.0, 60.0, 30.0],
    "joint": [math.nan, math.nan, 70.0],
    HOSTILE: [80.0, 70.0, 60.0],
}


def write_run(root: Path, name: str, seed: int, steps: list[float]) -> None:
    run = RunFolder(root / f"{sorted(RUNS).index(name)}" / f"seed{seed}")
    shown = [value + 2 * seed for value in steps]
    whole = not any(map(math.isnan, shown))
    summary: dict[str, Any] = {
        "method": name, "label": name, "dataset": "cifar100", "scenario": "cs10", "seed": seed, "A_step": shown[-1],
        "A_inc": sum(shown) / 3 if whole else None, "A_step_per_task": shown, "forgetting": 10.0 + len(name) % 7,
        "seconds": {"total": 10.0 * len(name)}, "stored": {"bytes": 1000 * len(name)}, "command": f"efcil {name}",
    }  # fmt: skip
    matrix = [[shown[row] if column <= row else math.nan for column in range(3)] for row in range(3)]
    run.write_accuracy(matrix, matrix, [1, 1, 1])
    for epoch in range(6):
        run.append_metrics(
            {"kind": "epoch", "task": epoch // 2 + 1, "epoch": 1, "losses": {"current": 1.0 / (epoch + 1)}}
        )
    run.write_summary(summary)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("report")
    for name, steps in RUNS.items():
        for seed in (0, 1):
            write_run(root / "runs", name, seed, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "verified_summary", RunFolder.read_summary)
        write_page(find_runs([root / "runs"]), root / "report.html")
        write_page(find_runs([root / "runs"]), root / "compared.html", reference="lwf")
    return (root / "report.html").as_uri()


@pytest.fixture
def browser(page: str) -> Iterator[Browser]:
    with Browser() as driven:
        driven.open(page)
        yield driven
        assert driven.complaints() == []
        assert driven.run("return document.title") != "owned"


def column(browser: Browser, heading: str) -> list[str]:
    """Return the first numbers in the visible cells of a column of the overview, from top to bottom."""
    return browser.run(
        "const table = document.querySelector('table.overview');"
        "const place = [...table.tHead.rows[0].cells].findIndex((each) => each.innerText.trim() === arguments[0]);"
        "return [...table.tBodies[0].rows].map((row) => row.cells[place].innerText.split(' ±')[0].trim())",
        heading,
    )


def visible(browser: Browser) -> list[str]:
    """Return the captions of the charts that are shown."""
    return browser.run(
        "return [...document.querySelectorAll('.charts > figure')].filter((each) => each.offsetParent !== null)"
        ".map((each) => each.querySelector('figcaption').innerText)"
    )


def press(browser: Browser, heading: str) -> None:
    browser.run(
        "[...document.querySelectorAll('.overview th button')].find((each) => each.innerText === arguments[0]).click()",
        heading,
    )


def test_columns_are_sorted(browser: Browser) -> None:
    assert column(browser, "method") == [HOSTILE, "efc", "joint", "lwf"]
    press(browser, "A_step")
    assert column(browser, "A_step") == ["71.00", "61.00", "51.00", "31.00"]
    press(browser, "A_step")
    assert column(browser, "A_step") == ["31.00", "51.00", "61.00", "71.00"]
    assert browser.run("return document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"
    press(browser, "A_inc")  # joint training has none, which is neither the most nor the least
    assert column(browser, "A_inc") == ["74.33", "71.00", "62.67", ""]
    press(browser, "A_inc")
    assert column(browser, "A_inc") == ["62.67", "71.00", "74.33", ""]
    press(browser, "method")
    assert column(browser, "method") == [HOSTILE, "efc", "joint", "lwf"]


def test_differences_are_sorted_and_switched_off_with_their_rows(browser: Browser, page: str, tmp_path: Path) -> None:
    browser.open(page.replace("report.html", "compared.html"))
    rows = "[...document.querySelectorAll('.differences tbody tr')]"
    cells = f"return {rows}.map((row) => row.innerText.split('\\t').map((each) => each.trim()).slice(0, 3))"
    assert browser.run(cells) == [
        [HOSTILE, "0 1", "+30.00 ± 0.00"],
        ["efc", "0 1", "+20.00 ± 0.00"],
        ["joint", "0 1", "+40.00 ± 0.00"],
    ]
    browser.run("document.querySelector('.differences th[data-column=A_step] button').click()")
    assert [row[2] for row in browser.run(cells)] == ["+40.00 ± 0.00", "+30.00 ± 0.00", "+20.00 ± 0.00"]
    browser.run("document.querySelector('input[value=g0r1]').click()")
    off = f"return {rows}.filter((row) => row.classList.contains('off')).map((row) => row.dataset.row)"
    assert browser.run(off) == ["g0r1"]
    for width in (390, 1400):
        browser.screenshot(tmp_path / "page.png", width)
        assert browser.run("return document.documentElement.scrollWidth") == width, "nothing is wider than the screen"


def test_the_metric_is_switched_and_values_are_read(browser: Browser) -> None:
    shown = visible(browser)
    assert shown[0] == "A_step after every task"
    assert "A_step against time" in shown
    browser.run("document.getElementById('metric-A_inc').click()")
    shown = visible(browser)
    assert shown[0] == "A_inc after every task"
    assert "A_inc against storage" in shown
    assert not [caption for caption in shown if caption.startswith("A_step")]
    # The first chart with the pointer over its last task: the mean of two seeds, and one deviation to both sides.
    said = browser.run(
        "const figure = [...document.querySelectorAll('.charts > figure')].find((each) => each.offsetParent !== null);"
        "const box = figure.querySelector('svg').getBoundingClientRect();"
        "figure.querySelector('.canvas').dispatchEvent(new PointerEvent('pointermove',"
        "  {clientX: box.right - 20, clientY: box.top + 40, bubbles: true}));"
        "return document.getElementById('tip').innerText"
    )
    assert said.splitlines()[0] == "task 3"
    assert "efc\t74.33 (72.92 to 75.75)" in said
    assert HOSTILE in said
    assert "joint" not in said


def test_a_chart_is_read_with_the_keyboard(browser: Browser) -> None:
    browser.run("document.querySelector('.charts .canvas').focus()")
    browser.type(".charts .canvas", "\ue014")  # arrow to the right
    assert browser.text("#tip").splitlines()[0] == "task 1"
    browser.type(".charts .canvas", "\ue010")  # end
    assert browser.text("#tip").splitlines()[0] == "task 3"
    browser.type(".charts .canvas", "\ue00c")  # escape
    assert browser.run("return document.getElementById('tip').hidden")


def best(browser: Browser) -> list[str]:
    return browser.run(
        "return ['best', 'second'].map((name) => document.querySelector(`td[data-column=A_step].${name}`)"
        ".closest('tr').cells[0].innerText.trim())"
    )


def test_a_run_is_switched_off(browser: Browser) -> None:
    assert best(browser) == [HOSTILE, "efc"]
    keys = "[...document.querySelectorAll('[data-key=g0r0]')]"
    assert browser.run(f"return {keys}.length") > 5
    browser.click("input[value=g0r0]")
    assert browser.run(f"return {keys}.filter((each) => getComputedStyle(each).display !== 'none').length") == 0
    assert best(browser) == ["efc", "lwf"], "joint training does not compete"
    browser.click("input[value=g0r0]")
    assert browser.run(f"return {keys}.filter((each) => getComputedStyle(each).display === 'none').length") == 0
    assert best(browser) == [HOSTILE, "efc"]


def test_a_row_leads_to_what_it_was_made_with(browser: Browser) -> None:
    browser.click("tr[data-row=g0r1] a")
    browser.wait("return document.querySelector('details#g0r1').open")
    assert "efcil efc" in browser.text("details#g0r1 .made")


@pytest.mark.parametrize("width", [390, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_widths_light_and_dark(browser: Browser, tmp_path: Path, width: int, dark: bool) -> None:
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    browser.screenshot(tmp_path / "page.png", width, dark)
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert browser.run("return document.documentElement.scrollWidth") == width, "nothing is wider than the screen"
    ink, paper = browser.run(
        "const style = getComputedStyle(document.body);"
        "return [style.color, style.backgroundColor].map((each) => +each.match(/\\d+/)[0])"
    )
    assert (ink > paper) == dark
    smallest = browser.run(
        "return Math.min(...[...document.querySelectorAll('.charts:not(.small) svg text')]"
        ".filter((each) => each.getBoundingClientRect().width).map((each) =>"
        "  parseFloat(getComputedStyle(each).fontSize) * each.ownerSVGElement.getScreenCTM().a))"
    )
    assert smallest > 8.5, "text in charts can be read"
    lane, words = browser.run(
        "return ['.overview.full td.lane', '.of-lanes']"
        ".map((each) => document.querySelector(each).getBoundingClientRect().width > 0)"
    )
    assert lane == words == (width == 1400), "words about the scale stand where there is one"


def test_without_javascript_everything_is_there(page: str) -> None:
    with Browser() as browser:
        browser.command("Emulation.setScriptExecutionDisabled", value=True)
        browser.open(page)
        browser.command("Emulation.setScriptExecutionDisabled", value=False)  # for the questions below
        assert browser.run("return document.querySelector('th button')") is None
        assert column(browser, "A_step") == ["61.00", "51.00", "71.00", "31.00"]
        assert len(visible(browser)) >= 5
        browser.run("document.getElementById('metric-A_inc').click()")  # switched by the style alone
        assert visible(browser)[0] == "A_inc after every task"
