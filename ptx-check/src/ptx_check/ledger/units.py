"""Units of a chip that execute each instruction, and the cycles for which a warp keeps them busy.

One table for NVIDIA's chips; AMD's is in gcn.py. Cycles are those of one scheduler (a quarter of a multiprocessor; half
of one on sm_60) for one instruction of a warp. Sources:

    lanes      CUDA C++ programming guide, "Throughput of native arithmetic instructions": results a cycle and
               multiprocessor; 32 lanes * schedulers / results = cycles a warp
    tensor     the whitepapers' dense half-precision rate with float32 sums over processors and boost clock: A100
               312 TFLOP/s, H100 989, B200 2,250, RTX 3090 71, RTX 4090 165, RTX 5090 209
    memory     an estimate: the load/store unit takes a warp instruction a cycle and serves four schedulers
    shared     128 bytes a cycle and multiprocessor
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ptx_check.ledger.code import Instruction

UNITS = ("issue", "fp32", "imad", "alu", "mufu", "memory", "tensor")
"""The columns of the ledger; the bound of a loop is the largest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Cycles of a scheduler for a warp's instruction, by unit."""

    fp32: float
    """FFMA, FADD, FMUL, and IMAD, which goes through the same lanes."""
    imad: float
    """IMAD alone, which only half of the lanes take where there are 128 of them."""
    alu: float
    """Integers, logic, comparison, selection, permutation of bytes, conversion to 16 bits."""
    mufu: float = 8
    """Exponential, logarithm, reciprocal; conversion between integers and floats."""
    memory: float = 4
    """Loads, stores and shuffles."""
    fma: float = 0
    """Multiply-adds of the tensor cores a cycle in half precision; 0 where Triton uses none."""
    schedulers: int = 4


RATES: dict[str, Rates] = {
    "sm_60": Rates(fp32=1, imad=3, alu=1, mufu=4, memory=2, schedulers=2),  # no integer multiply: three XMAD
    "sm_70": Rates(fp32=2, imad=2, alu=2),
    "sm_75": Rates(fp32=2, imad=2, alu=2),
    "sm_80": Rates(fp32=2, imad=2, alu=2, fma=256),
    "sm_86": Rates(fp32=1, imad=2, alu=2, fma=64),
    "sm_89": Rates(fp32=1, imad=2, alu=2, fma=64),
    "sm_90": Rates(fp32=1, imad=2, alu=2, fma=512),
    "sm_100": Rates(fp32=1, imad=2, alu=2, fma=1024),
    "sm_103": Rates(fp32=1, imad=2, alu=2, mufu=4, fma=1024),  # B300: twice the exponentials
    "sm_110": Rates(fp32=1, imad=2, alu=2, fma=1024),
    "sm_120": Rates(fp32=1, imad=2, alu=2, fma=64),
    "sm_121": Rates(fp32=1, imad=2, alu=2, fma=64),
}
"""By chip."""

_NAMES = {
    "fp32": "FFMA FADD FMUL FFMA2 FADD2 FMUL2 FSWZADD HFMA2 HADD2 HMUL2",
    "imad": "IMAD XMAD IMUL IDP",
    "alu": "LOP3 LOP IADD3 IADD VIADD SHF SHL SHR PRMT SEL ISETP FMNMX FMNMX3 FSEL F2FP FSETP IABS LEA IMNMX VIMNMX "
    "VIMNMX3 VIADDMNMX FSET ISCADD MOV PLOP3 P2R R2P SGXT BMSK HSET2 HSETP2 HMNMX2 VHMNMX I2FP I2IP VABSDIFF CS2R",
    "mufu": "MUFU I2F F2I F2F FRND POPC FLO BREV FCHK I2I",
    "memory": "LDS STS LDSM STSM LDG STG LDGSTS LD ST LDL STL SHFL ATOM ATOMG ATOMS RED REDUX REDG LDTM STTM UTMALDG "
    "UTMASTG UTMAREDG UBLKCP MATCH VOTE",
    "tensor": "HMMA HGMMA IMMA IGMMA QGMMA QMMA BMMA UTCHMMA UTCQMMA UTCIMMA OMMA",
}
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_SHAPE = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "884": 8 * 8 * 4, "1684": 16 * 8 * 4, "16832": 16 * 8 * 32}
_GROUP_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


def unit(instruction: Instruction) -> str:
    """fp32, imad, alu, mufu, memory, tensor; other for what takes an issue slot alone (control, uniform, barriers)."""
    return _UNITS.get(instruction.name, "other")


def multiply_adds(instruction: Instruction, warps: int, code: Sequence[Instruction] = ()) -> float:
    """Multiply-adds that a tensor instruction does for one warp: a fourth of wgmma's; of tcgen05's, which one thread
    starts for the whole program, its share among `warps`. code: the function, in which tcgen05's shape is looked up."""
    if match := _GROUP_SHAPE.search(instruction.opcode):
        m, n, k = map(int, match.groups())
        return m * n * k / 4
    if instruction.name.startswith("UTC"):
        return _descriptor_product(instruction, code) / warps
    return next((_SHAPE[part] for part in instruction.opcode.split(".") if part in _SHAPE), 0)


def _descriptor_product(instruction: Instruction, code: Sequence[Instruction]) -> int:
    """m * n * k of a tcgen05 product by its instruction descriptor: N / 8 in bits 17 to 22, M / 16 in bits 24 to 28
    (PTX ISA, "Instruction descriptor"), the constant that was last put into the register."""
    match = re.search(r"idesc\[(UR\d+)\]", instruction.operands)
    if match is None:
        return 0
    moved = [each for each in code if each.name == "UMOV" and each.address < instruction.address]
    values = [each.operands.split(",")[1] for each in moved if each.operands.startswith(f"{match[1]},")]
    constant = next((value.strip() for value in reversed(values) if value.strip().startswith("0x")), None)
    if constant is None:
        return 0
    word = int(constant, 16)
    n, m = (word >> 17 & 63) * 8, (word >> 24 & 31) * 16
    return m * n * (8 if word >> 7 & 7 == 2 else 16)  # the format of A: 2 is TF32


def tensor_cycles(instruction: Instruction, rates: Rates, warps: int, code: Sequence[Instruction] = ()) -> float:
    """Cycles of the tensor cores. TF32 goes at half the rate of 16 bits, 8-bit integers and floats at twice it."""
    slower = 2.0 if "TF32" in instruction.opcode else 0.5 if instruction.name in ("IMMA", "QMMA", "QGMMA") else 1.0
    return slower * multiply_adds(instruction, warps, code) / rates.fma if rates.fma else 0.0


def shared_bytes(instruction: Instruction) -> int:
    """Bytes that a thread reads or writes in shared memory."""
    if instruction.name in ("LDSM", "STSM"):
        match = re.search(r"\.([124])\b", instruction.opcode)
        return 4 * int(match[1]) if match else 4
    return _width(instruction) if instruction.name in ("LDS", "STS", "ATOMS") else 0


def global_bytes(instruction: Instruction) -> int:
    """Bytes that a thread reads or writes in global memory."""
    return _width(instruction) if instruction.name in ("LDG", "STG", "LDGSTS", "LD", "ST", "RED", "ATOMG") else 0


def _width(instruction: Instruction) -> int:
    for part, size in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)):
        if part in instruction.opcode:
            return size
    return 4
