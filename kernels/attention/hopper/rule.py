"""The rule by which a call goes to the kernels for sm_90, the tensor maps of its heads, and their launch."""

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

WIDTHS = (64, 128)
"""Head sizes."""

BLOCK = 16
"""Neighbouring keys that a block of Philox serves; a map in their order has whole ones."""

CACHED_BYTES = 32 << 20
"""What a section of heads has of keys and values: less than the second-level cache's 50 MB."""


class Heads(NamedTuple):
    """Rows of every head of a tensor (B, H, L, D), as a tensor map has them."""

    planes: int
    plane_stride: int
    rows: int
    row_stride: int
    width: int
    origin: tuple[int, int, int]
    """As an Origin of steps.py."""

    def mapped(self, rows: int, width: int) -> tuple[tuple[int, ...], ...]:
        """Shape, strides and block of a Mapped, of which a copy brings so many neighbouring rows of a head."""
        return (self.planes, self.rows, self.width), (self.plane_stride, self.row_stride, 1), (1, rows, width)

    def spread(self, rows: int, width: int) -> tuple[tuple[int, ...], ...]:
        """mapped() of which a copy brings the rows in the order of steps.key_order()."""
        shape = (self.planes, BLOCK // 2, self.rows // BLOCK, 2, self.width)
        strides = (self.plane_stride, 2 * self.row_stride, BLOCK * self.row_stride, self.row_stride, 1)
        return shape, strides, (1, BLOCK // 2, rows // BLOCK, 2, width)


def heads_of(x: Tensor) -> Heads | None:
    """The Heads of x (B, H, L, D): beside one another in a row, or one after the other in memory; None where no map
    of three dimensions has them all, or its steps are no multiples of 16 bytes."""
    (batch, heads, rows, width), (b, h, row, last) = x.shape, x.stride()
    if rows == 1:
        row = heads * width  # of a single row the stride says nothing
    if batch == 1 or b == 0:  # as of packed sequences
        batch, b = 1, 0
    if heads == 1:
        h = 0
    if (heads - 1) * h + width <= row:
        found = Heads(batch, b or rows * row, rows, row, (heads - 1) * h + width, (int(batch > 1), 0, h))
    elif batch == 1 or b == heads * h:
        found = Heads(batch * heads, h, rows, row, width, (heads if batch > 1 else 0, 1, 0))
    else:
        return None
    even = ((found.plane_stride | row | h) * x.element_size() | x.data_ptr()) % 16 == 0
    fits = max(found.plane_stride, row * BLOCK, found.planes, found.rows, found.width) <= LARGEST
    return found if last == 1 and even and fits else None


def takes(call: Call, *walked: Tensor) -> bool:
    """Return whether a kernel for sm_90 computes what this call asks for; walked: what it reads beside the inputs."""
    masking, constants = call.problem.masking, call.constants
    changed = (masking.mask, masking.offsets, masking.window, masking.softcap, masking.slopes, masking.sinks)
    packed = call.problem.spans[1] is not None
    drops = call.problem.dropout.seed is not None
    return (
        call.chip.name == "sm_90"
        and not interpreted()
        and tensor_map.usable()
        and call.kind in ("fp16", "bf16")
        and constants["D"] == constants["DV"]
        and constants["D"] in WIDTHS
        and all(x is None for x in changed)
        and not (drops and (packed or call.keys % BLOCK))
        and min(call.queries, call.keys, call.planes) > 0
        and all(heads_of(x) is not None for x in (*call.inputs, *walked))
    )


def section_of(call: Call) -> int:
    """Planes of a section: query heads whose keys and values fit CACHED_BYTES together, all sections of one size."""
    group = call.constants["GROUP"]
    shared = max(1, CACHED_BYTES // (4 * call.keys * call.constants["D"]))
    sections = ceil_div(call.planes, shared * group)
    return ceil_div(call.planes, sections * group) * group


def choose(choice: Choice[Tile | str], call: Call, *walked: Tensor) -> Tile | None:
    """The tile with which a kernel for sm_90 computes; None where it does not, or a table says triton; walked as
    takes() has them."""
    answer = choice(*call.size_class, key_class(call.keys)) if takes(call, *walked) else None
    return answer if isinstance(answer, Tile) else None


class Persistent:
    """The launch of a kernel whose programs, one a processor, go through all works of a signature."""

    def __init__(
        self, kernel: Any, call: Call, tile: Tile, read: Sequence[tuple[Tensor, int, Callable[..., Any]]],
        written: Sequence[Tensor], lse: Tensor, *, of_keys: bool = False,
    ) -> None:  # fmt: skip
        """Tensors laid out as those to come. read: what is copied, so many rows at a time, by a map of Heads;
        written: what strides lead to; of_keys: a work is a tile of keys, not of queries."""
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
        self._maps = [how(known, count, width) for known, (_, count, how) in zip(heads, read)]

    def launch(self, read: Sequence[Tensor], written: Sequence[Tensor], problem: tuple) -> None:
        """Starts the programs; written: with the lines of lse and delta behind."""
        maps = (tensor_map.Mapped(x, *known) for x, known in zip(read, self._maps))
        self._launch(*maps, *written, self._origins, *self._strides, problem, *self._numbers)


class Attempt:
    """A launch with tensor maps, and another with the same arguments that takes its place where the driver refuses
    one of these maps."""

    def __init__(self, launch: Callable[..., None], other: Callable[..., None]) -> None:
        self._launch, self._other = launch, other

    def __call__(self, *arguments: Any) -> None:
        try:
            self._launch(*arguments)
        except RuntimeError as error:
            said = f"attention: the driver takes no tensor map of these strides ({error}); another kernel computes"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            self._launch = self._other
            self._launch(*arguments)
