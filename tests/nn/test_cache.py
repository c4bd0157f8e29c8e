"""TransformerDecoder's cache: token-by-token decoding equals one causal pass."""

import copy
import itertools
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


def prepared(cache: DecoderCache) -> bool:
    """Return whether the last step used prepared calls."""
    return cache._step is not None


PLAIN: list[dict[str, Any]] = [
    {}, {"norm_first": True}, {"norm_first": True, "norm": False}, {"bias": False, "activation": "gelu"},
    {"batch_first": False, "norm": False, "activation": torch.sigmoid},
]  # fmt: skip


@pytest.mark.sample(7)
@pytest.mark.parametrize("chunks", [(1,) * L, (3, 1, 1, 2), (L,)])
@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("options", PLAIN, ids=["plain", "pre-norm", "no last norm", "gelu", "sigmoid"])
@torch.no_grad()
def test_pieces_give_the_full_pass(
    options: dict[str, Any], unbatched: bool, chunks: tuple[int, ...], route: str
) -> None:
    """The cache outgrows its capacity. Steps are prepared where kernels compute, once it holds the memory's keys."""
    model, first = decoder(**{"batch_first": True, **options}), options.get("batch_first", True)
    shape = (-1, E) if unbatched else (N, -1, E) if first else (-1, N, E)
    tgt, memory = (rand(*[length if n < 0 else n for n in shape]) for length in (L, S))
    cache, dim, pieces = DecoderCache(capacity=2), shape.index(-1), []
    for position, piece in enumerate(tgt.split(list(chunks), dim)):
        pieces.append(model(piece, memory, cache=cache))
        single = chunks[position] == 1 and not unbatched
        assert prepared(cache) == (route == "triton" and position > 0 and single)
    close(torch.cat(pieces, dim), whole(model, tgt, memory))
    assert cache.length == L


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["target padding and a memory mask", "a causal memory", "a target mask"])
@torch.no_grad()
def test_masks_count_all_positions(kind: str) -> None:
    """A target mask replaces causality."""
    model = decoder(batch_first=True)
    tgt, memory, hidden, across = rand(N, L, E), rand(N, L, E), hides_some(N, L), hides_some(L, L)
    ones = torch.ones(L, L, dtype=torch.bool)
    window = ones.triu(1) | ones.tril(-3)
    masks: Callable[[int, int], dict[str, Any]] = {
        "target padding and a memory mask": lambda a, b: {
            "memory_mask": across[a:b], "tgt_key_padding_mask": hidden[:, :b]
        },
        "a causal memory": lambda a, b: {"memory_is_causal": True},
        "a target mask": lambda a, b: {"tgt_mask": window[a:b, :b], "tgt_is_causal": False},
    }[kind]  # fmt: skip
    cache = DecoderCache()
    pieces = [model(tgt[:, a:b], memory, cache=cache, **masks(a, b)) for a, b in itertools.pairwise((0, 3, 4, L))]
    close(torch.cat(pieces, 1), whole(model, tgt, memory, **masks(0, L)))


def test_a_cache_is_refused_where_it_would_be_wrong() -> None:
    """torch.nn's own forward, which computes subclasses of tensors, has none: each position would see itself alone."""
    model, memory, tgt = decoder(batch_first=True), rand(N, S, E), rand(N, 1, E)
    with pytest.raises(ValueError, match=r"cache.*torch\.no_grad"):
        model(tgt, memory, cache=DecoderCache())
    with torch.no_grad(), pytest.raises(ValueError, match="cache does not go with tensor subclasses"):
        model(TwoTensor(tgt, tgt), memory, cache=DecoderCache())
    theirs = fasttfm.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(E, H), 1)
    with pytest.raises(TypeError, match=r"fasttfm\.nn\.TransformerDecoderLayer"):
        theirs(tgt, memory, cache=DecoderCache())
    no_layers = fasttfm.nn.TransformerDecoder(fasttfm.nn.TransformerDecoderLayer(E, H), 0)
    assert torch.equal(no_layers(tgt, memory, cache=DecoderCache()), tgt)


MOVES = [[2, 0, 1], [1, 1, 0], [0, 2, 2], [2, 1], [1, 0], [0, 1, 1, 0], [3, 0, 2, 2], [0, 1, 3, 2]]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("capacity", "memory_too"), [(None, True), (30, False)])
@torch.no_grad()
def test_rows_are_reordered_again_and_again(capacity: int | None, memory_too: bool) -> None:
    """Rows move, repeat, end and multiply as in beam search, and one step has two positions."""
    model, cache = decoder(batch_first=True), DecoderCache(capacity)
    past = rand(N, 1, E)
    memory = rand(N, S, E) if memory_too else rand(1, S, E).expand(N, S, E)
    model(past, memory, cache=cache)
    for number, rows in enumerate(MOVES):
        index = torch.tensor(rows)
        cache.reorder(index, memory=memory_too or len(rows) != len(past))
        new = rand(len(rows), 2 if number == 6 else 1, E)
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
    "another order": lambda model: setattr(model.layers[1], "norm_first", True),
    "other heads": replaced("self_attn", lambda: fasttfm.nn.MultiheadAttention(E, 4, batch_first=True)),
    "a key more": replaced(
        "self_attn", lambda: fasttfm.nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True)
    ),
    "a weight with gaps": lambda model: setattr(model.layers[1].norm1.weight, "data", torch.randn(2 * E)[::2]),
    "training": lambda model: model.train(),
}
STILL_PLAIN: dict[str, Callable[[Any], object]] = {
    "other numbers": lambda model: [parameter.mul_(0.7) for parameter in model.parameters()],
    "other memory": lambda model: [setattr(each, "data", each.data * 0.7) for each in model.parameters()],
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("change", [*NOT_PLAIN, *STILL_PLAIN])
@torch.no_grad()
def test_changed_layers_are_used_as_they_are_now(change: str, route: str) -> None:
    """Changed before the first step, and between two steps; layers that are not plain are called."""
    for when in (0, 3) if change != "other heads" else (0,):
        model = decoder(batch_first=True, dropout=0.0)
        tgt, memory, ours, theirs = rand(N, 5, E), rand(N, S, E), DecoderCache(), DecoderCache()
        for position, piece in enumerate(tgt.split(1, 1)):
            if position == when:
                (NOT_PLAIN | STILL_PLAIN)[change](model)
            got = model(piece, memory, cache=ours)
            plain = change in STILL_PLAIN or position < when
            assert prepared(ours) == (route == "triton" and position > 0 and plain)
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
