"""Add the partial sums of programs in a fixed order: deterministic parameter gradients without atomics.

One launch computes many sums: a training step has about a hundred, of a few kilobytes each, so launches dominate their
cost. Reads 4 * P * N bytes for P programs: a few percent of what the programs themselves read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div
from fasttfm.kernels.parameter import Pointers, Varyings
from fasttfm.kernels.tiles.rows import PARTIAL_SUMS

_LARGEST = 120
"""Most sums per launch: each takes 24 of the 4,096 bytes of kernel arguments."""


@jit
def _add_parts(
    parts: Pointers,  # (P, N) float32, each with its own P and N
    outs: Pointers,  # (N,) out, all of one dtype
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
    """Adds partial sums of fixed shapes: one launch for every dtype of outs and every _LARGEST sums."""

    def __init__(
        self, places: Sequence[int], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], chip: Chip
    ) -> None:
        """places: indices of the partial sums among the parts of a call; shapes (P, N) and dtypes: one per sum."""
        tile = PARTIAL_SUMS(chip)
        self.summed, self.chip = (places, shapes, dtypes), chip
        self._launches = []
        for dtype in dict.fromkeys(dtypes):
            alike = [i for i, each in enumerate(dtypes) if each == dtype]
            for first in range(0, len(alike), _LARGEST):
                batch = alike[first : first + _LARGEST]
                programs, columns = zip(*(shapes[i] for i in batch))
                launch = Launch(_add_parts, (ceil_div(max(columns), tile.columns), len(batch)), tile.options())
                self._launches.append((_getter([places[i] for i in batch]), launch, programs, columns))
        self._outs = [(place, N, dtype) for place, (_, N), dtype in zip(places, shapes, dtypes)]

    def __call__(self, parts: Sequence[Tensor | None], outs: Any = None) -> Any:
        """out (N,) = sum over P of parts (P, N) float32, both contiguous, rounded to out's dtype; in a fixed order.

        Returns outs; if None, a list of the parts with new tensors in place of those summed. Inside one_launch() these
        are written when it exits.
        """
        if outs is None:
            outs, waiting = list(parts), _here.waiting
            for place, N, dtype in self._outs:
                outs[place] = outs[place].new_empty(N, dtype=waiting.dtype if waiting and waiting.dtype else dtype)
            if waiting is not None:
                waiting.note(self, parts, outs)
                return outs
        for take, launch, programs, columns in self._launches:
            launch(take(parts), take(outs), programs, columns)
        return outs


def _getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple]:
    return itemgetter(*places) if len(places) > 1 else lambda values: (values[places[0]],)


class one_launch:
    """Context manager that defers the Sums of this thread and launches them together on exit, unless it raises.

    Results must not be read before the exit; all must be on one device. cache: a dict for the plans of recurring
    sequences of Sums; dtype: overrides the dtype of all sums.
    """

    def __init__(self, cache: dict[tuple, Sums], dtype: torch.dtype | None = None) -> None:
        self._cache, self.dtype = cache, dtype
        self._noted: list[tuple[Sums, int]] = []
        self._parts: list[Tensor | None] = []
        self._outs: list[Tensor | None] = []

    def note(self, sums: Sums, parts: Sequence[Tensor | None], outs: Sequence[Tensor | None]) -> None:
        self._noted.append((sums, len(self._parts)))
        self._parts += parts
        self._outs += outs

    def __enter__(self) -> None:
        self._outer, _here.waiting = _here.waiting, self

    def __exit__(self, failed: object, *_: object) -> None:
        _here.waiting = self._outer
        if failed is None and (key := tuple(self._noted)):
            merged = self._cache.get(key)
            if merged is None:
                merged = self._cache[key] = _merged(key, self.dtype)
            merged(self._parts, self._outs)


class _Here(threading.local):
    waiting: one_launch | None = None


_here = _Here()


def _merged(noted: Sequence[tuple[Sums, int]], dtype: torch.dtype | None) -> Sums:
    """Return one Sums in place of several, each given with the index of its first part."""
    places = [first + place for sums, first in noted for place in sums.summed[0]]
    shapes, dtypes = ([each for sums, _ in noted for each in sums.summed[i]] for i in (1, 2))
    return Sums(places, shapes, [dtype or each for each in dtypes], noted[0][0].chip)  # type: ignore[arg-type, misc]
