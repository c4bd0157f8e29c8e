"""Host side of the sm_90 and sm_100 kernels: which calls they accept, tensor maps of heads, the persistent launch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fasttfm.kernels import tensor_map
from fasttfm.kernels.attention.launch import Call, key_class, strides
from fasttfm.kernels.attention.problem import LineStrides
from fasttfm.kernels.choices import Choice
from fasttfm.kernels.jit import LARGEST, Launch
from fasttfm.kernels.launch import ceil_div, interpreted
from fasttfm.kernels.tiles.table import Tile

WIDTHS = (64, 96, 128, 256)
"""Supported head sizes."""

TENSOR_WIDTHS = (64, 128)
"""Those on sm_100, where the accumulators of 256 would take all tensor memory."""

BLOCK = 16
"""Consecutive keys per Philox block; maps in spread order hold whole blocks."""

CACHED_BYTES = 32 << 20
"""Most bytes of keys and values per section of heads; the L2 cache has 50 MB."""


class Heads(NamedTuple):
    """The rows of all heads of a tensor (B, H, L, D) as dimensions of a tensor map."""

    planes: int
    plane_stride: int
    rows: int
    row_stride: int
    width: int
    origin: tuple[int, int, int]
    """The fields of a steps.Origin."""

    def mapped(self, rows: int, width: int) -> tuple[tuple[int, ...], ...]:
        """Return shape, strides and block of a Mapped that copies `rows` consecutive rows of a head."""
        return (self.planes, self.rows, self.width), (self.plane_stride, self.row_stride, 1), (1, rows, width)

    def spread(self, rows: int, width: int) -> tuple[tuple[int, ...], ...]:
        """Return the same as mapped(), with rows copied in the order of steps.key_order()."""
        shape = (self.planes, BLOCK // 2, self.rows // BLOCK, 2, self.width)
        strides = (self.plane_stride, 2 * self.row_stride, BLOCK * self.row_stride, self.row_stride, 1)
        return shape, strides, (1, BLOCK // 2, rows // BLOCK, 2, width)


def heads_of(x: Tensor) -> Heads | None:
    """Return the Heads of x (B, H, L, D), with heads either side by side within a row or as separate planes; None if no
    three-dimensional tensor map covers them, or an address or stride is not a multiple of 16 bytes."""
    (batch, heads, rows, width), (b, h, row, last) = x.shape, x.stride()
    if rows == 1:
        row = heads * width  # the stride of a single row is arbitrary
    if batch == 1 or b == 0:  # b is 0 for packed sequences
        batch, b = 1, 0
    if heads == 1:
        h = 0
    if (heads - 1) * h + width <= row:
        result = Heads(batch, b or rows * row, rows, row, (heads - 1) * h + width, (int(batch > 1), 0, h))
    elif batch == 1 or b == heads * h:
        result = Heads(batch * heads, h, rows, row, width, (heads if batch > 1 else 0, 1, 0))
    else:
        return None
    aligned = ((result.plane_stride | row | h) * x.element_size() | x.data_ptr()) % 16 == 0
    fits = max(result.plane_stride, row * BLOCK, result.planes, result.rows, result.width) <= LARGEST
    return result if last == 1 and aligned and fits else None


def takes(call: Call, *walked: Tensor, chip: str = "sm_90") -> bool:
    """Return whether the kernels of a chip, sm_90 or sm_100, support a call; walked: other tensors that they read."""
    masking, constants = call.problem.masking, call.constants
    changed = (masking.mask, masking.offsets, masking.softcap, masking.slopes, masking.sinks)
    packed = call.problem.spans[1] is not None
    drops = call.problem.dropout.seed is not None
    return (
        call.chip.name == chip
        and not interpreted()
        and tensor_map.usable()
        and call.kind in ("fp16", "bf16")
        and constants["D"] == constants["DV"]
        and constants["D"] in (WIDTHS if chip == "sm_90" else TENSOR_WIDTHS)
        and all(x is None for x in changed)
        and not (drops and (packed or call.keys % BLOCK))
        and min(call.queries, call.keys, call.planes) > 0
        and all(heads_of(x) is not None for x in (*call.inputs, *walked))
    )


def part_of(width: int) -> int:
    """Return the columns of a copy and of a product's result, a power of two: heads of 96 have three parts of 32."""
    return width & -width


def queries_fit(width: int, *, dropout: bool) -> bool:
    """Return whether dQ fits shared memory; heads of 256 have tiles of 32 keys, and dropout needs 64."""
    return width <= 128 or not dropout


def keys_fit(width: int, *, dropout: bool) -> bool:
    """Return whether dK and dV fit the registers; heads of 128 with dropout spill in the loop, and the sums of
    256 take more than all."""
    return width <= 96 or (width == 128 and not dropout)


def section_of(call: Call) -> int:
    """Return the query heads per section, as evenly as possible, so that its keys and values fit CACHED_BYTES."""
    group = call.constants["GROUP"]
    shared = max(1, CACHED_BYTES // (4 * call.keys * call.constants["D"]))
    sections = ceil_div(call.planes, shared * group)
    return ceil_div(call.planes, sections * group) * group


def choose(choice: Choice[Tile | str], call: Call, *walked: Tensor, chip: str = "sm_90") -> Tile | None:
    """Return the tile of a chip's kernel; None if it does not support the call or the table says triton. walked: see
    takes()."""
    answer = choice(*call.size_class, key_class(call.keys)) if takes(call, *walked, chip=chip) else None
    return answer if isinstance(answer, Tile) else None


class Persistent:
    """Launch of a persistent kernel, one program per processor, for one signature."""

    def __init__(
        self, kernel: Any, call: Call, tile: Tile, read: Sequence[tuple[Tensor, int, Callable[..., Any]]],
        written: Sequence[Tensor], lse: Tensor, *, of_keys: bool = False,
    ) -> None:  # fmt: skip
        """All tensors only give the layouts of those in later calls. read: copied by tensor maps, each with rows per
        copy and a method of Heads; written: addressed by strides; of_keys: work items are tiles of keys."""
        width, rows, length = call.constants["D"], tile.rows, call.queries
        self._numbers = call.planes, section_of(call)
        if of_keys:
            rows, length = tile.columns, call.keys
            self._numbers = call.key_planes, section_of(call) // call.constants["GROUP"]
        constants = {name: call.constants[name] for name in ("D", "CAUSAL", "GROUP")}
        constants |= tile.options() | {"STAGES": tile.stages}
        works = ceil_div(length, rows) * self._numbers[0]
        self._launch = Launch(kernel, (min(works, call.chip.processors),), constants)
        heads: list[Any] = [heads_of(x) for x, *_ in read]
        self._origins = tuple(x.origin for x in heads)
        self._strides = strides(*written), LineStrides(*lse.stride()[:2])
        self._maps = [make_map(x, count, part_of(width)) for x, (_, count, make_map) in zip(heads, read)]

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel. arguments: tensors read, tensors written, lse, in backward delta, and the Problem."""
        *tensors, problem = arguments
        maps = (tensor_map.Mapped(x, *described) for x, described in zip(tensors, self._maps))
        written = tensors[len(self._maps) :]
        self._launch(*maps, *written, self._origins, *self._strides, problem, *self._numbers)


class Attempt:
    """A launch with tensor maps, and a fallback with the same arguments if the driver rejects a map."""

    def __init__(self, launch: Callable[..., None], fallback: Callable[..., None]) -> None:
        self._launch, self._fallback = launch, fallback

    def __call__(self, *arguments: Any) -> None:
        try:
            self._launch(*arguments)
        except RuntimeError as error:
            if "invalid argument" not in str(error):  # such as the failure of an earlier kernel
                raise
            message = f"attention: the driver rejects a tensor map of these strides ({error}); using another kernel"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            self._launch = self._fallback
            self._launch(*arguments)
