"""Batch-invariant matrix products: the bits of a row are independent of the row count and the number of threads.

A library changes its summation order with the number of rows and of threads, and so the last bits of a row. Many row
counts share one order, though. Which of them have that of one thread is found once for each kind of product, by
comparing sums whose bits reveal the order. Products are then composed of these counts, the last one padded with zeros.
Few counts also mean few primitives, of which oneDNN caches one for each count.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW_COUNTS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 40, 64, 96, 128, 192, 256)
"""Candidate row counts; chosen, not measured."""
_ELEMENTS = 512
"""Results that show whether two orders of summation agree: one alone may be equal by chance."""

Product = Callable[[Tensor], Tensor]
"""(M, K) -> (M, N)."""


class RowClasses(NamedTuple):
    """Row counts and threads with which a row of a product always has the same bits."""

    sizes: tuple[int, ...]
    """Allowed row counts, ascending."""
    one_thread: bool = False
    """Whether to use a single thread: more of them sum in another order at every row count."""


_cache: dict[tuple, RowClasses] = {}


def row_classes(
    make: Callable[[Tensor, Tensor], Product], outputs: int, inputs: int, dtype: torch.dtype, kind: tuple
) -> RowClasses:
    """Find the row counts at which a product gives the same bits to a row (inputs,), wherever it is in the batch.

    make(weight (outputs, inputs), bias (outputs,)) returns the product; kind: anything else that selects its algorithm.
    Cached by these and the number of threads. A single row if no two counts agree.
    """
    key = (*kind, outputs, inputs, dtype, torch.get_num_threads())
    if key not in _cache:
        rows, weight, bias = _orders_show(ROW_COUNTS[-1], inputs, outputs, dtype)
        _cache[key] = _agreeing(make(weight, bias), rows)
    return _cache[key]


def multiply(product: Product, rows: Tensor, classes: RowClasses) -> Tensor:
    """product(rows), rows (M, K), composed of calls with the row counts of classes; (M, N)."""
    if classes.one_thread:
        with _one_thread():
            return multiply(product, rows, RowClasses(classes.sizes))
    count, largest = rows.shape[0], classes.sizes[-1]
    if count <= largest:
        size = classes.sizes[bisect_left(classes.sizes, count)]
        if size == count:
            return product(rows)
        filled = rows.new_zeros(size, rows.shape[1])
        filled[:count] = rows
        return product(filled)[:count]
    return torch.cat([multiply(product, part, classes) for part in rows.split(largest)])


def _orders_show(count: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Operands whose product reveals its summation order: rows (count, inputs), weight (outputs, inputs) and bias.

    The exact product is 0, so the computed one is rounding error alone; the bias (outputs,) is as small, and shows
    whether it is added first or last. Every term has its negative elsewhere in the sum, at many magnitudes: two orders
    of summation differ in nearly every element, in half precision too. The last of an odd number of terms, and each of
    up to three, is as small as the bias.
    """
    generator = torch.Generator().manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    half = inputs // 2 if inputs > 3 else 0  # of p - p + c two orders agree
    rows = torch.randn(count, half, **draw).clamp_(-4, 4)
    rows *= torch.exp2(torch.randint(0, 13, rows.shape, generator=generator, device="cpu"))
    weight = torch.randn(outputs, half, **draw)
    order = torch.randperm(inputs, generator=generator, device="cpu")
    odd, other = (torch.randn(size, inputs - 2 * half, **draw) for size in (count, outputs))
    rows = torch.cat([rows, -rows, odd * 2.0**-8], dim=1)[:, order]
    weight = torch.cat([weight, weight, other], dim=1)[:, order]
    bias = torch.randn(outputs, **draw) * 2.0**-8
    return rows.to(dtype), weight.to(dtype), bias.to(dtype)


def _agreeing(product: Product, rows: Tensor) -> RowClasses:
    with _one_thread():
        for size in reversed(ROW_COUNTS[1:]):  # the largest at which a row's index does not matter
            expected = product(rows[:size].clone())
            if torch.equal(product(rows[:size].flip(0)).flip(0), expected):
                break
        else:
            return RowClasses((1,), one_thread=True)
        sizes = tuple(each for each in ROW_COUNTS if each <= size and _agrees(product, rows, expected, each))
    if torch.get_num_threads() == 1:
        return RowClasses(sizes)
    shared = tuple(each for each in sizes if _agrees(product, rows, expected, each))
    return RowClasses(shared) if shared else RowClasses(sizes, one_thread=True)


def _agrees(product: Product, rows: Tensor, expected: Tensor, size: int) -> bool:
    """Return whether products of `size` rows, in reverse order, equal the expected ones: of the first rows, and of more
    if they have few elements."""
    starts = range(0, len(expected) - size + 1, size)[: max(1, _ELEMENTS // (size * expected.shape[1]))]
    return all(torch.equal(product(rows[at : at + size].flip(0)).flip(0), expected[at : at + size]) for at in starts)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
