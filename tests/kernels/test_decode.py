"""attention/decode.py through the interpreter against reference.py: tiles, shares, and tables that hold nonsense."""

import pytest
import torch
from accuracy import assert_as_accurate

from fasttfm import reference
from fasttfm.kernels.attention.decode import shares_of
from fasttfm.kernels.attention.once import append, decode
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.kernels.tiles.attention import Tile
from fasttfm.reference_cache import attention_with_cache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
LENGTHS = [45, 0, 17, 64]


def problem(dtype=torch.float32, *, queries=2, heads=6, key_heads=2, width=24, page=8, slopes=True):
    """Arguments of decode(), the rows past each sequence's end no numbers."""
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


def specified(*, lengths, starts, slopes, left, right, precision=torch.float32, **given):
    for name in ("query", "key_cache", "value_cache"):
        given[name] = given[name].to(precision)
    options = {"cache_lengths": lengths, "cache_starts": starts, "alibi_slopes": slopes, "window": (left, right)}
    return attention_with_cache(**given, **options)


@pytest.mark.parametrize(
    ("tile", "dtype", "shares"),
    [
        (Tile(16, 16, 4, 1), torch.float32, 3),
        (Tile(16, 64, 4, 1), torch.float16, 1),
        (Tile(16, 16, 4, 1), torch.bfloat16, 9),
        (Tile(32, 32, 4, 1), torch.float32, 1),
        (Tile(32, 16, 4, 1), torch.bfloat16, 2),
    ],
)
def test_any_tile_and_any_number_of_shares_give_what_the_specification_says(tile, dtype, shares):
    given = problem(dtype, queries=7 if tile.rows == 32 else 2)
    output = decode(**given, tile=tile, shares=shares)
    assert_as_accurate(output, specified(**given, precision=dtype), specified(**given, precision=torch.float64))


@pytest.mark.parametrize(("left", "right"), [(None, None), (5, None), (0, 0), (None, 2), (20, 1), (1 << 40, 1 << 40)])
def test_windows(left, right):
    given = {**problem(queries=3, slopes=right is not None), "left": left, "right": right}
    output = decode(**given, tile=Tile(16, 64, 4, 1), shares=2)
    torch.testing.assert_close(output, specified(**given))


def test_keys_outside_of_the_window_are_never_touched(monkeypatch):
    """The walk grows with the window, not with the cache."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    products, dot = [], Builder.create_dot
    monkeypatch.setattr(Builder, "create_dot", lambda *a: products.append(1) or dot(*a))
    given = problem(queries=1, key_heads=1, heads=4)
    counts = []
    for left in (None, 15):
        products.clear()
        decode(**{**given, "starts": None, "left": left}, tile=Tile(16, 16, 4, 1), shares=1)
        counts.append(len(products))
    assert counts == [2 * (3 + 0 + 2 + 4), 2 * (2 + 0 + 2 + 1)]  # of 45, 0, 17 and 64 keys, and of their last 16


@pytest.mark.parametrize("page", [-1, 1 << 30, -(1 << 31)])
def test_a_page_that_there_is_not_is_no_key(page):
    """On a GPU the host does not look at the table, and the kernel reads nothing outside of the cache."""
    given = problem(queries=1)
    given["block_table"][0, 1] = page
    given |= {"softcap": 0.0, "sinks": None}
    output = decode(**given, shares=1)
    seen = torch.tensor([True] * 8 + [False] * 8 + [True] * 29)
    given["block_table"][0, 1] = given["block_table"][0, 0]
    mask = -given["slopes"][0, :, None, None] * torch.arange(44, -1, -1)
    keys, values = (
        given[name][given["block_table"][0].long()].transpose(0, 1).flatten(1, 2)[None, :, :45]
        for name in ("key_cache", "value_cache")
    )
    seen[:3] = False
    mask = mask.masked_fill(~seen, -torch.inf)[None]
    torch.testing.assert_close(
        output[:1], reference.attention(given["query"][:1], keys, values, mask=mask, scale=0.2)[0]
    )


def test_lengths_past_the_room_or_below_0_read_nothing_that_is_not_there():
    given = problem(queries=1)
    expected = decode(**{**given, "lengths": torch.tensor([45, 0, 17, 64]), "starts": None})
    wrong = decode(**{**given, "lengths": torch.tensor([45, -5, 17, 1 << 40]), "starts": None})
    torch.testing.assert_close(wrong, expected)


def test_rows_are_appended_where_there_is_room_and_a_page_and_nowhere_else():
    cache, x = torch.zeros(5, 2, 4, 24), torch.randn(3, 2, 3, 24)
    table = torch.tensor([[4, 1], [0, 7], [-1, 2]])  # 7 and -1 there are not
    append(cache, x, torch.tensor([3, 2, 6]), table)
    expected = torch.zeros_like(cache)
    expected[4, :, 3], expected[1, :, :2] = x[0, :, 0], x[0, :, 1:]
    expected[0, :, 2:] = x[1, :, :2]
    expected[2, :, 2:] = x[2, :, :2]
    assert torch.equal(cache, expected)
    append(cache, x, torch.tensor([-9, 1 << 40, 8]), table)
    assert torch.equal(cache, expected)


def test_sequences_are_shared_where_there_are_few_of_them():
    chip = CHIPS["sm_90"]
    assert shares_of(chip, 8, 64) == 1
    assert shares_of(chip, 8, 8192) == 32
    assert shares_of(chip, 8, 1 << 20) == 33
    assert shares_of(chip, 1000, 8192) == 1
    with LaunchLog() as log:
        decode(**problem(), shares=2)
    assert log.triton == {"attention.decode._decode": 1, "attention.decode._merge": 1}
