"""The passes between the products of a decoder's step on a CPU, each over a row at a time, compiled by numba.

PyTorch takes several calls for each of them and writes what lies between to memory. A row here is computed by itself,
so nothing depends on how many there are. Sums are float32 whatever the dtype. bfloat16 and float16 travel as uint16 and
int16, which tells them apart. Optional: `pip install numba` (usable() says whether it is there); nothing is compiled
before it is used, and what was compiled is kept on disk.

Cost: attention reads the keys and values of the positions seen once, 2 * 2 * R * L * d bytes in bfloat16; a norm reads
two rows and writes two.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PANELS: tuple[str, ...] = ("AVX2", "AVX512")
"""Processors, as PyTorch calls what they have, with float32 products and attention of our own: (2048, 512) on two cores
of an AMD EPYC with AVX2 alone, 184 -> 123 us for a row, 537 -> 414 for 32, 1763 -> 1519 for 128; on one of an EPYC with
AVX-512, 72 -> 53, 601 -> 586 and 2632 -> 2452. A search's last bits depend on it."""
_VIEWS = {torch.float32: None, torch.bfloat16: torch.uint16, torch.float16: torch.int16}


@functools.cache
def usable() -> bool:
    """Return whether numba is installed and works."""
    if importlib.util.find_spec("numba") is None:
        return False
    try:
        loops()
    except Exception:  # a numba that does not fit this Python, numpy or processor
        return False
    return True


def uses_panels() -> bool:
    """Return whether frozen weights are multiplied by panels in float32 here (panels.py)."""
    return torch.backends.cpu.get_cpu_capability() in PANELS and usable()


def takes(x: Tensor, head_size: int = 1) -> bool:
    """Return whether the passes take tensors like x."""
    return x.device.type == "cpu" and x.dtype in _VIEWS and head_size > 0 and usable()


def attend_to_ancestors(
    joint: Tensor, keys: Tensor, values: Tensor, ancestors: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Self-attention of one new position a row: softmax(q K^T / sqrt(D)) V over all positions up to it, (R, H * D).

    joint (R, 3 * H * D): queries, keys and values of position positions[r] (R,) int64, of which the latter two are
    stored in keys and values (P, capacity, H, D) at row slots[r] (R,) int32. Position t of row r was stored at row
    ancestors[r, t], ancestors (R, capacity) int32.
    """
    out = joint.new_empty(joint.shape[0], joint.shape[1] // 3)
    loops().attend_to_ancestors(
        team(), array(joint), None, None, array(keys), array(values), ancestors.numpy(), slots.numpy(),
        positions.numpy(), array(out), None, None,
    )  # fmt: skip
    return out


def attend_to_memory(query: Tensor, keys: Tensor, values: Tensor, sentences: Tensor, lengths: Tensor) -> Tensor:
    """Attention over the encoder's output, (R, H * D): query (R, H * D) of row r sees the first lengths[b] keys of
    keys and values (B, H, S, D) at b = sentences[r]; sentences (R,) int32, lengths (B,) int64."""
    out = torch.empty_like(query)
    loops().attend_to_memory(
        team(), array(query), None, None, array(keys), array(values), sentences.numpy(), lengths.numpy(), array(out),
        None, None,
    )  # fmt: skip
    return out


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """s = residual + x and y = LayerNorm(s); all (M, N) of one dtype, weight and bias (N,). Returns y and s."""
    y, s = torch.empty_like(x), torch.empty_like(x)
    loops().add_layer_norm(
        team(), array(x), None, None, array(residual), array(weight), array(bias), eps, len(x), array(y), array(s),
        None, None,
    )  # fmt: skip
    return y, s


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 (M, K) and scales (M,) float32 of x (M, K), as cpu/int8.py says."""
    quantized, scales = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[0], dtype=torch.float32)
    loops().quantize_rows(team(), array(x), quantized.numpy(), scales.numpy())
    return quantized, scales


def scale_rows(x: Tensor, scales: Tensor, bias: Tensor, relu: bool, dtype: torch.dtype) -> Tensor:
    """x * scales + bias, then max(0, .) with relu: x (M, N), scales (M,) and bias (N,) float32; (M, N) of dtype."""
    y = x if dtype == torch.float32 else x.new_empty(x.shape, dtype=dtype)
    loops().scale_rows(team(), array(x), scales.numpy(), array(bias), relu, array(y))
    return y


def likeliest(logits: Tensor, k: int, forbid: Callable[[Tensor], None]) -> tuple[Tensor, Tensor]:
    """Log-probabilities and places, both (R, k), of the k likeliest of each row of logits (R, V), falling, in float32.

    forbid(logits) sets some to -inf, in place, when the rows have been summed: the others keep their probabilities.
    """
    from fasttfm.cpu import search_loops

    rows = logits.shape[0]
    sums = logits.new_empty(rows, dtype=torch.float32)
    search_loops.log_sum_exp(team(), array(logits), sums.numpy())
    forbid(logits)
    values, ids = (logits.new_empty(rows, k, dtype=dtype) for dtype in (torch.float32, torch.int64))
    search_loops.largest_of_rows(team(), array(logits), sums.numpy(), values.numpy(), ids.numpy())
    return values, ids


def array(x: Tensor) -> Any:
    """x as the loops take it."""
    view = _VIEWS[x.dtype]
    return x.detach().numpy() if view is None else x.detach().view(view).numpy()


@functools.cache
def loops() -> Any:
    """The module of the compiled functions, which imports numba."""
    from fasttfm.cpu import step_loops

    return step_loops


def team() -> tuple[int, int]:
    """The threads that a loop runs over."""
    from fasttfm.cpu import thread_team

    return thread_team.team()
