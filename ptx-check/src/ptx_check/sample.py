"""Program sampling, and tracking of memory that skipped programs would have written.

In every tensor that the sample writes, the elements that it did not write are unknown, because skipped programs may
have written them. Unknown too are all results of launches that read an unknown element, and results of PyTorch
operators on unknown elements. Unknown elements count as written, as zeros if uninitialized.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ptx_check.allocations import EMPTY, Marks, elements_of, written_by

unknown = Marks()
"""Unknown bytes, by storage."""
_MOVING = {"_to_copy", "cat", "clone", "gather", "index", "index_select", "masked_select", "stack"}
"""Operators that only rearrange elements of their first argument."""
_OVERWRITING = {"copy_", "fill_", "zero_"}


def chosen(total: int, most: int | None) -> np.ndarray:
    """Indices of at most `most` programs: the first, the last, and evenly spaced ones between. From four on they form
    adjacent pairs, which are the most likely to access each other's memory."""
    if most is None or total <= most:
        return np.arange(total, dtype=np.int64)
    if most < 4:
        return np.linspace(0, total - 1, most).astype(np.int64)
    starts = np.linspace(0, total - 2, most // 2).astype(np.int64)
    return np.unique(np.concatenate([starts, starts + 1, [total // 2] * (most % 2)]).astype(np.int64))


class Footprint:
    """Bytes of a buffer that a launch accessed."""

    def __init__(self, size: int) -> None:
        self.stored: np.ndarray = np.zeros(size, dtype=bool)
        self.added: np.ndarray = np.zeros(size, dtype=bool)
        """Bytes accessed by atomics."""

    def note(self, positions: np.ndarray, width: int, *, atomic: bool) -> None:
        """Record accesses to words of `width` bytes."""
        into = (self.added if atomic else self.stored)[: len(self.stored) // width * width].reshape(-1, width)
        into[positions[positions < len(into)]] = True


def after(buffers: Iterable[Any], *, left_out: bool, guessed: bool) -> None:
    """Update unknown elements after a launch. left_out: some programs were skipped. guessed: the launch read unknown
    elements."""
    for buffer in buffers:
        done, now = buffer.footprint, buffer.unknown
        now = np.zeros(buffer.size, dtype=bool) if now is None else now.copy()
        now[done.stored] = guessed
        if left_out or guessed:
            now[done.added] = True
        if left_out and (done.stored.any() or done.added.any()):
            now[~done.stored] = True
        if left_out and buffer.marks is not None:
            nobody = (buffer.marks != 0) & ~done.stored & ~done.added
            now[nobody], buffer.bytes[: buffer.size][nobody], buffer.marks[:] = True, 0, 0
        unknown.put(buffer.storage, now)


def known(tensor: torch.Tensor) -> torch.Tensor:
    """Mask of known elements, in the tensor's shape."""
    marks = unknown.of(tensor.untyped_storage())
    if marks is None:
        return torch.ones(tensor.shape, dtype=torch.bool)
    return ~elements_of(marks, tensor).any(-1)


class Unknowns(TorchDispatchMode):
    """Inside the block, PyTorch operators propagate unknown elements."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            return func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if not unknown or name in EMPTY:
            return func(*args, **kwargs)
        first, others = args[0] if args else None, (*args[1:], *kwargs.values())
        steered = _doubtful(others)
        doubtful = steered or (name not in _OVERWRITING and _doubtful(first))
        where = None
        if name in _MOVING and doubtful and not steered:
            where = func(
                tree_map(lambda t: ~known(t) if isinstance(t, torch.Tensor) else t, first), *args[1:], **kwargs
            )
        elif name == "copy_" and doubtful:
            where = ~known(args[1])
        result = func(*args, **kwargs)
        for tensor in written_by(func, args, kwargs, result):
            unknown.written(tensor)
            storage = tensor.untyped_storage()
            if doubtful and storage.nbytes():
                marks = unknown.of(storage)
                marks = np.zeros(storage.nbytes(), dtype=bool) if marks is None else marks
                now = torch.ones((), dtype=torch.bool) if where is None else where != 0
                elements_of(marks, tensor).copy_(now.unsqueeze(-1))
                unknown.put(storage, marks)
        return result


def _doubtful(values: Any) -> bool:
    """Whether any of these tensors has unknown elements."""
    return any(isinstance(t, torch.Tensor) and not known(t).all() for t in tree_leaves(values))


@contextlib.contextmanager
def comparing(wrong: Callable[[], None]) -> Iterator[None]:
    """Inside the block, torch.testing.assert_close and torch.allclose compare known elements only. wrong is called on
    a mismatch."""
    close, equal = torch.testing.assert_close, torch.allclose

    def assert_close(actual: Any, expected: Any, *args: Any, **options: Any) -> None:
        pair = _known_of(actual, expected)
        try:
            close(*pair, *args, **options)
        except AssertionError:
            if isinstance(actual, torch.Tensor):
                wrong()
            raise

    def allclose(actual: torch.Tensor, expected: torch.Tensor, *args: Any, **options: Any) -> bool:
        if found := equal(*_known_of(actual, expected), *args, **options):
            return found
        wrong()
        return False

    with mock.patch.object(torch.testing, "assert_close", assert_close), mock.patch.object(torch, "allclose", allclose):
        yield


def _known_of(one: Any, other: Any) -> tuple[Any, Any]:
    """Elements known in both tensors; other arguments unchanged."""
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape):
        return one, other
    both = known(one) & known(other)
    return (one, other) if both.all() else (one[both], other[both])
