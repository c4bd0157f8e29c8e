"""The passes over a vocabulary's logits in a search on a CPU, for numba, and what calls them.

A row's log-probabilities are never written: their sum of exponentials is one pass, and the few best tokens are found by
another, block by block, where most blocks hold nothing that is good enough. Of equal logits the first comes first. Both
look at one row at a time, so a row does not depend on the rows beside it.

Cost: 2 * R * V * 4 bytes are read; PyTorch's log_softmax, amax and topk read and write three times as many.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from fasttfm.functional.step_loops import FAST, bits_of, exp, from_bits

_BLOCK = 64
_SIGN = np.int32(0x7FFFFFFF)


@njit
def _key(x):
    """An integer that rises with the float32 x; integers' maxima are vectorised, those of numbers with NaN are not."""
    bits = np.int32(bits_of(x))  # type: ignore[call-arg]
    return bits ^ ((bits >> np.int32(31)) & _SIGN)


@njit
def _of_key(key):
    return from_bits(key ^ ((key >> np.int32(31)) & _SIGN))  # type: ignore[call-arg]


@njit(fastmath=FAST, nogil=True, cache=True)
def log_sum_exp(x, out):
    """log sum exp of each row of x (R, V) to out (R,); NaN where one is no number or infinite."""
    width = x.shape[1]
    for r in range(x.shape[0]):
        row = x[r]
        key, largest_bits = _key(row[0]), np.uint32(0)
        for n in range(width):
            key = max(key, _key(row[n]))
            bits = bits_of(row[n])  # type: ignore[call-arg]
            largest_bits = max(largest_bits, bits & np.uint32(0x7FFFFFFF))
        largest = _of_key(key)
        total = np.float32(0.0)
        for n in range(width):
            total += exp(row[n] - largest)
        out[r] = np.float32(np.nan) if largest_bits > np.uint32(0x7F7FFFFF) else largest + np.log(total)


@njit(nogil=True, cache=True)
def largest_of_rows(x, sums, values, ids):
    """The k largest of each row of x (R, V), falling, less sums (R,), and where they are: values and ids (R, k)."""
    rows, width = x.shape
    most = values.shape[1]
    for r in range(rows):
        row, count = x[r], 0
        for first in range(0, width, _BLOCK):
            last = min(first + _BLOCK, width)
            key = _key(row[first])
            for n in range(first, last):
                key = max(key, _key(row[n]))
            if count == most and not _of_key(key) > values[r, most - 1]:
                continue
            for n in range(first, last):
                value = row[n]
                if count < most:
                    count += 1
                elif not value > values[r, most - 1]:
                    continue
                place = count - 1
                while place > 0 and value > values[r, place - 1]:
                    values[r, place], ids[r, place] = values[r, place - 1], ids[r, place - 1]
                    place -= 1
                values[r, place], ids[r, place] = value, n
        for place in range(most):
            values[r, place] -= sums[r]
