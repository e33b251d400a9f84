"""Figures as plain data: what is drawn, not how. `svg.py` draws them in the page, `files.py` in files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Colours that people with any kind of colour vision can distinguish (after Okabe and Ito), on white paper.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#c25e97", "#d99a00", "#56b4e9", "#882255", "#7a7a7a")
#: Where there are more lines than colours, dashes tell them apart.
DASHES = ("", "6 3", "2 2", "8 3 2 3")
SHAPES = ("circle", "square", "triangle", "diamond")


@dataclass(frozen=True)
class Series:
    """One line or set of points: y over x. Values that are not finite are gaps.

    `low` and `high` are the ends of a band around a line, or of a bar through a point; None where they are not known.
    `style` is the place in the palette (by default the place in the figure), `key` says which row of a table it shows.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    style: int | None = None
    joined: bool = True
    key: str = ""


@dataclass(frozen=True)
class Reference:
    """A straight line through the whole figure: at a y (`axis` "y") or at an x, such as a value of the paper.

    `low` and `high` may give its own spread. With a `style` it has the colour of the series with that style.
    """

    value: float
    label: str = ""
    axis: str = "y"
    low: float | None = None
    high: float | None = None
    style: int | None = None
    key: str = ""


@dataclass(frozen=True)
class Figure:
    """Lines and points over two axes.

    `limits` bounds what can be measured (accuracies: 0 and 100): bands are cut there. With `x_labels`, x counts these
    names from 0. `ordered` series are shades of one colour, from the first to the last. `named_points` are labelled
    beside the point instead of in a legend.
    """

    title: str
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    references: tuple[Reference, ...] = ()
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False
    x_labels: tuple[str, ...] = ()
    limits: tuple[float, float] | None = None
    ordered: bool = False
    named_points: bool = False
    note: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A matrix of numbers as shades; NaN cells stay empty. `low` and `high` are the ends of the scale.

    With `emphasise_small`, shades follow the square root: a few percent of one class taken for another are seen.
    """

    title: str
    values: Sequence[Sequence[float]]
    row_title: str
    column_title: str
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    low: float = 0.0
    high: float = 100.0
    decimals: int = 0
    emphasise_small: bool = False
    note: str = ""


def style(index: int) -> tuple[str, str]:
    """Return colour and dash pattern of the series number `index`."""
    return COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]


def shape(index: int) -> str:
    """Return the marker of the series number `index`: another one where a colour is used again."""
    return SHAPES[(index + index // len(COLOURS)) % len(SHAPES)]


def styles(figure: Figure) -> list[int]:
    """Return the place in the palette of every series."""
    return [index if each.style is None else each.style for index, each in enumerate(figure.series)]


def band(series: Series, limits: tuple[float, float] | None = None) -> list[tuple[float, float, float]]:
    """Return (x, low, high) wherever both are known, cut at the `limits`."""
    if not (series.low and series.high):
        return []
    bottom, top = limits or (-math.inf, math.inf)
    found = []
    for x, y, low, high in zip(series.x, series.y, series.low, series.high, strict=True):
        if low is not None and high is not None and all(map(math.isfinite, (x, y, low, high))):
            found.append((x, min(max(low, bottom), top), min(max(high, bottom), top)))
    return found


def points(series: Series) -> list[tuple[float, float]]:
    """Return the points that were measured."""
    return [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(x) and math.isfinite(y)]


def extent(figure: Figure) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Return the smallest and largest x and y of what is drawn; None if nothing can be.

    On a logarithmic axis, values that are not positive cannot be drawn and do not count.
    """
    # Where lines have gaps the axis is whole, so that charts beside each other have the same one.
    measured = [(each, found) for each in figure.series if (found := points(each))]
    xs = [x for each, _ in measured for x in each.x]
    ys = [y for _, found in measured for _, y in found]
    if not ys:
        return None
    ys += [y for each in figure.series for _, low, high in band(each, figure.limits) for y in (low, high)]
    for line in figure.references:
        (ys if line.axis == "y" else xs).extend(v for v in (line.value, line.low, line.high) if v is not None)
    if figure.x_labels:
        xs = [-0.5, len(figure.x_labels) - 0.5]
    xs = [x for x in xs if math.isfinite(x) and (x > 0 or not figure.log_x)]
    ys = [y for y in ys if math.isfinite(y) and (y > 0 or not figure.log_y)]
    if not xs or not ys or not math.isfinite(max(ys) - min(ys)) or not math.isfinite(max(xs) - min(xs)):
        return None
    return (min(xs), max(xs)), (min(ys), max(ys))


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


def log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers for a logarithmic axis that cover low..high, both positive."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    step = max(1, math.ceil((last - first) / 6))
    powers = [10.0**power for power in range(first, last + step, step)]
    if last - first > 2:
        return powers
    fine = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    bottom = max((tick for tick in fine if tick <= low * (1 + 1e-9)), default=powers[0])
    top = min((tick for tick in fine if tick >= high * (1 - 1e-9)), default=powers[-1])
    chosen = [tick for tick in fine if bottom <= tick <= top]
    return chosen if len(chosen) > 1 else [bottom, bottom * 10]


def thinned(count: int, most: int) -> list[int]:
    """Return the places that are drawn of a long line: all, or evenly spaced ones and the last."""
    step = max(1, math.ceil(count / most))
    places = list(range(0, count, step))
    return places if not places or places[-1] == count - 1 else [*places, count - 1]


def number(value: float) -> str:
    """Return a number as an axis shows it: whole thousands with separators, small ones without many digits."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}" if value == round(value, 6) else f"{value:.4g}"
