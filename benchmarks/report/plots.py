"""Plots of the report, drawn by matplotlib as SVG that stands inside a page or alone.

Text stays text, the background is transparent, and grey axes can be read on light and dark paper. Every plot carries a
title and its numbers in words (`<title>`, `<desc>`) for those who do not see it.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.measure.text_table import number

OURS = 0
SERIES = 8
"""Colours of other series: 1 to SERIES."""
_COLOURS = ("#0a7cae", "#8b96a3", "#8a6cc0", "#2f9f63", "#cf6a44", "#b09a1c", "#c0508a", "#4a7dc4", "#8b7a6b")
_INK, _LIMIT, _BAD = "#6e7781", "#c87a1e", "#d0453c"
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fasttfm",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One provider of a case: a value with its spread, or why there is none."""

    label: str
    value: float | None
    low: float = 0.0
    high: float = 0.0
    shown: str = ""
    """The value in words, or the reason why there is none."""
    ours: bool = False
    bad: bool = False
    """Its numbers were wrong."""


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    points: Sequence[Point]
    colour: int = OURS
    joined: bool = True


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes of a plot are called, and which are logarithmic."""

    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    width: float = 520
    height: float = 300
    x_names: Sequence[str] = ()
    """Names of the places 0, 1, ... in the place of numbers."""


def _new(width: float, height: float) -> tuple[Figure, Any]:
    """A figure of so many CSS pixels, and its axes."""
    figure = Figure(figsize=(width / 96, height / 96), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Figure, name: str, title: str, description: str) -> str:
    """The figure as an <svg> element whose ids begin with its name, so that many can stand in one page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    head, _, rest = text.partition(">")
    spoken = f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>'
    return f'{head} role="img" aria-labelledby="{name}-t {name}-d">{spoken}{rest}'


def bars(
    name: str, title: str, rows: Sequence[Bar], *, mark: float | None = None, mark_label: str = "", width: float = 360
) -> str:
    """Horizontal bars from zero, a whisker from low to high, and a dashed line at a value that means something."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(width, 34 + 30 * len(rows))
        for position, row in enumerate(rows):
            axes.text(0, position - 0.34, row.label, va="center", fontweight="bold" if row.ours else "normal")
            if row.value is None:
                reason = textwrap.shorten(row.shown, 56, placeholder="…")
                axes.text(0, position + 0.12, reason, va="center", color=_BAD if row.bad else _INK, fontsize=8)
                continue
            axes.barh(position + 0.12, row.value, 0.38, color=_COLOURS[OURS if row.ours else 1])
            spread = [[max(row.value - row.low, 0.0)], [max(row.high - row.value, 0.0)]]
            axes.errorbar(row.value, position + 0.12, xerr=spread, color=_INK, capsize=2, linewidth=1)
            axes.text(1, position - 0.34, row.shown, va="center", ha="right", transform=axes.get_yaxis_transform())
        axes.set_xlim(left=0)
        axes.set_ylim(len(rows) - 0.5, -0.7)
        if mark is not None:
            timed = [position for position, row in enumerate(rows) if row.value is not None]
            axes.vlines(
                [mark] * len(timed), [p - 0.12 for p in timed], [p + 0.36 for p in timed], color=_LIMIT, ls="--"
            )
        axes.set_xlabel(mark_label, color=_LIMIT, fontsize=8)
        axes.set_axis_off() if mark is None else axes.set_yticks([])
        axes.set_xticks([])
        for spine in axes.spines.values():
            spine.set_visible(False)
        for text in axes.texts:  # a long name may leave the axes, and must not shrink them
            text.set_in_layout(False)
        spoken = "; ".join(f"{row.label}: {row.shown}" for row in rows)
        return _svg(figure, name, title, f"{spoken}. {mark_label}".strip())


def ratios(name: str, title: str, rows: Sequence[Bar], *, width: float = 500) -> str:
    """A dot a row on a logarithmic scale around 1, with a whisker from low to high."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _new(width, 70 + 26 * len(rows))
        for position, row in enumerate(rows):
            value = row.value or 1.0
            spread = [[max(value - row.low, 0.0)], [max(row.high - value, 0.0)]]
            axes.errorbar(value, position, xerr=spread, fmt="o", color=_COLOURS[1], ecolor=_INK, capsize=2)
            axes.text(1.01, position, row.shown, va="center", transform=axes.get_yaxis_transform())
        axes.axvline(1.0, color=_LIMIT, linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlim(min(0.8, *(row.low for row in rows)) / 1.1, max(1.25, *(row.high for row in rows)) * 1.1)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_title("left of 1: quicker than fasttfm; right: slower", fontsize=8)
        axes.grid(axis="x")
        spoken = "; ".join(f"{row.label}: {row.shown}, from {row.low:.2f} to {row.high:.2f}" for row in rows)
        return _svg(figure, name, title, spoken)


def _spoken(series: Sequence[Series], axes: Axes) -> str:
    """The numbers of a plot in words; of more than sixty points only whose they are."""

    def position(p: Point) -> str:
        return axes.x_names[int(p.x)] if axes.x_names else number(p.x)

    many = sum(len(s.points) for s in series) > 60
    words = [
        f"{s.label}: " + ", ".join(f"{position(p)}: {number(p.y)}" for p in (() if many else s.points)) for s in series
    ]
    return f"{axes.y_label} against {axes.x_label}. " + "; ".join(words)


def _prepare(axes: Any, wanted: Axes, xs: Sequence[float]) -> None:
    """Scales, ticks and names."""
    axes.set_xlabel(wanted.x_label)
    axes.set_ylabel(wanted.y_label)
    if wanted.x_log:
        axes.set_xscale("log")
    if wanted.y_log:
        axes.set_yscale("log")
    plain = FuncFormatter(lambda value, _: f"{value:,.6g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    if wanted.x_names:
        every = math.ceil(len(wanted.x_names) / 6)
        axes.set_xticks(range(0, len(wanted.x_names), every), wanted.x_names[::every])
    elif wanted.x_log and len(set(xs)) <= 6:  # ticks that say what was measured
        axes.set_xticks(sorted(set(xs)))
        axes.xaxis.set_minor_locator(NullLocator())
    if not wanted.y_log:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(axis="y")


def _draw(axes: Any, series: Sequence[Series]) -> None:
    for one in sorted(series, key=lambda s: s.colour == OURS):  # ours on top
        colour = _COLOURS[one.colour]
        style = "-o" if one.joined and len(one.points) > 1 else "o"
        axes.plot(
            [p.x for p in one.points], [p.y for p in one.points], style, color=colour, label=one.label, markersize=4
        )
        band = [(p.x, p.low, p.high) for p in one.points if p.low is not None and p.high is not None]
        if one.joined and len(band) > 1:
            x, low, high = zip(*band)
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    if len(series) > 1:
        axes.figure.legend(fontsize=8, frameon=False, loc="outside lower left", ncols=3)


def lines(name: str, title: str, series: Sequence[Series], axes: Axes, *, level: float | None = None) -> str:
    """Curves with their spread as a band, or loose points; a dashed line at `level`."""
    with matplotlib.rc_context(_STYLE):
        figure, drawn = _new(axes.width, axes.height)
        _draw(drawn, series)
        _prepare(drawn, axes, [p.x for s in series for p in s.points])
        if level is not None:
            drawn.axhline(level, color=_LIMIT, linestyle="--", linewidth=1)
        return _svg(figure, name, title, _spoken(series, axes))


def roofline(
    name: str, title: str, series: Sequence[Series], *, gb_per_s: float, tflop_per_s: float, width: float = 580
) -> str:
    """TFLOP/s against FLOP a byte, both logarithmic, under the bandwidth's slope and the products' ceiling."""
    unit, times = ("GFLOP/s", 1e3) if tflop_per_s < 1 else ("TFLOP/s", 1.0)
    series = [replace(s, points=[replace(p, y=times * p.y) for p in s.points]) for s in series]
    ceiling, ridge = times * tflop_per_s, 1e3 * tflop_per_s / gb_per_s
    axes = Axes("FLOP a byte that must move", unit, x_log=True, y_log=True, width=width, height=350)
    xs = [p.x for s in series for p in s.points]
    roof = [(x, min(ceiling, times * x * gb_per_s / 1e3)) for x in (min(*xs, ridge) / 2, ridge, max(*xs, ridge) * 2)]
    label = f"{number(ceiling)} {unit} in a product, {number(gb_per_s)} GB/s in a copy: measured here"
    with matplotlib.rc_context(_STYLE):
        figure, drawn = _new(width, axes.height)
        drawn.plot(*zip(*roof), "--", color=_LIMIT, linewidth=1)
        _draw(drawn, series)
        _prepare(drawn, axes, xs)
        drawn.set_title(label, color=_LIMIT, fontsize=8, loc="right")
        return _svg(figure, name, title, f"{_spoken(series, axes)} {label}.")
