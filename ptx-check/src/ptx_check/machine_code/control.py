"""Control flow: branches, calls, exits and barriers, which set the lanes' program counters or make warps wait.

Also memory-ordering and reconvergence instructions, which are no-ops here.
"""

import re
from typing import Any

import numpy as np

from ptx_check.machine_code.integers import Step
from ptx_check.machine_code.operands import Code, bits, operand, predicate, truth


def branch(code: Code) -> Step:
    code.only("U")
    *conditions, _ = code.operands
    if len(conditions) > 1 or code.target is None:
        raise code.unknown("of this form is not known")
    way, target = predicate(conditions[0], code) if conditions else None, code.target

    def step(s: Any) -> None:
        s.go(target, None if way is None else way(s))

    return step


def leave(code: Code) -> Step:
    code.only()
    if code.operands:
        raise code.unknown("of this form is not known")

    def step(s: Any) -> None:
        s.leave()

    return step


def trap(code: Code) -> Step:
    """BPT.TRAP: tl.device_assert, or unreachable code."""
    code.only("TRAP")

    def step(s: Any) -> None:
        s.fault("assertion", code, "the kernel stops itself")
        s.leave()

    return step


def call(code: Code) -> Step:
    """CALL.REL.NOINC: the return address is already in registers."""
    if code.target is None or code.words != ("REL", "NOINC"):
        raise code.unknown()
    target = code.target

    def step(s: Any) -> None:
        s.go(target, None)

    return step


def come_back(code: Code) -> Step:
    """RET.REL.NODEC: return to the address in a register."""
    register, _, behind = code.operands[0].text.partition(" ")
    if code.words != ("REL", "NODEC") or behind != f"`({code.kernel})":
        raise code.unknown()
    read = bits(operand(register), code)

    def step(s: Any) -> None:
        s.go_to_addresses(code, np.broadcast_to(read(s), s.shape).astype(np.int64))

    return step


def branch_by_table(code: Code) -> Step:
    """BRX: branch to the address in a register, relative to the next instruction."""
    code.only()
    match = re.match(r"(-?0x[0-9a-f]+)", code.operands[-1].text) if len(code.operands) > 1 else None
    text = code.operands[0].text
    if match is None and (found := re.match(r"(R\d+)\s+(-?0x[0-9a-f]+)", text)):
        text, match = found[1], re.match(r"(-?0x[0-9a-f]+)", found[2])
    if match is None or not re.match(r"R\d+$", text):
        raise code.unknown("of this form is not known")
    number, base = int(text[1:]), int(match[1], 16) + code.address + 16

    def step(s: Any) -> None:
        s.go_to_addresses(code, s.R[number][s.w].view(np.int32).astype(np.int64) + base)

    return step


def barrier(code: Code) -> Step:
    """BAR.SYNC: wait until the given number of threads has arrived; BAR.ARV: arrive without waiting."""
    words = code.only("SYNC", "ARV", "DEFER_BLOCKING")
    code.count(1, 2)
    name = bits(code.operands[0], code)
    count = bits(code.operands[1], code) if len(code.operands) > 1 else None

    def step(s: Any) -> None:
        if s.m is not None and not s.whole_warps():
            s.fault("divergence", code, "a barrier that not all lanes of a warp reach together")
        s.meet(code, np.broadcast_to(name(s), s.shape)[:, 0], count and np.broadcast_to(count(s), s.shape)[:, 0] // 32,
               waits="SYNC" in words)  # fmt: skip

    return step


def registers(code: Code) -> Step:
    """USETMAXREG: release registers, or wait for more."""
    words = code.only("DEALLOC", "TRY_ALLOC", "CTAPOOL")
    wanted = code.operands[-1].number
    put = truth(code.operands[0], code) if "TRY_ALLOC" in words else None

    def step(s: Any) -> None:
        waits = np.zeros(len(s.rows), bool)
        freed = False
        for position, row in enumerate(s.rows.tolist()):
            program, more = int(s.program[row, 0]), wanted - int(s.registers[row])
            if more and (more > 0) != (put is not None):
                s.fault("value", code, f"setmaxnreg from {s.registers[row]} to {wanted} registers")
            waits[position] = more > s.pool[program]
            if waits[position]:
                s.why[row] = f"registers at {code.address:#x}"
            else:
                s.pool[program] -= more
                s.registers[row], freed = wanted, freed or more < 0
        if freed:
            s.changed()
        if s.go_on_without(waits) and put is not None:
            put(s, np.ones((1, 1), dtype=bool))

    return step


def nothing(code: Code) -> Step:
    """No-op for reconvergence, hints and memory fences: lanes reconverge automatically, and memory is in order."""
    return lambda s: None


CONTROL = {"BRA": branch, "EXIT": leave, "CALL": call, "RET": come_back, "BRX": branch_by_table, "BPT": trap,
           "BAR": barrier, "USETMAXREG": registers}  # fmt: skip
"""Instructions that end a code segment."""
MEANINGS = dict.fromkeys(
    ("NOP", "BSSY", "BSYNC", "WARPSYNC", "YIELD", "NANOSLEEP", "MEMBAR", "ERRBAR", "CCTL", "BMOV", "BREAK"), nothing
)
