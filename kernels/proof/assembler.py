"""The ptxas that makes machine code of the kernels' PTX: which one, why not a newer one, and what is known of it.

Triton brings two along and chooses by chip; one of the user's goes before it (TRITON_PTXAS_PATH, and
TRITON_PTXAS_BLACKWELL_PATH for the newer one's chips). The rule: the newest that the installed Triton brings for a chip
where all rings of proof pass with it. LEFT says where that is not the newest, and by which count. Machine code for
sm_90 is executed and held against its PTX (docs/assemblers.md); for other chips no test without a GPU notices a fault.
"""

import functools
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from itertools import groupby
from pathlib import Path

from fasttfm.kernels.chip import CHIPS

FAULTS = {"12.8.93": "assembles some kernels wrongly for Hopper, 13.1.80 does not (flash-linear-attention issue 1262)"}
"""Version -> what is published of it."""

LEFT = {
    ("12.8.93", "13.1.80"): "with it 9 of the 118 heaviest cases on sm_80 and sm_90 spill more than the rules allow; "
    "it does not know sm_60 and sm_70",
    ("12.9.86", "13.4.59"): "with it 4 of attention's 22 heaviest cases on sm_80 spill more than the rules allow; "
    "it does not know sm_60 and sm_70",
}
"""Version in use and a newer one in the same Triton -> why the newer one is left. Counts: compile-matrix.jsonl of
benchmarks/results, by the command that its lines name with TRITON_PTXAS_PATH."""


@dataclass(frozen=True, slots=True)
class Assembler:
    path: str
    version: str
    """As 12.8.93; unknown where it does not say."""
    variable: str
    """The environment variable that names another."""


def assembler(capability: int) -> Assembler:
    """The ptxas that Triton runs for NVIDIA chips of a compute capability, 90 for sm_90."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    path = knobs.nvidia.ptxas.path
    if hasattr(knobs.nvidia, "ptxas_blackwell"):  # Triton 3.5 has one alone
        path = compiler.get_ptxas(capability).path
    return Assembler(path, _version(path), f"TRITON_PTXAS{'_BLACKWELL' * (path != knobs.nvidia.ptxas.path)}_PATH")


@functools.cache
def _version(path: str | Path) -> str:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return match[1] if match else "unknown"


def by_chips() -> dict[str, Assembler]:
    """NVIDIA chips that have one assembler, as sm_60 to sm_90 or sm_100 and newer -> it."""
    nvidia = [chip for chip in CHIPS.values() if chip.capability]
    groups = [(used, [chip.name for chip in of]) for used, of in groupby(nvidia, lambda c: assembler(c.capability))]
    return {
        f"{names[0]} and newer" if names[-1] == nvidia[-1].name else f"{names[0]} to {names[-1]}": used
        for used, names in groups
    }


def left(used: Assembler) -> dict[str, str]:
    """The newer assemblers beside it, which Triton brings for other chips, by version -> why they are left."""
    beside = {_version(file) for file in Path(used.path).parent.glob("ptxas*")}
    order = lambda version: [int(part) for part in version.split(".")]  # noqa: E731
    newer = [version for version in beside - {"unknown"} if order(version) > order(used.version)]
    return {version: LEFT.get((used.version, version), "not tried") for version in sorted(newer, key=order)}


def toolchain() -> str:
    """Triton and its assemblers by the chips that they are for, in a line."""
    each = [f"ptxas {used.version} for {chips}" for chips, used in by_chips().items()]
    return ", ".join([f"triton {metadata.version('triton')}", *each])


def in_use(capability: int) -> str:
    """A line that names the assembler for these chips, what is published of it, and why it is not a newer one."""
    used = assembler(capability)
    said = f"sm_{capability} is assembled by ptxas {used.version} ({used.path})"
    if used.version in FAULTS:
        said += f", which {FAULTS[used.version]}"
    return "; ".join([said, *(f"{version} is left: {why}" for version, why in left(used).items())])
