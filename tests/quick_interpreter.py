"""Triton's interpreter in less time, with the same numbers: of what it does again and again, once.

It changes triton.language at every launch and every call of a helper, walking over all its members; it makes a table of
dtypes whenever it needs one; and it computes Philox in two hundred operations, each of which costs more than the words
of a tile. test_quick_interpreter.py compares.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
KEYS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def make_quick() -> None:
    """From now on triton.language is the interpreter's in this process, also between launches: nothing compiles."""
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    nothing = getattr(interpreter, "_LangPatchScope", lambda: None)()
    interpreter._patch_lang = lambda function: nothing
    of_scalars = functools.cache(interpreter._get_np_dtype)
    of_pointers = interpreter._get_np_dtype

    def dtype_of(kind: Any) -> np.dtype:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return (of_pointers if isinstance(kind, tl.pointer_type) else of_scalars)(kind)

    interpreter._get_np_dtype = dtype_of
    tl.random.philox_impl = functools.partial(_philox, tl, interpreter.TensorHandle, tl.random.philox_impl)


@contextlib.contextmanager
def without_computing() -> Iterator[None]:
    """Inside, kernels are launched, for a LaunchLog to count, and what they would write stays as it is."""
    from triton.runtime.interpreter import GridExecutor

    def nothing(self: Any, *arguments: Any, **constants: Any) -> None:
        """Keeps no tensor, as a mock would: autograd copies gradients that somebody else holds."""

    with mock.patch.object(GridExecutor, "__call__", nothing):
        yield


def _philox(tl: Any, handle: Any, plain: Any, c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any):
    """triton.language.random.philox_impl for words of 32 bits."""
    given = (c0, c1, c2, c3, k0, k1)
    if any(each.dtype != tl.uint32 for each in given):
        return plain(*given, n_rounds)
    c0, c1, c2, c3, k0, k1 = (each.handle.data for each in given)
    for _ in range(int(getattr(n_rounds, "value", n_rounds))):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c2 = _upper(second) ^ c1 ^ k0, _upper(first) ^ c3 ^ k1
        c1, c3 = second.astype(np.uint32), first.astype(np.uint32)
        k0, k1 = k0 + KEYS[0], k1 + KEYS[1]
    blocks = any(each.type.is_block() for each in given)

    def tensor(words: np.ndarray) -> Any:
        return tl.tensor(handle(words, tl.uint32), tl.block_type(tl.uint32, [*words.shape]) if blocks else tl.uint32)

    return tensor(c0), tensor(c1), tensor(c2), tensor(c3)


def _upper(product: np.ndarray) -> np.ndarray:
    return (product >> np.uint64(32)).astype(np.uint32)
