"""Registers, spills and shared memory of a compiled kernel, and its occupancy, without a device."""

import re
from dataclasses import dataclass
from typing import Any

from ptx_check.ledger import sass

_NVIDIA_MATRIX = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE)
_AMD_MATRIX = re.compile(r"^\s*v_(?:mfma|wmma)_", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one program of a kernel."""

    registers: int
    """Per thread; AMD: vector registers, including accumulation registers."""
    spill: int
    """Bytes of local memory per thread (spilled registers)."""
    shared: int
    """Bytes of shared memory."""
    matrix: int
    """Static number of matrix instructions in the code (mma, wgmma, tcgen05; mfma, wmma)."""
    bound: float = 0.0
    """Cycles of a scheduler per tile element on the busiest unit; 0 if the tile is unknown."""
    outside: int = 0
    """Instructions outside of loops."""


def read(compiled: Any, shared: int) -> Resources:
    """Return the resources of a triton.compile() result; shared: bytes of dynamic shared memory at launch."""
    if "amdgcn" in compiled.asm:
        return _read_amd(compiled.asm["amdgcn"], shared)
    usage = sass.resource_usage(compiled.asm["cubin"])
    registers, spill, static_shared = usage.get(compiled.metadata.name) or next(iter(usage.values()))
    return Resources(registers, spill, max(shared, static_shared), len(_NVIDIA_MATRIX.findall(compiled.asm["ptx"])))


def _read_amd(assembly: str, shared: int) -> Resources:
    def value(field: str) -> int:
        match = re.search(rf"^\s*\.{field}:\s*(\d+)", assembly, re.MULTILINE)
        if match is None:
            raise ValueError(f"the compiled kernel's metadata has no .{field}")
        return int(match[1])

    return Resources(
        registers=value("vgpr_count"),
        spill=value("private_segment_fixed_size"),
        shared=max(shared, value("group_segment_fixed_size")),
        matrix=len(_AMD_MATRIX.findall(assembly)),
    )


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """Residency limits of a multiprocessor."""

    warps: int
    programs: int
    shared: int
    """Bytes of shared memory."""
    reserved: int
    """Bytes of shared memory that the system reserves per program."""


@dataclass(frozen=True, slots=True)
class ComputeUnit:
    """Residency limits of four AMD SIMDs with one local memory: a compute unit, on RDNA chips a pair of them."""

    waves: int
    """Per SIMD."""
    registers: int
    """Per lane of a SIMD."""
    block: int
    """Registers are allocated in multiples of this number."""
    shared: int
    """Bytes of local memory."""


_KIB = 1024
MULTIPROCESSORS = {
    # CUDA C++ programming guide, table "Technical specifications per compute capability"
    "sm_60": Multiprocessor(64, 32, 64 * _KIB, 0),
    "sm_70": Multiprocessor(64, 32, 96 * _KIB, 0),
    "sm_75": Multiprocessor(32, 16, 64 * _KIB, 0),
    "sm_80": Multiprocessor(64, 32, 164 * _KIB, _KIB),
    "sm_86": Multiprocessor(48, 16, 100 * _KIB, _KIB),
    "sm_89": Multiprocessor(48, 24, 100 * _KIB, _KIB),
    "sm_90": Multiprocessor(64, 32, 228 * _KIB, _KIB),
    "sm_100": Multiprocessor(64, 32, 228 * _KIB, _KIB),
    "sm_103": Multiprocessor(64, 32, 228 * _KIB, _KIB),
    "sm_110": Multiprocessor(48, 24, 228 * _KIB, _KIB),
    "sm_120": Multiprocessor(48, 24, 100 * _KIB, _KIB),
    "sm_121": Multiprocessor(48, 24, 100 * _KIB, _KIB),
}
COMPUTE_UNITS = {
    # AMD's instruction set guides and whitepapers
    "gfx90a": ComputeUnit(8, 512, 8, 64 * _KIB),
    "gfx942": ComputeUnit(8, 512, 8, 64 * _KIB),
    "gfx950": ComputeUnit(8, 512, 8, 160 * _KIB),
    "gfx1100": ComputeUnit(16, 1536, 24, 128 * _KIB),
    "gfx1201": ComputeUnit(16, 1536, 24, 128 * _KIB),
}


def occupancy(chip: str, resources: Resources, num_warps: int) -> float:
    """Estimate the resident share of a multiprocessor's warps from registers, shared memory and warps per program."""
    registers = max(resources.registers, 1)
    if amd := COMPUTE_UNITS.get(chip):
        waves = min(amd.waves, amd.registers // (-(-registers // amd.block) * amd.block))
        programs = 4 * waves // num_warps
        if resources.shared:
            programs = min(programs, amd.shared // resources.shared)
        return programs * num_warps / (4 * amd.waves)
    unit = MULTIPROCESSORS[chip]
    registers_per_warp = -(-registers * 32 // 256) * 256
    programs = min(unit.programs, unit.warps // num_warps, 65536 // (registers_per_warp * num_warps))
    if resources.shared:
        programs = min(programs, unit.shared // (resources.shared + unit.reserved))
    return programs * num_warps / unit.warps
