"""Keys and values kept between two steps of a decoder (pytorch#49791).

Steps of plain layers are calls that are prepared once, over keys and values that never move, where kernels compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as nnF
from torch.nn.modules.module import _has_any_global_hook

from fasttfm.cpu.linear import batch_invariant
from fasttfm.errors import ArgumentError
from fasttfm.functional import backends
from fasttfm.functional.attention.api import attention
from fasttfm.functional.attention.paged import WIDEST_HEAD
from fasttfm.functional.onlookers import looked_at
from fasttfm.functional.subclasses import PLAIN_TENSORS
from fasttfm.kernels import choices
from fasttfm.models.plain import NORM, Snapshot, untouched
from fasttfm.models.residual import normalise
from fasttfm.models.step_layers import StepLayers

_FIRST_CAPACITY = 16
"""Positions that there is memory for at first, where the cache's capacity does not say."""
Pair = tuple[Tensor, Tensor]
"""Keys and values (B, H, S, D)."""
STEP_KEYS = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16}
"""Numbers in the keys up to which a step of a search takes torch's kernel on a CPU. With few keys our operator costs
more in calls than in arithmetic: on two cores of an AMD EPYC with AVX-512 in float32 64 -> 18 us for 4 rows of 8 heads
and 14 keys, 56 -> 26 for one row of 4 queries and 27 keys; with many that kernel is the slower. It takes one row after
the other, so that a batch-invariant search always takes it. A search's last bits depend on it."""


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """attention() of query (B, H, L, D) over keys and values (B, H, S, D), without gradient; (B, H, L, D).

    key_lengths (B,) int: keys at or past it are not attended; None: all are.
    """
    if (
        key_lengths is None
        and query.device.type == "cpu"
        and (keys.numel() <= STEP_KEYS.get(keys.dtype, 0) or batch_invariant(query))
        and keys.dtype == query.dtype
        and not torch.is_grad_enabled()
        and not backends.use_triton(query.device)
    ):
        return nnF.scaled_dot_product_attention(query, keys, values)
    return attention(query, keys, values, key_lengths=key_lengths)


class AttentionCache:
    """Keys and values (B, H, S, D) of one attention.

    grows: True for self-attention, whose every call adds keys; False for attention over the encoder's output, whose
    keys are computed in the first call alone. capacity: positions to make room for at once; more are made as they come.
    """

    def __init__(self, *, grows: bool, capacity: int | None = None) -> None:
        self.grows = grows
        self.capacity = capacity
        self.length = 0
        self._buffers: list[Tensor] = []
        """Keys and values, with room for more."""

    @property
    def kept(self) -> Pair | None:
        """All keys and values; None while the cache is empty."""
        if not self._buffers:
            return None
        keys, values = self._buffers
        return keys[:, :, : self.length], values[:, :, : self.length]

    @property
    def rows(self) -> int | None:
        """The batch size B; None while the cache is empty."""
        return self._buffers[0].shape[0] if self._buffers else None

    @property
    def complete(self) -> bool:
        """True if all keys and values are cached, so that none is computed again."""
        return not self.grows and bool(self._buffers)

    def update(self, keys: Tensor | None, values: Tensor | None) -> tuple[Tensor, Tensor]:
        """Adds keys and values (B, H, n, D), or none where the cache is complete; returns all (B, H, S, D)."""
        if keys is None or values is None:
            assert self.kept is not None
            return self.kept
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ArgumentError("cache is for inference, it passes no gradient: call under torch.no_grad()")
        if not self.grows:
            self._buffers, self.length = [keys, values], keys.shape[2]
            return keys, values
        if self.rows not in (None, keys.shape[0]):
            raise ArgumentError(
                f"the cache holds {self.rows} rows, the input has {keys.shape[0]}: "
                "call cache.reorder(rows) where rows end or multiply"
            )
        end, size = self.length + keys.shape[2], self._buffers[0].shape[2] if self._buffers else 0
        if end > size:  # it doubles, so that a token costs constant time on average
            size = max(end, 2 * size, _FIRST_CAPACITY) if self.capacity is None else max(end, self.capacity)
            before = self.kept or (keys[:, :, :0], values[:, :, :0])
            self._buffers = [_with_room(each, size) for each in before]
        for buffer, new in zip(self._buffers, (keys, values)):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]

    def reserve(self, like: Tensor, rows: int) -> None:
        """Makes room for `capacity` positions of rows like those of `like` (., H, ., D), before the first update."""
        shape = (rows, like.shape[1], self.capacity or _FIRST_CAPACITY, like.shape[3])
        self._buffers = [like.new_empty(shape), like.new_empty(shape)]

    def attend(self, query: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """The joined heads (B, L, H * D) of query (B, H, L, D) over all cached keys, at inference.

        In a cache that grows the queries are its newest positions and see no later one. key_lengths (B,): keys at or
        past it are not attended.
        """
        assert self.kept is not None
        keys, values = self.kept
        if self.grows and query.shape[2] > 1:
            first = self.length - query.shape[2]
            heads = attention(query, keys, values, key_lengths=key_lengths, causal=True, causal_offset=first)
        else:
            heads = cached_attention(query, keys, values, key_lengths)
        return heads.transpose(1, 2).flatten(2)

    def reorder(self, rows: Tensor) -> None:
        """Makes row r a copy of the old row rows[r]; rows (R,) int64, any number of them."""
        kept = self.kept
        if kept is None:
            return
        if self.grows and rows.is_cpu and len(rows) == self.rows:  # most stay in place: the others are copied
            moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
            for each in kept:
                each.index_copy_(0, moved, each.index_select(0, rows[moved]))
            return
        chosen, size = [each.index_select(0, rows) for each in kept], self._buffers[0].shape[2]
        self._buffers = [_with_room(each, size) for each in chosen] if self.grows else chosen


def _with_room(kept: Tensor, size: int) -> Tensor:
    """Memory (B, H, size, D) that begins with what is kept, (B, H, S, D)."""
    buffer = kept.new_empty(*kept.shape[:2], size, kept.shape[3])
    buffer[:, :, : kept.shape[2]] = kept
    return buffer


class LayerCache(NamedTuple):
    """Keys and values that one decoder layer remembers."""

    target: AttentionCache
    """Of self-attention."""
    memory: AttentionCache
    """Of attention over the encoder's output."""


class DecoderCache:
    """Keys and values of the positions that a decoder has seen, so that each is computed once.

        cache = DecoderCache()
        for token in ...:
            output = decoder(embedded_token, memory, cache=cache)      # (N, 1, E): only what is new

    Attention is then causal, and keys and values of `memory` are computed in the first call alone, so every call must
    be given the same memory. capacity: positions to make room for at once; more are made as they come. source_lengths
    (B,): of the memory without its padding, where no memory_key_padding_mask is given. shared_memory: the K rows
    (hypotheses) of a sentence, row = sentence * K + k, share its keys and values of the memory.

    Where kernels compute at inference, steps of one position without masks are prepared once and then only launched,
    from the second on, and reorder() moves a table in place of keys and values. They read nothing back, so a CUDA graph
    can hold them after two steps, if `capacity` makes room for all; `length` does not count replays.
    """

    def __init__(
        self, capacity: int | None = None, *, source_lengths: Tensor | None = None, shared_memory: bool = False
    ) -> None:
        self.capacity = capacity
        self.source_lengths = None if source_lengths is None else source_lengths.clone()
        self.shared_memory = shared_memory
        self._layers: list[LayerCache] = []
        self._step: CachedStep | None = None
        """Holder of the targets' keys and values in place of the layers, while steps are prepared calls."""

    @property
    def length(self) -> int:
        """Target positions seen."""
        first = self._step or (self._layers[0].target if self._layers else None)
        return first.length if first else 0

    @property
    def layers(self) -> list[LayerCache]:
        """The caches of all layers that were asked for."""
        step, self._step = self._step, None
        if step is not None:
            for (target, source), pair in zip(self._layers, step.keys_values()):
                target.update(*pair)
                source.reorder(step.sentence)
        return self._layers

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layers": self.layers, "_step": None}

    def layer(self, number: int) -> LayerCache:
        """The caches of one decoder layer."""
        while len(self.layers) <= number:
            self._layers.append(LayerCache(self._target(), AttentionCache(grows=False)))
        return self._layers[number]

    def _target(self) -> AttentionCache:
        return AttentionCache(grows=True, capacity=self.capacity)

    def step(
        self, x: Tensor, memory: Tensor | None, layers: Sequence[Any], norm: Any, lengths: Tensor | None,
        plain: Callable[[], bool],
    ) -> Tensor | None:  # fmt: skip
        """The output, shaped as x, of one new position of each row by prepared calls; None where layers are called.

        memory: looked at, not read; lengths: of its rows; plain: whether layers are no more than their classes.
        """
        if not _may_step(x):
            return None
        signature = _signature_of(x, memory, layers, norm, lengths)
        if self._step is None or not self._step.holds(signature):
            kept = [[cache.kept for cache in each] for each in self.layers]
            if not (plain() and _fits(x, layers, norm, kept, lengths, self.shared_memory)):
                return None
            self._step = CachedStep(x, layers, norm, signature, kept, self.capacity)
            self._layers = [LayerCache(self._target(), source) for _, source in self._layers]
        return self._step(x, lengths)

    def reorder(self, rows: Tensor, *, memory: bool | None = None) -> None:
        """Makes row r a copy of the old row rows[r]; rows (R,) int64, as a beam chooses, drops or repeats them.

        memory=False leaves the encoder's keys and values as they are, which saves their copy while every row keeps its
        sentence; they always stay with shared_memory, whose rows keep to sentence-major order and are equally many for
        each sentence.
        """
        of_memory = bool(memory or (memory is None and not self.shared_memory))
        if of_memory and self.source_lengths is not None:
            moved = self.source_lengths.index_select(0, rows)
            same = len(moved) == len(self.source_lengths)  # stays where a graph reads it
            self.source_lengths = self.source_lengths.copy_(moved) if same else moved
        if self._step is not None and self._step.rows == len(rows):
            self._step.reorder(rows, memory=of_memory)
            return
        for target, source in self.layers:
            target.reorder(rows)
            if of_memory:
                source.reorder(rows)

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Reorder rows with shared_memory and drop sentences at once: row r goes on from what row rows[r] (R,) was, as
        row ranks[r] (R,) of its sentence's."""
        before = self._step.rows if self._step is not None else self._layers[0].target.rows
        count = self._layers[0].memory.rows or 1
        kept = rows[ranks == 0] // ((before or count) // count)
        self.reorder(rows, memory=False)
        if len(kept) < count:
            for _, source in self.layers:
                source.reorder(kept)
            if self.source_lengths is not None:
                self.source_lengths = self.source_lengths.index_select(0, kept)


def _may_step(x: Tensor) -> bool:
    """Return whether kernels compute on x now, without a gradient, and nobody looks on."""
    if torch.is_grad_enabled() or looked_at() or _has_any_global_hook() or type(x) not in PLAIN_TENSORS:
        return False
    if backends.kernel_route(backends.current, x) != "triton" or torch.is_autocast_enabled(x.device.type):
        return False
    return not (x.is_cuda and x.get_device() != torch.cuda.current_device())


def _signature_of(x: Tensor, memory: Tensor | None, layers: Sequence[Any], norm: Any, lengths: Tensor | None) -> tuple:
    """All that prepared calls depend on besides what is in the modules."""
    given = [None if each is None else (each.shape, each.dtype, each.device) for each in (x, memory)]
    return (*layers, norm, *given, lengths is None, backends.current, choices.version)


def _fits(
    x: Tensor, layers: Sequence[Any], norm: Any, kept: Sequence[Sequence[Pair | None]], lengths: Tensor | None,
    shared: bool,
) -> bool:  # fmt: skip
    """Return whether prepared calls can go on for x, a new position of each row, from what is kept of each layer.

    lengths: of the memory's rows; shared: whether several rows of x may share one of them.
    """
    *lines, width = x.shape
    slots = rows = math.prod(lines)
    parts = [*layers] if norm is None or not untouched(norm, NORM) else [*layers, norm]
    if not rows or len(kept) != len(layers) or len({(type(each), each.norm_first) for each in layers}) != 1:
        return False
    weights = {(p.dtype, p.device, p.is_contiguous()) for part in parts for p in part.parameters()}
    if weights != {(x.dtype, x.device, True)}:
        return False
    for pairs in [*zip(*kept)][: 1 + hasattr(layers[0], "multihead_attn")]:
        if None in pairs or len({each.shape for pair in pairs for each in pair}) > 1:
            return False
        slots, heads, length, size = pairs[0][0].shape
        if heads * size != width or size > WIDEST_HEAD or not length or pairs[0][0].dtype is not x.dtype:
            return False
        if slots != rows and (pairs[0] is kept[0][0] or not shared or not slots or rows % slots):
            return False
    return lengths is None or lengths.shape == (slots,)


class CachedStep:
    """One new position of each row through plain layers, by kernels; a Past whose rows are at one position."""

    def __init__(
        self, x: Tensor, layers: Sequence[Any], norm: Any, signature: tuple, kept: Sequence[Any], capacity: int | None
    ) -> None:
        """x: like the new positions; signature: of such steps; kept: of each layer the Pair of what was seen, and that
        of the memory, which is read where it lies."""
        from fasttfm.models.step_launches import KernelOperations  # Triton may be missing elsewhere

        fused = norm if norm is not None and untouched(norm, NORM) else None
        modules = chain.from_iterable(each.modules() for each in (*layers, fused) if each is not None)
        self._signature, self._snapshot = signature, Snapshot(dict.fromkeys(modules))
        self._behind = None if fused is norm else norm
        own, memory = zip(*kept)
        self.rows, heads, self.length, size = own[0][0].shape
        slots, _, sources, _ = (0,) * 4 if memory[0] is None else memory[0][0].shape
        self._room = room = capacity if capacity and capacity > self.length else max(2 * self.length, _FIRST_CAPACITY)
        self._places = torch.arange(self.rows * room, device=x.device).view(self.rows, room)
        self.ancestors = self._places.clone()
        self.position = torch.full((1,), self.length, device=x.device)
        self.sentence = torch.arange(slots, device=x.device)
        self.source_lengths = torch.full((slots,), sources, device=x.device)
        self._own = x.new_zeros(len(layers), self.rows, room, 2, heads, size)
        for whole, pair in zip(self._own, own):
            whole[:, : self.length] = torch.stack(pair).permute(1, 3, 0, 2, 4)
        caches = self._own.view(len(layers), self.rows * room, -1)
        self._layers = StepLayers(layers, fused, heads, caches, memory, KernelOperations(self))

    def holds(self, signature: tuple) -> bool:
        """Return whether there is room for a position, and all is as it was."""
        return self.length < self._room and signature == self._signature and self._snapshot.unchanged()

    def __call__(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The output of one new position of each row, shaped as x; nothing is read back from the device."""
        self._layers.input.copy_(x.view(self._layers.input.shape))
        if lengths is not None:
            self.source_lengths.copy_(lengths)
        for call in self._layers.calls:
            call()
        self.position.add_(1)
        self.length += 1
        y = self._layers.output.clone().view(x.shape)
        return y if self._behind is None else normalise(y, self._behind)

    def reorder(self, rows: Tensor, *, memory: bool) -> None:
        """See DecoderCache.reorder(); as many rows as there are, of which tables alone move."""
        past = self._places[0] < self.position
        torch.where(past, self.ancestors.index_select(0, rows), self._places, out=self.ancestors)
        if memory:
            self.sentence.copy_(self.sentence.index_select(0, rows))

    def keys_values(self) -> list[Pair]:
        """Keys and values of all that each layer has seen, copies."""
        places = self.ancestors[:, : self.length]
        seen = (each.flatten(0, 1)[places] for each in self._own)  # (R, L, 2, H, D)
        return [each.permute(2, 0, 3, 1, 4).unbind(0) for each in seen]
