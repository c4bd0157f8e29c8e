"""Parser for the compiler's AMD assembly, and the cycles of each unit per instruction.

Cycles are those of one SIMD for one instruction of a wave.

    CDNA (gfx9)           16 lanes take four cycles for a wave of 64; transcendental functions and 32-bit integer
                          products run at a quarter of that rate; matrix instructions at the data sheets' rate (MI250X
                          383, MI300X 1,307, MI355X 2,516 TFLOP/s) divided by compute units, four SIMDs and clock
    RDNA (gfx11, gfx12)   32 lanes take one cycle for a wave of 32, four for transcendental functions; WMMA from
                          RX 7900 XTX 123 and RX 9070 XT 195 TFLOP/s divided by compute units, two SIMDs and clock
    memory                local memory: 128 bytes per cycle and compute unit; global memory: the same, as an estimate

Source: AMD's instruction set guides and whitepapers of CDNA 2 to 4, RDNA 3 and 4.
"""

import re
from dataclasses import dataclass

from ptx_check.ledger.code import Function, Instruction

_FUNCTION = re.compile(r"^\s*\.type\s+(\w+),@function")
_LABEL = re.compile(r"^(\.\w+):")
_LINE = re.compile(r"^\s+(?P<opcode>(?:[vs]|ds|buffer|global|flat|scratch|tbuffer)_\w+)\s*(?P<operands>[^;]*)")
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_?(\w*)")
"""Shape, number of products and type of a matrix instruction; gfx90a writes the type without an underscore."""
_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_(mul_lo_u32|mul_hi_[ui]32|mad_[ui]64_[ui]32|mul_lo_i32)")
_TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_")
_FLOAT = re.compile(r"v_(dual_)?(pk_)?(add|sub|subrev|mul|fma|fmac|fmamk|fmaak|mac|mad|fma_mix\w*)_f(16|32)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Cycles of a SIMD per wave instruction, by unit."""

    vector: float
    slow: float
    """Transcendental functions and 32-bit integer products."""
    memory: float
    """Per 4 bytes of a lane."""
    fma: float
    """Half-precision multiply-adds per cycle of the matrix unit."""
    single: float
    """Rate of float32 matrix products relative to `fma`; 0 if the chip has none."""
    eight: float
    """Rate of 8-bit matrix products relative to `fma`."""
    issue: float
    """Per instruction of any kind. CDNA issues five instructions, to different units, every four cycles."""
    wave: int
    simds: int


def _cdna(fma: float, single: float, eight: float = 2) -> Rates:
    return Rates(vector=4.0, slow=16.0, memory=8.0, issue=0.8, wave=64, simds=4, fma=fma, single=single, eight=eight)


def _rdna(fma: float, eight: float) -> Rates:
    return Rates(vector=1.0, slow=4.0, memory=2.0, issue=1.0, wave=32, simds=2, fma=fma, single=0, eight=eight)


RATES: dict[str, Rates] = {
    "gfx90a": _cdna(128, 1 / 4, eight=1),
    "gfx942": _cdna(256, 1 / 8),
    "gfx950": _cdna(512, 1 / 16),
    "gfx1100": _rdna(128, eight=1),
    "gfx1201": _rdna(256, eight=2),
}


def warp(chip: str) -> int:
    """Threads per warp (AMD: per wave) of any chip."""
    return RATES[chip].wave if chip in RATES else 32


def parse(text: str) -> list[Function]:
    """Return the functions of an assembly file; an instruction's address is its index in the function."""
    functions: list[tuple[str, list[tuple[str, str]], dict[str, int]]] = []
    for line in text.splitlines():
        if start := _FUNCTION.match(line):
            functions.append((start[1], [], {}))
        elif functions and (label := _LABEL.match(line)):
            functions[-1][2].setdefault(label[1], len(functions[-1][1]))
        elif functions and (match := _LINE.match(line)):
            functions[-1][1].append((match["opcode"], match["operands"].strip()))
    return [
        Function(name, tuple(_instruction(number, row, labels) for number, row in enumerate(rows)))
        for name, rows, labels in functions
    ]


def _instruction(number: int, row: tuple[str, str], labels: dict[str, int]) -> Instruction:
    opcode, operands = row
    target = labels.get(operands) if opcode.startswith(("s_branch", "s_cbranch")) else None
    ends = opcode in ("s_branch", "s_endpgm", "s_setpc_b64")
    return Instruction(number, opcode, operands, target=target, ends=ends)


def unit(instruction: Instruction) -> str:
    """Return the unit of an instruction: fp32 (float additions and multiplications), alu (other vector instructions),
    mufu (transcendental functions), memory, tensor, or other (scalar unit)."""
    opcode = instruction.opcode
    if opcode.startswith(("v_mfma", "v_smfmac", "v_wmma", "v_swmmac")):
        return "tensor"
    if opcode.startswith(("ds_", "buffer_", "global_", "flat_", "scratch_", "tbuffer_")):
        return "memory"
    if _TRANSCENDENTAL.match(opcode):
        return "mufu"
    if opcode.startswith("v_"):
        return "fp32" if _FLOAT.match(opcode) else "alu"
    return "other"


def vector_cycles(instruction: Instruction, rates: Rates) -> float:
    """Return the cycles of the vector lanes for an instruction."""
    return rates.slow if _SLOW.match(instruction.opcode) else rates.vector


def multiply_adds(instruction: Instruction) -> int:
    """Return the multiply-adds of a matrix instruction, per wave."""
    match = _SHAPE.search(instruction.opcode)
    return int(match[1]) * int(match[2]) * int(match[3]) * int(match[4] or 1) if match else 0


def tensor_cycles(instruction: Instruction, rates: Rates) -> float:
    match = _SHAPE.search(instruction.opcode)
    kind = match[5] if match else ""
    eight = rates.eight if re.match(r"i8|iu8|fp8|bf8|f8", kind) else 1.0
    share = {"f32": rates.single, "xf32": 0.5, "f64": 1 / 16}.get(kind, eight)
    return multiply_adds(instruction) / (rates.fma * share) if share else 0.0


def memory_cycles(instruction: Instruction, rates: Rates) -> float:
    """Return the cycles of the memory path: proportional to the width, at least 4 bytes per lane."""
    return rates.memory * max(4, width(instruction)) / 4


def width(instruction: Instruction) -> int:
    """Return the bytes that an instruction reads or writes per lane."""
    opcode = instruction.opcode
    if match := re.search(r"dwordx(\d)", opcode):
        return 4 * int(match[1])
    if match := re.search(r"_[biu](8|16|32|64|96|128)(?:_tr_b\d+|_d16\w*|_e\d+)?$", opcode):
        return int(match[1]) // 8 * (2 if "read2" in opcode or "write2" in opcode or "_2addr_" in opcode else 1)
    return next((size for name, size in (("byte", 1), ("short", 2), ("permute", 4)) if name in opcode), 4)
