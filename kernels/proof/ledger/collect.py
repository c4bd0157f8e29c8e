"""Counts whatever Triton compiles while a piece of code runs: other people's kernels, or a tile that is about to be
timed.

    with collected() as found:
        my_kernel[grid](x, y, BLOCK=128)
    found[0].count.main.bound

Without a device `compiled_for(chip)` lets launches on CPU tensors compile for a chip; nothing is then computed.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.proof import resources
from fasttfm.kernels.proof.ledger import counted
from fasttfm.kernels.proof.ledger.counted import Counted

_TILES = (("BLOCK_M", "BLOCK_N"), ("BLOCK_SIZE_M", "BLOCK_SIZE_N"), ("ROWS", "COLUMNS"), ("BLOCK_SIZE",), ("BLOCK",))
"""Constants that usually hold a tile's sizes."""


@dataclass(frozen=True, slots=True)
class Found:
    """A kernel that was compiled."""

    name: str
    chip: str
    constants: dict[str, Any]
    """Its tl.constexpr parameters that are numbers, and its options, by name."""
    counted: Counted

    def elements(self) -> float:
        """Elements of its tile a thread, as its constants have it; 1 where they do not say."""
        for names in _TILES:
            if all(isinstance(self.constants.get(name), int) for name in names):
                product = 1
                for name in names:
                    product *= self.constants[name]
                return product / (CHIPS[self.chip].warp * self.counted.warps)
        return 1.0


@contextlib.contextmanager
def collected(chip: Chip | None = None) -> Iterator[list[Found]]:
    """Gives a list that every kernel which Triton compiles inside the block is added to, unless it is cached in the
    process. chip: what kernels are counted for; None: what each is compiled for, of those in the compile matrix."""
    import triton.compiler as compiler

    found: list[Found] = []
    compile_it = compiler.compile

    def compile_and_count(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        result = compile_it(source, target=target, options=options, **more)
        of = chip or CHIPS.get(_name(result))
        if of is not None:
            found.append(_found(of, source, result))
        return result

    with mock.patch.object(compiler, "compile", compile_and_count):
        yield found


def _name(result: Any) -> str:
    arch = result.metadata.target.arch
    return f"sm_{arch}" if isinstance(arch, int) else str(arch)


def _found(chip: Chip, source: Any, result: Any) -> Found:
    names = source.fn.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    warps = result.metadata.num_warps
    needs = resources.read(result, result.metadata.shared)
    options = {"num_warps": warps, "num_stages": result.metadata.num_stages}
    numbers = {name: value for name, value in constants.items() if isinstance(value, (int, float))}
    return Found(
        result.metadata.name, chip.name, {**numbers, **options}, counted.of_compiled(chip, result, needs, warps)
    )


@contextlib.contextmanager
def compiled_for(chip: str) -> Iterator[list[Found]]:
    """Inside the block launches on CPU tensors compile for the chip and start nothing; gives what was compiled."""
    from fasttfm.kernels.proof import stand_in

    class Timed(stand_in.StandIn):
        def get_benchmarker(self) -> Callable:
            """triton.autotune compiles every configuration and takes any."""

            def once(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
                call()
                return 1.0 if quantiles is None else [1.0] * len(quantiles)

            return once

    undo = stand_in.install(Timed(chip))
    try:
        with collected(CHIPS[chip]) as found:
            yield found
    finally:
        undo()


def run_file(file: Path, chips: Sequence[str]) -> list[Found]:
    """Runs a Python file that launches Triton kernels on CPU tensors, and counts them for the chips.

    A file that says `with executed("sm_90")`, as docs/ptx.md has it, is compiled for the chips that are given here, or
    for its own where none is; nothing is executed. Without either: sm_80 and sm_90.
    """
    from fasttfm.kernels.proof.executed import ptx_check

    results: list[Found] = []

    @contextlib.contextmanager
    def only_counted(chip: str, **options: Any) -> Iterator[Any]:
        for each in chips[:1] or [chip]:
            with compiled_for(each) as found:
                yield mock.Mock(launches=[], faults=[], notes=[])
            results.extend(found)

    says_where = "executed(" in file.read_text(encoding="utf-8")
    for chip in chips or ([""] if says_where else ["sm_80", "sm_90"]):
        with mock.patch.object(ptx_check, "executed", only_counted), mock.patch.object(sys, "argv", [str(file)]):
            chips = [chip] if chip else []
            if says_where:
                runpy.run_path(str(file), run_name="__main__")
            else:
                with compiled_for(chip) as found:
                    runpy.run_path(str(file), run_name="__main__")
                results.extend(found)
    return results
