"""Host time of calls beside PyTorch doing the same, on a GPU whose kernels take no time to speak of.

    python -m benchmarks host

Tensors are so small that the host is what takes the time: calls follow one another, and nothing waits for the device in
between. Each is timed in turns with the peer's, and the least of many short runs stands for it, since whatever else the
machine does only adds to it. A CPU computes in the call itself, so its times say nothing of this.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as T
from torch import Tensor, nn

import fasttfm.nn as ours
from benchmarks import command
from fasttfm import functional as F
from fasttfm.cli.parser import InRange
from fasttfm.machine import pick_device

Call = Callable[[], object]
_B, _H, _L, _D, _E, _F, _V = 2, 4, 5, 16, 64, 128, 64


def operators(device: torch.device) -> Iterator[tuple[str, Call, Call]]:
    """Name, ours and PyTorch's, of calls in half precision: (B, H, L, D), (B, L, E) and weights beside them."""
    half = torch.bfloat16

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=half, requires_grad=True)

    def backward(call: Callable[[], Tensor], like: Tensor) -> Call:
        gradient = torch.ones_like(like)
        return lambda: call().backward(gradient)

    q, k, v = (tensor(_B, _H, _L, _D) for _ in range(3))
    lengths, seed = torch.tensor([_L, 3], device=device), torch.tensor([3], device=device)
    mask = torch.ones(_B, 1, _L, _L, dtype=torch.bool, device=device)
    drop: dict[str, Any] = {"dropout_p": 0.1, "seed": seed}

    def attention(**options: Any) -> Callable[[], Tensor]:
        return lambda: F.attention(q, k, v, **options)

    def sdpa(**options: Any) -> Callable[[], Tensor]:
        return lambda: T.scaled_dot_product_attention(q, k, v, **options)

    fixed = q.detach(), k.detach(), v.detach()
    yield "attention", partial(F.attention, *fixed), partial(T.scaled_dot_product_attention, *fixed)
    yield "attention, forward + backward", backward(attention(), q), backward(sdpa(), q)
    yield (
        "attention, lengths and dropout, forward + backward",
        backward(attention(key_lengths=lengths, **drop), q),
        backward(sdpa(attn_mask=mask, dropout_p=0.1), q),
    )
    x, residual, weight, bias = tensor(_B, _L, _E), tensor(_B, _L, _E), tensor(_E), tensor(_E)
    yield (
        "layer_norm, forward + backward",
        backward(lambda: F.layer_norm(x, weight, bias), x),
        backward(lambda: T.layer_norm(x, (_E,), weight, bias), x),
    )
    yield (
        "residual_layer_norm, dropout, forward + backward",
        backward(lambda: F.residual_layer_norm(x, residual, weight, bias, post_norm=True, **drop)[0], x),
        backward(lambda: T.layer_norm(residual + T.dropout(x, 0.1), (_E,), weight, bias), x),
    )
    w1, b1, w2, b2 = tensor(_F, _E), tensor(_F), tensor(_E, _F), tensor(_E)
    yield (
        "feed_forward, dropout, forward + backward",
        backward(lambda: F.feed_forward(x, w1, b1, w2, b2, **drop), x),
        backward(lambda: T.linear(T.dropout(T.relu(T.linear(x, w1, b1)), 0.1), w2, b2), x),
    )
    hidden, table, target = tensor(10, _E), tensor(_V, _E), torch.randint(4, _V, (10,), device=device)
    yield (
        "linear_cross_entropy, forward + backward",
        lambda: F.linear_cross_entropy(hidden, table, target)[0].backward(),
        lambda: T.cross_entropy(T.linear(hidden, table), target, reduction="sum").backward(),
    )
    tokens = torch.randint(4, _V, (_B, _L), device=device)
    yield (
        "embed, dropout, forward + backward",
        backward(lambda: F.embed(tokens, table, scale=8.0, **drop), x),
        backward(lambda: T.dropout(T.embedding(tokens, table) * 8.0, 0.1), x),
    )

    mine, theirs = (
        backward(partial(_first, module, x, x, x, need_weights=False), x)
        for module in _like_torch("MultiheadAttention", x, _E, _H)
    )
    yield "nn.MultiheadAttention, forward + backward", mine, theirs
    mine, theirs = (backward(partial(module, x), x) for module in _like_torch("TransformerEncoderLayer", x, _E, _H, _F))
    yield "nn.TransformerEncoderLayer, forward + backward", mine, theirs


def _like_torch(name: str, like: Tensor, *arguments: int) -> list[nn.Module]:
    """Ours and torch.nn's module of the name, on the tensor's device and in its dtype."""
    return [getattr(module, name)(*arguments, batch_first=True).to(like) for module in (ours, nn)]


def _first(module: nn.Module, *arguments: Tensor, **options: Any) -> Tensor:
    return module(*arguments, **options)[0]


def least(calls: Sequence[Call], device: torch.device, rounds: int, run: int = 50) -> list[float]:
    """Microseconds of the host for each call, the least of so many runs of `run` calls, in turns."""
    best = [math.inf] * len(calls)
    for _, (place, call) in itertools.product(range(rounds), enumerate(calls)):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an empty queue: a full one would make the host wait
        start = time.perf_counter()
        for _ in range(run):
            call()
        best[place] = min(best[place], (time.perf_counter() - start) / run * 1e6)
    return best


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks host", __doc__)
    parser.add_argument("--rounds", type=InRange(1, 10**6), default=40, help="runs of 50 calls (default: %(default)s)")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
    args = parser.parse_args(argv)
    device = pick_device(args.device)
    command.writable(args.results, "--results")
    measured = []
    for name, mine, theirs in operators(device):
        for call in (mine, theirs):
            call()
        us, peer_us = least((mine, theirs), device, args.rounds)
        measured.append(
            {"what": name, "us": round(us, 1), "peer_us": round(peer_us, 1), "ratio": round(us / peer_us, 3)}
        )
        print(json.dumps(measured[-1]), flush=True)
    command.keep(args.results, "host", measured=measured)
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
