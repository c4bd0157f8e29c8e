"""Log-sum-exp and top-k over the logits of a vocabulary, for a search on a CPU; compiled by numba.

Log-probabilities are never written: one pass sums the exponentials, a second finds the k best tokens block by block,
skipping blocks whose maximum is too small, as most are. Ties of log-probabilities are broken by the smaller index, even
if the logits differ. Each row is independent of the batch.

Cost: reads 2 * R * V elements; PyTorch's log_softmax, amax and topk read and write three times as many.
"""

import numpy as np

from fasttfm.cpu.loop_parts import (
    FAST,
    INFINITE,
    MAGNITUDE,
    bits_of,
    exp,
    inlined,
    loop,
    of_sort_key,
    read,
    sort_key,
)
from fasttfm.cpu.thread_team import over_threads

_BLOCK = np.uintp(64)


@inlined(fastmath=FAST)
def _sum_exp(flat, first, width, largest):
    total = np.float32(0.0)
    for n in range(width):
        total += exp(read(flat[first + n]) - largest)
    return total


@loop()
def log_sum_exp(team, x, out):
    over_threads(_log_sum_exp, team, np.uintp(x.shape[0]), np.uintp(1), (x, out))


@inlined()
def _log_sum_exp(begin, end, x, out):
    width = np.uintp(x.shape[1])
    flat = x.reshape(-1)
    for r in range(begin, end):
        first = r * width
        key, size = sort_key(read(flat[first])), np.int32(0)
        for n in range(width):
            value = read(flat[first + n])
            key = max(key, sort_key(value))
            size = max(size, np.int32(bits_of(value)) & MAGNITUDE)
        largest = of_sort_key(key)
        total = _sum_exp(flat, first, width, largest)
        # -inf is an excluded token; NaN may have either sign
        out[r] = np.float32(np.nan) if size > INFINITE or key >= INFINITE else largest + np.log(total)


@loop()
def largest_of_rows(team, x, sums, values, ids):
    over_threads(_largest_of_rows, team, np.uintp(x.shape[0]), np.uintp(1), (x, sums, values, ids))


@inlined()
def _largest_of_rows(begin, end, x, sums, values, ids):
    width, most = np.uintp(x.shape[1]), values.shape[1]
    flat = x.reshape(-1)
    for r in range(begin, end):
        count, start, total = 0, r * width, sums[r]
        for first in range(np.uintp(0), width, _BLOCK):
            last = min(first + _BLOCK, width)
            key = sort_key(read(flat[start + first]))
            for n in range(start + first, start + last):
                key = max(key, sort_key(read(flat[n])))
            if count == most and not of_sort_key(key) - total > values[r, most - 1]:
                continue
            for n in range(first, last):
                value = read(flat[start + n]) - total
                if count < most:
                    count += 1
                elif not value > values[r, most - 1]:
                    continue
                place = count - 1
                while place > 0 and value > values[r, place - 1]:
                    values[r, place], ids[r, place] = values[r, place - 1], ids[r, place - 1]
                    place -= 1
                values[r, place], ids[r, place] = value, n


@loop()
def choose_extensions(
    values, tokens, scores, penalties, worst, end, totals, parents, ranking, news, ended, live, of_live
):
    """The choice of search.beam.Beams among W tokens of each of r rows of b sentences, to the fields of its _Best.

    values and tokens (b, r, W): the likeliest tokens, best first; scores (b, r): of the rows; penalties and worst (b,):
    length penalties, and scores to beat; end: end-of-sentence.
    """
    rows, width = values.shape[1:]
    beam = live.shape[1]
    heads, found = np.empty(rows, np.int64), np.empty(2 * beam, np.int64)
    for b in range(len(values)):
        heads[:] = 0
        extra = 0
        for n in range(2 * beam):
            first, most = -1, np.int32(0)
            for r in range(rows):
                if heads[r] < width:
                    total = values[b, r, heads[r]] + scores[b, r]
                    key = sort_key(total) if total == total else MAGNITUDE  # NaN comes first, as in torch.topk
                    if first < 0 or key > most:
                        first, most = r, key
            if first < 0:  # a vocabulary smaller than the beam
                total, first, place = np.float32(-np.inf), rows - 1, extra % width
                extra += 1
            else:
                place = heads[first]
                total = values[b, first, place] + scores[b, first]
                heads[first] += 1
            totals[b, n], ranking[b, n], parents[b, n] = total, total / penalties[b], first
            found[n] = tokens[b, first, place]
            news[b, n] = found[n] == end and ranking[b, n] > worst[b]
            ended[b] += found[n] == end and n < beam and total > -np.inf
        count = 0
        for possible in (True, False):  # at most K end, so K go on unless some are forbidden
            for n in range(2 * beam):
                if (found[n] != end and totals[b, n] != -np.inf) == possible and count < beam:
                    live[b, count] = totals[b, n] if possible else np.float32(-np.inf)
                    of_live[0, b, count], of_live[1, b, count] = found[n], parents[b, n]
                    count += 1
