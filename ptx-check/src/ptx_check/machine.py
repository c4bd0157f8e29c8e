"""Executes launches of Triton kernels on CPU tensors from the PTX that Triton compiles for a chip.

    with executed("sm_90") as machine:
        my_kernel[grid](x, y, n, BLOCK=128)     # any @triton.jit kernel, or code that launches kernels
    machine.launches                            # what ran

Triton compiles the kernel to PTX as usual; numpy executes it without device, driver or assembler. A launch with a fault
raises FaultyKernel. Triton's interpreter mode must be off in this process.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import TensorWrapper

from ptx_check import sample
from ptx_check.allocations import Allocations
from ptx_check.bulk_copies import map_of
from ptx_check.chips import CHIPS, Chip
from ptx_check.code import Code, kept
from ptx_check.cuda import Answers
from ptx_check.faults import NOTES, Fault, FaultyKernel, Unsupported
from ptx_check.layouts import compiled_form, shallow_products
from ptx_check.machine_code.compared import MachineCode
from ptx_check.memory import buffers
from ptx_check.operands import parameters_of
from ptx_check.parse import MAP
from ptx_check.run import Launch

_FIRST_DEVICE = 96
"""First fake device number, above any real one: Triton caches compiled kernels by device."""


@dataclass(frozen=True, slots=True)
class Done:
    """An executed launch."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    instructions: int
    """Instructions in the kernel's PTX."""
    seconds: float
    left_out: int
    """Programs of the grid that were skipped: executed(programs=)."""


class Machine:
    """A Triton driver that executes launches on the CPU."""

    def __init__(
        self, chip: Chip, *, checks: bool, raising: bool, programs: int | None, seed: int | None,
        rewrite: Callable[[str], str] | None, machine_code: MachineCode | None,
    ) -> None:  # fmt: skip
        self.chip, self._seed, self.machine_code = chip, seed, machine_code
        self._checks, self._raising, self._programs, self._rewrite = checks, raising, programs, rewrite
        self.faults: list[Fault] = []
        self.notes: list[Fault] = []
        """Reports of the kinds in NOTES."""
        self.launches: list[Done] = []
        self.differing = False
        """Whether a comparison of known elements failed."""
        self.device = torch.device("cpu")
        """Device that Triton is told tensors are on; "cuda" with executed(cuda=True)."""
        self.utils = SimpleNamespace(
            fill_tma_descriptor_tiled=map_of,
            load_binary=lambda name, binary, shared, device: (None, binary.decode(), 32, 0, 1024),
            get_device_properties=lambda device: {
                "max_shared_mem": chip.shared_memory,
                "multiprocessor_count": chip.processors,
                "warpSize": 32,
                "max_num_regs": 65536,
            },
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.chip.number, 32)

    def get_current_device(self) -> int:
        return _FIRST_DEVICE + list(CHIPS).index(self.chip.name)

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return self.device

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(0)

    def clear_cache(self, cache: torch.Tensor) -> None: ...

    def get_benchmarker(self) -> Callable:
        """Benchmark function for triton.autotune: executes each configuration once, so that each is checked."""

        def once(call: Callable[[], object], quantiles: Sequence[float] | None = None, **_: Any) -> Any:
            began = time.perf_counter()
            call()
            took = 1e3 * (time.perf_counter() - began)
            return took if quantiles is None else [took] * len(quantiles)

        return once

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        shallow = shallow_products(metadata.name, compiled_form(source, metadata))

        def start(x, y, z, stream, function, packed, about, enter, leave, *arguments):
            running = triton.runtime.driver.active
            if not isinstance(running, Machine):
                raise RuntimeError("a kernel that executed() compiled is launched outside of it")
            if enter is not None:
                enter(about)
            running.report(shallow)
            _places[function] = metadata.hash
            running.execute((x, y, z), source, metadata, function, arguments)
            if leave is not None:
                leave(about)

        return start

    def execute(self, grid, source, metadata, ptx: str, arguments) -> None:
        began = time.perf_counter()
        maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
        tensors: list[torch.Tensor] = []
        given = list(_given(source.signature.values(), arguments, maps, tensors))
        code = translated(ptx if self._rewrite is None else self._rewrite(ptx))
        tensors += [value for value in given if isinstance(value, torch.Tensor)]
        foreign = [t.device for t in tensors if t.device.type != "cpu"]
        if foreign:
            raise ValueError(f"{metadata.name} is launched on a tensor on {foreign[0]}: executed() takes CPU tensors")
        hidden = len(code.facts.parameters) - len(given)
        values = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in given] + [0] * hidden
        if metadata.global_scratch_size:
            values[len(given)] = _scratch(metadata, grid, tensors)
        x, y, z = grid
        known, parameters = buffers(tensors), parameters_of(code.facts.parameters, values)
        launch = Launch(
            code, (x * metadata.num_ctas, y, z), metadata.num_warps * 32, metadata.shared, parameters,
            known, self._checks, self._programs, metadata.num_ctas, self._seed,
        )  # fmt: skip
        if self.machine_code is None:
            faults = launch.execute()
        else:
            kinds = [kind for _, kind in code.facts.parameters]
            raw = [v.numpy().tobytes() if kind == MAP else p.tobytes()
                   for kind, v, p in zip(kinds, [*given, *[0] * hidden], parameters)]  # fmt: skip
            faults = self.machine_code.execute(launch, raw, tensors)
        if code.text in _places:
            code.keep(_places[code.text])
        took = time.perf_counter() - began
        self.launches.append(Done(metadata.name, grid, launch.threads, code.facts.instructions, took, launch.left_out))
        self.notes += [fault for fault in faults if fault.kind in NOTES]
        self.report([fault for fault in faults if fault.kind not in NOTES])

    def known(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mask, in the tensor's shape, of elements whose values do not depend on skipped programs."""
        return sample.known(tensor)

    def differs(self) -> None:
        self.differing = True

    def report(self, faults: list[Fault]) -> None:
        self.faults += faults
        if faults and self._raising:
            raise FaultyKernel(faults)


def _scratch(metadata, grid, tensors: list[torch.Tensor]) -> int:
    """Address of the kernel's scratch memory, which is added to the tensors."""
    size = metadata.global_scratch_size * metadata.num_ctas * grid[0] * grid[1] * grid[2]
    memory = torch.empty(size + metadata.global_scratch_align, dtype=torch.int8)
    start = -memory.data_ptr() % metadata.global_scratch_align
    tensors.append(memory[start : start + size])
    return memory.data_ptr() + start


_places: dict[str, str] = {}
"""PTX -> key in Triton's cache."""


@functools.lru_cache(maxsize=512)
def translated(ptx: str) -> Code:
    return Code(ptx, kept(_places[ptx]) if ptx in _places else None)


_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Scalar types that kernels receive as bits."""


_UNUSED = (None,) * (make_tensordesc_arg.__code__.co_argcount - 2)
"""Arguments that newer Triton versions pass but do not use."""


def _unwrapped(value: Any) -> Any:
    """The tensor wrapped by triton.reinterpret; other values unchanged."""
    return value.base if isinstance(value, TensorWrapper) else value


def _given(signature, arguments, maps: Iterator[Any], mapped: list[torch.Tensor]) -> Iterator[Any]:
    """Arguments of the compiled kernel, tuples flattened. maps: required map fields of each tensor descriptor; empty on
    chips without TMA. mapped: collects the tensors of descriptors."""
    for kind, value in zip(signature, arguments):
        if isinstance(kind, tuple):
            yield from _given(kind, value, maps, mapped)
        elif kind.startswith("tensordesc"):
            mapped.append(_unwrapped(value.base))
            yield from map(_unwrapped, make_tensordesc_arg(value, next(maps, None), *_UNUSED))
        elif kind in _HALVES:
            yield torch.tensor(value, dtype=_HALVES[kind]).view(torch.uint16).item()
        elif kind != "constexpr":
            value = _unwrapped(value)
            if not (isinstance(value, (torch.Tensor, int, float))):
                raise Unsupported(f"a kernel argument of type {type(value).__name__}")
            yield value


@contextlib.contextmanager
def executed(
    chip: str,
    *,
    checks: bool = True,
    raising: bool = True,
    cuda: bool = True,
    configs: int | None = None,
    programs: int | None = None,
    seed: int | None = None,
    rewrite: Callable[[str], str] | None = None,
    machine_code: bool | Literal["compare"] = False,
    ptxas: str | Sequence[str] | None = None,
) -> Iterator[Machine]:
    """Inside the block kernels launched on CPU tensors are compiled for the chip and executed.

    checks: also detect races and uninitialized memory (slower); bounds and alignment are always checked. raising: a
    launch with faults raises FaultyKernel; else machine.faults collects them. cuda: torch.cuda, Tensor.device and
    Tensor.is_cuda answer as on the chip, and device tensors are allocated on the CPU. configs: maximum number of an
    autotuned kernel's configurations to execute.

    programs: launches with more programs execute a sample of this size: the first, the last, and evenly spaced ones
    between, in adjacent pairs from four on. Meant for grids of uniform programs: faults of skipped programs, and races
    with them, are not seen, and their results are missing. machine.known(tensor) marks the elements that are as in a
    full run; inside the block torch.testing.assert_close and torch.allclose compare only those, and machine.launches
    counts the skipped programs. Later launches treat missing elements as written (zeros in empty tensors); results
    computed from them are unknown too. Kernels that use results of atomic operations always run in full, because their
    programs may wait for each other.

    seed: randomizes the order of a warp-specialized kernel's teams and the arrival of bulk copies; None: a team runs
    until it waits, and copies arrive immediately.

    machine_code (sm_90): execute the machine code made by Triton's ptxas, or by the ptxas at a path, instead of the
    PTX; "compare": execute both and compare element by element, for each ptxas of a list.

    rewrite(ptx) -> ptx: replaces the text to execute. Raises ValueError for an unsupported chip, RuntimeError if
    Triton's interpreter is on.
    """
    if configs is not None and configs < 1:
        raise ValueError(f"executed(configs={configs}) must be at least 1, or None for all")
    if programs is not None and programs < 1:
        raise ValueError(f"executed(programs={programs}) must be at least 1, or None for all")
    if chip not in CHIPS:
        raise ValueError(f"executed({chip!r}): choose one of {', '.join(CHIPS)}")
    if knobs.runtime.interpret or os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise RuntimeError("Triton is in its interpreter (TRITON_INTERPRET=1): start a process without it")
    code = MachineCode(chip, ptxas, compare=machine_code == "compare") if machine_code else None
    machine = Machine(
        CHIPS[chip], checks=checks, raising=raising, programs=programs, seed=seed, rewrite=rewrite, machine_code=code
    )
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(machine)
        stack.callback(setattr, knobs.runtime, "add_stages_inspection_hook", knobs.runtime.add_stages_inspection_hook)
        knobs.runtime.add_stages_inspection_hook = _up_to_ptx
        answers = Answers(CHIPS[chip]) if cuda else None
        stack.enter_context(Allocations(answers))
        stack.enter_context(_tuning(machine.get_benchmarker(), configs))
        if programs is not None:
            stack.enter_context(sample.Unknowns())
            stack.enter_context(sample.comparing(machine.differs))
        if answers is not None:
            stack.enter_context(answers)
            machine.device = torch.device("cuda", 0)
        yield machine


@contextlib.contextmanager
def _tuning(once: Callable, most: int | None) -> Iterator[None]:
    """Inside the block autotuners ignore earlier choices and discard new ones, because CPU times are meaningless.

    once: benchmark function for each configuration. most: maximum number of configurations.
    """
    before: dict[Autotuner, dict[str, Any]] = {}

    def anew(tuner: Autotuner, *args: Any, **options: Any) -> Any:
        if tuner not in before:
            before[tuner] = {name: vars(tuner)[name] for name in _CHOICES if name in vars(tuner)}
            vars(tuner).update(zip(_CHOICES, ({}, False, once)))
        return _RUN(tuner, *args, **options)

    def first(*given: Any) -> list:
        return list(_PRUNE(*given))[:most]

    with mock.patch.object(Autotuner, "run", anew), mock.patch.object(Autotuner, "prune_configs", first):
        try:
            yield
        finally:
            for tuner, state in before.items():
                for name in _CHOICES:
                    vars(tuner).pop(name, None)
                vars(tuner).update(state)


_RUN, _PRUNE = Autotuner.run, Autotuner.prune_configs
_CHOICES = ("cache", "cache_results", "do_bench")
"""Attributes of an autotuner: its choices, disk cache flag, and benchmark function."""


def _up_to_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's stage hook: the assembler stage returns the PTX unchanged."""
    if stages is not None:
        stages["cubin"] = lambda source, metadata: source.encode()
    return "executed", "executed"
