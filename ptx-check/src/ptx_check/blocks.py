"""A kernel's basic blocks, compiled on first use.

A block propagates marks (undefined.py) only for registers that may have any, given the marks of running threads at its
entry. An instruction that loads undefined bits passes its variables to a version of the rest of the block that
propagates all marks.
"""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from ptx_check import exact, rounding, undefined
from ptx_check.control import first_source, names, registers_of, results_and_sources, uses_of
from ptx_check.operands import TYPES, constant_of, variable
from ptx_check.parse import Kernel, Vector
from ptx_check.translate import Writer

_HEADER = "U = M.undefined; T = U.marks"
_OWN = {"M", "S", "m", "U", "T"}
_MOST_VERSIONS = 4
NONE: frozenset[str] = frozenset()


class Block:
    """A block as a function of the running programs M, registers S that cross blocks, and m, the threads here."""

    def __init__(self, name: str, write: Callable[[frozenset[str] | None], Writer], space: dict, codes) -> None:
        self.name, self.write, self.space = name, write, space
        self.text: list[str] | None = write(NONE).body if codes is None else None
        """Version without marks; None until compiled."""
        self.codes: dict[Any, Any] = codes or {}
        """Compiled versions: by marked registers, and by entry point."""
        self.new = False
        """Whether anything was compiled since the last save."""
        self.versions: dict[frozenset[str] | None, Callable] = {}
        """Versions by marked registers at entry; None: any."""
        self.rests: dict[tuple[int, int], Callable] = {}
        """Versions with marks that start inside the block."""

    def __call__(self, run, registers: list, m) -> Any:
        undefined = run.undefined
        key: frozenset[str] | None = undefined.here(undefined.marks.keys() & self.names) if undefined.marks else NONE
        if key not in self.versions:
            if key and len(self.versions) >= _MOST_VERSIONS:
                key = None
            if key not in self.versions:
                if key not in self.codes:
                    lines = (self.text if key == NONE else None) or self.write(key).body
                    self.compile(key, "M, S, m", lines)
                    self.text = None if key == NONE else self.text
                self.versions[key] = self.function(key)
        return self.versions[key](run, registers, m)

    @property
    def names(self) -> frozenset[str]:
        """Names of registers read or written."""
        if "names" not in self.codes:
            flows = (results_and_sources(i) for i in self.write(NONE).block.instructions)
            self.codes["names"] = frozenset(r.name for flow in flows for registers in flow for r in registers)
            self.new = True
        return self.codes["names"]

    def rest(self, point: tuple[int, int], run, registers: list, m, variables: dict[str, Any]) -> Any:
        """Run the rest of the block from a point, with the current variables."""
        if point not in self.rests and point not in self.codes:
            writer, given = self.write(None), sorted(variables.keys() - _OWN)
            position = writer.points[point]
            lines = [f"{name} = L[{name!r}]" for name in given]
            for name, (at, loads) in writer.loads.items():
                if at < position and name not in variables:
                    lines += loads
            self.compile(point, "M, S, m, L", [*lines, *writer.body[position:]])
        if point not in self.rests:
            self.rests[point] = self.function(point)
        return self.rests[point](run, registers, m, variables)

    def compile(self, key: Any, parameters: str, lines: list[str]) -> None:
        text = "\n".join(f"    {line}" for line in [_HEADER, *lines])
        module = compile(f"def {self.name}({parameters}):\n{text}", f"<{self.name}>", "exec")
        self.codes[key] = next(part for part in module.co_consts if isinstance(part, types.CodeType))
        self.new = True

    def function(self, key: Any) -> Callable:
        code = self.codes[key]
        for name in code.co_names:
            if name.startswith("k_") and name not in self.space:
                self.space[name] = constant_of(name)
        return types.FunctionType(code, self.space)


class Translation:
    """Generates the blocks of a kernel. kernel: function that parses it on demand."""

    def __init__(self, kernel: Callable[[], Kernel]) -> None:
        self.read = kernel
        self.space: dict = {"np": np, **TYPES, **{n: f for n, f in vars(rounding).items() if not n.startswith("_")}}
        self.space |= {"exact": exact, "anded": undefined.anded, "ored": undefined.ored}

    def blocks(self, count: int, crossing: frozenset[str], tables: Mapping[str, torch.Tensor], codes) -> list[Block]:
        """A function per block. tables: the kernel's constants. codes: cached code by block, or None.

        Raises Unsupported with the line for an unknown opcode.
        """
        self.space |= {variable(name): np.full((1, 1), t.data_ptr(), np.uint64) for name, t in tables.items()}
        made = [Block(f"block_{number}", functools.partial(self.write, number), self.space,
                      None if codes is None else codes[number]) for number in range(count)]  # fmt: skip
        self.space |= {"BLOCKS": made, "CROSSING": crossing}
        return made

    @functools.cached_property
    def crossing(self) -> dict[str, int]:
        """Registers that a block reads before writing, and their slots."""
        read = set().union(*(uses_of(block)[0] for block in self.read().blocks))
        return {name: position for position, name in enumerate(sorted(read))}

    @functools.cached_property
    def context(self) -> tuple[Any, Any, Any, Any, Any, Any, Any, Any]:
        """Context shared by the code generators of all blocks."""
        kernel = self.read()
        labels = {label: number for number, block in enumerate(kernel.blocks) for label in block.labels}
        parameters = {name: (position, kind) for position, (name, kind) in enumerate(kernel.parameters)}
        everything = [i for block in kernel.blocks for i in block.instructions]
        products = [i for i in everything if "mma_async" in i.opcode]
        late = {r.name for i in products for r in registers_of(i.operands[0])}
        vectors = (i.operands[1] for i in products if isinstance(i.operands[1], Vector))
        taken = {r.name: True for vector in vectors for r in registers_of(vector)} | dict.fromkeys(late, False)
        late |= {r.name for i in everything if i.opcode.startswith("tcgen05.ld") for r in registers_of(i.operands[0])}
        if late:
            copies = [(names(i.operands[:1]), names(i.operands[1:])) for i in everything if i.words[0] == "mov"]
            while earlier := {to for made, given in copies if not late.isdisjoint(given) for to in made} - late:
                late |= earlier
        begun = {i.operands[1] for i in everything if i.opcode.endswith(".gpu.global.cas.b32")}
        read = {r.name for i in everything for o in i.operands[first_source(i) :] for r in registers_of(o)}
        return self.crossing, labels, parameters, self.space, late, taken, read, begun

    def write(self, number: int, marked: frozenset[str] | None) -> Writer:
        return Writer(number, self.read().blocks[number], marked, *self.context).write()
