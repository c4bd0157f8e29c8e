"""Triton's interpreter in less time, with the same numbers, except that float32 becomes bfloat16 as on a GPU.

A launch changes triton.language for the interpreter and changes it back. In between, each call of a helper changes it
again, walking over all its members; here one change a launch is enough, and after it triton.language is as Triton
leaves it, so that the same process may compile. The table of dtypes, which each operation makes anew, is made once. And
Philox is a loop over arrays of words, in the place of two hundred operations that cost more than the words of a tile.

The numbers of a tile take little of what is left: most goes to types and shapes, which an operation derives several
times. Types are made once a launch, operands of one type and shape are not promoted, and a number beside a tile becomes
a tile in one step. Sums and products are computed a second time in 64 bits to find overflow, whose result Triton drops
unless it debugs: only then they are. Triton drops the low half of a float32 that becomes bfloat16, which doubles the
error of every bfloat16 result; here it is rounded to the nearest, ties to even.
"""

import contextlib
import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

MULTIPLIERS = np.uint32(0xD2511F53), np.uint32(0xCD9E8D57)
KEYS = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
FLOATING = ("fp16", "fp32", "fp64")
INTEGRAL = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
"""Triton's names of the types beside which a number takes the type."""


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
            with _types_made_once():
                return call(self, *arguments, **constants)
        finally:
            tl.random.philox_impl = plain

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launched
    _derive_less(interpreter.interpreter_semantic)
    interpreter._convert_float = functools.partial(_convert_float, interpreter._convert_float)
    of_scalars, of_pointers = functools.cache(interpreter._get_np_dtype), interpreter._get_np_dtype

    def dtype_of(kind: Any) -> np.dtype:
        kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return (of_pointers if isinstance(kind, tl.pointer_type) else of_scalars)(kind)

    interpreter._get_np_dtype = dtype_of


def _convert_float(plain: Any, data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Return the bits of data as another type of floating-point numbers; plain: Triton's own, for other types."""
    if (source.name, target.name) == ("bf16", "fp32"):
        return data.view(np.uint16).astype(np.uint32) << 16
    if (source.name, target.name) != ("fp32", "bf16"):
        return plain(data, source, target, rounding)
    bits = np.ascontiguousarray(data).view(np.uint32)
    rounded = bits + ((bits >> 16 & 1) + np.uint32(0x7FFF))
    return (np.where(np.isnan(data), bits | 0x400000, rounded) >> 16).astype(np.uint16).reshape(data.shape)


def _sizes(kind: Any) -> tuple[int, ...]:
    """The shape of a block type; () for a scalar."""
    known = kind.__dict__.get("sizes")
    return known or ((*kind.shape,) if kind.is_block() else ())


@contextlib.contextmanager
def _types_made_once() -> Iterator[None]:
    """Within the block a block type, and the shape of a tensor, is derived once."""
    from triton.language.core import block_type, constexpr, tensor

    make_type, make_tensor = block_type.__init__, tensor.__init__
    types: dict[tuple, Any] = {}
    shapes: dict[tuple, tuple] = {}

    def known_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = getattr(shape, "values", shape)
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in sizes])
        known = types.get((id(element_ty), sizes))
        if known is None:
            make_type(self, element_ty, shape)
            self.sizes = sizes
            types[id(element_ty), sizes] = self  # which holds element_ty
        else:
            self.__dict__.update(known.__dict__)

    def known_tensor(self: Any, handle: Any, kind: Any) -> None:
        sizes = _sizes(kind)
        if sizes not in shapes:
            make_tensor(self, handle, kind)
            shapes[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shapes[sizes]

    block_type.__init__, tensor.__init__ = known_type, known_tensor
    try:
        yield
    finally:
        block_type.__init__, tensor.__init__ = make_type, make_tensor


def _derive_less(semantic: Any) -> None:
    """Give the interpreter's semantics short cuts to the results of its methods of the same names."""
    from triton.language.core import tensor
    from triton.runtime import interpreter

    plain = type(semantic)

    def filled(number: Any, like: Any) -> Any:
        """A tensor of this number, of the type of another one; the number itself where promotion is to decide."""
        kind = like.dtype
        if kind.name in FLOATING:
            fits = type(number) in (int, float)
        else:
            fits = kind.name in INTEGRAL and type(number) is int
            fits = fits and kind.get_int_min_value() <= number <= kind.get_int_max_value()
        if not fits:
            return number
        # Triton's zero has no sign
        data = np.full(_sizes(like.type) or 1, number or 0, dtype=interpreter._get_np_dtype(kind))
        return tensor(interpreter.TensorHandle(data, kind), like.type)

    def binary_op_type_checking_impl(
        lhs: Any, rhs: Any, left: bool = False, right: bool = False, arithmetic: bool = True, divides: bool = False
    ) -> tuple[Any, Any]:
        if not divides and arithmetic:
            if isinstance(lhs, tensor):
                rhs = rhs if isinstance(rhs, tensor) else filled(rhs, lhs)
            elif isinstance(rhs, tensor):
                lhs = filled(lhs, rhs)
        are_alike = isinstance(lhs, tensor) and isinstance(rhs, tensor) and lhs.dtype is rhs.dtype
        if are_alike and not divides and not lhs.dtype.is_ptr():
            return broadcast_impl_value(lhs, rhs)
        return plain.binary_op_type_checking_impl(semantic, lhs, rhs, left, right, arithmetic, divides)

    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if _sizes(lhs.type) == _sizes(rhs.type):
            return lhs, rhs
        return plain.broadcast_impl_value(semantic, lhs, rhs)

    def cast(value: Any, kind: Any, rounding: str | None = None) -> Any:
        return value if value.dtype is kind.scalar else plain.cast(semantic, value, kind, rounding)

    def binary_op_sanitize_overflow_impl(*operands: Any) -> None:
        if semantic.builder.options.debug:
            plain.binary_op_sanitize_overflow_impl(semantic, *operands)

    for method in (binary_op_type_checking_impl, broadcast_impl_value, cast, binary_op_sanitize_overflow_impl):
        setattr(semantic, method.__name__, method)


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
