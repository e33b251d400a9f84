"""Figures as files (SVG, PDF, PNG) through matplotlib, for papers and slides."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from efcil.errors import SettingsError, printable, shortened, unknown
from efcil.report.figure import (
    COLOURS,
    SHAPES,
    Figure,
    HeatMap,
    band,
    extent,
    log_ticks,
    number,
    shape,
    style,
    styles,
)

FIGURE_FORMATS = ("svg", "pdf", "png")
#: A longer name of a series has no room beside the axes.
_LONG_NAME = 24
_MARKERS = dict(zip(SHAPES, ("o", "s", "^", "D"), strict=True))
#: Fonts are embedded as fonts, so that publishers accept the files and text can be searched; names are never formulas.
_SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.linewidth": 0.6,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "pdf.fonttype": 42,
    "svg.hashsalt": "efcil",
    "text.parse_math": False,
}


def write_figure(figure: Figure | HeatMap, stem: Path | str, formats: Sequence[str] = FIGURE_FORMATS) -> list[Path]:
    """Write a figure to `stem` plus `.svg`, `.pdf` or `.png`, and return the files.

    The same figure gives the same files. Needs matplotlib (`pip install 'efcil[figures]'`).
    """
    for name in formats:
        if name not in FIGURE_FORMATS:
            raise unknown("format of figures", name, FIGURE_FORMATS)
    try:
        import matplotlib
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise SettingsError(
            "Figure files need matplotlib, which is not installed. Install it: pip install 'efcil[figures]'"
        ) from None
    stem, written = Path(stem), []
    settings: Any = {**matplotlib.rcParamsDefault, **_SETTINGS}  # not those of a matplotlibrc that lies around
    with matplotlib.rc_context(settings):
        canvas = Canvas(figsize=_size(figure), layout="constrained")
        axes = canvas.add_subplot()
        if isinstance(figure, HeatMap):
            _heat_map(figure, canvas, axes)
        else:
            _lines(figure, canvas, axes)
        axes.set_title(_wrapped(figure.title, round(12 * canvas.get_figwidth())), loc="left")
        try:
            stem.parent.mkdir(parents=True, exist_ok=True)
            for name in formats:
                file = stem.with_name(f"{stem.name}.{name}")
                metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {"Software": None}}[name]
                canvas.savefig(file, dpi=200, metadata=metadata)
                written.append(file)
        except OSError as error:
            reason = error.strerror or error
            raise SettingsError(f"{stem} cannot be written ({reason}). Choose another place for figures.") from None
    return written


def _size(figure: Figure | HeatMap) -> tuple[float, float]:
    if isinstance(figure, HeatMap):
        rows, columns = np.asarray(figure.values).shape
        return 1.4 + min(5.0, max(2.2, 0.32 * columns)), 0.9 + min(5.0, max(1.6, 0.26 * rows))
    below = sum(label.count("\n") + 1 for label in _labels(figure)) if _legend_is_below(figure) else 0
    return (5.4 if _has_legend(figure) else 4.2), 2.9 + 0.17 * below


def _has_legend(figure: Figure) -> bool:
    return len(figure.series) > 1


def _legend_is_below(figure: Figure) -> bool:
    """Say whether names are so long that beside the axes they would leave no room for them."""
    return _has_legend(figure) and max(len(printable(series.label)) for series in figure.series) > _LONG_NAME


def _labels(figure: Figure) -> list[str]:
    return [_wrapped(series.label, 70) for series in figure.series]


def _wrapped(words: str, width: int) -> str:
    return textwrap.fill(printable(words), width, break_on_hyphens=False)


def _lines(figure: Figure, canvas: Any, axes: Any) -> None:
    places, shades, labels = styles(figure), _shades(len(figure.series)), _labels(figure)
    for index, series in enumerate(figure.series):
        colour, dash = (shades[index], "") if figure.ordered else style(places[index])
        drawn = {"color": colour, "label": labels[index], "zorder": 3}
        spread = band(series, figure.limits)
        x, y = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
        if series.joined:
            marker = _MARKERS[shape(places[index])] if len(x) <= 30 and not figure.ordered else ""
            dashes = (0, tuple(map(float, dash.split()))) if dash else "-"
            axes.plot(x, y, linestyle=dashes, marker=marker, **drawn)
            if len(spread) > 1:
                xs, low, high = zip(*spread, strict=True)
                axes.fill_between(xs, low, high, color=colour, alpha=0.14, linewidth=0, zorder=2)
        else:
            axes.plot(x, y, linestyle="", marker=_MARKERS[shape(places[index])], **drawn)
            for at, bottom, top in spread:
                axes.plot([at, at], [bottom, top], color=colour, linewidth=1, zorder=2)
    _references(figure, axes)
    _axes(figure, axes)
    if _has_legend(figure):
        many, below = len(figure.series) > 12, _legend_is_below(figure)
        place = "outside lower left" if below else "outside right upper"
        canvas.legend(loc=place, fontsize=6 if many else 8, ncols=2 if many and not below else 1)


def _references(figure: Figure, axes: Any) -> None:
    for line in figure.references:
        if (figure.log_y if line.axis == "y" else figure.log_x) and line.value <= 0:
            continue  # no place on a logarithmic axis: its label would lie infinitely far below the figure
        colour = "#555555" if line.style is None else style(line.style)[0]
        draw = axes.axhline if line.axis == "y" else axes.axvline
        plain = not line.label and line.style is None  # where a task begins, for example
        drawn = {"color": "#bbbbbb", "linewidth": 0.7} if plain else {"color": colour, "linewidth": 1}
        draw(line.value, linestyle=(0, (4, 3) if plain else (1, 1.5)), zorder=1, **drawn)
        if line.low is not None and line.high is not None:
            (axes.axhspan if line.axis == "y" else axes.axvspan)(line.low, line.high, color=colour, alpha=0.07, lw=0)
        if line.label:
            right = line.axis == "y" and line.style is None
            at = (1.0 if right else 0.0, line.value) if line.axis == "y" else (line.value, 1.0)
            where = ("axes fraction", "data") if line.axis == "y" else ("data", "axes fraction")
            side = (
                {"ha": "right" if right else "left", "va": "bottom"}
                if line.axis == "y"
                else {"ha": "left", "va": "top"}
            )
            shift = (-3 if right else 3, 1) if line.axis == "y" else (2, -1)
            text = {"textcoords": "offset points", "fontsize": 7, "color": colour, **side}
            axes.annotate(printable(line.label), at, xycoords=where, xytext=shift, **text)


def _axes(figure: Figure, axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel(printable(figure.x_title))
    axes.set_ylabel(printable(figure.y_title))
    found = extent(figure)
    if found is None:
        axes.text(0.5, 0.5, "Nothing was measured.", transform=axes.transAxes, ha="center")
        return
    (low_x, high_x), (low_y, high_y) = found
    if figure.log_x and not figure.x_labels:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, low_x, high_x)
    if figure.log_y:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, low_y, high_y)
    elif figure.limits is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, figure.limits[0] - 1), min(high, figure.limits[1] + 1))
    if figure.x_labels:
        axes.set_xticks(range(len(figure.x_labels)), [printable(name) for name in figure.x_labels])
        axes.set_xlim(-0.5, len(figure.x_labels) - 0.5)
    elif figure.whole_x and not figure.log_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """Write round numbers: powers would be set as formulas, and formulas are off because names are none."""
    from matplotlib.ticker import NullLocator

    places = [place for place in log_ticks(low, high) if low / 1.05 <= place <= high * 1.05] or log_ticks(low, high)
    axis.set_ticks(places, [number(place) for place in places])
    axis.set_minor_locator(NullLocator())


def _shades(count: int) -> list[Any]:
    """Return `count` shades of the first colour, the last one strongest."""
    red, green, blue = (int(COLOURS[0][place : place + 2], 16) / 255 for place in (1, 3, 5))
    depths = [1.0 if count < 2 else 0.3 + 0.7 * index / (count - 1) for index in range(count)]
    return [tuple(1 - depth * (1 - part) for part in (red, green, blue)) for depth in depths]


def _heat_map(figure: HeatMap, canvas: Any, axes: Any) -> None:
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    values = np.ma.masked_invalid(np.asarray(figure.values, dtype=float))
    shades = LinearSegmentedColormap.from_list("efcil", ["#f2f6fa", COLOURS[0]])
    scale = PowerNorm(0.5 if figure.emphasise_small else 1.0, figure.low, figure.high)
    drawn = axes.imshow(values, cmap=shades, norm=scale, aspect="auto", interpolation="nearest")
    rows, columns = values.shape
    for axis, labels in ((axes.xaxis, figure.column_labels), (axes.yaxis, figure.row_labels)):
        step = math.ceil(len(labels) / 20) if labels else 1
        axis.set_ticks(range(0, len(labels), step), [shortened(printable(name), 28) for name in labels[::step]])
    if max(len(name) for name in figure.column_labels) > 3:
        axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel(printable(figure.column_title))
    axes.set_ylabel(printable(figure.row_title))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if rows <= 20 and columns <= 20:
        middle = 0.55
        for (row, column), value in np.ndenumerate(np.asarray(figure.values, dtype=float)):
            if math.isfinite(value):
                colour = "white" if scale(value) > middle else "#222222"
                text = f"{value:.{figure.decimals}f}"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
    else:
        canvas.colorbar(drawn, ax=axes)
