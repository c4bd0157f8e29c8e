"""Markdown tables, and numbers as text."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from fasttfm.errors import UserError


def number(value: float) -> str:
    """Three significant digits, with thousands separators."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "-"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}" if abs(value) < 1000 else f"{float(f'{value:.3g}'):,.0f}"


def duration(us: float) -> str:
    """Microseconds as text in s, ms or µs."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{number(us / size)} {unit}"
    return f"{number(us)} µs"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], *, names: int | None = None) -> str:
    """Markdown table; the first `names` columns (default: all) are left-aligned, the others right-aligned."""
    rule = ("---" if names is None or column < names else "--:" for column in range(len(head)))
    return "\n".join([f"| {' | '.join(head)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)])


def replaced(text: str, begin: str, end: str, content: str) -> str:
    """The text with new content between two markers. Raises UserError unless both are there, in order."""
    before, first, rest = text.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise UserError(f"the text needs the lines {begin} and {end}")
    return f"{before}{begin}{content}{end}{after}"


def shape_text(shape: dict[str, Any]) -> str:
    """Shape as text, such as B=2 H=8 L=27 causal; without False, None and dropout 0."""
    words = []
    for name, value in shape.items():
        if value is True:
            words.append(name)
        elif value is not False and value is not None and not (name == "dropout" and value == 0):
            words.append(f"{name}={value:,}" if isinstance(value, int) else f"{name}={value}")
    return " ".join(words)


_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def short_dtype(dtype: str) -> str:
    return _DTYPES.get(dtype, dtype)
