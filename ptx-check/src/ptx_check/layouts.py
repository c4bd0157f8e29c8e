"""Detects products whose layout is too wide for their depth, so that mma.sync multiplies wrong elements.

Four threads share a row of the left operand, and each holds kWidth consecutive elements along the depth K. Triton up to
3.7 derives kWidth from the narrowest type that leads to the product, not from K: after an 8-bit load and a join it is
8, and a product with K = 16 has only half of the 32 elements that the instructions exchange (triton#11691). PTX does
not show it other than by wrong numbers, so the layout is read from TTGIR.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from triton.runtime.cache import get_cache_manager

from ptx_check.faults import Fault, Location

_MMA = re.compile(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = 2\b", re.MULTILINE)
_PRODUCT = re.compile(
    r"tt\.dot\b.*: tensor<(?:\d+x)*(\d+)x[a-z]\w*, #ttg\.dot_op<\{opIdx = 0, parent = (#\w+), kWidth = (\d+)\}>>.*?"
    r"loc\((#\w+)\)"
)
_THREADS = 4
"""Threads that share a row of the left operand in mma.sync."""


def shallow_products(kernel: str, ttgir: str) -> list[Fault]:
    """One fault per product with K < 4 kWidth."""
    layouts = set(_MMA.findall(ttgir))
    faults = []
    for depth, layout, width, location in _PRODUCT.findall(ttgir):
        if layout in layouts and int(depth) < _THREADS * int(width):
            wide = _THREADS * int(width)
            message = f"a product {depth} deep in a layout for {wide} multiplies wrongly (triton#11691)"
            faults.append(Fault("product", message, Location(kernel, 0, _python(ttgir, location))))
    return faults


def compiled_form(source, metadata) -> str:
    """TTGIR of a compiled kernel from Triton's cache; empty if absent."""
    path = get_cache_manager(metadata.hash).get_file(f"{source.name[:150]}.ttgir")
    return Path(path).read_text() if path else ""


def _python(ttgir: str, location: str) -> str:
    """file.py:line:column of a TTGIR location, which may refer to others."""
    known = dict(re.findall(r"^(#\w+) = loc\((.*)\)$", ttgir, re.MULTILINE))
    return next(_sources(known, location), "")


def _sources(known: dict[str, str], location: str) -> Iterator[str]:
    text = known.get(location, "")
    match = re.search(r'"([^"]+)":(\d+):(\d+)', text)
    if match:
        yield f"{match[1].rsplit('/', 1)[-1]}:{match[2]}:{match[3]}"
    for name in re.findall(r"#\w+", text):
        yield from _sources(known, name)
