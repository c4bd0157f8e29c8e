"""Backend selection: Triton kernels or plain PyTorch."""

import contextlib
import functools
import importlib.util
import os
import threading
import warnings
from collections.abc import Iterator

import torch

from fasttfm.errors import UserError
from fasttfm.functional.onlookers import modes, transformed

BACKENDS = ("auto", "triton", "torch")
_KERNEL_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _checked(choice: str, where: str) -> str:
    if choice not in BACKENDS:
        raise ValueError(f"{where} is {choice!r}: choose auto, triton or torch")
    return choice


try:
    current = _checked(os.environ.get("FASTTFM_BACKEND", "auto"), "FASTTFM_BACKEND")
except ValueError as error:
    raise UserError(str(error)) from None


_chosen = [[current]]
"""The choice without a context, then those of the open contexts, oldest first; each its own object."""
_lock = threading.Lock()
checks_on_gpu = os.environ.get("FASTTFM_CHECK", "0") == "1"


@contextlib.contextmanager
def backend(choice: str) -> Iterator[None]:
    """Context that selects the backend of fasttfm's operators: auto (the default), triton or torch.

    auto takes Triton on CUDA and ROCm tensors, except where its tables list PyTorch as faster. triton on CPU tensors
    needs TRITON_INTERPRET=1 in the environment before the kernels are first imported. The choice is process-wide, other
    threads included: of the contexts still open, the one opened last counts. Raises ValueError for another name; an
    operator that does not support the backend raises fasttfm.errors.UserError.
    """
    global current
    own = [_checked(choice, "backend")]
    with _lock:
        _chosen.append(own)
        current = choice
    try:
        yield
    finally:
        with _lock:
            _chosen[:] = [each for each in _chosen if each is not own]
            (current,) = _chosen[-1]


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def values_are_checked(values: torch.Tensor) -> bool:
    """Return whether an operator checks the values in cu_seqlens and positions, in addition to their shapes.

    True on a CPU; on a GPU, where it waits for the device, with FASTTFM_CHECK=1; never while a graph is traced.
    """
    plain = type(values) in (torch.Tensor, torch.nn.Parameter)  # buffers may be parameters without a gradient
    if torch.compiler.is_compiling() or not plain or modes() or transformed():
        return False
    return values.is_cpu or (values.is_cuda and checks_on_gpu)


def use_triton(device: torch.device, choice: str | None = None) -> bool:
    """Return whether operators run Triton kernels on this device; choice overrides the current backend."""
    choice = current if choice is None else choice
    if choice == "torch":
        return False
    if device.type == "cuda":
        if _triton_installed():
            return True
        warn_once("Triton is not installed: fasttfm computes with plain PyTorch (pip install triton)")
        return False
    if choice == "triton":
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "1":
            return True
        raise UserError(
            f"backend triton was requested for a {device.type} tensor: it needs a CUDA or ROCm device, or "
            "TRITON_INTERPRET=1 in the environment (the interpreter, for tests)"
        )
    return False


def kernels_take(choice: str, device: torch.device, *dtypes: torch.dtype) -> bool:
    """Return whether Triton kernels take tensors of these dtypes on this device, under this choice of backend."""
    if device.type == "meta" or not use_triton(device, choice):
        return False
    # A fake tensor may name a device that is not there.
    return {*dtypes} <= _KERNEL_DTYPES and (device.type != "cuda" or torch.cuda.is_available())


def kernel_route(choice: str, *tensors: torch.Tensor) -> str:
    """The route of an operator with one kernel for these tensors, triton or torch.

    choice: auto, triton or torch; idempotent.
    """
    if choice == "torch" or (choice == "auto" and tensors[0].is_cpu):  # is_cpu costs a tenth of device.type
        return "torch"
    return "triton" if kernels_take(choice, tensors[0].device, *[t.dtype for t in tensors]) else "torch"
