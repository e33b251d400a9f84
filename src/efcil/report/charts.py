"""Line charts as SVG text: no library, no script, the same in every browser and on paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from efcil.output import escape

# Colours that people with any kind of colour vision can distinguish (Okabe and Ito); dashes when they run out.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b8a900")
DASHES = ("", "6 3", "2 2", "8 3 2 3")
WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 10, 40
MOST_POINTS = 300


@dataclass(frozen=True)
class Line:
    """One line of a chart: y over x, and the band around it, if known."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviation: Sequence[float | None] = ()


def style(index: int) -> tuple[str, str]:
    """Return colour and dash pattern of the line number `index`."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return about `about` round numbers that cover low..high."""
    if not high > low:
        low, high = low - max(0.5, abs(low) / 1000), high + max(0.5, abs(high) / 1000)
    raw = (high - low) / about
    if not (math.isfinite(raw) and raw > 1e-300):
        return [low, high]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def line_chart(lines: Sequence[Line], x_title: str, y_title: str, *, whole_x: bool = False) -> str:
    """Return a chart of all lines. Numbers that are not finite are gaps; with `whole_x`, x is ticked at integers."""
    reach = [
        y + sign * (d or 0.0)
        for line in lines
        for y, d in zip(line.y, line.deviation or [None] * len(line.y), strict=True)
        for sign in (-1, 1)
        if math.isfinite(y)
    ]
    if not reach or not math.isfinite(max(reach) - min(reach)):
        return "<p>Nothing was measured.</p>"
    places = [x for line in lines for x in line.x]
    low_x, high_x = min(places), max(places)
    x_ticks = [x for x in ticks(low_x, high_x, 10 if whole_x else 6) if not whole_x or x == round(x)]
    y_ticks = ticks(min(reach), max(reach))
    across = _scale(low_x, high_x if high_x > low_x else low_x + 1, LEFT, WIDTH - RIGHT)
    up = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(f"{y_title} over {x_title}")}">',
        *(_grid_line(up(y), f"{y:g}") for y in y_ticks),
        *(
            f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
            for x in x_ticks
            if low_x <= x <= high_x
        ),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="rotate(-90)" x="{-(HEIGHT - BOTTOM + TOP) / 2}" y="13" text-anchor="middle">'
        f"{escape(y_title)}</text>",
    ]
    bands = [_band(line, index, across, up) for index, line in enumerate(lines) if line.deviation]
    strokes = [_stroke(line, index, across, up) for index, line in enumerate(lines)]
    return "".join([*parts, *bands, *strokes, "</svg>"])


Scale = Callable[[float], float]


def _scale(low: float, high: float, first: float, last: float) -> Scale:
    """Return the linear map from low..high to first..last."""
    slope = (last - first) / (high - low)
    return lambda value: first + (value - low) * slope


def _grid_line(y: float, text: str) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    )


def _thinned(line: Line) -> list[int]:
    """Return the points that are drawn: all, or evenly spaced ones and the last."""
    step = max(1, math.ceil(len(line.x) / MOST_POINTS))
    places = list(range(0, len(line.x), step))
    return places if not places or places[-1] == len(line.x) - 1 else [*places, len(line.x) - 1]


def _stroke(line: Line, index: int, across: Scale, up: Scale) -> str:
    colour, dash = style(index)
    path, pen = [], "M"
    for place in _thinned(line):
        if not math.isfinite(line.y[place]):
            pen = "M"
            continue
        path.append(f"{pen}{across(line.x[place]):.1f} {up(line.y[place]):.1f}")
        pen = "L"
    dots = ""
    if len(line.x) <= 30:
        dots = "".join(
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="2.5" fill="{colour}">'
            f"<title>{escape(line.name)}: {y:.4g} at {x:g}</title></circle>"
            for x, y in zip(line.x, line.y, strict=True)
            if math.isfinite(y)
        )
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{"".join(path)}" fill="none" stroke="{colour}" stroke-width="1.8"{dashes}/>{dots}'


def _band(line: Line, index: int, across: Scale, up: Scale) -> str:
    rows = [
        (across(x), up(y - d), up(y + d))
        for x, y, d in zip(line.x, line.y, line.deviation, strict=True)
        if d is not None and math.isfinite(y)
    ]
    if len(rows) < 2:
        return ""
    there = "L".join(f"{x:.1f} {top:.1f}" for x, _, top in rows)
    back = "L".join(f"{x:.1f} {bottom:.1f}" for x, bottom, _ in reversed(rows))
    return f'<path d="M{there}L{back}Z" fill="{style(index)[0]}" fill-opacity="0.13" stroke="none"/>'
