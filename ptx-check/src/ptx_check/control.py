"""Control and data flow of a kernel: registers read and written, possibly uninitialized registers, reconvergence.

Diverged threads reconverge at the immediate post-dominator of the branch. A block post-dominates another if every path
from there to the kernel's end passes through it; the immediate post-dominator is the first such block.
Source: Fung et al. 2007, "Dynamic Warp Formation", section 2 (reconvergence by post-dominators).
"""

from collections.abc import Iterable, Iterator

from ptx_check.forms import carrying
from ptx_check.parse import Address, Block, Instruction, Kernel, Register, Vector

NO_RESULT = ("st", "bar", "cp", "stmatrix", "bra", "ret", "exit", "trap", "fence", "membar", "red", "prefetch",
             "prefetchu", "griddepcontrol", "tensormap", "call", "barrier", "setmaxnreg", "brx")  # fmt: skip
"""Opcodes whose first operand is a source."""
CARRY = Register("%cc", "pred")
"""The carry flag of multi-word sums."""
LEAVING = ("bra", "brx", "ret", "exit", "trap")


def registers_of(operand: object) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for part in operand.parts:
            yield from registers_of(part)
    elif isinstance(operand, Address) and isinstance(operand.base, Register):
        yield operand.base


def results_and_sources(i: Instruction) -> tuple[list[Register], list[Register]]:
    """Registers an instruction writes and reads; a guarded one also reads what it may write."""
    if i.flow is None:
        i.flow = _results_and_sources(i)
    return i.flow


def _results_and_sources(i: Instruction) -> tuple[list[Register], list[Register]]:
    first = first_source(i)
    written = [r for o in i.operands[:first] for r in registers_of(o)]
    read = [r for o in i.operands[first:] for r in registers_of(o)]
    if i.opcode in carrying():
        written += [CARRY] if "cc" in i.words else []
        read += [CARRY] if i.words[0] in ("addc", "subc", "madc") else []
    if i.opcode.startswith("wgmma"):
        read += written
        if "mma_async" not in i.opcode:
            written, read = [], []
    if i.guard:
        read += [i.guard, *written]
    return written, read


def first_source(i: Instruction) -> int:
    """Index of the first source operand."""
    if i.words[0] in ("tcgen05", "mbarrier"):
        return 1 if i.words[1] in ("ld", "try_wait") else 0
    return 0 if i.words[0] in NO_RESULT else 1


def is_asynchronous(i: Instruction) -> bool:
    """Whether it is an asynchronous product."""
    return "mma_async" in i.opcode or i.opcode.startswith("tcgen05.mma")


def successors(kernel: Kernel) -> list[list[int]]:
    """Successors of each block; len(kernel.blocks) stands for the kernel's end."""
    labels = {label: number for number, block in enumerate(kernel.blocks) for label in block.labels}
    return [_following(block, number, labels, len(kernel.blocks)) for number, block in enumerate(kernel.blocks)]


def _following(block: Block, number: int, labels: dict[str, int], end: int) -> list[int]:
    leaving = next((i for i in block.instructions if i.words[0] in LEAVING), None)
    if leaving is None:
        return [number + 1]
    if leaving.words[0] == "brx":
        return [labels[name.text] for name in leaving.operands[1:]]
    target = labels[leaving.operands[0].text] if leaving.words[0] == "bra" else end
    return [target, number + 1] if leaving.guard is not None else [target]


def going_on(following: list[list[int]], kernel: Kernel) -> list[list[int]]:
    """Successors of each block without those that always end in a trap, if there are others: threads that fail an
    assertion do not reconverge."""
    traps = [any(i.words[0] == "trap" and i.guard is None for i in block.instructions) for block in kernel.blocks]
    doomed, before = {number for number, trap in enumerate(traps) if trap}, -1
    while len(doomed) != before:
        before = len(doomed)
        doomed |= {number for number, each in enumerate(following) if doomed.issuperset(each)}
    return [[number for number in each if number not in doomed] or each for each in following]


def joins(following: list[list[int]]) -> list[int]:
    """Immediate post-dominator of each block; len(following), the end, if there is none."""
    end = len(following)
    everything = (1 << (end + 1)) - 1
    behind = [everything] * end + [1 << end]
    """Post-dominators of each block, itself included, as bits."""
    changed = True
    while changed:
        changed = False
        for block in reversed(range(end)):
            common = everything
            for each in following[block]:
                common &= behind[each]
            if behind[block] != common | 1 << block:
                behind[block], changed = common | 1 << block, True
    return [_nearest(behind, block, end) for block in range(end)]


def _nearest(behind: list[int], block: int, end: int) -> int:
    """The nearest of a block's post-dominators."""
    others = [other for other in range(end) if other != block and behind[block] >> other & 1]
    return max(others, key=lambda other: behind[other].bit_count(), default=end)


def unassigned(kernel: Kernel) -> dict[str, str]:
    """Registers that some path reads before writing (a guarded write may not happen), and the type of their bits."""
    following, count = successors(kernel), len(kernel.blocks)
    steps = [list(_steps(block)) for block in kernel.blocks]
    written = [{r.name for results, _ in each for r in results} for each in steps]
    everything = set(kernel.registers)
    before: list[set[str]] = [set() if number == 0 else everything for number in range(count)]
    changed = True
    while changed:
        changed = False
        for number in range(count):
            after = before[number] | written[number]
            for each in following[number]:
                if each < count and not before[each] <= after:
                    before[each], changed = before[each] & after, True
    never: dict[str, str] = {}
    for number, block in enumerate(steps):
        known = set(before[number])
        for results, sources in block:
            never.update({r.name: TYPE_OF[r.kind] for r in sources if r.name not in known})
            known |= {r.name for r in results}
    return never


TYPE_OF = {"pred": "p", "b16": "u16", "b32": "u32", "b64": "u64"}
"""Kinds of registers -> the type of their bits."""


def _steps(block: Block) -> Iterator[tuple[list[Register], list[Register]]]:
    """Registers that each instruction certainly writes, and those it reads."""
    for i in block.instructions:
        written, read = results_and_sources(i)
        if i.guard is not None:
            written, read = [], [i.guard, *(r for o in i.operands[first_source(i) :] for r in registers_of(o))]
        yield written, read
        if i.words[0] in LEAVING:
            return


def names(operands: Iterable) -> tuple[str, ...]:
    """Names of the registers in operands."""
    return tuple(r.name for o in operands for r in registers_of(o))


def uses_of(block: Block) -> tuple[set[str], set[str]]:
    """Names of the registers that a block reads before writing, and of those that it writes."""
    before: set[str] = set()
    defined: set[str] = set()
    for instruction in block.instructions:
        written, read = results_and_sources(instruction)
        before |= {r.name for r in read} - defined
        defined |= {r.name for r in written}
    return before, defined


class Touched:
    """wgmma registers that other instructions of a block touch after its last wgmma.fence.

    The compiler places copies between a fence and the product that uses them, and the assembler moves them before the
    fence. A copy therefore counts only if its source is computed after the fence, or after a product. The compiler also
    computes fragments there, even between products; the assembler then injects another fence (ptxas: C7519), so they
    are reported separately, unless a pending product uses the register or wgmma.commit_group came before.
    """

    def __init__(self, taken: dict[str, bool]) -> None:
        self._taken = taken
        """Registers used by products, and whether only as fragments of the left operand."""
        self._names: set[str] = set()
        self._late: set[str] = set()
        self._written: set[str] = set()
        self._busy: set[str] = set()
        """Used by products since the fence."""
        self._copying = self._open = False

    def fence(self) -> None:
        self._names, self._late, self._written, self._busy = set(), set(), set(), set()
        self._copying = self._open = True

    def commit(self) -> None:
        self._open = False

    def by(self, i: Instruction) -> None:
        """Record an instruction other than a product."""
        written, read = ({r.name for r in registers} for registers in results_and_sources(i))
        if not (self._copying and i.words[0] == "mov" and i.guard is None and self._written.isdisjoint(read)):
            touched = (written | read) & self._taken.keys()
            late = {name for name in touched - self._busy if self._open and self._taken[name]}
            self._late |= late
            self._names |= touched - late
            self._written |= written

    def told(self, taken: Iterable[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the registers touched so far, and separately the fragments for which another fence is injected.

        Called at a product that uses the registers `taken`, and at the block's end.
        """
        names, late = tuple(sorted(self._names)), tuple(sorted(self._late))
        self._names, self._late, self._copying = set(), set(), False
        self._busy |= set(taken)
        return names, late
