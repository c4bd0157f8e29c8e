"""Steps of a DecoderCache as calls that are prepared once, over keys and values that never move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from fasttfm.functional import backends
from fasttfm.functional.attention.paged import WIDEST_HEAD
from fasttfm.functional.onlookers import looked_at
from fasttfm.functional.subclasses import PLAIN_TENSORS
from fasttfm.kernels import choices
from fasttfm.models.plain import NORM, Snapshot, untouched
from fasttfm.models.residual import normalise
from fasttfm.models.step_layers import StepLayers

Pair = tuple[Tensor, Tensor]
"""Keys and values (B, H, S, D)."""
_FIRST_ROOM = 16
"""Positions that there is memory for at first, where the cache's capacity does not say."""


def may_step(x: Tensor) -> bool:
    """Return whether kernels compute on x now, without a gradient, and nobody looks on."""
    if torch.is_grad_enabled() or looked_at() or _has_any_global_hook() or type(x) not in PLAIN_TENSORS:
        return False
    if backends.kernel_route(backends.current, x) != "triton" or torch.is_autocast_enabled(x.device.type):
        return False
    return not (x.is_cuda and x.get_device() != torch.cuda.current_device())


def signature_of(x: Tensor, memory: Tensor | None, layers: Sequence[Any], norm: Any, lengths: Tensor | None) -> tuple:
    """All that prepared calls depend on besides what is in the modules."""
    given = [None if each is None else (each.shape, each.dtype, each.device) for each in (x, memory)]
    return (*layers, norm, *given, lengths is None, backends.current, choices.version)


def fits(
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
        self._room = room = capacity if capacity and capacity > self.length else max(2 * self.length, _FIRST_ROOM)
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
