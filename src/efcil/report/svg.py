"""Figures as SVG for the page: no script, colours from the page's style, so that they follow light and dark.

A series is a group with its key, which the page's script hides and shows. `chart_data` is what hovering reads.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from efcil.output import escape
from efcil.report.figure import (
    COLOURS,
    DASHES,
    Figure,
    HeatMap,
    Series,
    band,
    extent,
    log_ticks,
    number,
    shape,
    styles,
    thinned,
    ticks,
)

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 60, 14, 12, 46
MOST_POINTS = 160
#: The bands of more series are drawn paler, or they would hide each other.
MOST_BANDS = 5
#: More reference lines are told apart by their colours alone.
MOST_NAMED_REFERENCES = 4
#: Charts of at most so many tasks name every one of them.
MOST_WHOLE = 12
NOTHING = "<p>Nothing was measured.</p>"
#: A heat map of more cells has no numbers in them; of still more it is a picture.
MOST_NUMBERED, MOST_CELLS = 12, 26
#: Maps of many rows have flat cells.
TALLEST = 430.0

Scale = Callable[[float], float]


@dataclass(frozen=True)
class Axes:
    """Where numbers lie in the picture: the ends of both axes, and the ticks."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    log_x: bool = False
    log_y: bool = False

    def across(self, x: float) -> float:
        """Return the place of an x in the picture."""
        return _place(x, self.low_x, self.high_x, LEFT, WIDTH - RIGHT, self.log_x)

    def up(self, y: float) -> float:
        """Return the place of a y in the picture."""
        return _place(y, self.low_y, self.high_y, HEIGHT - BOTTOM, TOP, self.log_y)


def draw(figure: Figure | HeatMap) -> str:
    """Return the figure as SVG, or a sentence where there is nothing to draw."""
    return _heat_map(figure) if isinstance(figure, HeatMap) else _chart(figure)


def axes_of(figure: Figure) -> Axes | None:
    """Return the axes of a figure, None if there is nothing to draw."""
    found = extent(figure)
    if found is None:
        return None
    (low_x, high_x), (low_y, high_y) = found
    if figure.log_y:
        y_ticks = log_ticks(low_y, high_y)
    else:
        y_ticks = ticks(low_y, high_y)
        if figure.limits is not None:
            y_ticks = [tick for tick in y_ticks if figure.limits[0] <= tick <= figure.limits[1]] or y_ticks
    if figure.x_labels:
        x_ticks = [float(place) for place in range(len(figure.x_labels))]
    elif figure.log_x:
        low_x, high_x = (low_x / 1.3, high_x * 1.3) if figure.named_points or low_x == high_x else (low_x, high_x)
        x_ticks = log_ticks(low_x, high_x)
    else:
        if figure.named_points:
            room = 0.06 * (high_x - low_x) or 0.5
            low_x, high_x = low_x - room, high_x + room
        x_ticks = ticks(low_x, high_x, 8 if figure.whole_x else 5)
        if figure.whole_x and 0 < high_x - low_x <= MOST_WHOLE:
            x_ticks = [float(x) for x in range(math.ceil(low_x), math.floor(high_x) + 1)]
    if not high_x > low_x:
        low_x, high_x = low_x - 0.5, high_x + 0.5
    shown = [x for x in x_ticks if low_x - 1e-9 <= x <= high_x + 1e-9 and (not figure.whole_x or x == round(x))]
    if figure.log_x and len(shown) < 2:
        shown = sorted({x for each in figure.series for x in each.x if math.isfinite(x) and x > 0})[:8]
    low_y, high_y = min(low_y, y_ticks[0]), max(high_y, y_ticks[-1])
    return Axes(low_x, high_x, low_y, high_y, tuple(shown), tuple(y_ticks), figure.log_x, figure.log_y)


def chart_data(figure: Figure | HeatMap) -> dict[str, Any] | None:
    """Return what the page's script needs to show values under the pointer; None if there is nothing to show."""
    if isinstance(figure, HeatMap):
        return {
            "kind": "map",
            "box": _map_box(figure)[:4],
            "rows": list(figure.row_labels),
            "columns": list(figure.column_labels),
            "titles": [figure.row_title, figure.column_title],
            "values": [[round(value, 1) if math.isfinite(value) else None for value in row] for row in figure.values],
        }
    axes = axes_of(figure)
    if axes is None:
        return None
    series = []
    for place, each in zip(styles(figure), figure.series, strict=True):
        chosen = thinned(len(each.x), MOST_POINTS)
        spread = {x: (low, high) for x, low, high in band(each, figure.limits)}
        points = [[_short(each.x[i]), _short(each.y[i]), *map(_short, spread.get(each.x[i], ()))] for i in chosen]
        series.append({"name": each.label, "style": place % len(COLOURS), "key": each.key, "points": points})
    return {
        "kind": "lines",
        "box": [LEFT, WIDTH - RIGHT, TOP, HEIGHT - BOTTOM],
        "x": [axes.low_x, axes.high_x],
        "y": [axes.low_y, axes.high_y],
        "log": [axes.log_x, axes.log_y],
        "titles": [figure.x_title, figure.y_title],
        "labels": list(figure.x_labels),
        "points": figure.named_points or not any(each.joined for each in figure.series),
        "series": series,
    }


def swatch(index: int) -> str:
    """Return a short piece of the line number `index`, for tables and legends."""
    return (
        f'<svg class="swatch c{index % len(COLOURS)}" viewBox="0 0 26 10" aria-hidden="true">'
        f'<line x1="0" x2="26" y1="5" y2="5"{_dash(index)}/>{_marker(13, 5, index, 3.2)}</svg>'
    )


# -- lines and points ------------------------------------------------------------------------------------------------


def _chart(figure: Figure) -> str:
    axes = axes_of(figure)
    if axes is None:
        return NOTHING
    name = f"{figure.title}: {figure.y_title} over {figure.x_title}" if figure.title else figure.y_title
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(name)}">',
        *(_grid_line(axes.up(y), number(y)) for y in axes.y_ticks),
        *_x_axis(figure, axes),
        f'<text class="title" transform="rotate(-90)" x="{-(HEIGHT - BOTTOM + TOP) / 2}" y="12" '
        f'text-anchor="middle">{escape(figure.y_title)}</text>',
        *_references(figure, axes),
    ]
    places = styles(figure)
    for index, series in enumerate(figure.series):
        parts.append(_series(figure, series, places[index], index, axes))
    if figure.named_points:
        parts += _point_names(figure, axes)
    return "".join([*parts, "</svg>"])


def _x_axis(figure: Figure, axes: Axes) -> list[str]:
    base = HEIGHT - BOTTOM
    texts = []
    for x in axes.x_ticks:
        words = figure.x_labels[int(x)] if figure.x_labels else number(x)
        place = axes.across(x)
        texts.append(f'<line class="tick" x1="{place:.1f}" x2="{place:.1f}" y1="{base}" y2="{base + 4}"/>')
        texts.append(f'<text x="{place:.1f}" y="{base + 17}" text-anchor="middle">{escape(words)}</text>')
    texts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    texts.append(
        f'<text class="title" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(figure.x_title)}</text>'
    )
    return texts


def _grid_line(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _references(figure: Figure, axes: Axes) -> list[str]:
    parts: list[str] = []
    labelled: list[float] = []
    crowded = sum(bool(line.label) and line.axis == "y" for line in figure.references) > MOST_NAMED_REFERENCES
    for line in figure.references:
        if (axes.log_y if line.axis == "y" else axes.log_x) and line.value <= 0:
            continue
        place = axes.up(line.value) if line.axis == "y" else axes.across(line.value)
        colour = "ink" if line.style is None else f"c{line.style % len(COLOURS)}"
        colour += "" if line.label else " plain"
        ends = (LEFT, WIDTH - RIGHT, place, place) if line.axis == "y" else (place, place, TOP, HEIGHT - BOTTOM)
        x1, x2, y1, y2 = ends
        text = ""
        if line.label and not crowded and all(abs(place - other) > 13 for other in labelled):
            labelled.append(place)
            at: tuple[float, float, str] = (place + 4, TOP + 10, "start")
            if line.axis == "y":  # those of rows at the left, where falling curves leave room
                at = (WIDTH - RIGHT - 2, place - 4, "end") if line.style is None else (LEFT + 4, place - 4, "start")
            text = f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{at[2]}">{escape(line.label)}</text>'
        parts.append(
            f'<g class="reference {colour}"{_key(line.key)}><line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" '
            f'y2="{y2:.1f}"><title>{escape(line.label or figure.y_title)}: {number(line.value)}</title></line>'
            f"{text}</g>"
        )
    return parts


def _series(figure: Figure, series: Series, place: int, index: int, axes: Axes) -> str:
    shade = ""
    if figure.ordered:
        place, depth = 0, 1.0 if len(figure.series) < 2 else 0.22 + 0.78 * index / (len(figure.series) - 1)
        shade = f' opacity="{depth:.2f}"'
    spread = [each for each in band(series, figure.limits) if _drawable(figure, each[0], each[1])]
    crowded = " crowded" if len(figure.series) > MOST_BANDS else ""
    parts = [f'<g class="series{crowded} c{place % len(COLOURS)}"{_key(series.key)}{shade}>']
    if series.joined:
        parts += [_band(spread, axes), _path(figure, series, place, axes)]
    else:
        parts += [
            f'<line class="bar" x1="{axes.across(x):.1f}" x2="{axes.across(x):.1f}" y1="{axes.up(low):.1f}" '
            f'y2="{axes.up(high):.1f}"/>'
            for x, low, high in spread
        ]
    if len(series.x) <= 30 and not figure.ordered:
        for x, y in zip(series.x, series.y, strict=True):
            if _drawable(figure, x, y):
                at = figure.x_labels[int(x)] if figure.x_labels else f"{x:g}"
                title = f"<title>{escape(series.label)}: {y:.4g} at {escape(at)}</title>"
                parts.append(_marker(axes.across(x), axes.up(y), place, 3.0 if series.joined else 4.5, title))
    return "".join([*parts, "</g>"])


def _drawable(figure: Figure, x: float, y: float) -> bool:
    return (
        math.isfinite(x)
        and math.isfinite(y)
        and (x > 0 or not figure.log_x or bool(figure.x_labels))
        and (y > 0 or not figure.log_y)
    )


def _path(figure: Figure, series: Series, place: int, axes: Axes) -> str:
    path, pen = [], "M"
    for index in thinned(len(series.x), MOST_POINTS):
        x, y = series.x[index], series.y[index]
        if not _drawable(figure, x, y):
            pen = "M"
            continue
        path.append(f"{pen}{axes.across(x):.1f} {axes.up(y):.1f}")
        pen = "L"
    return f'<path class="line" d="{"".join(path)}"{_dash(place)}/>' if path else ""


def _band(spread: Sequence[tuple[float, float, float]], axes: Axes) -> str:
    if len(spread) < 2:
        return ""
    there = "L".join(f"{axes.across(x):.1f} {axes.up(high):.1f}" for x, _, high in spread)
    back = "L".join(f"{axes.across(x):.1f} {axes.up(low):.1f}" for x, low, _ in reversed(spread))
    return f'<path class="band" d="M{there}L{back}Z"/>'


def _point_names(figure: Figure, axes: Axes) -> list[str]:
    """Write the names beside their points, above or below one another where they would overlap."""
    taken: list[tuple[float, float, float, float]] = [
        (axes.across(x) - 6, axes.across(x) + 6, axes.up(y) - 6, axes.up(y) + 6)
        for each in figure.series
        for x, y in zip(each.x, each.y, strict=True)
        if _drawable(figure, x, y)
    ]
    parts = []
    for series in figure.series:
        found = [(x, y) for x, y in zip(series.x, series.y, strict=True) if _drawable(figure, x, y)]
        if not found:
            continue
        x, y = axes.across(found[-1][0]), axes.up(found[-1][1])
        length = 6.4 * len(series.label)
        for right, down in itertools.product((1, 0), (4, -9, 17, -22, 30)):
            left = x + 8 if right else x - 8 - length
            box = (left, left + length, y + down - 10, y + down + 3)
            inside = box[0] >= LEFT and box[1] <= WIDTH - 2 and box[2] >= TOP - 8 and box[3] <= HEIGHT - BOTTOM
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                anchor, at = ("start", x + 8) if right else ("end", x - 8)
                parts.append(
                    f'<text class="name" x="{at:.1f}" y="{y + down:.1f}" text-anchor="{anchor}"{_key(series.key)}>'
                    f"{escape(series.label)}</text>"
                )
                break
    return parts


def _overlap(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1] and one[2] < other[3] and other[2] < one[3]


def _marker(x: float, y: float, index: int, size: float, inside: str = "") -> str:
    drawn = shape(index)
    if drawn == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}">{inside}</circle>'
    if drawn == "square":
        side = f"{1.8 * size:.1f}"
        corner = f'x="{x - 0.9 * size:.1f}" y="{y - 0.9 * size:.1f}"'
        return f'<rect {corner} width="{side}" height="{side}">{inside}</rect>'
    triangle, diamond = ((0.0, -1.25), (1.15, 0.85), (-1.15, 0.85)), ((0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0))
    corners: tuple[tuple[float, float], ...] = triangle if drawn == "triangle" else diamond
    places = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{places}">{inside}</polygon>'


def _dash(index: int) -> str:
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _key(key: str) -> str:
    return f' data-key="{escape(key)}"' if key else ""


def _place(value: float, low: float, high: float, first: float, last: float, log: bool) -> float:
    if log:
        value, low, high = math.log10(value), math.log10(low), math.log10(high)
    return first + (value - low) / (high - low) * (last - first)


def _short(value: float | None) -> float | None:
    """Return a number with few digits, so that the page stays small."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")


# -- heat maps -------------------------------------------------------------------------------------------------------


def _map_box(figure: HeatMap) -> list[float]:
    """Return left, right, top, bottom of the cells, and the height of the whole picture."""
    rows, columns = len(figure.values), len(figure.column_labels)
    longest = max((len(name) for name in figure.row_labels), default=1)
    left = 30 + min(90.0, 6.6 * longest)
    side = min(40.0, (WIDTH - left - RIGHT) / max(1, columns))
    below = 40 + (min(60.0, 6.6 * _longest(figure.column_labels)) if _upright(figure.column_labels) else 0)
    bottom = TOP + min(side * rows, max(TALLEST, 9.0 * rows) if rows <= MOST_CELLS else TALLEST)
    return [left, left + side * columns, TOP, bottom, bottom + below]


def _longest(names: Sequence[str]) -> int:
    return max((len(name) for name in names), default=0)


def _upright(names: Sequence[str]) -> bool:
    return _longest(names) > 3


def _heat_map(figure: HeatMap) -> str:
    values = np.asarray(figure.values, dtype=float)
    if not np.isfinite(values).any():
        return NOTHING
    left, right, top, bottom, height = _map_box(figure)
    rows, columns = values.shape
    wide, high = (right - left) / columns, (bottom - top) / rows
    depth = np.clip((values - figure.low) / max(1e-12, figure.high - figure.low), 0, 1)
    depth = np.sqrt(depth) if figure.emphasise_small else depth
    parts = [
        f'<svg class="chart map" style="--wide: {1.15 * (right + RIGHT):.0f}px" role="img" '
        f'viewBox="0 0 {right + RIGHT:.0f} {height:.0f}" aria-label="{escape(figure.title)}">'
    ]
    if max(rows, columns) > MOST_CELLS:
        parts.append(
            f'<image x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
            f'preserveAspectRatio="none" href="{_picture(depth)}"/>'
        )
    else:
        for (row, column), value in np.ndenumerate(values):
            if math.isfinite(value):
                cell = (left + column * wide, top + row * high, wide, high, float(depth[row, column]))
                parts.append(_cell(cell, f"{value:.{figure.decimals}f}" if columns <= MOST_NUMBERED else ""))
    parts += _map_labels(figure, left, top, wide, high, height)
    return "".join([*parts, "</svg>"])


def _cell(cell: tuple[float, float, float, float, float], text: str) -> str:
    x, y, wide, high, depth = cell
    middle = f'<text x="{x + wide / 2:.1f}" y="{y + high / 2 + 4:.1f}" text-anchor="middle">{text}</text>'
    strong = " strong" if depth > 0.55 else ""
    return (
        f'<g class="cell{strong}"><rect x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{wide - 1:.1f}" '
        f'height="{high - 1:.1f}" fill-opacity="{0.06 + 0.94 * depth:.3f}"/>{middle if text else ""}</g>'
    )


def _picture(depth: np.ndarray) -> str:
    """Return a PNG of one pixel per cell: one colour, as opaque as the value is large, so that it fits any paper."""
    from PIL import Image

    pixels = np.zeros((*depth.shape, 4), dtype=np.uint8)
    pixels[..., :3] = (0, 114, 178)
    pixels[..., 3] = np.where(np.isfinite(depth), np.round(255 * np.nan_to_num(depth)), 0)
    content = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(content, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _map_labels(figure: HeatMap, left: float, top: float, wide: float, high: float, height: float) -> list[str]:
    bottom = top + high * len(figure.values)
    parts = []
    for place in range(0, len(figure.row_labels), max(1, math.ceil(13 / high))):
        y = top + (place + 0.5) * high + 4
        name = _cut(figure.row_labels[place])
        parts.append(f'<text x="{left - 5:.1f}" y="{y:.1f}" text-anchor="end">{escape(name)}</text>')
    upright = _upright(figure.column_labels)
    for place in range(0, len(figure.column_labels), max(1, math.ceil((13 if upright else 22) / wide))):
        x, y, name = left + (place + 0.5) * wide, bottom + 14, _cut(figure.column_labels[place])
        turned = f' transform="rotate(-90 {x:.1f} {bottom + 6:.1f})"' if upright else ""
        at = (x, bottom + 10, "end") if upright else (x, y, "middle")
        parts.append(f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{at[2]}"{turned}>{escape(name)}</text>')
    middle = left + wide * len(figure.column_labels) / 2
    parts.append(
        f'<text class="title" x="{middle:.1f}" y="{height - 8:.1f}" text-anchor="middle">'
        f"{escape(figure.column_title)}</text>"
    )
    parts.append(
        f'<text class="title" transform="rotate(-90)" x="{-(top + bottom) / 2:.1f}" y="12" text-anchor="middle">'
        f"{escape(figure.row_title)}</text>"
    )
    return parts


def _cut(name: str, most: int = 12) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"
