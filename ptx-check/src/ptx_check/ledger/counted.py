"""Resources and instruction counts of a compiled kernel.

nvdisasm supports sm_75 and newer. PTX for sm_60 and sm_70 is therefore assembled for sm_75, the nearest supported chip:
same source and tile, but sm_75 instructions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ptx_check.ledger import count, gcn, resources, sass
from ptx_check.ledger.count import Count, Usage
from ptx_check.ledger.resources import Resources

_OLDER = ("sm_60", "sm_70")
_STAND_IN = "sm_75"
"""Target for which the PTX of older chips is assembled."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Resources, instruction counts and warps per program of a compiled kernel."""

    resources: Resources
    count: Count
    warps: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Counted:
        about = written["count"]
        loops, outside = tuple(Usage(**loop) for loop in about["loops"]), Usage(**about["outside"])
        counted = Count(loops, outside, about["products"], tuple(about["orders"]))
        return cls(Resources(**written["resources"]), counted, written["warps"])


def of_compiled(chip: str, compiled: Any) -> Counted:
    """Count the result of triton.compile()."""
    if "amdgcn" in compiled.asm:
        functions = gcn.parse(compiled.asm["amdgcn"])
    else:
        cubin = assemble(compiled.asm["ptx"], _STAND_IN) if chip in _OLDER else compiled.asm["cubin"]
        functions = sass.parse(sass.disassemble(cubin))
    about = compiled.metadata
    function = next((each for each in functions if each.name == about.name), functions[0])
    own = re.search(r'"ttg.num-warps" = (\d+)', compiled.asm.get("ttgir", ""))  # a partition's, if specialized
    counted = count.count(function, chip, int(own[1]) if own else about.num_warps)
    needs = resources.read(compiled, about.shared)
    return Counted(replace(needs, outside=counted.outside.instructions), counted, about.num_warps)


def assemble(ptx: str, chip: str) -> bytes:
    """Assemble PTX of an older chip for `chip` with ptxas; returns the cubin. Raises ValueError if ptxas fails."""
    text = re.sub(r"^\.target .*$", f".target {chip}", ptx, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        done = subprocess.run(
            [str(sass.tool("ptxas")), "-v", f"--gpu-name={chip}", str(source), "-o", str(result)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ValueError(f"ptxas refuses the PTX for {chip}: {done.stderr.strip()[-300:]}")
        return result.read_bytes()
