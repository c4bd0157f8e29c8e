"""Uninitialized bytes of tensors, tracked from allocation through PyTorch operators and kernels.

Inside Allocations, torch.empty and similar functions mark the memory they allocate. Operators that write a tensor or a
view clear the marks of its elements, and so does Tensor.numpy(), since later writes through it are invisible. Marked
bytes are filled with POISON, a NaN, so that uncomputed results are visible; bytes that differ from it count as written.
Marks live as long as their storage.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ptx_check.cuda import Answers

POISON = {2: np.uint16(0xFFA5), 4: np.uint32(0xFFA5FFA5), 8: np.uint64(0xFFA5FFA5FFA5FFA5)}
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}


class Marks:
    """Marks of uninitialized bytes, by storage."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[StorageWeakRef, np.ndarray]] = {}
        """Storage and marks, by address of the storage."""

    def __bool__(self) -> bool:
        return bool(self._of)

    def put(self, storage: torch.UntypedStorage, marks: np.ndarray) -> None:
        """Set or clear the marks of a storage."""
        if marks.any():
            self._of[storage.data_ptr()] = StorageWeakRef(storage), marks
        else:
            self._of.pop(storage.data_ptr(), None)

    def of(self, storage: torch.UntypedStorage) -> np.ndarray | None:
        """Marks of this storage; an earlier storage at the same address does not count."""
        found = self._of.get(storage.data_ptr())
        if found is None:
            return None
        marked, marks = found
        if marked.expired() or marked.cdata != StorageWeakRef(storage).cdata or len(marks) != storage.nbytes():
            del self._of[storage.data_ptr()]
            return None
        return marks

    def written(self, tensor: torch.Tensor) -> None:
        """Clear the marks of a tensor's elements."""
        if not self or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        marks = self.of(storage)
        if marks is None:
            return
        if tensor.is_contiguous() and tensor.numel() * tensor.element_size() == len(marks):
            del self._of[storage.data_ptr()]
            return
        elements_of(marks, tensor).fill_(0)


unwritten = Marks()
"""0xFF for each uninitialized byte."""


def mark(tensor: torch.Tensor) -> None:
    """Mark a tensor's storage as uninitialized and fill it with POISON."""
    storage = tensor.untyped_storage()
    if storage.nbytes() and tensor.device.type == "cpu" and tensor.layout == torch.strided:
        raw = bytes_of(storage)
        raw[0::2], raw[1::2] = int(POISON[2]) & 255, int(POISON[2]) >> 8
        unwritten.put(storage, np.full(storage.nbytes(), 0xFF, dtype=np.uint8))


def marks_of(storage: torch.UntypedStorage) -> np.ndarray | None:
    """Marks of a storage, to be modified in place by writers; None if it is fully initialized."""
    marks = unwritten.of(storage)
    if marks is None:
        return None
    raw = bytes_of(storage)
    marks[0::2][raw[0::2] != int(POISON[2]) & 255] = 0
    marks[1::2][raw[1::2] != int(POISON[2]) >> 8] = 0
    unwritten.put(storage, marks)
    return marks if marks.any() else None


def elements_of(of_bytes: np.ndarray, tensor: torch.Tensor) -> torch.Tensor:
    """(*shape, bytes per element): view of a per-byte array of the storage with the tensor's layout."""
    width, marks = tensor.element_size(), torch.from_numpy(of_bytes)
    elements = marks[: len(marks) // width * width].view(-1, width)
    strides = (*(stride * width for stride in tensor.stride()), 1)
    return torch.as_strided(elements, (*tensor.shape, width), strides, tensor.storage_offset() * width)


def bytes_of(storage: torch.UntypedStorage, word: int = 1) -> np.ndarray:
    """A storage's memory without a copy, rounded up to words of `word` bytes."""
    raw: Any = (ctypes.c_uint8 * (-(-storage.nbytes() // word) * word)).from_address(storage.data_ptr())
    return np.frombuffer(raw, dtype=np.uint8)


_OF_PYTORCH = ("aten", "prim", "prims", "profiler", "quantized")
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Allocations(TorchDispatchMode):
    """Inside the block, PyTorch operators update the marks."""

    supports_higher_order_operators = True
    """Operators that launch a kernel, such as torch.library.wrap_triton's: the machine updates their marks."""

    def __init__(self, answers: Answers | None = None) -> None:
        super().__init__()
        self._answers = answers
        self._patches: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        if func.namespace in _OF_PYTORCH:
            result = func(*args, **(kwargs or {}))
        else:  # a library's operator, possibly written in Python: PyTorch disables both modes while it runs
            with self, self._answers.again() if self._answers else contextlib.nullcontext():
                result = func.redispatch(_CPU, *args, **(kwargs or {}))
        if func.namespace == "aten" and func._schema.name.split("::")[1] in EMPTY:
            if type(result) is torch.Tensor:
                mark(result)
            return result
        if unwritten:
            for tensor in written_by(func, args, kwargs, result):
                unwritten.written(tensor)
        return result

    def __enter__(self):
        patch = mock.patch.object(torch.Tensor, "numpy", _seen(torch.Tensor.numpy))
        self._patches.append(patch)  # a list: a library's operator enters the block again
        patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.pop().stop()
        return super().__exit__(*error)


def written_by(func, args, kwargs, result) -> Iterator[torch.Tensor]:
    """Tensors written by an operator call: mutable arguments, and returned tensors that are not views."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    given = [a for a, s in _by_argument(func, args, kwargs) if s.alias_info is not None and s.alias_info.is_write]
    for value in tree_leaves(given if views else [given, result]):
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            yield value


def _by_argument(func, args, kwargs):
    """Arguments of a call with their schema entries."""
    declared = func._schema.arguments
    yield from zip(args, declared)
    named = {argument.name: argument for argument in declared}
    yield from ((value, named[name]) for name, value in (kwargs or {}).items() if name in named)


def _seen(numpy):
    def as_array(tensor: torch.Tensor, *args: Any, **options: Any) -> np.ndarray:
        unwritten.written(tensor)
        return numpy(tensor, *args, **options)

    return as_array
