"""Unit of each NVIDIA instruction, and the cycles that a warp occupies it.

Cycles are those of one scheduler (a quarter of a multiprocessor; half of one on sm_60) for one warp instruction. AMD's
rates are in gcn.py. Sources:

    lanes      CUDA C++ programming guide, "Throughput of native arithmetic instructions": results per cycle and
               multiprocessor; 32 lanes * schedulers / results = cycles per warp instruction
    tensor     the whitepapers' dense half-precision rate with float32 accumulation, divided by processors and boost
               clock: A100 312 TFLOP/s, H100 989, B200 2,250, RTX 3090 71, RTX 4090 165, RTX 5090 209
    memory     an estimate: the load/store unit serves four schedulers with one warp instruction per cycle
    shared     128 bytes per cycle and multiprocessor
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ptx_check.ledger.code import Instruction

UNITS = ("issue", "fp32", "imad", "alu", "mufu", "memory", "tensor")
"""The columns of the ledger; the bound of a loop is the largest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Cycles of a scheduler per warp instruction, by unit."""

    fp32: float
    """FFMA, FADD, FMUL, and IMAD, which shares their lanes."""
    imad: float
    """IMAD alone: on multiprocessors with 128 FP32 lanes only half of the lanes execute it."""
    alu: float
    """Integer, logic, comparison, selection, byte permutation, conversion to 16 bits."""
    mufu: float = 8
    """Exponential, logarithm, reciprocal; conversion between integers and floats."""
    memory: float = 4
    """Loads, stores and shuffles."""
    fma: float = 0
    """Half-precision multiply-adds per cycle of the tensor cores; 0 if Triton does not use them."""
    int8: float = 2
    """Rate of 8-bit integer products relative to `fma`."""
    schedulers: int = 4


RATES: dict[str, Rates] = {
    "sm_60": Rates(fp32=1, imad=3, alu=1, mufu=4, memory=2, schedulers=2),  # no integer multiply: three XMAD
    "sm_70": Rates(fp32=2, imad=2, alu=2),
    "sm_75": Rates(fp32=2, imad=2, alu=2),
    "sm_80": Rates(fp32=2, imad=2, alu=2, fma=256),
    "sm_86": Rates(fp32=1, imad=2, alu=2, fma=64, int8=4),
    "sm_89": Rates(fp32=1, imad=2, alu=2, fma=64, int8=4),
    "sm_90": Rates(fp32=1, imad=2, alu=2, fma=512),
    "sm_100": Rates(fp32=1, imad=2, alu=2, fma=1024),
    "sm_103": Rates(fp32=1, imad=2, alu=2, mufu=4, fma=1024),  # B300: twice the exponentials
    "sm_110": Rates(fp32=1, imad=2, alu=2, fma=1024),
    "sm_120": Rates(fp32=1, imad=2, alu=2, fma=64, int8=4),
    "sm_121": Rates(fp32=1, imad=2, alu=2, fma=64, int8=4),
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
    """Return fp32, imad, alu, mufu, memory or tensor; "other" if an instruction takes only an issue slot (control flow,
    uniform datapath, barriers)."""
    return _UNITS.get(instruction.name, "other")


def multiply_adds(instruction: Instruction, warps: int, code: Sequence[Instruction] = ()) -> float:
    """Return the multiply-adds of a tensor instruction per warp.

    A warp has a quarter of a wgmma, and 1 / warps of a tcgen05 product, which one thread issues for the whole program.
    code: the function, in which the shape of a tcgen05 product is looked up.
    """
    if match := _GROUP_SHAPE.search(instruction.opcode):
        m, n, k = map(int, match.groups())
        return m * n * k / 4
    if instruction.name.startswith("UTC"):
        return _descriptor_product(instruction, code) / warps
    return next((_SHAPE[part] for part in instruction.opcode.split(".") if part in _SHAPE), 0)


def _descriptor_product(instruction: Instruction, code: Sequence[Instruction]) -> int:
    """Return m * n * k of a tcgen05 product from its instruction descriptor, the last constant moved to its register.

    Bits 17 to 22 are N / 8, bits 24 to 28 M / 16 (PTX ISA, "Instruction descriptor").
    """
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
    """Return the cycles of the tensor cores: TF32 at half the 16-bit rate, 8-bit floats at twice it."""
    eight = {"IMMA": rates.int8, "IGMMA": rates.int8, "QMMA": 2.0, "QGMMA": 2.0}.get(instruction.name, 1.0)
    share = 0.5 if "TF32" in instruction.opcode else eight
    return multiply_adds(instruction, warps, code) / (rates.fma * share) if rates.fma else 0.0


def shared_bytes(instruction: Instruction) -> int:
    """Return the bytes of shared memory that an instruction reads or writes per thread."""
    if instruction.name in ("LDSM", "STSM"):
        match = re.search(r"\.([124])\b", instruction.opcode)
        return 4 * int(match[1]) if match else 4
    return _width(instruction) if instruction.name in ("LDS", "STS", "ATOMS") else 0


def global_bytes(instruction: Instruction) -> int:
    """Return the bytes of global memory that an instruction reads or writes per thread."""
    names = ("LDG", "STG", "LDGSTS", "LD", "ST", "RED", "REDG", "ATOM", "ATOMG")
    return _width(instruction) if instruction.name in names else 0


def _width(instruction: Instruction) -> int:
    for part, size in ((".128", 16), (".64", 8), (".U16", 2), (".S16", 2), (".U8", 1), (".S8", 1)):
        if part in instruction.opcode:
            return size
    return 4
