"""The parameters of an attention launch, and the view that a program has of them."""

from __future__ import annotations

from typing import Any, NamedTuple

from fasttfm.kernels.parameter import (
    Float32Pointer,
    Int64Pointer,
    Int64Pointers,
    MaskPointer,
    Real,
    RealOrNone,
    Stride,
    Strides,
    Varying,
    VaryingOrNone,
)
from fasttfm.kernels.philox import Dropout


class Sizes(NamedTuple):
    H: Varying
    """Query heads."""
    L: Varying
    """The most queries of a sequence."""
    S: Varying
    """The most keys."""


class Masking(NamedTuple):
    """Keys that a query may attend, and what becomes of its scores.

    Query i sees keys up to i + causal_offset, where CAUSAL, and from i + causal_offset - window on.
    """

    mask: MaskPointer
    """(B, H, L, S) through its strides, or None; in what a kernel calls that of its head, (L, S)."""
    causal_offset: Varying
    mask_strides: Strides = (0, 0, 0, 0)
    """Its four, 0 where it is broadcast, as launch.masking_arguments() has them."""
    offsets: Int64Pointer = None
    """(B,) added to causal_offset, or None; added to it in that of a head."""
    window: VaryingOrNone = None
    softcap: RealOrNone = None
    """Scores lie between this and its negative, before anything is added to them."""
    slopes: Float32Pointer = None
    """ALiBi's (B, H), or None; in that of a head its slope, in base 2."""
    slope_stride: Stride = 0
    """From one b to the next."""
    past: Varying = 0
    """Keys past the diagonal that causal_offset lets a query see."""
    sinks: Float32Pointer = None
    """(H,), or None: scores that take weight and have no value; in that of a head its sink, in base 2."""


class Problem(NamedTuple):
    """All that a call asks for beside its tensors."""

    spans: Int64Pointers
    """key_lengths, (B,) or None: how many keys of a sequence are visible; query_starts and key_starts, (B + 1,) or
    None: the tensors are packed, and b's sequence begins there among queries and keys."""
    masking: Masking
    dropout: Dropout
    scale: Real
    sizes: Sizes


class Tiling(NamedTuple):
    """Constants of a kernel, for the functions that it calls."""

    D: Any
    DV: Any
    CAUSAL: Any
    PRECISION: Any
    ROWS: Any
    COLUMNS: Any


class LineStrides(NamedTuple):
    batch: Varying
    head: Varying


class Head(NamedTuple):
    """A head of a sequence, as a program sees it: device values."""

    plane: Any
    """b * H + h"""
    b: Any
    h: Any
    first_query: Any
    """Where packed sequences begin in their tensors; else 0."""
    first_key: Any
    queries: Any
    keys: Any
    visible: Any
    """Keys that lengths leave."""


class View(NamedTuple):
    """A Problem as a program sees it: that of its head."""

    head: Any
    masking: Any
    dropout: Any
    scale: Any


class Rows(NamedTuple):
    """Rows of a head: the first one, with unit stride inside, and elements from one to the next."""

    first: Any
    stride: Any
