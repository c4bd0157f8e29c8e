"""Tile elements per thread, by which the ledger divides a kernel's cycles."""

import re

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase

_TILE = re.compile(r"/(\d+)(?:x(\d+))?(?:x(\d+))?w(\d+)s\d+$")
DEPTH = 64
"""Depth for which an element of a matrix product is counted: that of an attention score with head dim 64."""


def elements(chip: Chip, case: CompileCase) -> float:
    """Tile elements per thread: attention scores, elements of a row, or elements of a matrix product's result for a
    depth of DEPTH."""
    return tile_elements(case.name, chip.warp)


def tile_elements(name: str, warp: int) -> float:
    """elements() from the name of a case, which ends in its tile, such as 128x64w4s3. Raises ValueError if it does
    not."""
    match = _TILE.search(name)
    if match is None:
        raise ValueError(f"the case {name} does not end in a tile such as 64x32w4s2")
    rows, columns, depth, warps = (int(part or 0) for part in match.groups())
    # Groups of `warps` warps that share the tile.
    groups = 2 if name.startswith(("attention.hopper", "attention.blackwell")) else 1
    return rows * (columns or 1) * ((depth or DEPTH) / DEPTH) / (groups * warps * warp)
