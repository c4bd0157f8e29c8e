"""Gradient of an embedding table, compiled by numba; tensors are passed as addresses, as in norm_loops.py, unchecked.

PyTorch zeroes the table's gradient, applies dropout and scale to the output's in a pass each, and adds a row per token.
Here every row of the table is written once, as the sum of its tokens' rows in order: V * N elements written and T * N
read, for V rows in the table and T tokens of N elements.
"""

import numpy as np

from fasttfm.cpu.loop_parts import inlined, loop, numbers_at, read, round_to, rows_of_part
from fasttfm.cpu.thread_team import over_threads
from fasttfm.cpu.training_loops import PART


@loop()
def embedding_gradient(
    team, count, width, vocabulary, like, like_token, grad, tokens, pad, keep, kept_scale, scale, out
):
    """Write the table's gradient (vocabulary, width) to out from grad (count, width), that of the tokens' rows.

    keep: address of dropout's mask (count, width) uint8, or 0; kept_scale: its scale; pad: the token without gradient,
    or -1; like and like_token: an element of grad's type and of the tokens'.
    """
    of_tokens = numbers_at(tokens, count, like_token)
    begins, places = np.zeros(vocabulary + 2, np.uintp), np.empty(count, np.uintp)
    for i in range(np.uintp(count)):
        if of_tokens[i] != pad:
            begins[np.uintp(of_tokens[i]) + np.uintp(2)] += np.uintp(1)
    for v in range(np.uintp(2), np.uintp(vocabulary + 2)):
        begins[v] += begins[v - np.uintp(1)]
    for i in range(np.uintp(count)):
        if of_tokens[i] != pad:
            token = np.uintp(of_tokens[i]) + np.uintp(1)
            places[begins[token]] = i
            begins[token] += np.uintp(1)
    numbers = count * width
    args = (
        begins, places, numbers_at(grad, numbers, like), numbers_at(keep, numbers, np.uint8(0)), keep != 0, kept_scale,
        scale, np.uintp(width), numbers_at(out, vocabulary * width, like),
    )  # fmt: skip
    over_threads(_gradient_rows, team, np.uintp(vocabulary), rows_of_part(width, PART), args)


@inlined()
def _gradient_rows(begin, end, begins, places, grad, keep, drops, kept_scale, scale, width, out):
    """Rows begin to end of the table; places[begins[v] : begins[v + 1]] are the positions of token v, ascending."""
    total = np.empty(width, np.float32)
    for v in range(begin, end):
        total[:] = np.float32(0.0)
        for place in range(begins[v], begins[v + np.uintp(1)]):
            first = places[place] * width
            if drops:
                for n in range(width):
                    total[n] += read(grad[first + n]) * np.float32(keep[first + n]) * kept_scale * scale
            else:
                for n in range(width):
                    total[n] += read(grad[first + n]) * scale
        for n in range(width):
            out[v * width + n] = round_to(total[n], out[v * width + n])
