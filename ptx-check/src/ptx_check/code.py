"""A translated kernel, and its cache on disk for later processes.

Parsing PTX and compiling its blocks takes longer than many launches, so the results are cached next to the PTX in
Triton's cache, keyed by the versions involved. The instructions are parsed again only to name one in a message or to
compile another version of a block.
"""

import functools
import hashlib
import marshal
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from triton.runtime.cache import get_cache_manager

from ptx_check.blocks import Block, Translation
from ptx_check.control import first_source, going_on, is_asynchronous, joins, registers_of, successors, unassigned
from ptx_check.parse import Instruction, Kernel, parse
from ptx_check.races import grain_of


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a kernel that a launch needs besides the blocks."""

    name: str
    parameters: list[tuple[str, str]]
    registers: int
    instructions: int
    local: int
    tables: dict[str, bytes]
    never: dict[str, str]
    """Registers that may be read before they are written, and their types."""
    asynchronous: bool
    tensor_columns: int
    joins: list[int]
    """Reconvergence block of each block; the number of blocks stands for the kernel's end."""
    waiting: bool
    """Whether a program may wait for another, such as for a lock."""
    shared_grain: int
    global_grain: int
    crossing: frozenset[str]
    """Registers that live across blocks."""
    specialised: bool
    """Whether some warps of a program wait independently of the others (teams.py)."""
    maxnreg: int


class Code:
    """A translated kernel. kept: cached result of keep() for the same text, or None."""

    def __init__(self, text: str, kept: bytes | None = None) -> None:
        self.text = text
        digest, facts, codes = pickle.loads(kept) if kept else ("", None, b"")
        if digest != _digest(text):
            facts, codes = None, b""
        self.translation = Translation(lambda: self.kernel)
        self.facts: Facts = facts or _facts(self.kernel, self.instructions, self.translation.crossing)
        self.tables = {name: torch.frombuffer(bytearray(table), dtype=torch.uint8).clone()
                       for name, table in self.facts.tables.items()}  # fmt: skip
        """The kernel's constants, in memory of their own."""
        self.functions = self.translation.blocks(
            len(self.facts.joins), self.facts.crossing, self.tables, marshal.loads(codes) if codes else None
        )

    @functools.cached_property
    def kernel(self) -> Kernel:
        return parse(self.text)

    @functools.cached_property
    def instructions(self) -> list[Instruction]:
        return [i for block in self.kernel.blocks for i in block.instructions]

    def keep(self, key: str) -> None:
        """Save to Triton's cache next to the kernel of this key, unless unchanged."""
        blocks = [f for f in self.functions if isinstance(f, Block)]
        if any(block.new for block in blocks):
            codes = marshal.dumps([block.codes for block in blocks])
            get_cache_manager(key).put(pickle.dumps((_digest(self.text), self.facts, codes)), _file())
            for block in blocks:
                block.new = False


def kept(key: str) -> bytes | None:
    """Load the result of keep() for the kernel of this key, or None."""
    path = get_cache_manager(key).get_file(_file())
    return Path(path).read_bytes() if path else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _file() -> str:
    """Cache file name, specific to the versions of all code involved."""
    made_by = hashlib.sha256(f"{sys.version} {np.__version__} {torch.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        made_by.update(path.read_bytes())
    return f"ptx_check-{made_by.hexdigest()[:20]}"


def _facts(kernel: Kernel, instructions: list[Instruction], crossing) -> Facts:
    read = {r.name for i in instructions for o in i.operands[first_source(i) :] for r in registers_of(o)}
    exchanges = [i for i in instructions if i.words[0] == "atom" and "global" in i.words]
    return Facts(
        name=kernel.name,
        parameters=kernel.parameters,
        registers=len(kernel.registers),
        instructions=len(instructions),
        local=kernel.local,
        tables=kernel.tables,
        never=unassigned(kernel),
        asynchronous=any(is_asynchronous(i) or i.opcode.startswith("cp.async.bulk") for i in instructions),
        tensor_columns=sum(i.operands[1].value for i in instructions if i.opcode.startswith("tcgen05.alloc")),
        joins=joins(going_on(successors(kernel), kernel)),
        waiting=any(r.name in read for i in exchanges for r in registers_of(i.operands[0])),
        shared_grain=grain_of(_widths(instructions, "shared")),
        global_grain=grain_of(_widths(instructions, "global")),
        crossing=frozenset(crossing),
        specialised=kernel.specialised,
        maxnreg=kernel.maxnreg,
    )


def _widths(instructions: list[Instruction], space: str) -> list[int]:
    widths = [4]
    for i in instructions:
        if i.words[0] in ("ld", "st") and i.words[1].split("::")[0] == space:
            widths.append(int("".join(c for c in i.words[-1] if c.isdigit())) // 8)
    return widths
