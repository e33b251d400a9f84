"""Figures: where the numbers lie, what is cut, and the files that are written."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from efcil.errors import SettingsError
from efcil.report import Figure, HeatMap, Reference, Series, write_figure
from efcil.report.export import slug
from efcil.report.figure import COLOURS, band, log_ticks, number, shape, style, ticks
from efcil.report.svg import BOTTOM, HEIGHT, LEFT, MOST_CELLS, MOST_POINTS, NOTHING, RIGHT, TOP, WIDTH, chart_data, draw


def chart(*series: Series, **options: object) -> Figure:
    return Figure("title", "x", "y", tuple(series), **options)  # type: ignore[arg-type]


def drawn(figure: Figure | HeatMap) -> ElementTree.Element:
    return ElementTree.fromstring(draw(figure))


def path_of(figure: Figure) -> str:
    return next(each for each in drawn(figure).iter("path") if each.get("class") == "line").get("d") or ""


def test_a_line_has_a_gap_where_nothing_was_measured() -> None:
    path = path_of(chart(Series("a", [1, 2, 3, 4], [1.0, math.nan, 2.0, 3.0])))
    assert [part[0] for part in re.findall(r"[ML][^ML]+", path)] == ["M", "M", "L"]
    assert draw(chart(Series("a", [1, 2], [math.nan, math.nan]))) == NOTHING
    assert chart_data(chart(Series("a", [1, 2], [math.nan, math.nan]))) is None


def test_numbers_beyond_all_bounds_are_not_drawn() -> None:
    assert draw(chart(Series("a", [1, 2], [1e308, -1e308]))) == NOTHING


def test_points_lie_where_the_numbers_are() -> None:
    found = drawn(chart(Series("a", [0, 5, 10], [0.0, 50.0, 100.0])))
    circles = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in found.iter("circle")]
    (left, bottom), (middle, centre), (right, top) = circles
    assert (left, right, bottom, top) == (LEFT, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP)
    assert (middle, centre) == ((left + right) / 2, (bottom + top) / 2)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    found = drawn(chart(Series("a", [1, 10, 100], [1e-4, 1e-2, 1.0]), log_x=True, log_y=True))
    places = [(float(c.get("cx", "")), float(c.get("cy", ""))) for c in found.iter("circle")]
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.2)
    assert places[1][1] - places[0][1] == pytest.approx(places[2][1] - places[1][1], abs=0.2)
    path = path_of(chart(Series("a", [1, 2, 3], [1.0, 0.0, 2.0]), log_y=True))
    assert [part[0] for part in re.findall(r"[ML][^ML]+", path)] == ["M", "M"], "zero has no logarithm"


def test_bands_never_leave_what_can_be_measured() -> None:
    series = Series("a", [1, 2, 3], [98.0, 50.0, 1.0], [93.0, None, -4.0], [103.0, None, 6.0])
    assert band(series, (0.0, 100.0)) == [(1, 93.0, 100.0), (3, 0.0, 6.0)]
    texts = [float(t.text) for t in drawn(chart(series, limits=(0.0, 100.0))).iter("text") if (t.text or "").isdigit()]
    assert max(texts) == 100.0


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    count = 10 * MOST_POINTS + 7
    points = re.findall(r"[ML]([\d.]+) ", path_of(chart(Series("a", range(count), [float(i) for i in range(count)]))))
    assert len(points) <= MOST_POINTS + 1
    assert (float(points[0]), float(points[-1])) == (LEFT, WIDTH - RIGHT)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (-0.02, 0.03), (12.0, 98765.0), (1e-9, 2e-9)])
def test_ticks_are_round_and_cover(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert all(float(f"{value:.6g}") == pytest.approx(value, rel=1e-6, abs=1e-15) for value in found)


@pytest.mark.parametrize(("low", "high"), [(1.0, 100.0), (3.0, 3.0), (1e-12, 10.0), (0.02, 0.03), (7.0, 40.0)])
def test_logarithmic_ticks_cover(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert found[0] <= low * (1 + 1e-9)
    assert found[-1] >= high * (1 - 1e-9)
    assert 2 <= len(found) <= 10


def test_numbers_on_axes_are_short() -> None:
    shown = [number(v) for v in (0.0, 0.1 + 0.2, 5.0, 1234567.0, 12000.0, 1e-5, 0.05)]
    assert shown == ["0", "0.3", "5", "1e6", "12,000", "1e-5", "0.05"]


def test_every_line_looks_different() -> None:
    assert len({style(index) for index in range(32)}) == 32
    # Points have no dashes: where a colour comes again, it has another shape.
    assert len({(COLOURS[index % len(COLOURS)], shape(index)) for index in range(4 * len(COLOURS))}) == 32


def test_names_beside_points_do_not_overlap() -> None:
    series = [Series(f"method {i}", [1.0 + i / 1000], [50.0 + i / 10], joined=False) for i in range(4)]
    found = drawn(chart(*series, Series("far", [9.0], [90.0], joined=False), named_points=True))
    rows = [float(t.get("y", "")) for t in found.iter("text") if t.get("class") == "name" and t.text != "far"]
    assert len(rows) >= 2
    assert all(abs(a - b) > 10 for i, a in enumerate(rows) for b in rows[:i])


def test_what_hovering_reads() -> None:
    series = Series("a<b>", [1, 2], [98.0, math.nan], [93.0, None], [103.0, None], style=9, key="k")
    found = chart_data(chart(series, limits=(0.0, 100.0)))
    assert found is not None
    assert found["series"] == [{"name": "a<b>", "style": 1, "key": "k", "points": [[1, 98, 93, 100], [2, None]]}]


def heat_map(side: int) -> HeatMap:
    values = [[math.nan if column > row else 100.0 * row / side for column in range(side)] for row in range(side)]
    names = tuple(f"<{place}>" for place in range(side))
    return HeatMap("map", values, "row", "column", names, names)


def test_heat_maps_have_a_cell_for_every_number() -> None:
    cells = [cell.findtext("text") for cell in drawn(heat_map(3)).iter("g")]
    assert cells == ["0", "33", "33", "67", "67", "67"]
    large = drawn(heat_map(MOST_CELLS + 1))
    assert len(list(large.iter("image"))) == 1
    assert list(large.iter("rect")) == []
    empty = HeatMap("map", [[math.nan]], "row", "column", ("1",), ("1",))
    assert draw(empty) == NOTHING


class TestFiles:
    figure = Figure(
        "one $x_{ & <two>",
        "epoch",
        "loss $",
        (
            Series("a_b$", [1, 10, 100], [1.0, 2.0, 3.0], [0.5, None, 2.5], [1.5, None, 3.5]),
            Series("points", [1, 10], [2.0, math.nan], joined=False),
        ),
        (Reference(2.0, "paper $", style=0), Reference(10.0, axis="x")),
        log_x=True,
        log_y=True,
    )

    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("matplotlib", reason="the extra `figures` is not installed")

    def test_all_formats_are_written_the_same_each_time(self, tmp_path: Path) -> None:
        first = write_figure(self.figure, tmp_path / "deep" / "a.b")
        assert [file.name for file in first] == ["a.b.svg", "a.b.pdf", "a.b.png"]
        begins = [file.read_bytes()[:5] for file in first]
        assert begins == [b"<?xml", b"%PDF-", b"\x89PNG\r"]
        again = write_figure(self.figure, tmp_path / "again")
        assert [file.read_bytes() for file in again] == [file.read_bytes() for file in first]

    @pytest.mark.filterwarnings("error")
    def test_long_names_leave_room_for_the_axes(self, tmp_path: Path) -> None:
        shared = "first_task.learning_rate=0.001, later.learning_rate=0.0001, classifier=own"
        names = [f"efc, efm_weight={weight}, {shared}" for weight in (1, 2)]
        write_figure(chart(*(Series(name, [1, 2], [1.0, 2.0]) for name in names)), tmp_path / "long", ["svg"])
        labels = tuple(f"{number}" * 120 for number in range(4))
        write_figure(replace(heat_map(4), row_labels=labels, column_labels=labels), tmp_path / "map", ["svg"])

    @pytest.mark.parametrize(
        "figure",
        [
            heat_map(4),
            heat_map(30),
            chart(Series("a", [], [])),
            chart(Series("a", [0, 1], [1.0, 2.0]), x_labels=("one", "two"), log_x=True),
            chart(*(Series(f"task {i}", [1, 2], [1.0 + i, 2.0]) for i in range(14)), ordered=True, whole_x=True),
        ],
    )
    def test_every_kind(self, tmp_path: Path, figure: Figure | HeatMap) -> None:
        (file,) = write_figure(figure, tmp_path / "figure", ["svg"])
        ElementTree.parse(file)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("axis", ["x", "y"])
    def test_a_line_below_a_logarithmic_axis_does_not_upset_the_layout(self, tmp_path: Path, axis: str) -> None:
        line = Reference(0.0, "nothing", axis=axis)
        figure = chart(Series("a", [1, 2], [1.0, 0.1]), references=(line,), log_x=axis == "x", log_y=axis == "y")
        (file,) = write_figure(figure, tmp_path / "figure", ["svg"])
        assert "nothing" not in file.read_text(encoding="utf-8")

    def test_other_formats_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match="Unknown format of figures 'gif'"):
            write_figure(self.figure, tmp_path / "a", ["gif"])

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SettingsError, match="cannot be written"):
            write_figure(self.figure, tmp_path / "file" / "a", ["svg"])


def test_without_matplotlib_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SettingsError, match=r"pip install 'efcil\[figures\]'"):
        write_figure(chart(Series("a", [1], [1.0])), tmp_path / "a")


def test_names_of_files_are_plain_and_differ() -> None:
    assert slug("digits-cs5-efc, efm_weight=1-accuracy") == "digits-cs5-efc-efm_weight=1-accuracy"
    odd = [slug("a/../<b>"), slug("a/../[b]"), slug("é" * 300), slug("è" * 300)]
    assert len(set(odd)) == 4
    assert all(re.fullmatch(r"[\w.+=-]{1,140}", name, re.ASCII) and name != ".." for name in odd)
