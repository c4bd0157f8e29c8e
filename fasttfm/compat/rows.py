"""Gathers the used rows of keys and values in pages, or in buffers longer than their sequences."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fasttfm.functional.attention.paged import check_pages
from fasttfm.functional.backends import values_are_checked
from fasttfm.functional.record import WHOLE


def used_rows(
    function: str,
    key: Tensor,
    value: Tensor,
    batch: int,
    starts: Tensor | None,
    used: Tensor | None,
    block_table: Tensor | None,
    longest: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values (T, Hk, .) of the sequences packed, and their cu_seqlens (B + 1,).

    starts (B + 1,): cu_seqlens of key and value (T, Hk, .); with block_table (B, pages per sequence), whose pages are
    key and value (P, page, Hk, .), only their differences, the lengths, are read. used (B,): shorter lengths. longest:
    upper bound of the lengths. Copies at most B * longest rows without waiting for the device; gradients pass. Raises
    ValueError for arguments that do not agree, values included where values_are_checked().
    """
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"{function}: k {tuple(key.shape)} and v {tuple(value.shape)} must agree in rows and heads")
    pages = block_table.shape[-1] if block_table is not None else 1
    shapes = {"cu_seqlens_k": (batch + 1,), "seqused_k": (batch,), "block_table": (batch, pages)}
    for (name, shape), x in zip(shapes.items(), (starts, used, block_table)):
        if x is not None and (x.dtype not in WHOLE or x.shape != shape or x.device != key.device):
            raise ValueError(
                f"{function}: {name} is {x.dtype} {tuple(x.shape)} on {x.device}: int32 or int64 {shape} on "
                f"{key.device} is needed"
            )
    if used is None:
        assert starts is not None
        used = starts.diff()
    _check(function, key, starts, used, block_table, longest)
    ends = pad(used.cumsum(0), (1, 0))
    rows = len(key) if block_table is None else min(batch * longest, block_table.numel() * key.shape[1])
    row = torch.arange(rows, device=key.device)
    if batch:
        sequence = torch.searchsorted(ends[1:], row, right=True).clamp_(max=batch - 1)
        row = row - ends[sequence]
        if block_table is not None:
            page = key.shape[1]
            row = block_table[sequence, (row // page).clamp_(max=pages - 1)] * page + row % page
        elif starts is not None:
            row = row + starts[sequence]
    if block_table is not None:
        key, value = key.flatten(0, 1), value.flatten(0, 1)
    row = row.clamp(0, max(len(key) - 1, 0))  # for rows past the last sequence
    return key.index_select(0, row), value.index_select(0, row), ends


def _check(
    function: str, key: Tensor, starts: Tensor | None, used: Tensor, block_table: Tensor | None, longest: int
) -> None:
    """Raise ValueError for lengths and pages that do not exist, where values_are_checked()."""
    if not len(used) or not values_are_checked(used):
        return
    least, most = (int(x) for x in used.aminmax())
    what = f"{function}: keys of a sequence reach from {least} to {most}"
    if least < 0 or most > longest:
        raise ValueError(f"{what}, and max_seqlen_k is {longest}")
    if block_table is None:
        if starts is not None and (bool((used > starts.diff()).any()) or starts[0] < 0 or starts[-1] > len(key)):
            raise ValueError(f"{what}, more than cu_seqlens_k leaves room for in k {tuple(key.shape)}")
        return
    count, page = key.shape[:2]
    if most > block_table.shape[1] * page:
        raise ValueError(f"{what}: there is room for {block_table.shape[1]} pages of {page} in block_table")
    check_pages(block_table, used, page, count)
