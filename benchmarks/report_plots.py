"""Plots as SVG text: readable in light and dark, without scripts, the same bytes for the same numbers.

Colours are classes whose style stands once in STYLE. Coordinates are rounded to a tenth, so that no platform's last
bit shows. Every plot has a title and a description for those who do not see it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape

STYLE = """
:root{--paper:#fcfcfa;--ink:#1b1f24;--muted:#5c6670;--rule:#d9dde1;--ours:#0a6c96;--floor:#b35c00;--bad:#b3261e;
--c1:#8b96a3;--c2:#7a5ea8;--c3:#2f8f5b;--c4:#c0603a;--c5:#a08a1c;--c6:#b0487c;--c7:#4a7dc4;--c8:#6b5a4b}
@media (prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e7eaed;--muted:#9ba6b1;--rule:#343c44;--ours:#4db8e0;
--floor:#f0a24a;--bad:#ff8a80;--c1:#76828f;--c2:#b79be6;--c3:#62c48e;--c4:#ee9470;--c5:#d8c14f;--c6:#e98bbb;
--c7:#8ab4f0;--c8:#b8a590}}
svg text{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--ink)}
svg .m{fill:var(--muted)}svg .s{font-size:12px}svg .b{font-weight:600}
svg .e{text-anchor:end}svg .mid{text-anchor:middle}
svg .bad{fill:var(--bad)}svg .fl{fill:var(--floor)}
svg .grid{stroke:var(--rule);stroke-width:1}svg .axis{stroke:var(--muted);stroke-width:1}
svg .whisker{stroke:var(--ink);stroke-width:1.5}svg .floor{stroke:var(--floor);stroke-width:1.5;stroke-dasharray:4 2}
svg .line{fill:none;stroke-width:2}svg .band{opacity:.18;stroke:none}
""" + "".join(
    f"svg .f{i}{{fill:var(--{name})}}svg .l{i}{{stroke:var(--{name})}}"
    for i, name in enumerate(("ours", *(f"c{n}" for n in range(1, 9))))
)
"""For the page, or inside an SVG that stands alone."""

OURS = 0
SERIES = 8
"""Colours of other series: 1 to SERIES."""


def number(value: float) -> str:
    """Three significant digits, thousands apart."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def duration(us: float) -> str:
    """Microseconds in the unit that reads best."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{number(us / size)} {unit}"
    return f"{number(us)} µs"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _text(x: float, y: float, words: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text x="{_at(x)}" y="{_at(y)}"{kind}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{_at(x1)}" y1="{_at(y1)}" x2="{_at(x2)}" y2="{_at(y2)}" class="{style}"/>'


def _svg(name: str, width: float, height: float, title: str, description: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_at(width)} {_at(height)}" role="img" '
        f'style="max-width:{_at(1.15 * width)}px" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title>'
        f'<desc id="{name}-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def standalone(svg: str) -> str:
    """The same plot as a file of its own, which needs its style with it and a background."""
    head, rest = svg.split("</desc>", 1)
    paper = '<rect width="100%" height="100%" style="fill:var(--paper)"/>'
    return f"{head}</desc><style>{STYLE}</style>{paper}{rest}\n"


def _shortened(words: str, most: int) -> str:
    return words if len(words) <= most else words[: most - 1].rstrip() + "…"


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


def bars(
    name: str, title: str, rows: Sequence[Bar], *, mark: float | None = None, mark_label: str = "", width: float = 360
) -> str:
    """Horizontal bars from zero, a whisker from low to high, and a dashed line at a value that means something."""
    most = max([row.high for row in rows if row.value is not None] + [mark or 0.0]) or 1.0
    step, parts = 36, []
    height = step * len(rows) + (20 if mark is not None else 2)

    def across(value: float) -> float:
        return width * value / most

    for place, row in enumerate(rows):
        y = step * place + 14
        parts.append(_text(0, y, _shortened(row.label, 30), "b" if row.ours else ""))
        if row.value is None:
            parts.append(_text(0, y + 15, _shortened(row.shown, 52), "s bad" if row.bad else "s m"))
            continue
        parts.append(_text(width, y, row.shown, "e b" if row.ours else "e"))
        fill, long = "f0" if row.ours else "f1", _at(max(across(row.value), 1))
        parts.append(f'<rect x="0" y="{_at(y + 5)}" width="{long}" height="11" rx="1.5" class="{fill}"/>')
        low, high = across(row.low), across(row.high)
        if high - low >= 1:
            middle = y + 10.5
            parts.append(_line(low, middle, high, middle, "whisker"))
            parts += [_line(x, middle - 3.5, x, middle + 3.5, "whisker") for x in (low, high)]
    if mark is not None:
        x = across(mark)
        # at the bars alone: through names it could not be read
        beside = [step * place + 14 for place, row in enumerate(rows) if row.value is not None]
        parts += [_line(x, y + 3, x, y + 19, "floor") for y in beside]
        left = x < width / 2
        parts.append(_text(x if left else width, height - 6, mark_label, "s fl" if left else "s fl e"))
    spoken = "; ".join(f"{row.label}: {row.shown}" for row in rows)
    return _svg(name, width, height, title, f"{spoken}. {mark_label}".strip(), parts)


def ratios(name: str, title: str, rows: Sequence[Bar], *, width: float = 500) -> str:
    """A dot a row on a logarithmic scale around 1, with a whisker from low to high."""
    left, right, step, top = 165, 122, 26, 24
    limits = min(0.8, *(row.low for row in rows)) / 1.1, max(1.25, *(row.high for row in rows)) * 1.1
    height = top + step * len(rows) + 34

    def across(value: float) -> float:
        return left + (width - left - right) * _share(value, limits, log=True)

    bottom = top + step * len(rows)
    parts = [_text(across(1.0) - 8, 13, "quicker than fasttfm", "s m e"), _text(across(1.0) + 8, 13, "slower", "s m")]
    for tick in _ticks(limits, log=True):
        parts += [
            _line(across(tick), top, across(tick), bottom, "grid"),
            _text(across(tick), bottom + 17, f"{tick:g}x", "s m mid"),
        ]
    parts.append(_line(across(1.0), top - 6, across(1.0), bottom, "floor"))
    for place, row in enumerate(rows):
        y = top + step * place + step / 2
        parts.append(_text(0, y + 4, _shortened(row.label, 23)))
        parts.append(_line(across(row.low), y, across(row.high), y, "whisker"))
        parts.append(f'<circle cx="{_at(across(row.value or 1.0))}" cy="{_at(y)}" r="5.5" class="f1"/>')
        parts.append(_text(width, y + 4, row.shown, "e"))
    spoken = "; ".join(f"{row.label}: {row.shown}, from {row.low:.2f} to {row.high:.2f}" for row in rows)
    return _svg(name, width, height, title, spoken, parts)


@dataclass(frozen=True, slots=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    label: str
    points: Sequence[Point]
    colour: int = OURS
    joined: bool = True


@dataclass(slots=True)
class Axes:
    """Where values come to lie: linear from zero, or logarithmic."""

    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    width: float = 520
    height: float = 300
    x_names: Sequence[str] = ()
    """Names of the places 0, 1, ... in the place of numbers."""
    _sizes: list[float] = field(default_factory=list, init=False)
    """The values on a logarithmic x axis where they are few: ticks that say what was measured."""
    _x: tuple[float, float] = field(default=(0, 1), init=False)
    _y: tuple[float, float] = field(default=(0, 1), init=False)

    LEFT, RIGHT, TOP, BOTTOM = 58, 14, 26, 44

    def fit(self, series: Sequence[Series]) -> None:
        xs = [p.x for s in series for p in s.points]
        ys = [v for s in series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
        self._x = (-0.5, len(self.x_names) - 0.5) if self.x_names else _range(xs, self.x_log)
        self._y = _range(ys, self.y_log)
        self._sizes = sorted(set(xs)) if self.x_log and len(set(xs)) <= 6 else []

    def x(self, value: float) -> float:
        return self.LEFT + (self.width - self.LEFT - self.RIGHT) * _share(value, self._x, self.x_log)

    def y(self, value: float) -> float:
        inner = self.height - self.TOP - self.BOTTOM
        return self.TOP + inner * (1 - _share(value, self._y, self.y_log))

    def frame(self) -> list[str]:
        """Grid, ticks and names of the axes."""
        right, bottom = self.width - self.RIGHT, self.height - self.BOTTOM
        parts = []
        for tick in _ticks(self._y, self.y_log):
            y = self.y(tick)
            parts += [_line(self.LEFT, y, right, y, "grid"), _text(self.LEFT - 6, y + 4, _tick(tick), "s m e")]
        if self.x_names:
            every = math.ceil(len(self.x_names) / 6)
            for place in range(0, len(self.x_names), every):
                parts.append(_text(self.x(place), bottom + 17, self.x_names[place], "s m mid"))
        else:
            for tick in self._sizes or _ticks(self._x, self.x_log):
                parts += [
                    _line(self.x(tick), bottom, self.x(tick), bottom + 4, "axis"),
                    _text(self.x(tick), bottom + 17, _tick(tick), "s m mid"),
                ]
        parts.append(_line(self.LEFT, bottom, right, bottom, "axis"))
        parts.append(_text(0, 13, self.y_label, "s m"))
        parts.append(_text(right, self.height - 6, self.x_label, "s m e"))
        return parts


def _range(values: Sequence[float], log: bool) -> tuple[float, float]:
    if log:
        low, high = min(values) / 1.25, max(values) * 1.25
        return low, high
    return min(0.0, *values), (max(values) or 1.0) * 1.06


def _share(value: float, limits: tuple[float, float], log: bool) -> float:
    low, high = limits
    if log:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def _ticks(limits: tuple[float, float], log: bool) -> list[float]:
    low, high = limits
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        fine = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= m * 10.0**d <= high]
        coarse = [tick for tick in fine if f"{tick:e}".startswith("1")]
        return coarse if len(fine) > 7 and len(coarse) >= 2 else fine
    size = 10.0 ** math.floor(math.log10((high - low) / 4))
    size *= next(m for m in (1, 2, 5, 10) if (high - low) / (size * m) <= 6)
    return [n * size for n in range(math.ceil(low / size), math.floor(high / size) + 1)]


def _tick(value: float) -> str:
    return f"{value:,.10g}" if abs(value) >= 0.001 or value == 0 else f"{value:.0e}"


def lines(name: str, title: str, series: Sequence[Series], axes: Axes, *, level: float | None = None) -> str:
    """Curves with their spread as a band, or loose points; the legend stands below, ours first."""
    axes.fit(series)
    parts = axes.frame()
    if level is not None:
        parts.append(_line(axes.LEFT, axes.y(level), axes.width - axes.RIGHT, axes.y(level), "floor"))
    # ours last, so that it lies on top
    for one in sorted(series, key=lambda s: s.colour == OURS):
        spread = [p for p in one.points if p.low is not None and p.high is not None]
        if one.joined and len(spread) > 1:
            edge = [(p.x, p.high) for p in spread] + [(p.x, p.low) for p in reversed(spread)]
            around = " ".join(f"{_at(axes.x(x))},{_at(axes.y(y))}" for x, y in edge if y is not None)
            parts.append(f'<polygon points="{around}" class="band f{one.colour}"/>')
        if one.joined and len(one.points) > 1:
            path = " ".join(f"{_at(axes.x(p.x))},{_at(axes.y(p.y))}" for p in one.points)
            parts.append(f'<polyline points="{path}" class="line l{one.colour}"/>')
        for p in one.points:
            parts.append(_dot(axes, p, one.colour, "3.2"))
    return _svg(
        name,
        axes.width,
        axes.height + _legend_height(series, axes),
        title,
        _spoken(series, axes),
        [*parts, *_legend(series, axes)],
    )


def _dot(axes: Axes, point: Point, colour: int, radius: str) -> str:
    spoken = f"<title>{escape(point.label)}</title>" if point.label else ""
    at = f'cx="{_at(axes.x(point.x))}" cy="{_at(axes.y(point.y))}"'
    return f'<circle {at} r="{radius}" class="f{colour}">{spoken}</circle>'


def _spoken(series: Sequence[Series], axes: Axes) -> str:
    def place(p: Point) -> str:
        return axes.x_names[int(p.x)] if axes.x_names else number(p.x)

    many = sum(len(s.points) for s in series) > 60
    words = [
        f"{s.label}: " + ", ".join(f"{place(p)}: {number(p.y)}" for p in (() if many else s.points)) for s in series
    ]
    return f"{axes.y_label} against {axes.x_label}. " + "; ".join(words)


_PER_CHARACTER, _ROW = 7.4, 19


def _placed(series: Sequence[Series], axes: Axes) -> list[tuple[float, int, Series]]:
    """x, row and series of every entry of the legend, wrapped to the width."""
    found, x, row = [], 0.0, 0
    for one in sorted(series, key=lambda s: s.colour != OURS):
        wide = 24 + _PER_CHARACTER * len(one.label)
        if x and x + wide > axes.width:
            x, row = 0.0, row + 1
        found.append((x, row, one))
        x += wide
    return found


def _legend_height(series: Sequence[Series], axes: Axes) -> float:
    return 8 + _ROW * (1 + _placed(series, axes)[-1][1]) if len(series) > 1 else 0


def _legend(series: Sequence[Series], axes: Axes) -> list[str]:
    if len(series) < 2:
        return []
    parts = []
    for x, row, one in _placed(series, axes):
        y = axes.height + 8 + _ROW * row
        parts.append(f'<rect x="{_at(x)}" y="{_at(y)}" width="12" height="12" rx="2" class="f{one.colour}"/>')
        parts.append(_text(x + 17, y + 11, one.label, "s b" if one.colour == OURS else "s"))
    return parts


def roofline(
    name: str, title: str, series: Sequence[Series], *, gb_per_s: float, tflop_per_s: float, width: float = 580
) -> str:
    """TFLOP/s against FLOP a byte, both logarithmic, under the bandwidth's slope and the products' ceiling."""
    small = tflop_per_s < 1
    unit, times = ("GFLOP/s", 1e3) if small else ("TFLOP/s", 1.0)
    series = [replace(s, points=[replace(p, y=times * p.y) for p in s.points]) for s in series]
    top = times * tflop_per_s
    axes = Axes("FLOP a byte that must move", unit, x_log=True, y_log=True, width=width, height=350)
    ridge = 1e3 * tflop_per_s / gb_per_s
    xs = [p.x for s in series for p in s.points]
    ends = (min(*xs, ridge) / 2, max(*xs, ridge) * 2)
    roof = [Point(x, min(top, times * x * gb_per_s / 1e3)) for x in (ends[0], ridge, ends[1])]
    axes.fit([*series, Series("", roof)])
    parts = axes.frame()
    path = " ".join(f"{_at(axes.x(p.x))},{_at(axes.y(p.y))}" for p in roof)
    parts.append(f'<polyline points="{path}" class="line floor"/>')
    label = f"{number(top)} {unit} in a product, {number(gb_per_s)} GB/s in a copy: measured here"
    parts.append(_text(axes.x(roof[2].x), axes.y(top) - 7, label, "s fl e"))
    for one in sorted(series, key=lambda s: s.colour == OURS):
        for p in one.points:
            parts.append(_dot(axes, p, one.colour, "4"))
    height = axes.height + _legend_height(series, axes)
    return _svg(name, width, height, title, f"{_spoken(series, axes)} {label}.", [*parts, *_legend(series, axes)])
