"""The ptxas that makes machine code of the kernels' PTX, and what is known of it.

Triton brings two along, one for chips before sm_100; another of the user's goes before it (TRITON_PTXAS_PATH, and
TRITON_PTXAS_BLACKWELL_PATH from sm_100 on). Machine code for sm_90 is executed and held against its PTX
(docs/assemblers.md); what an assembler does wrong for another chip no test without a GPU can notice.
"""

import re
import subprocess
from dataclasses import dataclass

FAULTS = {"12.8.93": "assembles some kernels wrongly on Hopper, 13.1.80 does not (flash-linear-attention issue 1262)"}
"""Version -> what is published of it, for chips before sm_100."""


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

    newer = capability >= 100 and hasattr(knobs.nvidia, "ptxas_blackwell")
    path = (knobs.nvidia.ptxas_blackwell if newer else knobs.nvidia.ptxas).path
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return Assembler(
        path, match[1] if match else "unknown", "TRITON_PTXAS_BLACKWELL_PATH" if newer else "TRITON_PTXAS_PATH"
    )


def in_use(capability: int) -> str:
    """A line that names the assembler for these chips, and what is published of it."""
    used = assembler(capability)
    fault = f", which {FAULTS[used.version]}" if capability < 100 and used.version in FAULTS else ""
    return f"sm_{capability} is assembled by ptxas {used.version} ({used.path}){fault}"
