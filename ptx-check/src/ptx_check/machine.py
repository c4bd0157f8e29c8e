"""Launches of Triton kernels on CPU tensors, each executed from the PTX that Triton compiles for a chip.

    with executed("sm_90") as machine:
        my_kernel[grid](x, y, n, BLOCK=128)     # any @triton.jit kernel, or code that launches some
    machine.launches                            # what ran

The kernel goes Triton's own way up to PTX, which is read and run by numpy: no device, no driver, no assembler. A launch
that does something wrong raises FaultyKernel. Needs a process in which Triton is not in its interpreter.
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
"""Above the numbers of devices that a machine has; Triton keeps by it what it has compiled for a chip."""


@dataclass(frozen=True, slots=True)
class Done:
    """A launch that was executed."""

    name: str
    grid: tuple[int, int, int]
    threads: int
    instructions: int
    """Of the kernel's text."""
    seconds: float
    left_out: int
    """Programs of the grid that were not executed: executed(programs=)."""


class Machine:
    """A driver that executes what is launched, with as much as Triton asks of one."""

    def __init__(
        self, chip: Chip, *, checks: bool, raising: bool, programs: int | None, seed: int | None,
        rewrite: Callable[[str], str] | None, machine_code: MachineCode | None,
    ) -> None:  # fmt: skip
        self.chip, self._seed, self.machine_code = chip, seed, machine_code
        self._checks, self._raising, self._programs, self._rewrite = checks, raising, programs, rewrite
        self.faults: list[Fault] = []
        self.notes: list[Fault] = []
        """Of the kinds NOTES."""
        self.launches: list[Done] = []
        self.differing = False
        """Whether a comparison failed of what is known."""
        self.device = torch.device("cpu")
        """Where programs are told that tensors lie."""
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
        """Return what triton.autotune times configurations by: each is executed once, so each is checked."""

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
        """Tell which elements are what they would be had no program been left out: booleans of the tensor's shape."""
        return sample.known(tensor)

    def differs(self) -> None:
        self.differing = True

    def report(self, faults: list[Fault]) -> None:
        self.faults += faults
        if faults and self._raising:
            raise FaultyKernel(faults)


def _scratch(metadata, grid, tensors: list[torch.Tensor]) -> int:
    """The address of the memory that a kernel asks for besides its tensors, which it is added to."""
    size = metadata.global_scratch_size * metadata.num_ctas * grid[0] * grid[1] * grid[2]
    memory = torch.empty(size + metadata.global_scratch_align, dtype=torch.int8)
    start = -memory.data_ptr() % metadata.global_scratch_align
    tensors.append(memory[start : start + size])
    return memory.data_ptr() + start


_places: dict[str, str] = {}
"""The key in Triton's cache of each PTX that it has compiled."""


@functools.lru_cache(maxsize=512)
def translated(ptx: str) -> Code:
    return Code(ptx, kept(_places[ptx]) if ptx in _places else None)


_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Types of numbers that go to a kernel as their bits."""


_UNUSED = (None,) * (make_tensordesc_arg.__code__.co_argcount - 2)
"""Arguments that newer Tritons hand on and do not read."""


def _unwrapped(value: Any) -> Any:
    """The tensor that triton.reinterpret gives another type."""
    return value.base if isinstance(value, TensorWrapper) else value


def _given(signature, arguments, maps: Iterator[Any], mapped: list[torch.Tensor]) -> Iterator[Any]:
    """The arguments that the compiled kernel takes, tuples flattened. maps: of each tensor descriptor what its map must
    say; nothing on chips without. mapped: takes the tensors of descriptors."""
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

    checks: look for races and unwritten memory too, which takes longer; bounds and alignment are always checked.
    raising: a launch with faults raises FaultyKernel; else machine.faults collects them. cuda: questions to torch.cuda,
    Tensor.device and Tensor.is_cuda are answered as on the chip, and what is asked for on a device lies on the CPU.
    configs: of an autotuned kernel no more than so many configurations are executed, the first ones.

    programs: of a launch with more programs than that, a sample of so many is executed: the first, the last, and
    between them evenly spread ones, from four on in pairs of neighbours. It is for grids whose programs do alike. What
    the others do wrong is not seen, nor races with them; what they would have written is missing from the results. So
    machine.known(tensor) tells which elements are what they would be with all programs, torch.testing.assert_close and
    torch.allclose compare those alone inside the block, and machine.launches says how many were left out. A later
    launch takes what is missing for written (zeros, in empty tensors); what it computes of that is not known either. A
    kernel that uses the results of atomic operations runs whole, because its programs may wait for each other.

    seed: teams of warps of a specialised kernel run in an order that is drawn, and bulk copies arrive late, in any
    order; None: a team runs until it waits, and copies arrive at once.

    machine_code (sm_90): in place of the PTX, the machine code that Triton's ptxas makes of it, or that of the ptxas at
    a path; "compare": both, whose results must agree element by element, under each ptxas of a list.

    rewrite(ptx) -> ptx: what is executed instead. Raises ValueError for a chip whose instructions the machine does not
    know, RuntimeError where Triton is in its interpreter.
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
    """Inside the block autotuners know of no choice that was made outside of it, nor outside of those made here: times
    on a CPU say nothing. Each configuration is timed by `once`; most: no more than so many, the first."""
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
"""Attributes of an autotuner: what it has chosen, whether it reads and keeps that on disk, and what times it."""


def _up_to_ptx(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's hook: the assembler's stage leaves the PTX as it is."""
    if stages is not None:
        stages["cubin"] = lambda source, metadata: source.encode()
    return "executed", "executed"
