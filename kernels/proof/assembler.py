"""The ptxas that assembles the kernels: which version, its known faults, and why newer versions are not used.

Triton ships two and chooses by chip; TRITON_PTXAS_PATH, and TRITON_PTXAS_BLACKWELL_PATH for the chips of the newer one,
override them. The rule: the newest ptxas that the installed Triton ships for a chip and with which all checks pass.
LEFT gives the reasons for not taking a newer one. Machine code for sm_90 is executed and compared with its PTX
(docs/assemblers.md); for other chips no test without a GPU detects a faulty assembler.
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
"""Version -> its published fault."""

LEFT = {
    ("12.8.93", "13.1.80"): "with it 9 of the 118 heaviest cases on sm_80 and sm_90 spill more than the rules allow; "
    "it does not know sm_60 and sm_70",
    ("12.9.86", "13.4.59"): "with it 4 of attention's 22 heaviest cases on sm_80 spill more than the rules allow; "
    "it does not know sm_60 and sm_70",
}
"""(version in use, newer version in the same Triton) -> why the newer one is not used. Counts are from
benchmarks/results/compile-matrix.jsonl, by the recorded commands with TRITON_PTXAS_PATH."""


@dataclass(frozen=True, slots=True)
class Assembler:
    path: str
    version: str
    """Such as 12.8.93, or unknown."""
    variable: str
    """The environment variable that overrides the path."""


def assembler(capability: int) -> Assembler:
    """The ptxas that Triton runs for a compute capability, such as 90 for sm_90."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    path = knobs.nvidia.ptxas.path
    if hasattr(knobs.nvidia, "ptxas_blackwell"):  # Triton 3.5 has only one ptxas
        path = compiler.get_ptxas(capability).path
    return Assembler(path, _version(path), f"TRITON_PTXAS{'_BLACKWELL' * (path != knobs.nvidia.ptxas.path)}_PATH")


@functools.cache
def _version(path: str | Path) -> str:
    output = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", output)
    return match[1] if match else "unknown"


def by_chips() -> dict[str, Assembler]:
    """Range of NVIDIA chips, such as "sm_60 to sm_90" or "sm_100 and newer" -> their assembler."""
    nvidia = [chip for chip in CHIPS.values() if chip.capability]
    groups = [(used, [chip.name for chip in of]) for used, of in groupby(nvidia, lambda c: assembler(c.capability))]
    return {
        f"{names[0]} and newer" if names[-1] == nvidia[-1].name else f"{names[0]} to {names[-1]}": used
        for used, names in groups
    }


def left(used: Assembler) -> dict[str, str]:
    """Newer versions that the same Triton ships for other chips -> why they are not used."""
    shipped = {_version(file) for file in Path(used.path).parent.glob("ptxas*")}
    order = lambda version: [int(part) for part in version.split(".")]  # noqa: E731
    newer = [version for version in shipped - {"unknown"} if order(version) > order(used.version)]
    return {version: LEFT.get((used.version, version), "not tried") for version in sorted(newer, key=order)}


def toolchain() -> str:
    """One line with the versions of Triton and of its assemblers by chips."""
    each = [f"ptxas {used.version} for {chips}" for chips, used in by_chips().items()]
    return ", ".join([f"triton {metadata.version('triton')}", *each])


def in_use(capability: int) -> str:
    """One line with the assembler of a compute capability, its published fault, and why it is not a newer one."""
    used = assembler(capability)
    line = f"sm_{capability} is assembled by ptxas {used.version} ({used.path})"
    if used.version in FAULTS:
        line += f", which {FAULTS[used.version]}"
    return "; ".join([line, *(f"{version} is not used: {why}" for version, why in left(used).items())])
