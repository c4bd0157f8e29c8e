"""Tiles of LayerNorm's kernels, and the number of programs that share a backward pass."""

from __future__ import annotations

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import choice
from fasttfm.kernels.launch import ceil_div, power_of_two
from fasttfm.kernels.tiles.rows import LAYER_NORM_BACKWARD, LAYER_NORM_FORWARD, MAX_COLUMNS, NARROWEST, RowTile


def _alternatives(chip: Chip, columns: int, direction: str) -> tuple[RowTile, ...]:
    """Half and twice the rows, half and twice the elements a thread."""
    shipped = row_tile.shipped(chip, columns, direction)
    tiles = [RowTile(shipped.rows, columns, shipped.warps * 2), RowTile(shipped.rows, columns, shipped.warps // 2)]
    if shipped.rows > 1:
        tiles.append(RowTile(shipped.rows // 2, columns, max(1, shipped.warps // 2)))
    if columns <= 1024:
        tiles.append(RowTile(2 * shipped.rows, columns, shipped.warps * 2))
    return tuple(tile for tile in tiles if 1 <= tile.warps <= 16)


@choice("layer_norm.tile", alternatives=_alternatives)
def row_tile(chip: Chip, columns: int, direction: str) -> RowTile:
    """Whole rows of a power of two columns; direction forward or backward."""
    return (LAYER_NORM_BACKWARD if direction == "backward" else LAYER_NORM_FORWARD)(chip, columns)


def tile(chip: Chip, N: int, *, backward: bool) -> RowTile:
    """The tile for rows of N columns. Raises ValueError above MAX_COLUMNS."""
    if N > MAX_COLUMNS:
        raise ValueError(f"LayerNorm over {N} columns: the kernel holds a row in registers, at most {MAX_COLUMNS}")
    return row_tile(chip, max(NARROWEST, power_of_two(N)), "backward" if backward else "forward")


def programs_of(chip: Chip, tile: RowTile, M: int) -> int:
    """Return the number of programs that share the row tiles in backward: 24 warps a processor as registers allow."""
    return min(ceil_div(M, tile.rows), max(1, 24 // tile.warps) * chip.processors)
