"""Instructions, control flow and natural loops of machine code, independent of the disassembler."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    opcode: str
    """With its modifiers, such as HMMA.16816.F32.BF16 or v_mfma_f32_32x32x8_bf16."""
    operands: str
    target: int | None = None
    """Target address of a branch."""
    ends: bool = False
    """Whether control never falls through: an unconditional branch or an exit."""
    stall: int = 0
    """Cycles until the warp's next instruction may issue, from NVIDIA's control codes."""
    guard: str = ""
    """Guard predicate, such as @!P0."""
    targets: tuple[int, ...] = ()
    """Target addresses of an indirect branch: the partitions of a warp-specialized kernel."""

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Loop:
    """A natural loop: the instructions on any path from its header back to its header."""

    places: frozenset[int]
    """Indices of all its instructions in the function."""
    own: tuple[Instruction, ...]
    """Its instructions, without those of nested loops."""
    inner: int
    """Instructions of the longest nested loop; 0 for an innermost loop."""
    depth: int
    """Number of enclosing loops."""


@dataclass(frozen=True)
class Function:
    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Label -> address."""

    @functools.cached_property
    def loops(self) -> tuple[Loop, ...]:
        """All loops, in the order of their headers."""
        bodies = _loops(_Flow.of(self.instructions))
        result = []
        for body in bodies:
            inside = [other for other in bodies if other < body]
            held = frozenset[int]().union(*inside)
            own = tuple(self.instructions[place] for place in sorted(body - held))
            longest = max(map(len, inside), default=0)
            result.append(Loop(body, own, longest, sum(body < other for other in bodies)))
        return tuple(result)

    @functools.cached_property
    def outside(self) -> tuple[Instruction, ...]:
        """The instructions outside all loops, which a program executes at most once; without padding."""
        inside = frozenset[int]().union(*(loop.places for loop in self.loops))
        return tuple(
            each for place, each in enumerate(self.instructions) if place not in inside and each.name not in _PADDING
        )


_PADDING = ("NOP", "s_nop", "s_code_end")


@dataclass(frozen=True)
class _Flow:
    """The control flow graph: basic blocks in code order, and the edges between them."""

    starts: tuple[int, ...]
    """Index of the first instruction of each block, then the number of instructions."""
    successors: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, code: tuple[Instruction, ...]) -> _Flow:
        place = {each.address: index for index, each in enumerate(code)}
        targets = [[place[to] for to in (each.target, *each.targets) if to in place] for each in code]
        leaders = {0, *(target for each in targets for target in each)}
        leaders |= {i + 1 for i, each in enumerate(code) if (targets[i] or each.ends) and i + 1 < len(code)}
        starts = sorted(leaders)
        block = {start: number for number, start in enumerate(starts)}
        edges = []
        for number, end in enumerate([*starts[1:], len(code)]):
            following = () if code[end - 1].ends or end == len(code) else (number + 1,)
            edges.append((*following, *(block[target] for target in targets[end - 1])))
        return cls((*starts, len(code)), tuple(edges))

    def places(self, blocks: set[int]) -> frozenset[int]:
        return frozenset(i for number in blocks for i in range(self.starts[number], self.starts[number + 1]))


def _dominators(flow: _Flow) -> list[int]:
    """The dominators of each block as a bit mask; 0 for an unreachable block."""
    count = len(flow.successors)
    everything = (1 << count) - 1
    result = [1, *[everything] * (count - 1)]
    before: list[list[int]] = [[] for _ in range(count)]
    for number, following in enumerate(flow.successors):
        for each in following:
            before[each].append(number)
    changed = True
    while changed:
        changed = False
        for number in range(1, count):
            common = everything
            for each in before[number]:
                common &= result[each]
            new = (common | 1 << number) if before[number] else 0
            if new != result[number]:
                result[number], changed = new, True
    return result


def _loops(flow: _Flow) -> list[frozenset[int]]:
    """The instruction indices of every natural loop; loops with the same header are merged."""
    dominators = _dominators(flow)
    before: dict[int, list[int]] = {}
    for number, following in enumerate(flow.successors):
        for each in following:
            before.setdefault(each, []).append(number)
    bodies: dict[int, set[int]] = {}
    for number, following in enumerate(flow.successors):
        for head in following:
            if dominators[number] >> head & 1 and dominators[number]:
                body, waiting = bodies.setdefault(head, {head}), [number]
                while waiting:
                    block = waiting.pop()
                    if block not in body:
                        body.add(block)
                        waiting += before.get(block, [])
    # A branch to itself at the end of the code is padding, not a loop; spinning on a barrier is a loop.
    found = [(head, body) for head, body in sorted(bodies.items()) if not _idles(flow, head, body)]
    return [flow.places(body) for _, body in found]


def _idles(flow: _Flow, head: int, body: set[int]) -> bool:
    return body == {head} and flow.starts[head + 1] - flow.starts[head] == 1 and flow.successors[head] == (head,)
