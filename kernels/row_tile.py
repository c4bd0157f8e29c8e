"""What the kernels that walk over rows share: the shape of a tile, and how a case of theirs is listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.launch import Chip

NARROWEST = 128
"""Columns of a tile at least, so that few tiles need compiling."""


@dataclass(frozen=True, slots=True)
class RowTile:
    rows: int
    columns: int
    warps: int


def warps(chip: Chip, elements: int, per_thread: int = 16, threads: int = 512) -> int:
    """So many elements a thread, but at most so many threads."""
    lanes = 64 if chip.name.startswith("gfx") else 32
    return max(1, min(threads, elements // per_thread) // lanes)


def row_case(kernel: Any, name: str, dtype: str, tile: RowTile, arguments: Mapping[str, Any]) -> CompileCase:
    """The case of a kernel over (M, N) with constants ROWS and COLUMNS, at an N that divides by 16."""
    return CompileCase(
        kernel=kernel,
        name=f"{name}/{tile.rows}x{tile.columns}w{tile.warps}s1",
        dtype=dtype,
        arguments={**arguments, "N": "i32:16", "ROWS": tile.rows, "COLUMNS": tile.columns},
        num_warps=tile.warps,
        num_stages=1,
    )
