"""Matrix products whose rows do not depend on how many rows are multiplied.

A library sums a product in another order when it has another number of rows or of threads, and the last bits of a row
then depend on its neighbours and on how many threads there are. The order is one and the same over many row counts,
though: which ones have that of one thread is found out once for each kind of product, by comparing bits of sums that
show it. Products are then made of these counts alone, the last one filled up with zeros. Few counts also mean few
primitives, which oneDNN makes and keeps for every new one.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROW_COUNTS: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 40, 64, 96, 128, 192, 256)
"""Row counts that products may have. Which of them sum alike is found out. Chosen, not measured."""
LARGE_ROW_COUNTS: tuple[int, ...] = (384, 512, 640, 768, 896, 1024)
"""Row counts of an encoder's products, each tried when rows come for it: products joined take longer than one."""

Product = Callable[[Tensor], Tensor]
"""(M, K) to (M, N)."""


class RowClasses(NamedTuple):
    """Ways to compute a product so that a row always has the same bits."""

    sizes: tuple[int, ...] = ROW_COUNTS
    """Row counts, rising."""
    one_thread: bool = False
    """Whether by one thread alone: more of them sum in another order, whatever the row count."""


_known: dict[tuple, RowClasses] = {}


def large_size(rows: int) -> int:
    """The row count beyond ROW_COUNTS that so many rows, in as few products as it takes, are filled up to; or 0."""
    if rows <= ROW_COUNTS[-1]:
        return 0
    products = -(-rows // LARGE_ROW_COUNTS[-1])
    return next(size for size in LARGE_ROW_COUNTS if size * products >= rows)


def row_classes(
    make: Callable[[Tensor, Tensor], Product],
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    kind: tuple,
    large: int = 0,
) -> RowClasses:
    """Return what gives a row (inputs,) of a product the same bits, wherever it stands, with any number of threads.

    make(weight (outputs, inputs), bias (outputs,)) returns the product; kind: what else decides how it is computed;
    large: as large_size() says. Found out once for each, and for each number of threads. A single row is the answer
    where no two counts agree.
    """
    key = (*kind, outputs, inputs, dtype, torch.get_num_threads(), large)
    if key not in _known:
        rows, weight, bias = _orders_show(large or ROW_COUNTS[-1], inputs, outputs, dtype)
        product = make(weight, bias)
        if large:
            _known[key] = _with_large(product, rows, row_classes(make, outputs, inputs, dtype, kind))
        else:
            _known[key] = _agreeing(product, rows)
    return _known[key]


def multiply(product: Product, rows: Tensor, classes: RowClasses) -> Tensor:
    """product of rows (M, K), in as many products as it takes; (M, N)."""
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
    """Rows (count, inputs) and a weight (outputs, inputs) whose product is 0, so that what is computed is rounding
    alone, and a bias (outputs,) as small as that, which shows whether it is added first or last.

    Every addend has its opposite elsewhere in the sum, and they are of many magnitudes: two orders of summation that
    round differently do so in nearly every number, in half precision too.
    """
    generator = torch.Generator().manual_seed(0)
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    half = inputs // 2
    rows = torch.randn(count, half, **draw).clamp_(-4, 4)
    rows *= torch.exp2(torch.randint(0, 13, rows.shape, generator=generator, device="cpu"))
    weight = torch.randn(outputs, half, **draw)
    order = torch.randperm(inputs, generator=generator, device="cpu")
    rows = torch.cat([rows, -rows, rows.new_zeros(len(rows), inputs - 2 * half)], dim=1)[:, order]
    weight = torch.cat([weight, weight, rows.new_zeros(outputs, inputs - 2 * half)], dim=1)[:, order]
    bias = torch.randn(outputs, **draw) * 2.0**-8
    return rows.to(dtype), weight.to(dtype), bias.to(dtype)


def _agreeing(product: Product, rows: Tensor) -> RowClasses:
    with _one_thread():
        for size in reversed(ROW_COUNTS[1:]):  # the largest that does not care for a row's index
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


def _with_large(product: Product, rows: Tensor, classes: RowClasses) -> RowClasses:
    """With the count of rows as one more, if it agrees."""
    if classes.sizes[-1] < ROW_COUNTS[-1]:
        return classes
    expected = multiply(product, rows, classes)
    with _one_thread() if classes.one_thread else nullcontext():
        agrees = _agrees(product, rows, expected, len(rows))
    return classes._replace(sizes=(*classes.sizes, len(rows))) if agrees else classes


def _agrees(product: Product, rows: Tensor, expected: Tensor, size: int) -> bool:
    """Return whether a product of so many rows gives what is expected of them, in another order."""
    return torch.equal(product(rows[:size].flip(0)).flip(0), expected[:size])


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
