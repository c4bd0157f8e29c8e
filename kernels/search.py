"""Beam search step on the device, around the decoder's layers: four launches, no synchronization with the host.

    admit       idle slots take the next sentences of a queue
    embed       y[r] = table[newest[r]] * scale + positions[position[r // K]]
    likeliest   per row and share of the vocabulary: the largest logit, the sum of exponentials, the W likeliest tokens
    choose      total = score + logit - lse over the shares; the best hypotheses continue, ended ones are stored

S slots of K rows search one sentence each, at their own positions; Memory holds their state. Ties are broken by lower
row, then by larger logit, then by lower token. Logits are read once, R * V elements for R = S * K rows: 12 MB at
R = 160, V = 37,000 in bfloat16, 2.8 us at 4.3 TB/s; the rest is latency. Invalid values in memory never lead to an
access out of bounds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fasttfm.kernels.chip import Chip
from fasttfm.kernels.jit import Launch, jit
from fasttfm.kernels.launch import ceil_div, chip
from fasttfm.kernels.parameter import (
    BoolPointer,
    Float32Pointer,
    Int32Pointer,
    Int64Pointer,
    Pointer,
    Real,
    Size,
    Varying,
)
from fasttfm.kernels.tiles.rows import SEARCH_CANDIDATES, SEARCH_SHARES, SEARCH_SLOTS
from fasttfm.kernels.tiles.table import Tile
from fasttfm.kernels.wide import wide

LOG2E = tl.constexpr(1.4426950408889634)
# Columns of Memory.settings, and their number.
LIMIT, LEAST, BEAM, NBEST, ENOUGH, RANKS, SOURCE, NUMBER, SETTINGS = map(tl.constexpr, range(9))
SHARES = tl.constexpr(128)  # maximum per vocabulary
PLACES = tl.constexpr(4096)  # maximum tokens per share
PAST = tl.constexpr(64)  # past positions moved per iteration


class Sizes(NamedTuple):
    S: Varying
    """Slots, at most 1,024."""
    K: Varying
    """Rows per slot, at most 16."""
    N: Varying
    """Hypotheses kept per sentence, at most 8, or 16 if K exceeds 8."""
    T: Varying
    """Maximum output length."""
    Q: Varying
    """Places for sentences; place Q is a dummy: a slot that searches it is idle."""
    V: Size
    """Vocabulary size."""


class Memory(NamedTuple):
    """State of all searches, contiguous: of slots, of the queue, and of places."""

    sentence: Int64Pointer
    """(S,): place of the sentence in each slot."""
    position: Int64Pointer
    """(S,): length of the live hypotheses."""
    ended: Int64Pointer
    """(S,): hypotheses ended within the beam."""
    scores: Float32Pointer
    """(S, K): log-probability of each live hypothesis, descending; -inf for unused rows."""
    newest: Int64Pointer
    """(S, K): newest token."""
    ancestors: Int64Pointer
    """(S * K, T): storage index, row * T + position, of the keys of each earlier position of a row."""
    source_lengths: Int64Pointer
    """(S,)"""
    queue: Int64Pointer
    """(Q,): ring buffer of places."""
    head: Int64Pointer
    """(1,): sentences taken by slots."""
    tail: Int64Pointer
    """(1,): sentences queued."""
    settings: Int64Pointer
    """(Q + 1, 8): maximum and minimum output length, rows used, hypotheses kept, ended hypotheses that end the search,
    best extensions of a step that may end, source length, number of the sentence."""
    forced: Int64Pointer
    """(Q + 1, T): forced token at each position; below 0: any."""
    divisors: Float32Pointer
    """(Q + 1, T): length penalty of a hypothesis that ends at each position; divides its log-probability."""
    found_scores: Float32Pointer
    """(Q + 1, N): scores of ended hypotheses, descending; -inf where there is none."""
    found_log_probabilities: Float32Pointer
    """(Q + 1, N)"""
    found_ends: Int64Pointer
    """(Q + 1, N): position * K + row after which they ended."""
    tokens: Int64Pointer
    """(Q + 1, T, K): token of each row at each position."""
    parents: Int64Pointer
    """(Q + 1, T, K): previous row that it continues."""
    finished: Int64Pointer
    """(Q + 1,): number of the sentence that ended in each place."""
    first_scores: Float32Pointer
    """(K,): initial scores of a search."""


class Shares(NamedTuple):
    """Logits reduced by share, P shares per row: the maximum, the sum of exponentials relative to it, and the W
    likeliest tokens that may follow, with their logits, descending."""

    peaks: Float32Pointer
    """(R, P)"""
    sums: Float32Pointer
    """(R, P)"""
    logits: Float32Pointer
    """(R, P, W)"""
    tokens: Int32Pointer
    """(R, P, W)"""


@triton.jit
def _setting(memory, sentence, COLUMN: tl.constexpr):
    return tl.load(memory.settings + sentence * SETTINGS + COLUMN)


@triton.jit
def _among(number, count):
    """Return number clamped to 0 .. count - 1."""
    return tl.minimum(tl.maximum(number, 0), count - 1)


@triton.jit
def _turned(bits):
    """Map the bits of a float32 to an int32 with the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keys(x, within, HALF: tl.constexpr):
    """Return sort keys that order by x (float32), then by lower place `within`: the next likeliest is the largest key
    below the last one. HALF: x had 16 bits, so its last 13 bits are zero and make room; else keys are int64."""
    order = _turned((x + 0.0).to(tl.int32, bitcast=True))  # -0 becomes 0
    order = order & -PLACES if HALF else order.to(tl.int64) * PLACES
    return order + (PLACES - 1 - within)


@triton.jit
def _value(key, HALF: tl.constexpr):
    """Return the x of a key."""
    bits = _turned(key) & -PLACES if HALF else _turned((key >> 12).to(tl.int32))
    return bits.to(tl.float32, bitcast=True)


@jit
def _admit(memory: Memory, sizes: Sizes, bos: Varying, COLUMNS: tl.constexpr):
    S, K, _, _, Q, _ = sizes
    slots = tl.arange(0, COLUMNS)
    exists = slots < S
    sentence = tl.load(memory.sentence + slots, mask=exists, other=0)
    free = exists & (sentence == Q)
    head = tl.load(memory.head)
    before = tl.cumsum(free.to(tl.int32), 0) - 1
    takes = free & (head + before < tl.load(memory.tail))
    first = (head.to(tl.uint64) % Q.to(tl.uint64)).to(tl.int32)
    place = tl.load(memory.queue + (first + before) % Q, mask=takes, other=0)
    place = tl.where((place < 0) | (place > Q), Q, place)
    sentence = tl.where(takes, place, sentence)
    taken = tl.sum(takes.to(tl.int32), 0)
    tl.debug_barrier()  # every thread has read the head
    tl.store(memory.head, head + taken)
    tl.store(memory.sentence + slots, sentence, mask=takes)
    tl.store(memory.position + slots, 0, mask=takes)
    tl.store(memory.ended + slots, 0, mask=takes)
    for k in range(K):
        tl.store(memory.newest + slots * K + k, bos, mask=takes)
        tl.store(memory.scores + slots * K + k, tl.load(memory.first_scores + k), mask=takes)
    source = tl.load(memory.settings + _among(sentence, Q + 1) * SETTINGS + SOURCE, mask=exists, other=0)
    tl.store(memory.source_lengths + slots, source, mask=exists)


@jit
def _embed(
    memory: Memory,
    table: Pointer,  # (V, N)
    positions: Float32Pointer,  # (P, N)
    y: Pointer,  # (R, N) out
    sizes: Sizes,
    scale: Real,
    padding: Varying,  # the token whose embedding is zero
    P: Varying,
    N: Size,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.load(memory.newest + row)
    place = tl.load(memory.position + row // sizes.K)
    exists = (token >= 0) & (token < sizes.V) & (place >= 0) & (place < P)
    read = exists & (token != padding) & (columns < N)
    value = wide(tl.load(table + token * N + columns, mask=read, other=0.0)) * scale
    value += tl.load(positions + place * N + columns, mask=read, other=0.0)
    value = tl.where(exists | (token == padding), value, float("nan"))  # makes invalid state visible
    tl.store(y + row.to(tl.int64) * N + columns, value.to(y.dtype.element_ty), mask=columns < N)


@jit
def _likeliest(
    logits: Pointer,  # (R, V), rows `logits_stride` apart
    refused: BoolPointer,  # (R, V) or (V,), rows `refused_stride` apart: tokens that may not follow
    selected: BoolPointer,  # (Q + 1, V): tokens that a sentence may write, and the softmax covers; None: all
    memory: Memory,
    shares: Shares,  # out
    sizes: Sizes,
    W: Varying,
    eos: Varying,
    logits_stride: Size,
    refused_stride: Size,
    COLUMNS: tl.constexpr,
):
    _, K, _, T, Q, V = sizes
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    sentence = tl.load(memory.sentence + row // K)
    if (sentence >= 0) & (sentence < Q):
        position = _among(tl.load(memory.position + row // K), T)
        within = tl.arange(0, COLUMNS)
        tokens = tl.program_id(1) * COLUMNS + within
        inside = tokens < V
        x = wide(tl.load(logits + row * logits_stride + tokens, mask=inside, other=float("-inf")))
        if selected is not None:
            x = tl.where(tl.load(selected + sentence * V + tokens, mask=inside, other=False), x, float("-inf"))
        peak = tl.max(x, 0)
        below = x - tl.where(peak == float("-inf"), 0.0, peak)
        tl.store(shares.peaks + part, peak)
        tl.store(shares.sums + part, tl.sum(tl.exp2(below * LOG2E), 0))

        forced = tl.minimum(tl.load(memory.forced + sentence * T + position), V).to(tl.int32)
        too_early = tl.where(position < _setting(memory, sentence, LEAST), eos, -1)
        may = tl.load(refused + row * refused_stride + tokens, mask=inside, other=True) == 0
        may = tl.where(forced >= 0, tokens == forced, may & (tokens != too_early))
        HALF: tl.constexpr = logits.dtype.element_ty.primitive_bitwidth == 16
        LOWEST: tl.constexpr = -(1 << 31) if HALF else -(1 << 63)
        keys = _keys(tl.where(may & (x == x), x, float("-inf")), within, HALF)
        key = tl.full((), -1 - LOWEST, keys.dtype)
        for rank in range(W):
            key = tl.max(tl.where(keys < key, keys, LOWEST), 0)
            place = PLACES - 1 - (key & (PLACES - 1)).to(tl.int32)
            tl.store(shares.logits + part * W + rank, _value(key, HALF))
            tl.store(shares.tokens + part * W + rank, tl.program_id(1) * COLUMNS + place)


@jit
def _choose(
    memory: Memory,
    shares: Shares,
    sizes: Sizes,
    P: Varying,
    W: Varying,
    eos: Varying,
    ROWS: tl.constexpr,  # at least K and N
    COLUMNS: tl.constexpr,  # at least P * W
):
    _, K, N, T, Q, _ = sizes
    slot = tl.program_id(0).to(tl.int64)
    sentence = tl.load(memory.sentence + slot)
    if (sentence >= 0) & (sentence < Q):
        position = _among(tl.load(memory.position + slot), T)
        rows = tl.arange(0, ROWS)
        exists = rows < K
        line = slot * K + rows
        score = tl.load(memory.scores + line, mask=exists, other=float("-inf"))
        share = tl.arange(0, SHARES)[None, :]
        inside = exists[:, None] & (share < P)
        peaks = tl.load(shares.peaks + (line[:, None] * P + share), mask=inside, other=float("-inf"))
        sums = tl.load(shares.sums + (line[:, None] * P + share), mask=inside, other=0.0)
        peak = tl.max(peaks, 1)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(sums * tl.exp2((peaks - peak[:, None]) * LOG2E), 1)
        logarithm = tl.log(tl.where(total == 0.0, 1.0, total))
        column = tl.arange(0, COLUMNS)[None, :]
        inside = exists[:, None] & (column < P * W)
        values = tl.load(shares.logits + (line[:, None] * (P * W) + column), mask=inside, other=float("-inf"))
        kept = rows < N
        list_place = sentence * N + rows
        found = tl.load(memory.found_scores + list_place, mask=kept, other=float("-inf"))
        found_log_probability = tl.load(memory.found_log_probabilities + list_place, mask=kept, other=0.0)
        found_end = tl.load(memory.found_ends + list_place, mask=kept, other=0)
        divisor = tl.load(memory.divisors + sentence * T + position)
        limit = _setting(memory, sentence, LIMIT)
        last_divisor = tl.load(memory.divisors + sentence * T + _among(limit, T))
        used = _setting(memory, sentence, BEAM)
        ranks = _setting(memory, sentence, RANKS)
        last = _among(_setting(memory, sentence, NBEST) - 1, N)
        ended = tl.load(memory.ended + slot)
        tl.debug_barrier()  # every thread has read what is written from here on

        # Merge of K descending lists: take the best head, 2 K times. If nothing is left, it is -inf, in the first row.
        filed, lives = 0, 0
        moved = tl.zeros((ROWS,), tl.int32)  # places by which each stored hypothesis moves down
        worst = tl.full((), float("-inf"), tl.float32)
        live = tl.full((ROWS,), float("-inf"), tl.float32)
        parent, token = tl.zeros((ROWS,), tl.int32), tl.zeros((ROWS,), tl.int32)
        for rank in range(2 * K):
            heads = tl.max(values, 1)
            totals = score + ((heads - peak) - logarithm)
            totals = tl.where(exists & (totals == totals), totals, float("-inf"))
            best, row = tl.max(totals, 0, return_indices=True)
            chosen = (rows == row)[:, None]
            at = tl.min(tl.min(tl.where(chosen & (values == heads[:, None]), column, COLUMNS), 1), 0)
            values = tl.where(chosen & (column == at), float("-inf"), values)
            follows = tl.load(shares.tokens + (slot * K + row) * (P * W) + tl.minimum(at, P * W - 1))
            if (follows == eos) & (best > float("-inf")):
                ended += (rank < used).to(tl.int64)
                if rank < ranks:
                    ratio = tl.div_rn(best, divisor)
                    place = filed + tl.sum((found >= ratio).to(tl.int32), 0)
                    tl.store(memory.found_scores + sentence * N + place, ratio, mask=place < N)
                    tl.store(memory.found_log_probabilities + sentence * N + place, best, mask=place < N)
                    tl.store(memory.found_ends + sentence * N + place, position * K + row, mask=place < N)
                    worst = tl.where(place == last, ratio, worst)
                    moved += (found < ratio).to(tl.int32)
                    filed += 1
            else:
                live = tl.where((rows == lives) & (rows < used), best, live)
                parent = tl.where(rows == lives, row, parent)
                token = tl.where(rows == lives, follows, token)
                lives += 1

        goes = kept & (moved > 0) & (rows + moved < N)
        tl.store(memory.found_scores + list_place + moved, found, mask=goes)
        tl.store(memory.found_log_probabilities + list_place + moved, found_log_probability, mask=goes)
        tl.store(memory.found_ends + list_place + moved, found_end, mask=goes)
        worst = tl.maximum(worst, tl.max(tl.where(rows + moved == last, found, float("-inf")), 0))
        done = (position == limit) | (ended >= _setting(memory, sentence, ENOUGH))
        done = done | (tl.div_rn(tl.max(live, 0), last_divisor) <= worst)
        written = (sentence * T + position) * K + rows
        tl.store(memory.tokens + written, token, mask=exists)
        tl.store(memory.parents + written, parent, mask=exists)
        tl.store(memory.newest + line, token, mask=exists)
        tl.store(memory.scores + line, live, mask=exists)
        tl.store(memory.ended + slot, ended)
        if done:
            tl.store(memory.finished + sentence, _setting(memory, sentence, NUMBER))
            tl.store(memory.sentence + slot, Q)
            tl.store(memory.position + slot, 0)
        else:
            tl.store(memory.position + slot, position + 1)
            source = (slot * K + parent) * T
            tl.store(memory.ancestors + line * T + position, source + position, mask=exists)
            moves = exists & (parent != rows)
            for first in range(0, position.to(tl.int32), PAST):
                past = first + tl.arange(0, PAST)[None, :]
                known = moves[:, None] & (past < position)
                places = tl.load(memory.ancestors + (source[:, None] + past), mask=known, other=0)
                tl.debug_barrier()  # every thread has read the rows that others write
                tl.store(memory.ancestors + (line[:, None] * T + past), places, mask=known)


_COLUMNS = (1024, 4096)
_CANDIDATES = {8: (128, 512, 2048), 16: (512,)}
_EMBEDDING = Tile(0, 512, 1)


def _rows(beam: int) -> int:
    return 8 if beam <= 8 else 16


def _candidates(beam: int, vocabulary: int, columns: int) -> int | None:
    """Return the size class of candidates per row for shares of this width; None if one program cannot hold them."""
    parts, width = ceil_div(vocabulary, columns), min(2 * beam, vocabulary)
    return next((size for size in _CANDIDATES[_rows(beam)] if parts * width <= size and parts <= SHARES.value), None)


def takes(beam: int, vocabulary: int, rows: int) -> bool:
    """Return whether the kernels support rows // beam slots of `beam` rows, with as many hypotheses kept."""
    return 1 <= beam <= 16 and rows <= 1024 * beam and _candidates(beam, vocabulary, _COLUMNS[-1]) is not None


def share_tile(chip: Chip, beam: int, vocabulary: int, rows: int) -> Tile:
    """Return the tile of a share: small if large ones give fewer than two programs per processor to hide latency."""
    small, large = _COLUMNS
    occupied = rows * ceil_div(vocabulary, large) >= 2 * chip.processors
    return SEARCH_SHARES(chip, large if occupied or _candidates(beam, vocabulary, small) is None else small)


def new_shares(sizes: Sizes, device: torch.device) -> Shares:
    """Allocate the buffers between Likeliest and Choose."""
    rows = sizes.S * sizes.K
    parts = ceil_div(sizes.V, share_tile(chip(device), sizes.K, sizes.V, rows).columns)
    logits = torch.empty(rows, parts, min(2 * sizes.K, sizes.V), dtype=torch.float32, device=device)
    return Shares(logits[..., 0].clone(), logits[..., 0].clone(), logits, logits.int())


class Admit:
    """Idle slots take the next sentences of the queue."""

    def __init__(self, sizes: Sizes, bos: int, device: torch.device) -> None:
        tile = SEARCH_SLOTS(chip(device), 128 if sizes.S <= 128 else 1024)
        self._launch, self._numbers = Launch(_admit, (1,), tile.options()), (sizes, bos)

    def __call__(self, memory: Memory) -> None:
        """Update memory."""
        self._launch(memory, *self._numbers)


class Embed:
    """Embeddings of the newest tokens, for one signature."""

    def __init__(self, table: Tensor, positions: Tensor, sizes: Sizes, scale: float, padding: int) -> None:
        """table (V, d), positions (P, d) float32, contiguous."""
        grid = (sizes.S * sizes.K, ceil_div(table.shape[1], _EMBEDDING.columns))
        self._launch = Launch(_embed, grid, _EMBEDDING.options())
        self._numbers = sizes, scale, padding, *positions.shape

    def __call__(self, memory: Memory, table: Tensor, positions: Tensor, out: Tensor) -> None:
        """Write out (R, d) in table's dtype; NaN for an invalid token or position."""
        self._launch(memory, table, positions, out, *self._numbers)


class Likeliest:
    """The likeliest tokens of every share of every row, for one signature."""

    def __init__(self, logits: Tensor, refused: Tensor, sizes: Sizes, eos: int) -> None:
        """logits (R, V) float32, float16 or bfloat16; refused (V,) or (R, V) bool; unit stride along V."""
        tile = share_tile(chip(logits.device), sizes.K, sizes.V, sizes.S * sizes.K)
        self._launch = Launch(_likeliest, (sizes.S * sizes.K, ceil_div(sizes.V, tile.columns)), tile.options())
        refused_stride = refused.stride(0) if refused.dim() == 2 else 0
        self._numbers = sizes, min(2 * sizes.K, sizes.V), eos, logits.stride(0), refused_stride

    def __call__(self, memory: Memory, logits: Tensor, refused: Tensor, selected: Tensor | None, out: Shares) -> None:
        """Write out, except rows of idle slots. selected (Q + 1, V) bool, contiguous: the tokens that each sentence
        may write, None for all."""
        self._launch(logits, refused, selected, memory, out, *self._numbers)


class Choose:
    """Selects the hypotheses of all slots after a step, and stores those that have ended."""

    def __init__(self, sizes: Sizes, shares: Shares, eos: int) -> None:
        rows, (_, parts, width) = _rows(max(sizes.K, sizes.N)), shares.logits.shape
        size = next(size for size in _CANDIDATES[rows] if parts * width <= size)
        tile = SEARCH_CANDIDATES(chip(shares.logits.device), rows, size)
        self._launch = Launch(_choose, (sizes.S,), tile.options())
        self._numbers = sizes, parts, width, eos

    def __call__(self, memory: Memory, shares: Shares) -> None:
        """Update memory, except for idle slots."""
        self._launch(memory, shares, *self._numbers)
