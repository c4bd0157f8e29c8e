"""Host side shared by all attention kernels: route, size classes, kernel arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.kernels.attention.problem import Masking, Problem, Sizes
from fasttfm.kernels.attention.steps import FAR
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.jit import LARGEST
from fasttfm.kernels.launch import chip, precision, product_kind
from fasttfm.kernels.philox import NOTHING_DROPPED, dropout_arguments
from fasttfm.kernels.tiles.attention import LONG_WIDTH, SHORT_KEYS, Tile

MAX_WIDTH = 256
"""Largest head dim of queries, keys and values."""

TILE_ROWS = 128
"""Maximum queries, and maximum keys, of a tile."""


@dataclass(slots=True)
class Call:
    """One attention call: inputs, sizes and the arguments shared by its kernels."""

    inputs: tuple[Tensor, Tensor, Tensor]
    """Query, key and value, with unit stride in the last dimension."""
    chip: Chip
    kind: str
    """fp32, tf32, fp16 or bf16."""
    planes: int
    """Batch times heads."""
    key_planes: int
    """Batch times key heads."""
    queries: int
    keys: int
    problem: Problem
    constants: dict[str, Any]

    @property
    def size_class(self) -> tuple:
        """Key of the tile tables: chip, kind, width_class() of the larger head dim (at least 64), and extras()."""
        width = width_class(max(64, self.constants["D"], self.constants["DV"]))
        masking, dropout = self.problem.masking, self.problem.dropout
        scored = any(x is not None for x in (masking.window, masking.softcap, masking.slopes))
        shared = self.constants["GROUP"] > 1
        extra = extras(self.kind, dropout.seed is not None, masking.mask is not None, shared=shared, scored=scored)
        return self.chip, self.kind, width, extra


def extras(kind: str, dropout: bool, mask: bool, *, shared: bool, scored: bool = False) -> int:
    """Return the class of register use besides the scores: 0 none, 1 dropout, 2 a mask, 3 (the heaviest) a window, soft
    cap or slopes, 4 shared keys. In float32, whose products take many registers, shared keys with dropout are 2."""
    if scored:
        return 3
    if mask or (dropout and shared and kind in ("fp32", "tf32")):
        return 2
    return 4 if shared else int(dropout)


def key_class(keys: int) -> int:
    """Return the size class of a row: the smallest power of two >= keys, from 16 to 2048, else 4096."""
    return _power_of_two(keys, 2048)


def width_class(width: int) -> int:
    """Return the padded head dim: the smallest power of two >= width, from 16 to MAX_WIDTH, else twice MAX_WIDTH."""
    return _power_of_two(width, MAX_WIDTH)


def _power_of_two(size: int, most: int) -> int:
    power = 16
    while power < size and power <= most:  # comparisons only: size may be symbolic under torch.compile
        power *= 2
    return power


def fits_short(chip: Chip, kind: str, width: int, keys: int) -> bool:
    """Return whether the kernels for short rows take this width_class() and key_class() without spilling."""
    return keys <= SHORT_KEYS(chip, kind, max(64, width))


def takes_long(chip: Chip, kind: str, width: int) -> bool:
    """Return whether the kernels for long rows take this width_class(); wider heads spill or exceed shared memory with
    every tile."""
    return width <= LONG_WIDTH(chip, kind)


def _routes(chip: Chip, kind: str, width: int, keys: int) -> list[str]:
    if not takes_long(chip, kind, width):
        return ["softmax"]
    return ["short", "flash", "softmax"] if fits_short(chip, kind, width, keys) else ["flash", "softmax"]


def _route(chip: Chip, kind: str, width: int, keys: int) -> str:
    """Return the shipped route: short (short.py), flash (forward.py, backward.py) or softmax (masked_softmax.py between
    two cuBLAS products).

    kind: product_kind(); width: width_class(); keys: key_class(). Where Triton cannot use matrix units, cuBLAS wins
    once products outweigh memory traffic: a chip with 15 TFLOP/s and 900 GB/s does 17 FLOPs per byte, and a row of S
    keys needs about S / 2 per byte in half precision. Above 1,024 keys the scores would fill the memory, so flash runs,
    except for wide float32 heads, which spill. These limits have not been measured.
    """
    if fits_short(chip, kind, width, keys):
        return "short"
    if not takes_long(chip, kind, width):
        return "softmax"
    if chip.capability and (not chip.matrix_units or kind == "fp32") and keys <= 1024:
        return "softmax"
    return "flash"


route = Choice("attention.route", _route, _routes)


def unit(x: Tensor) -> Tensor:
    """Return x with unit stride in the last dimension, copied if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()


def strides(*tensors: Tensor, rows: int = TILE_ROWS) -> tuple[tuple[int | None, ...], ...]:
    """Return the batch, head and row strides of each tensor. A trailing None selects 64-bit offsets in the kernel, if
    the offset across `rows` rows exceeds 32 bits."""
    reach = LARGEST // rows
    return tuple([x.stride()[:3] if x.stride(2) <= reach else (*x.stride()[:3], None) for x in tensors])


def like_heads(x: Tensor, width: int | None = None) -> Tensor:
    """Return an empty tensor (B, H, L, width) like x (B, H, L, ...), contiguous as (B, L, H, width)."""
    batch, heads, length = x.shape[:3]
    width = x.shape[3] if width is None else width
    shape, layout = (batch, heads, length, width), (length * heads * width, width, heads * width, 1)
    return torch.empty_strided(shape, layout, dtype=x.dtype, device=x.device)


def clamped(causal_offset: int, queries: int, keys: int) -> int:
    """Return the causal offset, clamped with the same meaning so that adding a row index fits 32 bits."""
    return max(-queries, min(causal_offset, keys))


def masking_arguments(
    shape: tuple[int, ...],
    *,
    mask: Tensor | None = None,
    causal_offset: int = 0,
    offsets: Tensor | None = None,
    window: int = -1,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    past: int = 0,
    sinks: Tensor | None = None,
) -> Masking:
    """Return the Masking of scores of shape (B, H, L, S); arguments as in Options (functional/attention/call.py)."""
    _, heads, queries, keys = shape
    if mask is not None:
        mask = mask.expand(shape)
    rows, columns = (queries, keys) if offsets is None else (FAR.value,) * 2
    last = clamped(causal_offset, rows, columns)
    return Masking(
        mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask,
        last,
        _mask_strides(mask),
        offsets=offsets,
        window=None if window == -1 else last - clamped(causal_offset - window, rows, columns),
        softcap=softcap or None,
        slopes=None if slopes is None else slopes.contiguous(),
        slope_stride=0 if slopes is None or len(slopes) == 1 else heads,
        past=0 if slopes is None else past - (causal_offset - last),
        sinks=None if sinks is None else sinks.float().contiguous(),
    )


def _mask_strides(mask: Tensor | None) -> tuple[int | None, ...]:
    """Return the four strides of a mask, and a trailing None as in strides(); tiles of masked_softmax.py have up to
    8,192 columns."""
    if mask is None:
        return (0, 0, 0, 0)
    far = mask.stride(2) * TILE_ROWS + mask.stride(3) * 8192 > LARGEST
    return (*mask.stride(), None) if far else mask.stride()


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_lengths: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    scale: float = 1.0,
    seed: Tensor | None = None,
    site: int = 0,
    packed: tuple[Tensor, Tensor, int, int] | None = None,
    **places: Any,
) -> Call:
    """Return the Call for query (B, H, L, D), key (B, Hk, S, D) and value (B, Hk, S, DV). Other arguments as in Options
    (functional/attention/call.py); places: for masking_arguments(). packed: both cu_seqlens, then both max_seqlen."""
    query, key, value = unit(query), unit(key), unit(value)
    batch, heads, queries, width = query.shape
    keys, value_width = value.shape[2:]
    if key_lengths is not None:
        key_lengths = key_lengths.contiguous()
    device = chip(query.device)
    kind = product_kind(query.dtype, device)
    query_starts = key_starts = None
    if packed is not None:
        query_starts, key_starts, queries, keys = packed
        query_starts, key_starts = query_starts.contiguous(), key_starts.contiguous()
    return Call(
        inputs=(query, key, value),
        chip=device,
        kind=kind,
        planes=batch * heads,
        key_planes=batch * key.shape[1],
        queries=queries,
        keys=keys,
        problem=Problem(
            (key_lengths, query_starts, key_starts), masking_arguments((batch, heads, queries, keys), **places),
            dropout_arguments(dropout_p, seed, site), scale, Sizes(heads, queries, keys),
        ),
        constants={
            "D": width, "DV": value_width, "CAUSAL": causal, "PRECISION": precision(kind),
            "GROUP": heads // max(1, key.shape[1]),
        },
    )  # fmt: skip


class Problems:
    """Builds the Problem of each call of one signature from its tensors, seed and site."""

    def __init__(
        self, call: Call, spans: Sequence[Tensor | None], *, mask: Tensor | None, slopes: Tensor | None,
        sinks: Tensor | None, positive: bool = False,
    ) -> None:  # fmt: skip
        """call: prepared from tensors of this signature. positive: use |scale|; the caller has negated the queries
        instead, because the forward pass takes the row maximum before scaling."""
        self._spans_copied = any(x is not None and not x.is_contiguous() for x in spans)
        _, masking, dropout, scale, self._sizes = call.problem
        self._scale = abs(scale) if positive else scale
        self._rate = None if dropout.seed is None else (dropout.threshold, dropout.keep_scale)
        self._masking = None
        if masking.mask is masking.offsets is masking.slopes is masking.sinks is None:
            self._masking = tuple(masking)
        self._numbers = masking[1:3], masking[4:6], masking[7:9]
        self._is_bool = mask is not None and mask.dtype == torch.bool
        kept = (slopes is None or slopes.is_contiguous()) and (sinks is None or masking.sinks is sinks)
        self._copied = not kept or masking.offsets is not None

    def __call__(self, spans: tuple[Tensor | None, ...], tensors: tuple[Tensor | None, ...], site: int) -> tuple:
        """Return the Problem as a plain tuple. spans: key lengths, cu_seqlens of queries and keys; tensors: mask,
        offsets, slopes, sinks and seed."""
        mask, offsets, slopes, sinks, seed = tensors
        if self._spans_copied:
            spans = tuple(None if x is None else x.contiguous() for x in spans)
        masking = self._masking
        if masking is None:
            if self._is_bool:
                mask = mask.view(torch.uint8)  # type: ignore[union-attr]
            if self._copied:
                offsets, slopes = (None if x is None else x.contiguous() for x in (offsets, slopes))
                sinks = None if sinks is None else sinks.float().contiguous()
            placed, scored, sloped = self._numbers
            masking = mask, *placed, offsets, *scored, slopes, *sloped, sinks
        dropout = NOTHING_DROPPED if self._rate is None else (seed, site, *self._rate)
        return spans, masking, dropout, self._scale, self._sizes


def stages_for(chip: Chip, tile: Tile, *walked: Tensor) -> int:
    """Return the pipeline stages of a loop that loads the operands `walked`: the tile's, or 1 on sm_90 and sm_100 if
    only some operands are 16-byte aligned.

    Only the copies of aligned operands are asynchronous. Triton 3.7.1 then places the single fence.proxy.async of an
    iteration after the stores of the others, before the copies have arrived, so that matrix units read data that no
    fence made visible.
    """
    if tile.stages == 1 or not 90 <= chip.capability < 120:
        return tile.stages
    aligned = {x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in x.stride()[:-1]) for x in walked}
    return tile.stages if len(aligned) == 1 else 1
