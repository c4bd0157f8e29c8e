"""Resources of a chip that a compiled kernel takes, read from its machine code without a device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasttfm.kernels.chip import Chip

_NVIDIA_MATRIX = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)", re.MULTILINE)
_AMD_MATRIX = re.compile(r"^\s*v_(?:mfma|wmma)_", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resources:
    """Needs of one program of a kernel."""

    registers: int
    """Per thread; AMD: vector registers, accumulation registers included."""
    spill: int
    """Bytes of local memory per thread: registers that did not fit."""
    shared: int
    """Bytes of shared memory."""
    matrix: int
    """Matrix instructions in the code (mma, wgmma, tcgen05; mfma), each counted once however often a loop runs it."""
    bound: float = 0.0
    """Cycles of a scheduler that the ledger's busiest unit needs for an element of the tile; 0 where not counted."""
    outside: int = 0
    """Instructions that no loop over tiles holds."""


def read(compiled: Any, shared: int) -> Resources:
    """The resources of a triton.compile() result, which asks for `shared` bytes at launch."""
    if "amdgcn" in compiled.asm:
        return _read_amd(compiled.asm["amdgcn"], shared)
    registers, stack, static_shared = _usage(compiled.asm["cubin"])
    return Resources(registers, stack, max(shared, static_shared), len(_NVIDIA_MATRIX.findall(compiled.asm["ptx"])))


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


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and static shared memory; cuobjdump comes with Triton."""
    import triton  # not before: the compile matrix must be able to switch the interpreter off first

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        output = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", output)
    if match is None:
        raise ValueError(f"cuobjdump reported no resource usage: {output!r}")
    registers, stack, shared, local = map(int, match.groups())
    return registers, max(stack, local), shared


@dataclass(frozen=True, slots=True)
class _Multiprocessor:
    warps: int
    programs: int
    shared: int
    """Bytes of shared memory on the multiprocessor."""
    reserved: int
    """Bytes that the system takes of it for every program."""


_KIB = 1024
_MULTIPROCESSORS = {
    # CUDA C++ programming guide, table "Technical specifications per compute capability"
    60: _Multiprocessor(64, 32, 64 * _KIB, 0),
    70: _Multiprocessor(64, 32, 96 * _KIB, 0),
    75: _Multiprocessor(32, 16, 64 * _KIB, 0),
    80: _Multiprocessor(64, 32, 164 * _KIB, _KIB),
    86: _Multiprocessor(48, 16, 100 * _KIB, _KIB),
    89: _Multiprocessor(48, 24, 100 * _KIB, _KIB),
    90: _Multiprocessor(64, 32, 228 * _KIB, _KIB),
    100: _Multiprocessor(64, 32, 228 * _KIB, _KIB),
    120: _Multiprocessor(48, 24, 100 * _KIB, _KIB),
}


def occupancy(chip: Chip, resources: Resources, num_warps: int) -> float:
    """The share of a multiprocessor's warps that can be resident, estimated from registers, shared memory and warps."""
    registers = max(resources.registers, 1)
    if not chip.capability:
        # CDNA: four SIMDs a compute unit, each with 512 registers a lane (in eights) and at most eight waves.
        waves = 4 * min(8, 512 // (-(-registers // 8) * 8))
        programs = waves // num_warps
        if resources.shared:
            programs = min(programs, chip.shared_memory // resources.shared)
        return programs * num_warps / 32
    unit = _MULTIPROCESSORS[chip.capability]
    registers_per_warp = -(-registers * 32 // 256) * 256
    programs = min(unit.programs, unit.warps // num_warps, 65536 // (registers_per_warp * num_warps))
    if resources.shared:
        programs = min(programs, unit.shared // (resources.shared + unit.reserved))
    return programs * num_warps / unit.warps
