"""Triton's interpreter in less time, with the same numbers.

A launch changes triton.language for the interpreter and changes it back. In between, each call of a helper changes it
again, walking over all its members; here one change a launch is enough, and after it triton.language is as Triton
leaves it, so that the same process may compile. The table of dtypes, which each operation makes anew, is made once. And
Philox is a loop over arrays of words, in the place of two hundred operations that cost more than the words of a tile.
"""

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np

MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
KEYS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)


def make_quick() -> None:
    """Make the interpreter of this process quick."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    changed: set[Any] = set()
    """The languages, tl and tl.core, that this launch has changed."""

    @functools.cache
    def languages(function: Any) -> list[Any]:
        return [module for module in (tl, tl.core) if any(module is each for each in function.__globals__.values())]

    def patch_once(function: Any) -> Any:
        missing = [module for module in languages(function) if module not in changed]
        changed.update(missing)
        return patch(SimpleNamespace(__globals__=dict(enumerate(missing)))) if missing else None

    def launched(self: Any, *arguments: Any, **constants: Any) -> Any:
        plain = tl.random.philox_impl
        changed.clear()
        tl.random.philox_impl = functools.partial(_philox, plain)
        try:
            return call(self, *arguments, **constants)
        finally:
            tl.random.philox_impl = plain

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launched
    of_scalars, of_pointers = functools.cache(interpreter._get_np_dtype), interpreter._get_np_dtype

    def dtype_of(kind: Any) -> np.dtype:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return (of_pointers if isinstance(kind, tl.pointer_type) else of_scalars)(kind)

    interpreter._get_np_dtype = dtype_of


def _philox(plain: Any, c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any) -> tuple[Any, ...]:
    """Compute triton.language.random.philox_impl, for words of 32 bits; plain: Triton's own, for others."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    given = (c0, c1, c2, c3, k0, k1)
    if any(each.dtype != tl.uint32 for each in given):
        return plain(*given, n_rounds)

    def high(multiplier: np.uint32, words: np.ndarray) -> np.ndarray:
        """The upper halves of the products, by the interpreter's own operation, which tests count."""
        return interpreter_builder.create_umulhi(
            TensorHandle(multiplier, tl.uint32), TensorHandle(words, tl.uint32)
        ).data

    c0, c1, c2, c3, k0, k1 = (each.handle.data for each in given)
    for _ in range(int(getattr(n_rounds, "value", n_rounds))):
        first, second = high(MULTIPLIERS[0], c0), high(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = second ^ c1 ^ k0, MULTIPLIERS[1] * c2, first ^ c3 ^ k1, MULTIPLIERS[0] * c0
        k0, k1 = k0 + KEYS[0], k1 + KEYS[1]
    are_blocks = any(each.type.is_block() for each in given)

    def tensor(words: np.ndarray) -> Any:
        kind = tl.block_type(tl.uint32, [*words.shape]) if are_blocks else tl.uint32
        return tl.tensor(TensorHandle(words, tl.uint32), kind)

    return tensor(c0), tensor(c1), tensor(c2), tensor(c3)
