"""Counts every kernel that Triton compiles inside a block: third-party kernels, or a tile about to be timed.

    with collected() as found:
        my_kernel[grid](x, y, BLOCK=128)
    found[0].counted.count.main.bound

`compiled_for(chip)` needs no device: launches on CPU tensors compile for the chip, and nothing is computed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ptx_check.ledger import counted, gcn, units
from ptx_check.ledger.counted import Counted

_TILES = (("BLOCK_M", "BLOCK_N"), ("BLOCK_SIZE_M", "BLOCK_SIZE_N"), ("ROWS", "COLUMNS"), ("BLOCK_SIZE",), ("BLOCK",))
"""Usual names of the constants with a tile's sizes."""
_FIRST_DEVICE = 128
"""First fake device number, above any real one: Triton caches compiled kernels by device."""


@dataclass(frozen=True, slots=True)
class Found:
    """A compiled kernel and its counts."""

    name: str
    chip: str
    constants: dict[str, Any]
    """Numeric tl.constexpr parameters, num_warps and num_stages, by name."""
    counted: Counted

    def elements(self) -> float:
        """Tile elements per thread, from the constants in _TILES; 1 if the kernel has none of them."""
        for names in _TILES:
            if all(isinstance(self.constants.get(name), int) for name in names):
                product = 1
                for name in names:
                    product *= self.constants[name]
                return product / (gcn.warp(self.chip) * self.counted.warps)
        return 1.0


@contextlib.contextmanager
def collected() -> Iterator[list[Found]]:
    """Yield a list to which every kernel compiled inside the block is added.

    Kernels that this process has already compiled are not compiled again, and chips unknown to the ledger are skipped.
    """
    import triton.compiler as compiler

    found: list[Found] = []
    compile_it = compiler.compile

    def compile_and_count(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        result = compile_it(source, target=target, options=options, **more)
        arch = result.metadata.target.arch
        chip = f"sm_{arch}" if isinstance(arch, int) else str(arch)
        if chip in units.RATES or chip in gcn.RATES:
            found.append(_found(chip, source, result))
        return result

    with mock.patch.object(compiler, "compile", compile_and_count):
        yield found


def _found(chip: str, source: Any, result: Any) -> Found:
    names = source.fn.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    numbers = {name: value for name, value in constants.items() if isinstance(value, (int, float))}
    options = {"num_warps": result.metadata.num_warps, "num_stages": result.metadata.num_stages}
    return Found(result.metadata.name, chip, {**numbers, **options}, counted.of_compiled(chip, result))


class Compiling:
    """A Triton driver that reports a target chip and launches nothing."""

    def __init__(self, chip: str) -> None:
        self._chip = chip
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (binary, name, 32, 0, 1024),
            get_device_properties=lambda device: {
                "max_shared_mem": 1 << 30,
                "multiprocessor_count": 1,
                "warpSize": gcn.warp(chip),
            },
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self._chip in gcn.RATES:
            return GPUTarget("hip", self._chip, gcn.warp(self._chip))
        return GPUTarget("cuda", int(self._chip.removeprefix("sm_")), 32)

    def get_current_device(self) -> int:
        return _FIRST_DEVICE + [*units.RATES, *gcn.RATES].index(self._chip)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable:
        return lambda *launch: None

    def get_benchmarker(self) -> Callable:
        """Return a benchmarker for triton.autotune that calls, and so compiles, each configuration once."""

        def once(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
            call()
            return 1.0 if quantiles is None else [1.0] * len(quantiles)

        return once


@contextlib.contextmanager
def compiled_for(chip: str) -> Iterator[list[Found]]:
    """Compile launches inside the block for a chip without running them; yields the list of collected().

    device="cuda" means the CPU. torch.cuda answers as on the chip if executed() supports it.
    """
    from triton.runtime import driver

    from ptx_check.chips import CHIPS
    from ptx_check.cuda import Answers, OnCpu

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(Compiling(chip))
        stack.enter_context(Answers(CHIPS[chip]) if chip in CHIPS else OnCpu())
        yield stack.enter_context(collected())


def run_file(file: Path, chips: Sequence[str]) -> list[Found]:
    """Run a Python file that launches Triton kernels, and count the kernels for the chips.

    Default chips: those of the file's executed(...) blocks, else sm_80 and sm_90. Kernels are compiled and not
    executed, so the file's checks (assert, torch.testing.assert_close) are disabled.
    """
    import ptx_check

    results: list[Found] = []

    @contextlib.contextmanager
    def only_counted(chip: str, **options: Any) -> Iterator[Any]:
        for each in chips[:1] or [chip]:
            with compiled_for(each) as found:
                yield mock.Mock(launches=[], faults=[], notes=[])
            results.extend(found)

    import torch

    text = file.read_text(encoding="utf-8")
    says_where = "executed(" in text

    def run() -> None:
        exec(compile(text, str(file), "exec", optimize=1), {"__name__": "__main__", "__file__": str(file)})

    for chip in chips or ([""] if says_where else ["sm_80", "sm_90"]):
        with (
            mock.patch.object(ptx_check, "executed", only_counted),
            mock.patch.object(torch.testing, "assert_close"),
            mock.patch.object(sys, "argv", [str(file)]),
            mock.patch.object(sys, "path", [str(file.resolve().parent), *sys.path]),
        ):
            chips = [chip] if chip else []
            if says_where:
                run()
            else:
                with compiled_for(chip) as found:
                    run()
                results.extend(found)
    return results
