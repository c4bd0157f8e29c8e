"""Divisor of a kernel's counts: the elements of its tile that one thread holds."""

import re

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof.compile_case import CompileCase

_TILE = re.compile(r"/(\d+)(?:x(\d+))?(?:x(\d+))?w(\d+)s\d+$")
DEPTH = 64
"""A trip of a product over the depth is counted for so many of it, as a score of heads of 64 has."""


def elements(chip: Chip, case: CompileCase) -> float:
    """Elements of a case's tile for each thread: scores of attention, elements of a row kernel; of a product's loop
    elements of the result, for DEPTH of the depth."""
    return tile_elements(case.name, chip.warp)


def tile_elements(name: str, warp: int) -> float:
    """The same by the name of a case, which ends in its tile: 128x64w4s3. Raises ValueError where it does not."""
    match = _TILE.search(name)
    if match is None:
        raise ValueError(f"the case {name} does not end in a tile such as 64x32w4s2")
    rows, columns, depth, warps = (int(part or 0) for part in match.groups())
    groups = 2 if name.startswith("attention.hopper") else 1  # of so many warps each, which share the tile
    return rows * (columns or 1) * ((depth or DEPTH) / DEPTH) / (groups * warps * warp)
