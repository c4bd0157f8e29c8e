"""Parameters of the attention kernels, as launched and as a program sees them."""

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
    """Maximum queries of a sequence."""
    S: Varying
    """Maximum keys of a sequence."""


class Masking(NamedTuple):
    """Keys that a query may attend, and modifications of its scores.

    Query i sees keys up to i + causal_offset if CAUSAL, and from i + causal_offset - window on. steps.masking_of()
    reduces a Masking to one head, as noted below.
    """

    mask: MaskPointer
    """(B, H, L, S), strided, or None. Of one head: (L, S)."""
    causal_offset: Varying
    mask_strides: Strides = (0, 0, 0, 0)
    """Strides of mask, 0 in broadcast dimensions; a trailing None selects 64-bit offsets."""
    offsets: Int64Pointer = None
    """(B,), added to causal_offset, or None. Of one head: None, causal_offset includes it."""
    window: VaryingOrNone = None
    softcap: RealOrNone = None
    """Soft cap c: scores become c * tanh(score / c) before anything is added to them."""
    slopes: Float32Pointer = None
    """ALiBi slopes (B, H), or None. Of one head: its slope, in base 2."""
    slope_stride: Stride = 0
    """Batch stride of slopes."""
    past: Varying = 0
    """Keys past the diagonal that causal_offset includes; ALiBi's distances start at the diagonal."""
    sinks: Float32Pointer = None
    """(H,), or None: additional scores that take weight but have no value. Of one head: its sink, in base 2."""


class Problem(NamedTuple):
    """Arguments of an attention call besides query, key, value and outputs."""

    spans: Int64Pointers
    """key_lengths (B,) or None: visible keys of each sequence; query_starts and key_starts (B + 1,), the cu_seqlens of
    packed sequences, or None."""
    masking: Masking
    dropout: Dropout
    scale: Real
    sizes: Sizes


class Tiling(NamedTuple):
    """Compile-time constants that a kernel passes to its device functions."""

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
    """One head of one sequence, in device values."""

    plane: Any
    """b * H + h"""
    b: Any
    h: Any
    first_query: Any
    """First row of a packed sequence in its tensor, else 0."""
    first_key: Any
    queries: Any
    keys: Any
    visible: Any
    """Keys within key_lengths."""


class View(NamedTuple):
    """A Problem reduced to one head, its scale in base 2."""

    head: Any
    masking: Any
    dropout: Any
    scale: Any


class Rows(NamedTuple):
    """Rows of a head: pointer to the first, and row stride; unit stride within a row."""

    first: Any
    stride: Any
