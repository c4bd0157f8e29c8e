"""Counts whatever Triton compiles while a piece of code runs: other people's kernels, or a tile that is about to be
timed.

    with collected() as found:
        my_kernel[grid](x, y, BLOCK=128)
    found[0].counted.count.main.bound

Without a device `compiled_for(chip)` lets launches on CPU tensors compile for a chip; nothing is then computed.
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
"""Constants that usually hold a tile's sizes."""
_FIRST_DEVICE = 128
"""Above the numbers of devices that a machine has; Triton keeps by it what it has compiled for a chip."""


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
                return product / (gcn.warp(self.chip) * self.counted.warps)
        return 1.0


@contextlib.contextmanager
def collected() -> Iterator[list[Found]]:
    """Gives a list that every kernel which Triton compiles inside the block, for a chip that the ledger knows, is added
    to, unless it is cached in the process."""
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
    """A driver that names a chip and starts nothing."""

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
        """Return what triton.autotune times configurations by: each is compiled, and any is taken."""

        def once(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
            call()
            return 1.0 if quantiles is None else [1.0] * len(quantiles)

        return once


@contextlib.contextmanager
def compiled_for(chip: str) -> Iterator[list[Found]]:
    """Inside the block launches compile for the chip and start nothing; gives what was compiled. A device
    means the CPU, and torch.cuda answers as on the chip where it is one that executed() knows."""
    from triton.runtime import driver

    from ptx_check.chips import CHIPS
    from ptx_check.cuda import Answers, OnCpu

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(Compiling(chip))
        stack.enter_context(Answers(CHIPS[chip]) if chip in CHIPS else OnCpu())
        yield stack.enter_context(collected())


def run_file(file: Path, chips: Sequence[str]) -> list[Found]:
    """Runs a Python file that launches Triton kernels, and counts them for the chips.

    A file that says `with executed("sm_90")` is compiled for the chips that are given here, or for its own where none
    is; nothing is executed, so its checks (assert, torch.testing.assert_close) are left out. Without either: sm_80 and
    sm_90.
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
