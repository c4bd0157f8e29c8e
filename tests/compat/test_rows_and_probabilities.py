"""Paged and partly used keys in flash_attn's and torch's signatures; the log-sum-exps and weights that they return."""

import math
import re

import pytest
import torch
from torch.nn.attention.varlen import AuxRequest

from fasttfm import reference
from fasttfm.compat import flash_attn, varlen
from fasttfm.functional import draw_seed

H, HK, D, PAGE = 4, 2, 8, 4
QUERIES, KEYS = torch.tensor([3, 1, 5]), torch.tensor([6, 0, 9])
TABLE = torch.tensor([[5, 2, 7], [1, 1, 1], [0, 6, 4]])


def starts_of(lengths):
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


@pytest.fixture
def case():
    """Queries, pages, and the same keys and values packed."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(int(QUERIES.sum()), H, D, generator=generator, requires_grad=True)
    pages = [torch.randn(8, PAGE, HK, D, generator=generator, requires_grad=True) for _ in range(2)]
    rows = [x[TABLE].flatten(1, 2) for x in pages]  # (B, pages * PAGE, HK, D)
    return q, pages, [torch.cat([x[b, :n] for b, n in enumerate(KEYS.tolist())]) for x in rows]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25, 1.0, 0.1]), "softcap": 2.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_pages_equal_packed_keys_with_gradients(case, options):
    q, pages, packed = case
    starts = starts_of(QUERIES), starts_of(KEYS)
    expected = flash_attn.flash_attn_varlen_func(q, *packed, *starts, 5, 9, **options)
    output = flash_attn.flash_attn_varlen_func(q, *pages, *starts, 5, 9, **options, block_table=TABLE)
    assert torch.equal(output, expected)
    grad = torch.randn(output.shape)
    for ours, theirs in zip(*(torch.autograd.grad(x, (q, *pages), grad) for x in (output, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.manual_seed(3)
    dropped = flash_attn.flash_attn_varlen_func(q, *packed, *starts, 5, 9, 0.3, **options)
    torch.manual_seed(3)
    assert torch.equal(
        flash_attn.flash_attn_varlen_func(q, *pages, *starts, 5, 9, 0.3, **options, block_table=TABLE.int()), dropped
    )


def test_varlen_attn_takes_pages_and_partly_used_keys(case):
    q, pages, packed = case
    starts = starts_of(QUERIES)
    expected = varlen.varlen_attn(q, *packed, starts, starts_of(KEYS), 5, 9, window_size=(-1, 0), enable_gqa=True)
    given = {"window_size": (-1, 0), "enable_gqa": True, "seqused_k": KEYS.int()}
    assert torch.equal(varlen.varlen_attn(q, *pages, starts, None, 5, 9, **given, block_table=TABLE), expected)
    room = [torch.full((12, 3, HK, D), math.nan) for _ in range(2)]
    for filled, x in zip(room, packed, strict=True):
        for b, part in enumerate(x.split(KEYS.tolist())):
            filled[: len(part), b] = part
    room = [x.transpose(0, 1).flatten(0, 1) for x in room]  # unused rows are NaN
    fixed = torch.tensor([0, 12, 24, 36])
    torch.testing.assert_close(varlen.varlen_attn(q, *room, starts, fixed, 5, 12, **given), expected)


def test_no_sequences_and_no_keys():
    q, k = torch.zeros(0, H, D), torch.zeros(8, PAGE, H, D)
    none, table = torch.zeros(1, dtype=torch.int32), torch.zeros(0, 3, dtype=torch.int32)
    assert flash_attn.flash_attn_varlen_func(q, k, k, none, none, 0, 0, block_table=table).shape == q.shape
    q, table = torch.randn(3, H, D), torch.zeros(1, 2, dtype=torch.int32)
    starts = torch.tensor([0, 3]), torch.zeros(2, dtype=torch.int32)
    paged = flash_attn.flash_attn_varlen_func(q, k, k, *starts, 3, 0, block_table=table, return_attn_probs=True)
    q, k = q[None], torch.zeros(1, 0, H, D)
    padded = flash_attn.flash_attn_func(q, k, k, 0.5, return_attn_probs=True)
    for output, lse, _ in (paged, padded):
        assert not output.any()
        assert (lse == -math.inf).all()
    assert padded[2].shape == (1, H, 3, 0)


WRONG_PAGES = {
    "block_table has page 8: there are 0 to 7": {"block_table": TABLE + 3},
    "block_table is torch.float32 (3, 3) on cpu: int32 or int64 (3, 3)": {"block_table": TABLE.float()},
    "block_table is torch.int64 (2, 3) on cpu: int32 or int64 (3, 3)": {"block_table": TABLE[:2]},
    "reach from 0 to 9: there is room for 2 pages of 4 in block_table": {"block_table": TABLE[:, :2]},
    "keys of a sequence reach from 0 to 9, and max_seqlen_k is 8": {"max_seqlen_k": 8},
}
WRONG_LENGTHS = {
    "varlen_attn: block_table needs seqused_k": {"block_table": TABLE},
    "give enable_gqa=True": {"enable_gqa": False},
    "keys of a sequence reach from 1 to 9, more than cu_seq_k": {"seqused_k": KEYS + torch.tensor([0, 1, 0])},
    "seqused_k is torch.int64 (2,) on cpu: int32 or int64 (3,)": {"seqused_k": KEYS[:2]},
}


@pytest.mark.parametrize("words", [*WRONG_PAGES, *WRONG_LENGTHS])
def test_wrong_pages_and_lengths_are_refused(case, words):
    q, pages, packed = case
    starts = starts_of(QUERIES), starts_of(KEYS)
    if words in WRONG_PAGES:
        function = flash_attn.flash_attn_varlen_func
        given = {"block_table": TABLE, "max_seqlen_k": 9} | WRONG_PAGES[words]
        arguments = (q, *pages, *starts, 5)
    else:
        function, given = varlen.varlen_attn, {"enable_gqa": True} | WRONG_LENGTHS[words]
        arguments = (q, *(pages if "block_table" in given else packed), *starts, 5, 9)
    with pytest.raises(ValueError, match=re.escape(words)):
        function(*arguments, **given)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("queries", [5, 700])
def test_probabilities_equal_the_reference(options, queries):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, h, D, generator=generator) for n, h in ((queries, H), (7, HK), (7, HK)))
    words = {"window_size": "window"}
    scoring = {words.get(name, name): value for name, value in options.items()}
    qt, kt, vt = (x.transpose(1, 2).double() for x in (q, k, v))
    _, weights = reference.attention(qt, kt, vt, causal_offset=7 - queries, **scoring)
    torch.manual_seed(5)
    output, lse, weights_dropped = flash_attn.flash_attn_func(q, k, v, 0.4, **options, return_attn_probs=True)
    torch.manual_seed(5)
    seed = draw_seed()
    torch.manual_seed(5)
    assert torch.equal(output, flash_attn.flash_attn_func(q, k, v, 0.4, **options))
    kept = reference.keep_mask((2 * H, queries, 7), 0.4, seed).view(2, H, queries, 7)
    unnormalised = (weights / weights.amax(-1, keepdim=True)).nan_to_num(0.0)
    torch.testing.assert_close(
        weights_dropped.double(), torch.where(kept, unnormalised, -unnormalised), rtol=1e-4, atol=1e-6
    )
    scores = reference.attention_scores(qt, kt, causal_offset=7 - queries, **scoring)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_packed_probabilities_equal_those_of_each_sequence(case):
    q, _, packed = case
    starts, cu_seqlens_k = starts_of(QUERIES), starts_of(KEYS)
    _, lse, none = flash_attn.flash_attn_varlen_func(
        q, *packed, starts, cu_seqlens_k, 5, 9, causal=True, return_attn_probs=True
    )
    assert none.numel() == 0
    assert lse.shape == (H, len(q))
    for b in range(3):
        i, j = (slice(s[b], s[b + 1]) for s in (starts, cu_seqlens_k))
        if KEYS[b]:
            one = flash_attn.flash_attn_func(
                q[None, i], *(x[None, j] for x in packed), causal=True, return_attn_probs=True
            )
            torch.testing.assert_close(lse[:, i], one[1][0])
        else:
            assert (lse[:, i] == -math.inf).all()
    given = (q, *packed, starts, cu_seqlens_k, 5, 9)
    _, aux = varlen.varlen_attn(*given, window_size=(-1, 0), enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert torch.equal(aux, lse)
    assert isinstance(varlen.varlen_attn(*given, enable_gqa=True, return_aux=AuxRequest()), torch.Tensor)
