"""TransformerDecoder's cache: token-by-token decoding equals one causal pass."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from replayable import Watched
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fasttfm.nn
from fasttfm.functional import backend
from fasttfm.nn import DecoderCache

from .twins import hides_some, padding
from .twins import rand as in_float64

pytestmark = pytest.mark.sample(1)  # tests about kernels have more cases
N, H, L, S, E = 3, 2, 7, 5, 8


@pytest.fixture(params=["torch", "triton"], autouse=True)
def route(request: Any) -> Iterator[str]:
    """Plain PyTorch in float64; kernels, through the interpreter, in float32."""
    torch.set_default_dtype(torch.float64 if request.param == "torch" else torch.float32)
    with backend(request.param):
        yield request.param
    torch.set_default_dtype(torch.float32)


def rand(*shape: int) -> Tensor:
    return in_float64(*shape).to(torch.get_default_dtype())


def decoder(norm: bool = True, **options: Any) -> fasttfm.nn.TransformerDecoder:
    torch.manual_seed(0)
    layer = fasttfm.nn.TransformerDecoderLayer(E, H, 12, **options)
    model = fasttfm.nn.TransformerDecoder(layer, 2, fasttfm.nn.LayerNorm(E) if norm else None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.2
    return model


def whole(model: fasttfm.nn.TransformerDecoder, tgt: Tensor, memory: Tensor, **options: Any) -> Tensor:
    """The output of a causal pass over all positions, in plain PyTorch."""
    with backend("torch"):
        return model(tgt, memory, **{"tgt_is_causal": True, **options})


def close(ours: Tensor, theirs: Tensor) -> None:
    rounding = {} if ours.dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **rounding)  # type: ignore[arg-type]


@pytest.mark.sample(4)
@pytest.mark.parametrize("chunks", [(1,) * L, (3, 1, 1, 2), (L,)])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@torch.no_grad()
def test_pieces_give_the_full_pass(batch_first: bool, norm_first: bool, chunks: tuple[int, ...]) -> None:
    model = decoder(batch_first=batch_first, norm_first=norm_first)
    tgt, memory = (rand(N, L, E), rand(N, S, E)) if batch_first else (rand(L, N, E), rand(S, N, E))
    hidden = padding(5, 2, 4)
    full = whole(model, tgt, memory, memory_key_padding_mask=hidden)
    cache, dim = DecoderCache(), int(batch_first)
    pieces = [model(x, memory, memory_key_padding_mask=hidden, cache=cache) for x in tgt.split(list(chunks), dim)]
    close(torch.cat(pieces, dim), full)
    assert cache.length == L


@torch.no_grad()
def test_unbatched_pieces() -> None:
    model = decoder()
    tgt, memory, cache = rand(L, E), rand(S, E), DecoderCache()
    pieces = [model(row[None], memory, cache=cache) for row in tgt]
    close(torch.cat(pieces), whole(model, tgt, memory))


@torch.no_grad()
def test_target_padding_and_memory_masks_count_all_positions() -> None:
    model = decoder(batch_first=True)
    tgt, memory, hidden, across = rand(N, L, E), rand(N, S, E), hides_some(N, L), hides_some(L, S)
    full = whole(model, tgt, memory, memory_mask=across, tgt_key_padding_mask=hidden)
    cache, pieces = DecoderCache(), []
    for i, piece in enumerate(tgt.split(1, 1)):
        masks = {"memory_mask": across[i : i + 1], "tgt_key_padding_mask": hidden[:, : i + 1]}
        pieces.append(model(piece, memory, cache=cache, **masks))
    close(torch.cat(pieces, 1), full)


@torch.no_grad()
def test_a_causal_memory_goes_on_where_it_was() -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, L, E), rand(N, L, E), DecoderCache()
    full = whole(model, tgt, memory, memory_is_causal=True)
    pieces = [model(x, memory, memory_is_causal=True, cache=cache) for x in tgt.split([2, 1, 4], 1)]
    close(torch.cat(pieces, 1), full)


@torch.no_grad()
def test_a_target_mask_replaces_causality() -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, L, E), rand(N, S, E), DecoderCache()
    ones = torch.ones(L, L, dtype=torch.bool)
    window = ones.triu(1) | ones.tril(-3)
    full = whole(model, tgt, memory, tgt_mask=window, tgt_is_causal=False)
    pieces = [model(tgt[:, :4], memory, tgt_mask=window[:4, :4], cache=cache)]
    pieces += [model(tgt[:, 4:], memory, tgt_mask=window[4:], cache=cache)]
    close(torch.cat(pieces, 1), full)


@torch.no_grad()
def test_the_memory_is_projected_once() -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, L, E), rand(N, S, E), DecoderCache()
    first = model(tgt[:, :1], memory, cache=cache)
    repeated = model(tgt[:, 1:2], torch.zeros_like(memory), cache=cache)  # only its shape matters
    full = whole(model, tgt[:, :2], memory)
    close(torch.cat([first, repeated], 1), full)


@pytest.mark.parametrize("memory_too", [True, False])
@torch.no_grad()
def test_reordered_rows_continue_the_selected_ones(memory_too: bool) -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(N, 4, E), rand(N, S, E), DecoderCache()
    if not memory_too:
        memory = memory[:1].expand(N, S, E)  # rows of one sentence, as in a beam
    model(tgt[:, :3], memory, cache=cache)
    rows = torch.tensor([2, 0, 0, 1] if memory_too else [2, 0, 0])
    cache.reorder(rows, memory=memory_too)
    got = model(tgt[rows, 3:], memory[rows], cache=cache)
    close(got, whole(model, tgt[rows], memory[rows])[:, 3:])


@pytest.mark.sample(2)
@pytest.mark.parametrize("capacity", [None, 2, 64])
@torch.no_grad()
def test_the_cache_grows_beyond_its_capacity(capacity: int | None) -> None:
    model = decoder(batch_first=True)
    tgt, memory, cache = rand(1, 40, E), rand(1, S, E), DecoderCache(capacity)
    pieces = [model(x, memory, cache=cache) for x in tgt.split(1, 1)]
    close(torch.cat(pieces, 1), whole(model, tgt, memory))


def test_a_cache_refuses_gradients() -> None:
    model = decoder(batch_first=True)
    with pytest.raises(ValueError, match=r"cache.*torch\.no_grad"):
        model(rand(N, 1, E), rand(N, S, E), cache=DecoderCache())


@torch.no_grad()
def test_a_cache_refuses_tensors_that_torch_computes() -> None:
    """torch.nn's own forward has no cache: each position would see itself alone."""
    model, memory, tgt = decoder(batch_first=True), rand(N, S, E), rand(N, 1, E)
    with pytest.raises(ValueError, match="cache does not go with tensor subclasses"):
        model(TwoTensor(tgt, tgt), memory, cache=DecoderCache())


@torch.no_grad()
def test_a_decoder_without_layers_may_have_a_cache() -> None:
    model, x = fasttfm.nn.TransformerDecoder(fasttfm.nn.TransformerDecoderLayer(E, H), 0), rand(1, N, E)
    assert torch.equal(model(x, rand(S, N, E), cache=DecoderCache()), x)


def test_layers_without_a_cache_are_named() -> None:
    model = fasttfm.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(E, H), 1)
    with pytest.raises(TypeError, match=r"fasttfm\.nn\.TransformerDecoderLayer"):
        model(rand(1, 1, E), rand(S, 1, E), cache=DecoderCache())


def prepared(cache: DecoderCache) -> bool:
    """Return whether the last step used prepared calls."""
    return cache._step is not None


PLAIN: list[dict[str, Any]] = [
    {}, {"norm_first": True}, {"norm_first": True, "norm": False}, {"bias": False, "activation": "gelu"},
    {"batch_first": False, "norm": False, "activation": torch.sigmoid},
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("options", PLAIN)
@torch.no_grad()
def test_steps_are_prepared_where_kernels_compute(options: dict[str, Any], route: str) -> None:
    model = decoder(**{"batch_first": True, **options})
    tgt, memory, cache = rand(N, L, E), rand(N, S, E), DecoderCache()
    if not options.get("batch_first", True):
        tgt, memory = tgt.transpose(0, 1), memory.transpose(0, 1)
    dim = int(options.get("batch_first", True))
    first, *others = tgt.split(1, dim)
    pieces = [model(first, memory, cache=cache)]
    assert not prepared(cache)  # the layers compute the memory's keys
    for piece in others:
        pieces.append(model(piece, memory, cache=cache))
        assert prepared(cache) == (route == "triton")
    close(torch.cat(pieces, dim), whole(model, tgt, memory))


@pytest.mark.sample(4)
@pytest.mark.parametrize(("capacity", "memory_too"), [(None, True), (30, False)])
@torch.no_grad()
def test_rows_are_reordered_again_and_again(capacity: int | None, memory_too: bool) -> None:
    """Rows move, repeat, end and multiply as in beam search, and one step has two positions."""
    model, cache = decoder(batch_first=True), DecoderCache(capacity)
    past = rand(N, 1, E)
    memory = rand(N, S, E) if memory_too else rand(1, S, E).expand(N, S, E)
    model(past, memory, cache=cache)
    for number, rows in enumerate([[2, 0, 1], [1, 1, 0], [0, 2, 2], [2, 1], [1, 0], [0, 1, 1, 0], [3, 0, 2, 2]] * 2):
        index = torch.tensor(rows)
        cache.reorder(index, memory=memory_too or len(rows) != len(past))
        new = rand(len(rows), 2 if number == 9 else 1, E)
        past, memory = torch.cat([past[index % len(past)], new], 1), memory[index % len(past)]
        got = model(new, memory, cache=cache)
        assert cache.length == past.shape[1]
        close(got, whole(model, past, memory)[:, -new.shape[1] :])


def replaced(name: str, part: Callable[[], nn.Module]) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model.layers[1], name, part())  # type: ignore[index,union-attr]


NOT_PLAIN: dict[str, Callable[[Any], object]] = {
    "a hook": lambda model: model.layers[1].norm2.register_forward_hook(lambda *_: None),
    "another activation": replaced("activation", nn.SiLU),
    "another linear layer": replaced("linear2", lambda: nn.Sequential(nn.Linear(12, E))),
    "another norm": replaced("norm3", lambda: nn.RMSNorm(E)),
    "another order": lambda model: setattr(model.layers[1], "norm_first", True),
    "other heads": replaced("self_attn", lambda: fasttfm.nn.MultiheadAttention(E, 4, batch_first=True)),
    "a key more": replaced(
        "self_attn", lambda: fasttfm.nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True)
    ),
    "a weight with gaps": lambda model: setattr(model.layers[1].norm1.weight, "data", torch.randn(2 * E)[::2]),
    "training": lambda model: None,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("change", NOT_PLAIN)
@torch.no_grad()
def test_layers_that_are_not_plain_are_called(change: str, route: str) -> None:
    """Changed before the first step, and between two steps."""
    for when in (0, 3) if change != "other heads" else (0,):
        model = decoder(batch_first=True, dropout=0.0)
        tgt, memory, ours, theirs = rand(N, 5, E), rand(N, S, E), DecoderCache(), DecoderCache()
        for position, piece in enumerate(tgt.split(1, 1)):
            if position == when:
                NOT_PLAIN[change](model)
                model.train(change == "training")
            got = model(piece, memory, cache=ours)
            assert prepared(ours) == (route == "triton" and 0 < position < when)
            with backend("torch"):
                close(got, model(piece, memory, cache=theirs))


@pytest.mark.sample(2)
@torch.no_grad()
def test_source_lengths_mask_the_memory_and_are_reordered(route: str) -> None:
    model, tgt, memory = decoder(), rand(7, N, E), rand(S, N, E)
    lengths = torch.tensor([2, 5, 4])
    cache = DecoderCache(source_lengths=lengths)
    for position in range(7):
        if position in (2, 4, 5):
            rows = torch.tensor([1, 2, 0] if position < 5 else [1, 0])
            cache.reorder(rows)
            tgt, memory, lengths = tgt[:, rows], memory[:, rows], lengths[rows]
        hidden = torch.arange(S) >= lengths[:, None]
        full = whole(model, tgt[: position + 1], memory, memory_key_padding_mask=hidden)
        close(model(tgt[position : position + 1], memory, cache=cache), full[position:])
        assert prepared(cache) == (route == "triton" and position > 0)


@torch.no_grad()
def test_steps_with_masks_and_wrong_inputs_call_the_layers(route: str) -> None:
    model, memory, tgt = decoder(batch_first=True), rand(N, S, E), rand(N, 6, E)
    cache, hidden = DecoderCache(), padding(6, 3, 4)
    full = whole(model, tgt, memory, tgt_key_padding_mask=hidden)
    for position, piece in enumerate(tgt.split(1, 1)):
        mask = None if position < 3 else hidden[:, : position + 1]  # no row is padded before
        close(model(piece, memory, tgt_key_padding_mask=mask, cache=cache), full[:, position : position + 1])
        assert prepared(cache) == (route == "triton" and 0 < position < 3)
    with pytest.raises(ValueError, match=r"holds 3 rows, the input has 2.*reorder"):
        model(tgt[:2, :1], memory[:2], cache=cache)
    with pytest.raises(ValueError, match="must be 8 wide"):
        model(tgt[:, :1, 1:], memory, cache=cache)
    with pytest.raises(ValueError, match="must have one batch size"):
        model(tgt[:, :1], memory[:2], cache=cache)


@pytest.mark.sample(2)
@torch.no_grad()
def test_changed_weights_are_used() -> None:
    """Changed in place, and moved to other memory."""
    model, tgt, memory = decoder(batch_first=True), rand(N, 5, E), rand(N, S, E)
    caches = DecoderCache(), DecoderCache()
    for position, piece in enumerate(tgt.split(1, 1)):
        for parameter in model.parameters() if position > 2 else ():
            parameter.mul_(0.7)
            parameter.data = parameter.data.clone() if position > 3 else parameter.data
        got = model(piece, memory, cache=caches[0])
        with backend("torch"):
            close(got, model(piece, memory, cache=caches[1]))


@torch.no_grad()
def test_a_copied_cache_is_independent() -> None:
    model, tgt, memory, cache = decoder(batch_first=True), rand(N, 5, E), rand(N, S, E), DecoderCache()
    for piece in tgt[:, :3].split(1, 1):
        model(piece, memory, cache=cache)
    twin, other = copy.deepcopy(cache), rand(N, 2, E)
    for new, each in ((tgt[:, 3:], cache), (other, twin)):
        tgt = torch.cat([tgt[:, :3], new], 1)
        pieces = [model(piece, memory, cache=each) for piece in new.split(1, 1)]
        close(torch.cat(pieces, 1), whole(model, tgt, memory)[:, 3:])


@pytest.mark.sample(4)
@pytest.mark.parametrize("lengths", [None, [5, 3, 4]])
@torch.no_grad()
def test_a_graph_can_capture_steps_and_reorders(lengths: list[int] | None, route: str) -> None:
    """Every step makes the same calls at the same addresses, without synchronizing."""
    if route == "torch":
        return
    model, memory = decoder(batch_first=True), rand(N, S, E)
    cache = DecoderCache(12, source_lengths=None if lengths is None else torch.tensor(lengths))
    for _ in range(2):
        model(rand(N, 1, E), memory, cache=cache)

    def step(x: Tensor, rows: Tensor) -> None:
        cache.reorder(rows)
        model(x, memory, cache=cache)

    graphs = Watched(torch.device("cpu"))
    for _ in range(6):
        graphs(step, None, [rand(N, 1, E), torch.randint(N, (N,))])
    assert prepared(cache)
    assert len(graphs.runs[None]) == 6
