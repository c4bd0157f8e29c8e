"""Cases of `python -m benchmarks host`: operators, modules, a training step, a search step and a bare launch.

Tensors are tiny, so that the host is the bottleneck: (B, H, L, D), (B, L, E), weights (F, E), a table (V, E).
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fasttfm.nn as ours
from benchmarks.cases import synthetic
from benchmarks.cases.training_step import loaded
from benchmarks.peers import huggingface, torch_nn
from fasttfm import functional as F
from fasttfm.kernels.jit import Launch, typed
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig
from fasttfm.search.device.engine import Engine
from fasttfm.search.device.state import Sizes

Call = Callable[[], object]
Tensors = Callable[[], Tensor]
Named = tuple[str, Call, Call | None]
"""(name, our call, the peer's call or None)."""
Sides = tuple[Sequence[Call], Sequence[Call]]
"""Our calls and the peer's: none, one, or a search of FEW and one of MANY steps."""
FEW, MANY = 6, 26
"""Steps of two searches, whose difference gives the cost per step."""
_B, _H, _L, _D, _E, _F, _V = 2, 4, 5, 16, 64, 128, 64
_BOTH = "forward + backward"


class Case(NamedTuple):
    """A call and the peer's equivalent."""

    what: str
    make: Callable[[], Sides]
    """Raises ImportError if the peer is not installed."""
    peer: str = "PyTorch"


def cases(device: torch.device) -> Iterator[Case]:
    """All cases, in the report's order."""
    for what, mine, theirs in (*_operators(device), *_modules(device)):
        yield Case(what, lambda mine=mine, theirs=theirs: ([mine], [theirs] if theirs else []))  # type: ignore[misc]
    yield Case(f"layer_norm in float32, {_BOTH}", partial(_liger, device), "Liger Kernel")
    for name in ("layer_norm", "attention"):
        yield Case(f"a launch alone, {name}", partial(_launch, name, device), "Triton")
    yield Case("a training step, 6 + 6 layers, bfloat16", partial(_step, device), "torch.nn")
    for beam in (1, 4):
        yield Case(f"a step of a search without its graph, beam {beam}", partial(_search, beam, device), "Hugging Face")


def _tensors(device: torch.device) -> Callable[..., Tensor]:
    """Factory of inputs, in bfloat16; in float32 on a CPU, where bfloat16 products take tens of microseconds."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return partial(torch.randn, device=device, dtype=dtype, requires_grad=True)


def _backward(call: Callable[[], Tensor], like: Tensor) -> Call:
    gradient = torch.ones_like(like)
    return lambda: call().backward(gradient)


def _operators(device: torch.device) -> Iterator[Named]:
    tensor, whole = _tensors(device), partial(torch.tensor, device=device)
    drop: dict[str, Any] = {"dropout_p": 0.1, "seed": whole([3])}
    x, residual, weight, bias = tensor(_B, _L, _E), tensor(_B, _L, _E), tensor(_E), tensor(_E)

    def both(name: str, mine: Tensors, theirs: Tensors | None, like: Tensor = x) -> Named:
        return f"{name}, {_BOTH}", _backward(mine, like), theirs and _backward(theirs, like)

    yield from _attention(device, both, drop)
    norm = partial(T.layer_norm, normalized_shape=(_E,), weight=weight, bias=bias)
    yield both("layer_norm", lambda: F.layer_norm(x, weight, bias), lambda: norm(x))
    yield both(
        "residual_layer_norm, dropout",
        lambda: F.residual_layer_norm(x, residual, weight, bias, x_bias=bias, **drop)[0],
        lambda: norm(residual + T.dropout(x + bias, 0.1)),
    )
    w1, b1, w2, b2 = tensor(_F, _E), tensor(_F), tensor(_E, _F), tensor(_E)
    yield both(
        "feed_forward, dropout",
        lambda: F.feed_forward(x, w1, b1, w2, b2, **drop),
        lambda: T.linear(T.dropout(T.relu(T.linear(x, w1, b1)), 0.1), w2, b2),
    )
    hidden, table, target = tensor(10, _E), tensor(_V, _E), torch.randint(4, _V, (10,), device=device)
    yield (
        f"linear_cross_entropy, {_BOTH}",
        lambda: F.linear_cross_entropy(hidden, table, target)[0].backward(),
        lambda: T.cross_entropy(T.linear(hidden, table), target, reduction="sum").backward(),
    )
    tokens, places = target.view(_B, _L), tensor(16, _E).detach()
    yield both(
        "embed, dropout",
        lambda: F.embed(tokens, table, places, scale=8.0, **drop),
        lambda: T.dropout(T.embedding(tokens, table) * 8.0 + places[:_L], 0.1),
    )


def _attention(device: torch.device, both: Callable[..., Named], drop: dict[str, Any]) -> Iterator[Named]:
    tensor, whole = _tensors(device), partial(torch.tensor, device=device)
    q, k, v = (tensor(_B, _H, _L, _D) for _ in range(3))
    lengths, mask = whole([_L, 3]), torch.ones(_B, 1, _L, _L, dtype=torch.bool, device=device)
    fixed: Any = [q.detach(), k.detach(), v.detach()]
    sdpa: Any = T.scaled_dot_product_attention

    def ours(**options: Any) -> Tensors:
        return lambda: F.attention(q, k, v, **options)

    def theirs(**options: Any) -> Tensors:
        return lambda: sdpa(q, k, v, **options)

    yield "attention, no gradient", lambda: F.attention(*fixed), lambda: sdpa(*fixed)
    yield both("attention", ours(), theirs(), q)
    yield both(
        "attention, lengths and dropout", ours(key_lengths=lengths, **drop), theirs(attn_mask=mask, dropout_p=0.1), q
    )
    yield both("attention, mask", ours(mask=mask), theirs(attn_mask=mask), q)
    packed = tensor(_B, _L, 3, _H, _D)

    def unpacked() -> Tensor:
        heads = packed.permute(2, 0, 3, 1, 4).unbind(0)
        return sdpa(*heads, dropout_p=0.1).transpose(1, 2).reshape(_B, _L, _E)

    yield both(
        "packed_qkv_attention, lengths and dropout",
        lambda: F.packed_qkv_attention(packed, key_lengths=lengths, **drop),
        unpacked,
    )
    starts = whole([0, 5, 8], dtype=torch.int32)
    a, b, c = (tensor(8, _H, _D) for _ in range(3))
    yield both("varlen_attention", lambda: F.varlen_attention(a, b, c, starts, starts, _L, _L), None, a)


def _modules(device: torch.device) -> Iterator[Named]:
    x = torch.randn(_B, _L, _E, device=device, requires_grad=True)

    def both(name: str, *sizes: int, **options: Any) -> list[nn.Module]:
        return [getattr(package, name)(*sizes, batch_first=True, **options).to(device) for package in (ours, nn)]

    mine, theirs = (
        _backward(lambda module=module: module(x, x, x, need_weights=False)[0], x)  # type: ignore[misc]
        for module in both("MultiheadAttention", _E, _H, dropout=0.1)
    )
    yield f"nn.MultiheadAttention, {_BOTH}", mine, theirs
    mine, theirs = (_backward(partial(module, x), x) for module in both("TransformerEncoderLayer", _E, _H, _F))
    yield f"nn.TransformerEncoderLayer, {_BOTH}", mine, theirs
    decoder = ours.TransformerDecoder(ours.TransformerDecoderLayer(_E, _H, _F, batch_first=True), 6).to(device).eval()
    token, rows, cache = x[:, :1].detach(), torch.tensor([1, 0], device=device), ours.DecoderCache(4096)

    def step() -> Tensor:
        with torch.no_grad():
            cache.reorder(rows, memory=False)
            return decoder(token, x, cache=cache)

    yield "nn.TransformerDecoder, a step with its cache, 6 layers", step, None


def _liger(device: torch.device) -> Sides:
    function = importlib.import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    x = torch.randn(_B * _L, _E, device=device, requires_grad=True)
    weight, bias = (torch.ones(_E, device=device, requires_grad=True) for _ in range(2))
    mine = _backward(lambda: F.layer_norm(x, weight, bias), x)
    return [mine], [_backward(lambda: function.apply(x, weight, bias, 1e-5), x)]


def _launch(name: str, device: torch.device) -> Sides:
    """An operator's forward launch, by our Launch and by Triton's JITFunction of the same kernel."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Launch, tuple]] = []
    tensor = _tensors(device)
    x, row = (tensor(_B, _H, _L, _E) for _ in range(2))
    run = Launch.__call__

    def record(launch: Launch, *arguments: Any) -> None:
        launches.append((launch, arguments))
        run(launch, *arguments)

    with mock.patch.object(Launch, "__call__", record):
        F.attention(x, x, x) if name == "attention" else F.layer_norm(x, row[0, 0, 0], row[0, 0, 0])
    launch, arguments = launches[0]
    by_triton: Any = JITFunction(launch.kernel.fn)
    grid, constants = launch.grid, launch.constants
    named = tuple(map(typed, launch.kernel.kinds.values(), arguments))  # compiled, a kernel reads fields by name
    return [lambda: launch(*arguments)], [lambda: by_triton[grid](*named, **constants)]


def _model(device: torch.device, **changes: Any) -> tuple[TransformerConfig, dict[str, Tensor], Transformer]:
    sizes = {"vocab_size": _V, "d_model": _E, "heads": _H, "d_ff": _F, "encoder_layers": 6, "decoder_layers": 6}
    config = TransformerConfig(**{**sizes, "max_length": 64, **changes})
    weights = torch_nn.TorchTransformer(config).state_dict()
    return config, weights, loaded(Transformer, config, weights, device)


def _step(device: torch.device) -> Sides:
    """Forward and backward of a training step, without the optimizer."""
    config, _, model = _model(device, dropout=0.1)
    theirs = torch_nn.TorchTransformer(config).to(device)
    batch = synthetic.batch(_B, _L, 0.3, _V, seed=0).to(device)

    def step(module: nn.Module, loss: Callable[[], Tensor]) -> Call:
        parameters = list(module.train().parameters())

        def run() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                value = loss() / batch.target_tokens
            value.backward()
            for parameter in parameters:
                parameter.grad = None

        return run

    return (
        [step(model, lambda: model.batch_loss(batch, label_smoothing=0.1)[0])],
        [step(theirs, lambda: torch_nn.loss(theirs, batch, 0.1))],
    )


def _search(beam: int, device: torch.device) -> Sides:
    config, weights, model = _model(device, dropout=0.0)
    model.eval()
    marian = huggingface.marian(config, weights).to(device)
    sources = [[5, 6, 7, 8, 9, 3]]
    with torch.inference_mode():
        sizes = Sizes(1, beam, beam, 32, 32, 2, config.vocab_size)
        engine = Engine(model, sizes, DecodingConfig(), device, kernels=True)

    def step() -> None:
        with torch.inference_mode():
            engine.step()

    def generate(steps: int) -> Call:
        return partial(huggingface.Generate(marian, beam, steps), sources)

    return [step], [generate(FEW), generate(MANY)]
