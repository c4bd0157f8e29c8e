"""attention/decode.py in the interpreter against reference.py: tiles, shares, and invalid tables."""

import pytest
import torch
from accuracy import assert_as_accurate
from attention_once import append, decode

from fasttfm import reference
from fasttfm.kernels.tiles.attention import Tile
from fasttfm.reference_cache import attention_with_cache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
LENGTHS = [45, 0, 17, 64]


def problem(dtype=torch.float32, *, queries=2, heads=6, key_heads=2, width=24, page=8, slopes=True):
    """Arguments of decode(), with NaN past the end of each sequence."""
    torch.manual_seed(2)
    pages = -(-64 // page)
    table = torch.randperm(4 * pages + 3)[: 4 * pages].view(4, pages).int()
    caches = torch.full((2, 4 * pages + 3, page, key_heads, width), torch.nan)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            caches[:, table[b, t // page], t % page] = torch.randn(2, key_heads, width)
    key_cache, value_cache = caches.to(dtype).transpose(2, 3)
    query = torch.randn(4, queries, heads, width).to(dtype).transpose(1, 2)
    return {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "lengths": torch.tensor(LENGTHS),
        "starts": torch.tensor([3, 0, 17, 0]), "block_table": table,
        "slopes": torch.rand(4, heads) if slopes else None, "softcap": 3.0, "sinks": torch.randn(heads),
        "left": None, "right": 0, "scale": 0.2,
    }  # fmt: skip


def specified(*, lengths, starts, slopes, left, right, precision=torch.float32, **arguments):
    for name in ("query", "key_cache", "value_cache"):
        arguments[name] = arguments[name].to(precision)
    options = {"cache_lengths": lengths, "cache_starts": starts, "alibi_slopes": slopes, "window": (left, right)}
    return attention_with_cache(**arguments, **options)


@pytest.mark.parametrize(
    ("tile", "dtype", "shares", "left", "right"),
    [
        (Tile(16, 16, 4, 1), torch.float32, 3, None, 0),
        (Tile(16, 64, 4, 1), torch.float16, 1, 5, None),
        (Tile(16, 16, 4, 1), torch.bfloat16, 9, 0, 0),
        (Tile(32, 32, 4, 1), torch.float32, 1, None, 2),
        (Tile(32, 16, 4, 1), torch.bfloat16, 2, 20, 1),
        (Tile(16, 64, 4, 1), torch.float32, 2, 1 << 40, 1 << 40),
        (Tile(16, 32, 4, 1), torch.float32, 2, None, None),
    ],
)
def test_any_tile_window_and_number_of_shares_give_what_the_specification_says(tile, dtype, shares, left, right):
    queries = 7 if tile.rows == 32 else 2
    arguments = {**problem(dtype, queries=queries, slopes=right is not None), "left": left, "right": right}
    output = decode(**arguments, tile=tile, shares=shares)
    exact = specified(**arguments, precision=torch.float64)
    assert_as_accurate(output, specified(**arguments, precision=dtype), exact)


@pytest.mark.parametrize("page", [-1, 1 << 30, -(1 << 31)])
def test_keys_of_an_invalid_page_are_hidden(page):
    """On a GPU the host does not read the table, and the kernel reads nothing outside of the cache."""
    arguments = problem(queries=1)
    table = arguments["block_table"][0]
    table[1] = page
    arguments |= {"softcap": 0.0, "sinks": None}
    output = decode(**arguments, shares=1)
    visible = torch.tensor([True] * 8 + [False] * 8 + [True] * 29)
    visible[:3] = False
    table[1] = table[0]
    caches = arguments["key_cache"], arguments["value_cache"]
    keys, values = (cache[table.long()].transpose(0, 1).flatten(1, 2)[None, :, :45] for cache in caches)
    mask = -arguments["slopes"][0, :, None, None] * torch.arange(44, -1, -1)
    mask = mask.masked_fill(~visible, -torch.inf)[None]
    expected = reference.attention(arguments["query"][:1], keys, values, mask=mask, scale=0.2)[0]
    torch.testing.assert_close(output[:1], expected)


def test_invalid_lengths_read_nothing_out_of_bounds():
    arguments = problem(queries=1)
    expected = decode(**{**arguments, "lengths": torch.tensor([45, 0, 17, 64]), "starts": None})
    clamped = decode(**{**arguments, "lengths": torch.tensor([45, -5, 17, 1 << 40]), "starts": None})
    torch.testing.assert_close(clamped, expected)


def test_rows_are_appended_only_within_the_capacity_and_to_valid_pages():
    cache, x = torch.zeros(5, 2, 4, 24), torch.randn(3, 2, 3, 24)
    table = torch.tensor([[4, 1], [0, 7], [-1, 2]])  # 7 and -1 are invalid
    append(cache, x, torch.tensor([3, 2, 6]), table)
    expected = torch.zeros_like(cache)
    expected[4, :, 3], expected[1, :, :2] = x[0, :, 0], x[0, :, 1:]
    expected[0, :, 2:] = x[1, :, :2]
    expected[2, :, 2:] = x[2, :, :2]
    assert torch.equal(cache, expected)
    append(cache, x, torch.tensor([-9, 1 << 40, 8]), table)
    assert torch.equal(cache, expected)
