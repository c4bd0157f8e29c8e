"""KV caches of decoders (pytorch#49791).

With kernels, decoding steps of plain layers are calls prepared once, over caches that never move.
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
"""Positions allocated at first, unless the cache has a capacity."""
Pair = tuple[Tensor, Tensor]
"""Keys and values (B, H, S, D)."""
STEP_KEYS = {torch.float32: 1 << 18, torch.bfloat16: 1 << 16}
"""Largest keys.numel() for which a decoding step on a CPU calls torch's kernel, by dtype.

With few keys our operator's call overhead dominates: on two cores of an AMD EPYC with AVX-512 in float32, torch takes
18 us instead of 64 for 4 rows of 8 heads and 14 keys, 26 instead of 56 for one row of 4 queries and 27 keys; with many
keys it is slower. It computes row by row, so a batch-invariant search always uses it. Last bits depend on the choice.
"""


def cached_attention(query: Tensor, keys: Tensor, values: Tensor, key_lengths: Tensor | None = None) -> Tensor:
    """attention() at inference: query (B, H, L, D), keys and values (B, H, S, D), output (B, H, L, D).

    key_lengths (B,) int: keys at or past it are masked.
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

    grows: True for self-attention, where each call appends keys; False for cross-attention, whose keys are computed
    once. capacity: positions allocated at first; the buffers double beyond it.
    """

    def __init__(self, *, grows: bool, capacity: int | None = None) -> None:
        self.grows = grows
        self.capacity = capacity
        self.length = 0
        self._buffers: list[Tensor] = []
        """Keys and values (B, H, capacity, D)."""

    @property
    def kept(self) -> Pair | None:
        """All cached keys and values, or None if the cache is empty."""
        if not self._buffers:
            return None
        keys, values = self._buffers
        return keys[:, :, : self.length], values[:, :, : self.length]

    @property
    def rows(self) -> int | None:
        """Batch size B, or None if the cache is empty."""
        return self._buffers[0].shape[0] if self._buffers else None

    @property
    def complete(self) -> bool:
        """True if all keys and values are cached; always False if the cache grows."""
        return not self.grows and bool(self._buffers)

    def update(self, keys: Tensor | None, values: Tensor | None) -> Pair:
        """Append keys and values (B, H, n, D), None if complete; returns all cached ones (B, H, S, D)."""
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
        if end > size:  # doubling: amortized constant time per token
            size = max(end, 2 * size, self.capacity or _FIRST_CAPACITY)
            self._buffers = [_enlarged(x, size) for x in self.kept or (keys[:, :, :0], values[:, :, :0])]
        for buffer, new in zip(self._buffers, (keys, values)):
            buffer[:, :, self.length : end] = new
        self.length = end
        return self._buffers[0][:, :, :end], self._buffers[1][:, :, :end]

    def reserve(self, like: Tensor, rows: int) -> None:
        """Allocate `capacity` positions before the first update; like (., H, ., D): heads, dtype and device."""
        shape = (rows, like.shape[1], self.capacity or _FIRST_CAPACITY, like.shape[3])
        self._buffers = [like.new_empty(shape), like.new_empty(shape)]

    def attend(self, query: Tensor, key_lengths: Tensor | None = None) -> Tensor:
        """Concatenated heads (B, L, H * D) for query (B, H, L, D) over all cached keys, at inference.

        If the cache grows, queries are its newest positions and attention is causal. key_lengths (B,): keys at or past
        it are masked.
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
        """Replace row r by the old row rows[r]; rows (R,) int64, for any R."""
        kept = self.kept
        if kept is None:
            return
        if self.grows and rows.is_cpu and len(rows) == self.rows:  # copy only the rows that move: usually few
            moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
            for each in kept:
                each.index_copy_(0, moved, each.index_select(0, rows[moved]))
            return
        chosen, size = [each.index_select(0, rows) for each in kept], self._buffers[0].shape[2]
        self._buffers = [_enlarged(each, size) for each in chosen] if self.grows else chosen


def _enlarged(x: Tensor, size: int) -> Tensor:
    """A buffer (B, H, size, D) that begins with x (B, H, S, D)."""
    buffer = x.new_empty(*x.shape[:2], size, x.shape[3])
    buffer[:, :, : x.shape[2]] = x
    return buffer


class LayerCache(NamedTuple):
    """Caches of one decoder layer."""

    target: AttentionCache
    """Self-attention."""
    memory: AttentionCache
    """Cross-attention."""


class DecoderCache:
    """Keys and values of the positions that a decoder has processed.

        cache = DecoderCache()
        for token in ...:
            output = decoder(embedded_token, memory, cache=cache)      # (N, 1, E): only the new position

    Attention is causal. Keys and values of `memory` are computed in the first call only, so every call must pass the
    same memory. capacity: positions allocated at first; the buffers double beyond it. source_lengths (B,): lengths of
    the memory, instead of memory_key_padding_mask. shared_memory: the K rows (hypotheses) of a sentence, row =
    sentence * K + k, share one copy of its memory.

    With kernels at inference, steps of one position without masks are prepared in the second call, and later ones only
    launch; reorder() then permutes an index table instead of keys and values. Such steps do not synchronize, so a CUDA
    graph can capture them after two steps if `capacity` suffices; `length` does not count replays.
    """

    def __init__(
        self, capacity: int | None = None, *, source_lengths: Tensor | None = None, shared_memory: bool = False
    ) -> None:
        self.capacity = capacity
        self.source_lengths = None if source_lengths is None else source_lengths.clone()
        self.shared_memory = shared_memory
        self._layers: list[LayerCache] = []
        self._step: CachedStep | None = None
        """Prepared steps, which then own the self-attention caches of all layers."""

    @property
    def length(self) -> int:
        """Number of cached target positions."""
        first = self._step or (self._layers[0].target if self._layers else None)
        return first.length if first else 0

    @property
    def layers(self) -> list[LayerCache]:
        """The caches of all layers so far; ends prepared steps."""
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
        """The output for one new position x of each row by prepared calls, or None if the layers must be called.

        memory: only its shape is used; lengths: of its rows; plain: returns whether all layers are plain.
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
        """Replace row r by the old row rows[r]; rows (R,) int64: those that a beam selects, possibly repeated.

        memory=False skips the copy of the memory's keys and values, for rows that stay with their sentence. With
        shared_memory they are never reordered: rows stay sentence-major, equally many per sentence.
        """
        reorders_memory = bool(memory or (memory is None and not self.shared_memory))
        if reorders_memory and self.source_lengths is not None:
            moved = self.source_lengths.index_select(0, rows)
            in_place = len(moved) == len(self.source_lengths)  # a CUDA graph may read it
            self.source_lengths = self.source_lengths.copy_(moved) if in_place else moved
        if self._step is not None and self._step.rows == len(rows):
            self._step.reorder(rows, memory=reorders_memory)
            return
        for target, source in self.layers:
            target.reorder(rows)
            if reorders_memory:
                source.reorder(rows)

    def go_on(self, rows: Tensor, ranks: Tensor) -> None:
        """Reorder rows with shared_memory and drop sentences: row r continues the old row rows[r] (R,), as row ranks[r]
        (R,) of its sentence."""
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
    """Return whether prepared calls may replace layers for x: kernels at inference, not traced, no global hooks."""
    if torch.is_grad_enabled() or looked_at() or _has_any_global_hook() or type(x) not in PLAIN_TENSORS:
        return False
    if backends.kernel_route(backends.current, x) != "triton" or torch.is_autocast_enabled(x.device.type):
        return False
    return not (x.is_cuda and x.get_device() != torch.cuda.current_device())


def _signature_of(x: Tensor, memory: Tensor | None, layers: Sequence[Any], norm: Any, lengths: Tensor | None) -> tuple:
    """Everything that prepared calls depend on besides the contents of modules."""
    inputs = [None if each is None else (each.shape, each.dtype, each.device) for each in (x, memory)]
    return (*layers, norm, *inputs, lengths is None, backends.current, choices.version)


def _fits(
    x: Tensor, layers: Sequence[Any], norm: Any, kept: Sequence[Sequence[Pair | None]], lengths: Tensor | None,
    shared: bool,
) -> bool:  # fmt: skip
    """Return whether prepared calls can process x, one new position per row, given the cached pairs of each layer.

    lengths: of the memory's rows; shared: whether several rows of x may share one.
    """
    *batch, width = x.shape
    slots = rows = math.prod(batch)
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
    """Prepared calls for one new position per row through plain layers; a Past whose rows share one position."""

    def __init__(
        self, x: Tensor, layers: Sequence[Any], norm: Any, signature: tuple, kept: Sequence[Any], capacity: int | None
    ) -> None:
        """x: example input; kept: cached pairs per layer, of self-attention (copied) and cross-attention (shared)."""
        from fasttfm.models.step_launches import KernelOperations  # requires Triton

        fused = norm if norm is not None and untouched(norm, NORM) else None
        modules = chain.from_iterable(each.modules() for each in (*layers, fused) if each is not None)
        self._signature, self._snapshot = signature, Snapshot(dict.fromkeys(modules))
        self._behind = None if fused is norm else norm
        own, memory = zip(*kept)
        self.rows, heads, self.length, size = own[0][0].shape
        slots, _, sources, _ = (0,) * 4 if memory[0] is None else memory[0][0].shape
        self._room = room = capacity if capacity and capacity > self.length else max(2 * self.length, _FIRST_CAPACITY)
        self._places = torch.arange(self.rows * room, device=x.device).view(self.rows, room)  # own cache entries
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
        """Return whether the next step can use these calls: capacity left, same signature, modules unchanged."""
        return self.length < self._room and signature == self._signature and self._snapshot.unchanged()

    def __call__(self, x: Tensor, lengths: Tensor | None) -> Tensor:
        """The output for one new position per row, in x's shape; does not synchronize."""
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
        """See DecoderCache.reorder(); only tables are permuted, for an unchanged number of rows."""
        past = self._places[0] < self.position
        torch.where(past, self.ancestors.index_select(0, rows), self._places, out=self.ancestors)
        if memory:
            self.sentence.copy_(self.sentence.index_select(0, rows))

    def keys_values(self) -> list[Pair]:
        """Copies of the keys and values of each layer."""
        places = self.ancestors[:, : self.length]
        pairs = (each.flatten(0, 1)[places] for each in self._own)  # (R, L, 2, H, D)
        return [each.permute(2, 0, 3, 1, 4).unbind(0) for each in pairs]
