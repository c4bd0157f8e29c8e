"""Emulation of torch.cuda and CUDA tensors for programs that run on CPU tensors.

    with Answers(CHIPS["sm_90"]):
        torch.cuda.get_device_capability()      # (9, 0)
        x = torch.randn(8, device="cuda")       # a CPU tensor whose is_cuda and device are those of a CUDA tensor

PyTorch's own modules get the true answers, so that they do not use a device that does not exist. Streams and events do
nothing, because launches are synchronous.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton
from torch.overrides import TorchFunctionMode

from ptx_check.chips import Chip


class Stream:
    """A stream whose operations complete immediately."""

    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...
    def synchronize(self) -> None: ...
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class Event:
    """An event that records host time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._at = time.perf_counter()

    def record(self, stream: object = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: object = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._at - self._at)


def properties(chip: Chip) -> SimpleNamespace:
    """Device properties, as from torch.cuda.get_device_properties."""
    major, minor = chip.capability
    return SimpleNamespace(
        name=chip.product, major=major, minor=minor, multi_processor_count=chip.processors, total_memory=chip.memory,
        warp_size=32, max_threads_per_multi_processor=chip.threads, regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=chip.shared_memory,
        shared_memory_per_multiprocessor=chip.shared_memory + 1024, is_integrated=0, is_multi_gpu_board=0,
        gcnArchName="",
    )  # fmt: skip


def answers(chip: Chip) -> dict[str, Any]:
    """Replacements of torch.cuda's functions and classes."""
    nothing = (
        "synchronize", "set_device", "empty_cache", "init", "manual_seed", "manual_seed_all", "seed", "seed_all",
        "reset_peak_memory_stats", "reset_max_memory_allocated", "ipc_collect", "set_stream",
    )  # fmt: skip
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "current_device")
    stream = Stream()
    return {
        **dict.fromkeys(nothing, lambda *_, **__: None),
        **dict.fromkeys(zero, lambda *_, **__: 0),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "get_device_capability": lambda device=None: chip.capability,
        "get_device_properties": lambda device=None: properties(chip),
        "get_device_name": lambda device=None: chip.product,
        "get_arch_list": lambda: [chip.name],
        "is_bf16_supported": lambda including_emulation=True: including_emulation or chip.number >= 80,
        "is_tf32_supported": lambda: chip.number >= 80,
        "mem_get_info": lambda device=None: (chip.memory, chip.memory),
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream=None: contextlib.nullcontext(stream),
        "device": lambda device=None: contextlib.nullcontext(),
        "device_of": lambda tensor=None: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
    }


def _wants_the_truth() -> bool:
    """Whether the caller's caller is PyTorch or this package."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.partition(".")[0] in ("torch", "ptx_check")


def _either(true: Callable, answer: Callable) -> Callable:
    def answered(*args: Any, **kwargs: Any) -> Any:
        return (true if _wants_the_truth() else answer)(*args, **kwargs)

    return answered


def _property(name: str, answer: Any) -> property:
    true = getattr(torch.Tensor, name).__get__

    def answered(tensor: torch.Tensor) -> Any:
        truth = true(tensor)
        return truth if _wants_the_truth() or tensor.is_meta else answer

    return property(answered)


class OnCpu(TorchFunctionMode):
    """Inside the block, CUDA devices mean the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "cuda":
            return args[0]
        if name == "pin_memory":
            return args[0]
        if name == "get_device":
            return 0
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        if name in ("to", "new_empty", "type", "full_like", "_to"):
            args = tuple(_on_cpu(a) if isinstance(a, (str, torch.device)) else a for a in args)
        return func(*args, **kwargs)


def _of_other_modules() -> dict[str, Any]:
    """Replacements outside of torch.cuda, by module.name."""
    return {
        "torch.accelerator.is_available": lambda: True,
        "torch.accelerator.device_count": lambda: 1,
        "torch.accelerator.current_accelerator": lambda check_available=False: torch.device("cuda"),
        "torch.accelerator.synchronize": lambda device=None: None,
        "torch.utils._triton.has_triton": lambda: True,
        "torch.compile": _not_compiled,
        "torch.autocast": _Autocast,
        "torch.amp.autocast": _Autocast,
        "torch.cuda.amp.autocast": lambda enabled=True, dtype=None, cache_enabled=None: _Autocast(
            "cuda", dtype, enabled, cache_enabled
        ),
        "torch.Generator": _Generator,
    }


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """torch.compile: returns its argument uncompiled."""
    return model if model is not None else lambda function: function


class _Generators(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class _Generator(metaclass=_Generators):
    """torch.Generator that is always on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(_on_cpu(device))


class _Autocast(torch.autocast):
    """torch.autocast whose "cuda" mode applies to CPU tensors; queries about CUDA autocast see it too."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        self._on_device = device_type.split(":")[0] == "cuda"
        if self._on_device:  # float16 is CUDA's default, bfloat16 the CPU's
            if (args[0] if args else kwargs.get("dtype")) is None:
                args, kwargs = (torch.get_autocast_dtype("cuda"), *args[1:]), {**kwargs}
                kwargs.pop("dtype", None)
            device_type = "cpu"
        super().__init__(device_type, *args, **kwargs)

    def __enter__(self) -> Any:
        if self._on_device:
            self._before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
            torch.set_autocast_enabled("cuda", self._enabled)
            torch.set_autocast_dtype("cuda", self.fast_dtype)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        if self._on_device:
            torch.set_autocast_enabled("cuda", self._before[0])
            torch.set_autocast_dtype("cuda", self._before[1])
        return super().__exit__(*error)


def _put_everywhere(replaced: list[tuple[Any, Any]]) -> None:
    """Replace old by new in all modules that bound it by `from torch.cuda import ...`."""
    new_of = {id(old): new for old, new in replaced}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] in ("torch", "ptx_check"):
            continue
        names = vars(module) if hasattr(module, "__dict__") else {}
        for name, new in [(n, new_of[id(v)]) for n, v in list(names.items()) if id(v) in new_of]:
            setattr(module, name, new)


class Answers(OnCpu):
    """Inside the block, torch.cuda also answers as on a chip, including functions that modules imported by name."""

    def __init__(self, chip: Chip) -> None:
        super().__init__()
        self.chip = chip
        self._undo: list[Callable[[], None]] = []

    def __enter__(self):
        places = {f"torch.cuda.{name}": answer for name, answer in answers(self.chip).items()} | _of_other_modules()
        replaced = []
        for place, answer in places.items():
            module, _, name = place.rpartition(".")
            owner = sys.modules[module]
            true = getattr(owner, name)
            new = answer if isinstance(answer, type) else _either(true, answer)
            setattr(owner, name, new)
            replaced.append((true, new))
            self._undo.append(lambda owner=owner, name=name, true=true: setattr(owner, name, true))
        _put_everywhere(replaced)
        self._undo.append(lambda: _put_everywhere([(new, true) for true, new in replaced]))
        for name, answer in (("is_cuda", True), ("is_cpu", False), ("device", torch.device("cuda", 0))):
            before = vars(torch.Tensor).get(name)
            made = _property(name, answer)
            type.__setattr__(torch.Tensor, name, made)
            self._undo.append(
                (lambda name=name: type.__delattr__(torch.Tensor, name))
                if before is None
                else (lambda name=name, before=before: type.__setattr__(torch.Tensor, name, before))
            )
        gradients = torch.autograd._engine_run_backward
        torch.autograd._engine_run_backward = self._within(gradients)
        self._undo.append(lambda: setattr(torch.autograd, "_engine_run_backward", gradients))
        return super().__enter__()

    def _within(self, function: Callable) -> Callable:
        """Also enters the mode in backward functions: PyTorch leaves modes during Tensor.backward."""

        def answered(*args: Any, **kwargs: Any) -> Any:
            with self.again():
                return function(*args, **kwargs)

        return answered

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside the block, enter the mode in code that PyTorch runs with modes off."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __exit__(self, *error):
        while self._undo:
            self._undo.pop()()
        return super().__exit__(*error)


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device("cpu")
    if isinstance(device, str):
        return "cpu" if device.split(":")[0] == "cuda" else device
    return torch.device("cpu") if isinstance(device, torch.device) and device.type == "cuda" else device
