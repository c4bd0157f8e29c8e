"""Adds up what programs summed on their own, in a fixed order: how parameter gradients stay the same every time.

Any number of sums in one launch: a training step has some sixty, of a few kilobytes each, so launches are their cost.
Reads 4 * P * N bytes for P programs: a few percent of what the programs themselves read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip
from fasttfm.kernels.parameter import Pointers, Varyings
from fasttfm.kernels.tiles.rows import PARTIAL_SUMS

_LARGEST = 120
"""Sums of one launch: their pointers and sizes, 24 bytes each, are kernel arguments, of which there may be 4 KB."""


@jit
def _add_parts(
    parts: Pointers,  # (P, N) float32, P and N each their own
    outs: Pointers,  # (N,) out, of one dtype
    programs: Varyings,  # P
    columns: Varyings,  # N
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    source, target, P, N = parts[0].to(tl.int64), outs[0].to(tl.int64), programs[0], columns[0]
    for i in tl.static_range(1, len(parts)):
        source = tl.where(which == i, parts[i].to(tl.int64), source)
        target = tl.where(which == i, outs[i].to(tl.int64), target)
        P = tl.where(which == i, programs[i], P)
        N = tl.where(which == i, columns[i], N)
    source = source.to(parts[0].dtype)
    target = target.to(outs[0].dtype)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, P, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < P)[:, None] & (column < N)[None, :]
        total += tl.load(source + rows.to(tl.int64)[:, None] * N + column[None, :], mask=inside, other=0.0)
    tl.store(target + column, tl.sum(total, axis=0).to(target.dtype.element_ty), mask=column < N)


class Sums:
    """Adds up parts of known shapes: one launch for every dtype of outs, unless there are more than it can take."""

    def __init__(
        self, places: Sequence[int], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], chip: Chip
    ) -> None:
        """places: of what is summed among the parts and outs of a call; shapes: (P, N) of each; dtypes: of each out."""
        tile = PARTIAL_SUMS(chip)
        self._launches = []
        for dtype in dict.fromkeys(dtypes):
            alike = [i for i, each in enumerate(dtypes) if each == dtype]
            for first in range(0, len(alike), _LARGEST):
                taken = alike[first : first + _LARGEST]
                programs, columns = zip(*(shapes[i] for i in taken))
                launch = Launch(_add_parts, (ceil_div(max(columns), tile.columns), len(taken)), tile.options())
                self._launches.append((_taking([places[i] for i in taken]), launch, programs, columns))
        self._outs = [(place, N, dtype) for place, (_, N), dtype in zip(places, shapes, dtypes)]

    def __call__(self, parts: Sequence[Tensor | None], outs: Any = None) -> Any:
        """out (N,) = sum over P of parts (P, N) float32, both contiguous, rounded to out's dtype; in a fixed order.

        Returns outs; None: the parts, with new tensors in the place of those that are summed.
        """
        if outs is None:
            outs = list(parts)
            for place, N, dtype in self._outs:
                outs[place] = outs[place].new_empty(N, dtype=dtype)
        for take, launch, programs, columns in self._launches:
            launch(take(parts), take(outs), programs, columns)
        return outs


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple]:
    return itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


def add_parts(sums: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Sums of each (parts, out)."""
    if sums:
        parts, outs = zip(*sums)
        dtypes = [out.dtype for out in outs]
        Sums(range(len(parts)), [each.shape for each in parts], dtypes, chip(parts[0].device))(parts, outs)
