"""A kernel's blocks, compiled when they are first run.

A block has lines that follow marks (undefined.py) for the registers alone that may have any, by what has some in
threads that run when it begins. An instruction that loads undefined bits hands its variables on to a function of the
rest of its block, which follows all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ptx_check import exact, rounding, undefined
from ptx_check.control import first_source, names, registers_of, results_and_sources, uses_of
from ptx_check.operands import TYPES, variable
from ptx_check.parse import Kernel, Vector
from ptx_check.translate import Writer

_HEADER = "U = M.undefined; T = U.marks"
_OWN = {"M", "S", "m", "U", "T"}
_MOST_VERSIONS = 4
NONE: frozenset[str] = frozenset()


class Block:
    """A block as a function of the running programs M, registers S that cross blocks, and m, the threads here."""

    def __init__(self, name: str, write: Callable[[frozenset[str] | None], Writer], space: dict) -> None:
        self.name, self.write, self.space = name, write, space
        self.text: list[str] | None = write(NONE).body
        """Without marks, until it is compiled."""
        self.versions: dict[frozenset[str] | None, Callable] = {}
        """By the registers that have marks when it begins; None: any."""
        self.rests: dict[tuple[int, int], Callable] = {}
        """From a point on, with marks."""

    def __call__(self, run, registers: list, m) -> Any:
        undefined = run.undefined
        key: frozenset[str] | None = undefined.here(undefined.marks.keys() & self.names) if undefined.marks else NONE
        if key not in self.versions:
            if key and len(self.versions) >= _MOST_VERSIONS:
                key = None
            if key not in self.versions:
                lines = (self.text if key == NONE else None) or self.write(key).body
                self.versions[key] = self.compiled("M, S, m", lines)
                self.text = None if key == NONE else self.text
        return self.versions[key](run, registers, m)

    @functools.cached_property
    def names(self) -> set[str]:
        """Of the registers that it reads or writes."""
        flows = (results_and_sources(i) for i in self.write(NONE).block.instructions)
        return {r.name for flow in flows for registers in flow for r in registers}

    def rest(self, point: tuple[int, int], run, registers: list, m, variables: dict[str, Any]) -> Any:
        """Runs what follows a point, with the variables so far."""
        if point not in self.rests:
            writer, given = self.write(None), sorted(variables.keys() - _OWN)
            position = writer.points[point]
            lines = [f"{name} = L[{name!r}]" for name in given]
            for name, (at, loads) in writer.loads.items():
                if at < position and name not in variables:
                    lines += loads
            self.rests[point] = self.compiled("M, S, m, L", [*lines, *writer.body[position:]])
        return self.rests[point](run, registers, m, variables)

    def compiled(self, parameters: str, lines: list[str]) -> Callable:
        text = "\n".join(f"    {line}" for line in [_HEADER, *lines])
        exec(compile(f"def {self.name}({parameters}):\n{text}", f"<{self.name}>", "exec"), self.space)
        return self.space.pop(self.name)


def translate(kernel: Kernel, tables: Mapping[str, torch.Tensor] = MappingProxyType({})) -> list[Block]:
    """A function for every block; tables: the kernel's constants. Raises Unsupported for an opcode that is not known,
    with its line."""
    uses = [uses_of(block) for block in kernel.blocks]
    crossing = {name: position for position, name in enumerate(sorted(set().union(*(u for u, _ in uses))))}
    labels = {label: number for number, block in enumerate(kernel.blocks) for label in block.labels}
    space: dict = {"np": np, **TYPES, **{n: f for n, f in vars(rounding).items() if not n.startswith("_")}}
    space |= {variable(name): np.full((1, 1), table.data_ptr(), np.uint64) for name, table in tables.items()}
    space |= {"exact": exact, "anded": undefined.anded, "ored": undefined.ored, "CROSSING": frozenset(crossing)}
    parameters = {name: position for position, (name, _) in enumerate(kernel.parameters)}
    everything = [i for block in kernel.blocks for i in block.instructions]
    products = [i for i in everything if "mma_async" in i.opcode]
    late = {r.name for i in products for r in registers_of(i.operands[0])}
    loads = [i for i in everything if i.opcode.startswith("tcgen05.ld")]
    taken = late | {r.name for i in products for r in registers_of(i.operands[1]) if isinstance(i.operands[1], Vector)}
    late |= {r.name for i in loads for r in registers_of(i.operands[0])}
    if late:
        copies = [(names(i.operands[:1]), names(i.operands[1:])) for i in everything if i.words[0] == "mov"]
        while earlier := {to for made, given in copies if not late.isdisjoint(given) for to in made} - late:
            late |= earlier
    read = {r.name for i in everything for o in i.operands[first_source(i) :] for r in registers_of(o)}

    def writing(number: int) -> Callable[[frozenset[str] | None], Writer]:
        def write(marked: frozenset[str] | None) -> Writer:
            block = kernel.blocks[number]
            return Writer(number, block, crossing, labels, parameters, space, late, taken, read, marked).write()

        return write

    blocks = [Block(f"block_{number}", writing(number), space) for number in range(len(kernel.blocks))]
    space["BLOCKS"] = blocks
    return blocks
