"""Counts the machine code of compile cases, in parallel, and keeps what came out.

Compiling and disassembling takes a second or two a case, so each count is kept in the user's cache folder under the
hash of everything that it depends on: the kernel's source, the arguments, the options, Triton and the ledger itself.
nvdisasm knows sm_75 and newer. For sm_60 and sm_70 the PTX that Triton made for them is assembled for sm_75, the
nearest chip that it does know: the same tile and the same source, another chip's instructions.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fasttfm.kernels import choice_cache
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CompileCase
from fasttfm.kernels.proof import compiling, resources
from fasttfm.kernels.proof.ledger import code, count, gcn, sass, units, work
from fasttfm.kernels.proof.ledger.count import Count, Usage
from fasttfm.kernels.proof.resources import Resources

STAND_IN = 75
"""The chip whose assembler and disassembler are taken for older ones."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A compiled kernel: what it takes of the chip, and what its machine code asks for."""

    resources: Resources
    count: Count
    warps: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, written: dict[str, Any]) -> Counted:
        loops, outside = written["count"]["loops"], written["count"]["outside"]
        counted = Count(tuple(Usage(**loop) for loop in loops), Usage(**outside), written["count"]["products"])
        return cls(Resources(**written["resources"]), counted, written["warps"])


def of_case(chip: Chip, case: CompileCase) -> Counted:
    """A case's count, from the cache if it is there. Raises what the compiler raises."""
    file = _folder() / f"{_digest(chip, case)}.json"
    try:
        return Counted.from_json(json.loads(file.read_text()))  # noqa: TID251 (kernels know nothing of fasttfm)
    except (OSError, ValueError, LookupError, TypeError):  # not there, or half written by a process that ended
        pass
    compiled, needs = compiling.compiled(chip, case)
    result = of_compiled(chip, compiled, needs, case.num_warps)
    main, outside = work.main(case, result.count), result.count.outside.instructions
    needs = replace(needs, bound=round(main.bound / work.elements(chip, case), 2), outside=outside)
    result = replace(result, resources=needs)
    _keep(file, result)
    return result


def of_compiled(chip: Chip, compiled: Any, needs: Resources, warps: int) -> Counted:
    """The count of a triton.compile() result."""
    if "amdgcn" in compiled.asm:
        functions = gcn.parse(compiled.asm["amdgcn"])
    else:
        functions = sass.parse(sass.disassemble(_readable(chip, compiled)))
    name = compiled.metadata.name
    function = next((each for each in functions if each.name == name), functions[0])
    return Counted(needs, count.count(function, chip, warps), warps)


def _readable(chip: Chip, compiled: Any) -> bytes:
    """The cubin, or for a chip that nvdisasm does not know one of the same PTX for the stand-in."""
    if chip.capability >= STAND_IN:
        return compiled.asm["cubin"]
    return assemble(compiled.asm["ptx"], STAND_IN)


def assemble(ptx: str, capability: int) -> bytes:
    """ptxas' cubin of PTX that was written for an older chip. Raises ValueError when it refuses."""
    text = re.sub(r"^\.target .*$", f".target sm_{capability}", ptx, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        done = subprocess.run(
            [str(sass.tool("ptxas")), "-v", f"--gpu-name=sm_{capability}", str(source), "-o", str(result)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ValueError(f"ptxas refuses the PTX for sm_{capability}: {done.stderr.strip()[-300:]}")
        return result.read_bytes()


def _folder() -> Path:
    return choice_cache.folder().with_name("ledger")


def _digest(chip: Chip, case: CompileCase) -> str:
    described = [sorted(map(repr, part.items())) for part in compiling.specialization(case)]
    options = (case.num_warps, case.num_stages, metadata.version("triton"))
    parts = (chip, case.name, case.kernel.cache_key, described, options, _own_digest())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def _own_digest() -> str:
    """A digest of the files that compile, read and count."""
    modules = (code, compiling, count, gcn, resources, sass, units, work)
    return hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()[:16]


def _keep(file: Path, result: Counted) -> None:
    """Whole or not at all: several processes may count at a time. A folder that cannot be written costs only time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(result.as_json(), part)
        os.replace(part.name, file)
    except OSError:
        pass
