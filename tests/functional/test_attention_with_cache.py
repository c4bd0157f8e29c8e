"""Attention over a paged KV cache: both backends against reference_cache.py, and flash_attn's signature of it."""

import math
import re

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference_cache
from fasttfm.compat.flash_attn import flash_attn_with_kvcache
from fasttfm.kernels.attention import decode as kernel

H, D, DV = 4, 8, 6
on_each_backend = pytest.mark.parametrize("backend", ["torch", "triton"])
LENGTHS, STARTS = [13, 0, 7], [2, 0, 6]
CASES = {
    "one query": {"queries": 1},
    "causal": {"queries": 5, "causal": True},
    "all keys": {"queries": 3, "new": 2, "cos": True},
    "nothing new": {"queries": 2, "new": 0, "causal": True},
    "window": {"queries": 5, "window": (3, None)},
    "both sides": {"queries": 4, "window": (3, 1), "cos": True, "starts": True},
    "causal window": {"queries": 4, "window": (2, 3), "causal": True, "interleaved": True, "cos": True},
    "alibi": {"queries": 3, "alibi": True, "causal": True, "starts": True},
    "capped": {"queries": 3, "softcap": 0.7, "causal": True, "sinks": torch.arange(H) - 1.5, "scale": 2.0},
    "sinks of all weight": {"queries": 2, "sinks": torch.tensor([torch.inf, -torch.inf, 3.4e38, -torch.inf])},
    "more queries than keys": {"queries": 20, "new": 3, "causal": True},
}


def problem(
    *, queries, new=None, starts=False, cos=False, alibi=False, page=4, pages=True, dtype=torch.float32, **options
):
    """Arguments of attention_with_cache(), with NaN in the unused rows of the caches."""
    new = queries if new is None else new
    table = torch.randperm(36).int()[:30].view(3, 10) if pages else None
    rows = (36, 2, page) if pages else (3, 2, 40)
    given = {
        "query": torch.randn(3, queries, H, D).transpose(1, 2),
        "key_cache": torch.full((*rows, D), torch.nan),
        "value_cache": torch.full((*rows, DV), torch.nan),
    }
    given |= {"key": torch.randn(3, 2, new, D), "value": torch.randn(3, 2, new, DV)} if new else {}
    given |= dict(zip(("cos", "sin"), F.rotary_tables(40, 6))) if cos else {}
    given = {name: x.to(dtype) for name, x in given.items()}
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            at = (table[b, t // page], slice(None), t % page) if pages else (b, slice(None), t)
            for cache in (given["key_cache"], given["value_cache"]):
                cache[at] = torch.randn(cache[at].shape).to(dtype)
    given |= {"cache_lengths": torch.tensor(LENGTHS), "block_table": table}
    given |= {"cache_starts": torch.tensor(STARTS).int()} if starts else {}
    given |= {"alibi_slopes": torch.rand(3, H) + 0.1} if alibi else {}
    return {**given, **options}


def copied(given):
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


@pytest.mark.sample(10)
@on_each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shares", [1, 3])
@pytest.mark.parametrize("pages", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_operator_computes_the_specification_and_leaves_the_same_cache(
    case, pages, shares, dtype, backend, monkeypatch
):
    """shares: programs that split the keys of a sequence. The specification is computed in float64."""
    monkeypatch.setattr(kernel, "shares_of", lambda *a: shares)
    given = problem(**{"scale": 0.3, **CASES[case]}, pages=pages, dtype=dtype)
    theirs = {name: x.double() if torch.is_tensor(x) and x.dtype == dtype else x for name, x in copied(given).items()}
    expected = reference_cache.attention_with_cache(**theirs, return_lse=True)
    with F.backend(backend):
        output, lse = F.attention_with_cache(**given, return_lse=True)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype.itemsize > 2 else {"rtol": 2e-2, "atol": 2e-2}
    lse, sums = (x.double().clamp(max=1e30) for x in (lse, expected[1]))  # ours has no larger sink
    torch.testing.assert_close((output.double(), lse), (expected[0], sums), **close)
    assert output.dtype == dtype
    assert output.transpose(1, 2).is_contiguous()
    for name in ("key_cache", "value_cache"):
        torch.testing.assert_close(given[name].double(), theirs[name].double(), equal_nan=True, **close)


@on_each_backend
def test_decoding_step_by_step_equals_attention_over_the_whole_text(backend):
    """Pages in any order, an odd page size, rotary positions: as a model decodes."""
    x = torch.randn(3, 2, 2, 21, D)  # queries, keys, values: (B, H, L, D)
    cos, sin = F.rotary_tables(21, D)
    q, k = (F.rotary(each, cos, sin) for each in x[:2])
    expected = F.attention(q, k, x[2], causal=True)
    caches = [torch.full((6 * 2, 2, 5, D), torch.nan) for _ in range(2)]
    table = torch.randperm(12).view(2, 6)
    steps = []
    for first, last in ((0, 9), (9, 10), (10, 14), (14, 21)):
        q, k, v = x[:, :, :, first:last]
        options = {"cache_lengths": first, "block_table": table, "cos": cos, "sin": sin, "causal": True}
        with F.backend(backend):
            steps.append(F.attention_with_cache(q, *caches, k, v, **options))
    torch.testing.assert_close(torch.cat(steps, 2), expected)


@on_each_backend
def test_a_cache_with_other_strides_is_written_in_place(backend):
    given = problem(queries=2, causal=True)
    strided = copied(given)
    for name in ("key_cache", "value_cache"):
        strided[name] = strided[name].transpose(1, 3).contiguous().transpose(1, 3)
    with F.backend(backend):
        torch.testing.assert_close(F.attention_with_cache(**strided), F.attention_with_cache(**given))
    torch.testing.assert_close(strided["value_cache"], given["value_cache"], equal_nan=True)


@on_each_backend
def test_empty_calls_and_a_full_cache(backend):
    given = problem(queries=1, new=0)
    empty = {**given, "query": given["query"][:, :, :0]}
    nobody = {name: x[:0] if name in ("query", "cache_lengths", "block_table") else x for name, x in given.items()}
    query, key, value = torch.randn(3, 2, H, 5, D)
    with F.backend(backend):
        assert F.attention_with_cache(**empty).shape == (3, H, 0, DV)
        assert F.attention_with_cache(**nobody).shape == (0, H, 1, DV)
        for width in (0, D):
            caches = torch.zeros(2, H, 4, D), torch.zeros(2, H, 4, width)
            _, lse = F.attention_with_cache(query, *caches, return_lse=True)
            torch.testing.assert_close(lse, torch.full((2, H, 5), math.log(4)))
        torch.testing.assert_close(F.attention_with_cache(query, key, value), F.attention(query, key, value))


WRONG = {
    "block_table has page 36: there are 0 to 35": {"block_table": torch.full((3, 10), 36)},
    "cache_lengths reach from 0 to 40, and 2 are appended: ": {"cache_lengths": torch.tensor([13, 0, 40])},
    "cache_lengths=9223372036854775808 must fit 64 bits": {"cache_lengths": 1 << 63},
    "has 1180591620717411303424: it must be below 2^62": {"window": (1 << 70, 1)},
    "cache_lengths is needed beside key": {"cache_lengths": None},
    "cache_starts must lie between 0 and cache_lengths": {"cache_starts": torch.tensor([14, 0, 0])},
    "block_table is torch.int32 (30,)": {"block_table": torch.zeros(30).int()},
    "key_cache has 36 rows and query 3: give a block_table": {"block_table": None},
    "value_cache is torch.float16": {"value_cache": torch.zeros(36, 2, 4, DV).half()},
    "must agree in heads": {"query": torch.zeros(3, 3, 2, D)},
    "key and value belong together": {"value": None},
    "key (3, 2, 2, 9) and value": {"key": torch.zeros(3, 2, 2, D + 1)},
    "cos has 14 positions": dict(zip(("cos", "sin"), F.rotary_tables(14, 8))),
    "cos, sin and key belong together": {"cos": torch.ones(40, 2)},
    "query requires a gradient": {"query": torch.zeros(3, H, 2, D, requires_grad=True)},
}
"""Words of the error -> arguments."""


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_refused_before_the_cache_is_changed(words):
    given = problem(queries=2)
    before = given["key_cache"].clone()
    with pytest.raises(ValueError, match=re.escape(words)):
        F.attention_with_cache(**{**given, **WRONG[words]})
    torch.testing.assert_close(given["key_cache"], before, equal_nan=True)


@pytest.mark.sample(5)
@pytest.mark.parametrize("case", CASES)
def test_flash_attn_with_kvcache_has_the_same_bits(case):
    given = problem(**{**CASES[case], "sinks": None})
    x, mine = copied(given), copied(given)
    expected, sums = F.attention_with_cache(**mine, return_lse=True)
    for name in ("query", "key_cache", "value_cache", "key", "value"):
        if name in x:
            x[name] = x[name].transpose(1, 2)
    window = tuple(-1 if side is None else side for side in x.get("window") or (-1, -1))
    output, lse = flash_attn_with_kvcache(
        x["query"], x["key_cache"], x["value_cache"], x.get("key"), x.get("value"), x.get("cos"), x.get("sin"),
        x["cache_lengths"].int(), None, x.get("cache_starts"), x["block_table"], causal=x.get("causal", False),
        window_size=window, rotary_interleaved=x.get("interleaved", False), alibi_slopes=x.get("alibi_slopes"),
        softcap=x.get("softcap", 0.0), softmax_scale=x.get("scale"), return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(output, expected.transpose(1, 2))
    assert torch.equal(lse, sums)
    torch.testing.assert_close(x["key_cache"].transpose(1, 2), mine["key_cache"], equal_nan=True)


def test_flash_attns_cache_rows():
    cache, lengths = torch.randn(2, 5, 9, 2, D), torch.tensor([3, 9, 1])
    q, rows = torch.randn(3, 1, H, D), torch.tensor([4, 0, 2])
    expected = flash_attn_with_kvcache(q, *cache[:, rows], cache_seqlens=lengths)
    assert torch.equal(flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, cache_batch_idx=rows), expected)
    with pytest.raises(ValueError, match=r"cache_batch_idx is torch.int64 \(2,\)"):
        flash_attn_with_kvcache(q, *cache, cache_batch_idx=rows[:2])
    with pytest.raises(ValueError, match="cache_seqlens reach from 10 to 10"):
        flash_attn_with_kvcache(q, *cache, cache_seqlens=10, cache_batch_idx=rows)
