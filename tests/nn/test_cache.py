"""TransformerDecoder's cache: position by position gives what one pass over all positions gives."""

from typing import Any

import pytest
import torch

import fasttfm.nn
from fasttfm.nn import DecoderCache

from .twins import hides_some, padding, rand

N, H, L, S, E = 3, 2, 7, 5, 8


def decoder(**options: Any) -> fasttfm.nn.TransformerDecoder:
    torch.manual_seed(0)
    layer = fasttfm.nn.TransformerDecoderLayer(E, H, 12, **options)
    return fasttfm.nn.TransformerDecoder(layer, 2, fasttfm.nn.LayerNorm(E)).double().eval()


@pytest.mark.parametrize("chunks", [(1,) * L, (3, 1, 1, 2), (L,)])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_pieces_give_the_full_pass(batch_first: bool, norm_first: bool, chunks: tuple[int, ...]) -> None:
    model = decoder(batch_first=batch_first, norm_first=norm_first)
    tgt, memory = (rand(N, L, E), rand(N, S, E)) if batch_first else (rand(L, N, E), rand(S, N, E))
    hidden = padding(5, 2, 4)
    full = model(tgt, memory, tgt_is_causal=True, memory_key_padding_mask=hidden)
    cache = DecoderCache()
    dim = 1 if batch_first else 0
    pieces = [
        model(piece, memory, memory_key_padding_mask=hidden, cache=cache) for piece in tgt.split(list(chunks), dim)
    ]
    torch.testing.assert_close(torch.cat(pieces, dim), full)
    assert cache.length == L


@torch.no_grad()
def test_unbatched_pieces() -> None:
    model = decoder()
    tgt, memory, cache = rand(L, E), rand(S, E), DecoderCache()
    pieces = [model(row[None], memory, cache=cache) for row in tgt]
    torch.testing.assert_close(torch.cat(pieces), model(tgt, memory, tgt_is_causal=True))


@torch.no_grad()
def test_target_padding_and_memory_masks_count_all_positions() -> None:
    model = decoder(batch_first=True)
    tgt, memory, hidden, across = rand(N, L, E), rand(N, S, E), hides_some(N, L), hides_some(L, S)
    full = model(tgt, memory, memory_mask=across, tgt_is_causal=True, tgt_key_padding_mask=hidden)
    cache = DecoderCache()
    pieces = [
        model(
            tgt[:, i : i + 1],
            memory,
            memory_mask=across[i : i + 1],
            tgt_key_padding_mask=hidden[:, : i + 1],
            cache=cache,
        )
        for i in range(L)
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), full)


@torch.no_grad()
def test_a_causal_memory_goes_on_where_it_was() -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, L, E), rand(N, L, E), DecoderCache()
    full = model(tgt, memory, tgt_is_causal=True, memory_is_causal=True)
    pieces = [model(x, memory, memory_is_causal=True, cache=cache) for x in tgt.split([2, 1, 4], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full)


@torch.no_grad()
def test_a_mask_of_ones_own_replaces_causality() -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, L, E), rand(N, S, E), DecoderCache()
    window = torch.ones(L, L, dtype=torch.bool).triu(1) | torch.ones(L, L, dtype=torch.bool).tril(-3)
    full = model(tgt, memory, tgt_mask=window)
    pieces = [model(tgt[:, :4], memory, tgt_mask=window[:4, :4], cache=cache)]
    pieces += [model(tgt[:, 4:], memory, tgt_mask=window[4:], cache=cache)]
    torch.testing.assert_close(torch.cat(pieces, 1), full)


@torch.no_grad()
def test_the_memory_is_projected_once() -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, L, E), rand(N, S, E), DecoderCache()
    first = model(tgt[:, :1], memory, cache=cache)
    repeated = model(tgt[:, 1:2], torch.zeros_like(memory), cache=cache)  # only its shape is looked at
    full = model(tgt[:, :2], memory, tgt_is_causal=True)
    torch.testing.assert_close(torch.cat([first, repeated], 1), full)


@pytest.mark.parametrize("memory_too", [True, False])
@torch.no_grad()
def test_reordered_rows_go_on_as_the_chosen_ones(memory_too: bool) -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, 4, E), rand(N, S, E), DecoderCache()
    if not memory_too:
        memory = memory[:1].expand(N, S, E)  # rows of one sentence, as in a beam
    model(tgt[:, :3], memory, cache=cache)
    rows = torch.tensor([2, 0, 0, 1] if memory_too else [2, 0, 0])
    cache.reorder(rows, memory=memory_too)
    got = model(tgt[rows, 3:], memory[rows], cache=cache)
    torch.testing.assert_close(got, model(tgt[rows], memory[rows], tgt_is_causal=True)[:, 3:])


@pytest.mark.parametrize("capacity", [None, 2, 64])
@torch.no_grad()
def test_room_grows_as_positions_come(capacity: int | None) -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(1, 40, E), rand(1, S, E), DecoderCache(capacity)
    pieces = [model(x, memory, cache=cache) for x in tgt.split(1, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), model(tgt, memory, tgt_is_causal=True))


def test_a_cache_refuses_gradients() -> None:
    model = decoder(batch_first=True)
    with pytest.raises(ValueError, match=r"cache.*torch\.no_grad"):
        model(rand(N, 1, E), rand(N, S, E), cache=DecoderCache())


@torch.no_grad()
def test_a_changed_number_of_rows_is_told() -> None:
    model, cache = decoder(batch_first=True), DecoderCache()
    model(rand(N, 1, E), rand(N, S, E), cache=cache)
    with pytest.raises(ValueError, match=r"holds 3 rows, the input has 2.*reorder"):
        model(rand(2, 1, E), rand(2, S, E), cache=cache)


def test_layers_without_a_cache_are_named() -> None:
    model = fasttfm.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(E, H), 1)
    with pytest.raises(TypeError, match=r"fasttfm\.nn\.TransformerDecoderLayer"):
        model(rand(1, 1, E), rand(S, 1, E), cache=DecoderCache())
