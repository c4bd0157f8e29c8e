"""Matrix products that read a prepacked weight once, for a search on a CPU: in vector registers by panel_tiles.py, in
tile registers by amx.py."""

import copy
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm.cpu import amx, panel_tiles, step_passes
from fasttfm.cpu.panel_tiles import ABREAST, LINE, PANEL, TILE, has
from fasttfm.cpu.thread_team import team

_CHUNK = 1 << 25
"""Bytes of an allocation shared by the panels of many weights: 32 MiB. NumPy asks for huge pages from 4 MiB on."""

_MANY_ROWS = 5 * TILE + 1 if has("amx-tile") else 1 << 62
"""Least number of float32 rows whose tiles prefetch eighths of panels. (2048, 512) on a core of a Xeon with AMX, where
weights come from memory: 48 rows 870 -> 740 us, 64 rows 1,070 -> 950. Not measured on other processors."""


class PanelProduct:
    """rows (M, K) -> rows weight^T + bias (M, N), then max(0, .) with relu; all float32, or bfloat16 where
    multiplies_pairs(); K a multiple of UNROLLED."""

    def __init__(self, weight: Tensor, bias: Tensor | None, relu: bool) -> None:
        outputs, inputs = weight.shape
        count = -(-outputs // (PANEL * ABREAST)) * ABREAST
        filled = weight.new_zeros(count * PANEL, inputs)
        filled[:outputs] = weight.detach()
        numbers = step_passes.array(filled)
        self._panels = _chunks.take(filled.nbytes).view(numbers.dtype)
        side_by_side = numbers.reshape(count, PANEL, -1, 4 // filled.itemsize).swapaxes(1, 2)
        self._panels.reshape(side_by_side.shape)[:] = side_by_side
        self._outputs, self._relu, self._of_outputs = outputs, relu, self._vectors(filled, bias)

    def _vectors(self, filled: Tensor, bias: Tensor | None) -> Any:
        """Per-output operands (1 or 3, N padded to whole panels) float32: here the bias."""
        vector = filled.new_zeros(1, filled.shape[0], dtype=torch.float32)
        if bias is not None:
            vector[0, : len(bias)] = bias.detach()
        return vector.numpy()

    def __call__(self, rows: Tensor, scales: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The product, on all of PyTorch's threads, in new memory or out. scales (M,): of integer rows, if scaled()."""
        out = self._out(rows) if out is None else out
        multiply, *args = self.launch(rows.detach().contiguous(), out, None if scales is None else scales.numpy())
        multiply(team(), *args)
        return out

    def launch(self, rows: Tensor, out: Tensor, scales: Any = None) -> tuple[Any, ...]:
        """The compiled loop that multiplies the content of rows, contiguous, into out (M, N), and its arguments."""
        args = step_passes.array(rows), self._panels, self._of_outputs, self._relu, step_passes.array(out), scales
        if rows.dtype != torch.float32 and amx.takes(rows.shape[1] * rows.itemsize):
            return amx.multiply, *args
        many = True if len(rows) >= _MANY_ROWS and rows.dtype == torch.float32 else None
        return panel_tiles.multiply, *args, many

    def _out(self, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape[0], self._outputs)


class IntegerPanelProduct(PanelProduct):
    """rows (M, K) uint8 -> ((rows - 128) weight^T) * scales (M, N) float32; weight (N, K) int8 and scales (N,) float32
    from quantize_weight(), K a multiple of UNROLLED and below 2^16, so that sums fit 32 bits."""

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__(weight, scales, relu=False)

    def _out(self, rows: Tensor) -> Tensor:
        return rows.new_empty(rows.shape[0], self._outputs, dtype=torch.float32)

    def _vectors(self, filled: Tensor, bias: Tensor | None) -> Any:
        """The scales, the initial value of the integer sums, which corrects for the zero point of the rows, and the
        bias of scaled(), 0."""
        scales, begin = super()._vectors(filled, bias), -128 * filled.sum(dim=1, dtype=torch.int32)
        return np.concatenate([scales, begin.numpy().view(np.float32)[None], np.zeros_like(scales)])

    def scaled(self, bias: Tensor, relu: bool) -> "IntegerPanelProduct":
        """The product of rows with scales: that times scales + bias (N,), float32, then max(0, .) with relu."""
        product = copy.copy(self)
        product._of_outputs, product._relu = self._of_outputs.copy(), relu
        product._of_outputs[2, : self._outputs] = bias
        return product


def multiplies_integers() -> bool:
    """Return whether this processor supports IntegerPanelProduct; all support PanelProduct."""
    return has("avx2")


def multiplies_pairs() -> bool:
    """Return whether this processor supports PanelProduct in bfloat16."""
    return has("avx512bf16")


class _Chunks:
    """Allocator of panels from large chunks; a chunk is freed with the last panels in it."""

    def __init__(self) -> None:
        self._rest: Any = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, count: int) -> Any:
        """An array of `count` bytes, aligned to a cache line."""
        with self._lock:
            if len(self._rest) < count:
                chunk = np.empty(max(count, _CHUNK) + LINE, np.uint8)
                self._rest = chunk[-chunk.ctypes.data % LINE :]
            taken, self._rest = self._rest[:count], self._rest[-(-count // LINE) * LINE :]
        return taken


_chunks = _Chunks()
