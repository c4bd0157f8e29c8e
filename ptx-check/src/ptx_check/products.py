"""Merging of adjacent mma.sync instructions into one product.

A compiler multiplies a warp's tile piece by piece: at every step of the depth it multiplies each piece of rows with
each piece of columns and accumulates in registers. Each rectangle of rows and columns becomes one product.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ptx_check.control import registers_of, results_and_sources
from ptx_check.forms import executed
from ptx_check.parse import Instruction, Register, Vector


@dataclass(frozen=True, slots=True)
class Product:
    """mma.sync instructions executed as one."""

    instructions: tuple[Instruction, ...]
    """In program order."""
    rows: tuple[tuple[Register, ...], ...]
    """Left operands of each piece of rows, by step."""
    columns: tuple[tuple[Register, ...], ...]
    sums: tuple[tuple[Register, ...], ...]
    """Accumulators of each piece of rows with each piece of columns."""
    steps: int


def in_products(instructions: Iterable[Instruction]) -> Iterator[Instruction | Product]:
    """Yield a block's instructions with the parts of each product grouped.

    Only mov is reordered, ahead of products whose results it does not read and whose registers it does not write.
    """
    group: list[Instruction] = []
    sums: set[str] = set()
    factors: set[str] = set()
    for i in instructions:
        if _joins(i) and (not group or i.opcode == group[0].opcode):
            result, *taken = ({r.name for r in registers_of(o)} for o in i.operands[:3])
            chained = any(i.operands[0] == other.operands[0] for other in group)
            if not sums.isdisjoint(set().union(*taken)) or result & factors or (not chained and result & sums):
                yield from _rectangles(group)
                group, sums, factors = [], set(), set()
            group.append(i)
            sums |= result
            factors = factors.union(*taken)
            continue
        if group and i.words[0] == "mov" and i.guard is None:
            written, read = ({r.name for r in registers} for registers in results_and_sources(i))
            if written.isdisjoint(sums | factors) and read.isdisjoint(sums):
                yield i
                continue
        yield from _rectangles(group)
        group, sums, factors = [], set(), set()
        yield i
    yield from _rectangles(group)


def _joins(i: Instruction) -> bool:
    """Whether an instruction accumulates in place, and the sum of several steps may be rounded once."""
    if i.words[0] != "mma" or not executed(i.opcode) or i.guard is not None:
        return False
    rounded_once = i.words[-4] != "f16" and "satfinite" not in i.words
    return rounded_once and i.operands[0] == i.operands[3] and all(isinstance(o, Vector) for o in i.operands)


def _rectangles(group: list[Instruction]) -> Iterator[Product]:
    chains: dict[tuple, list[Instruction]] = {}
    for i in group:
        chains.setdefault(i.operands[0].parts, []).append(i)
    tiles: dict[tuple, dict[tuple, tuple]] = {}
    for parts, chain in chains.items():
        left, right = (tuple(r for i in chain for r in i.operands[side].parts) for side in (1, 2))
        row = tiles.setdefault(left, {})
        if right in row:  # the same product twice
            yield Product(tuple(chain), (left,), (right,), (parts,), len(chain))
        else:
            row[right] = parts
    alike: dict[tuple, list[tuple]] = {}
    for left, row in tiles.items():
        alike.setdefault(tuple(row), []).append(left)
    for columns, rows in alike.items():
        sums = tuple(tiles[left][right] for left in rows for right in columns)
        members = set(sums)
        taken = tuple(i for i in group if i.operands[0].parts in members)
        yield Product(taken, tuple(rows), columns, sums, len(taken) // len(sums))
