"""Cost of an operator's call on the host, above the computation that it calls.

    python -m benchmarks.operator_overhead

The computation is one torch.empty_like, which is subtracted, so no device takes part. Beside fasttfm's registration
stand the ways that PyTorch offers: through the dispatcher with the same registration, and torch.library.custom_op. Each
time is the quickest of many short runs, since whatever else the machine does only adds to it; the median over the runs
is kept beside it. Appends one line to benchmarks/results/operator-overhead.jsonl.
"""

import gc
import json
import statistics
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import command
from fasttfm.cli.parser import InRange
from fasttfm.functional.operator import Operator

_CALLS = 100  # in a run: about a millisecond, less than a time slice


class Arguments(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    eps: float
    dropout_p: float
    site: int


class _Saved(NamedTuple):
    x: Tensor
    weight: Tensor
    eps: float
    dropout_p: float
    site: int


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dropout_p: float, site: int) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.options = inputs[3:]


_operator = Operator(
    "overhead",
    Arguments,
    "Tensor",
    lambda call: torch.empty_like(call.x),
    lambda call: torch.empty_like(call.x),
    save=lambda call, output: (call.x, call.weight, call.eps, call.dropout_p, call.site),
    saved=_Saved,
    backward=lambda saved, wanted, grad: {"x": grad},
    autocast=lambda call, dtype: call,
)
_SCHEMA = str(_operator.dispatched._schema).removeprefix("fasttfm::overhead")
_custom = torch.library.custom_op("fasttfm_overhead::custom", _compute, mutates_args=(), schema=_SCHEMA)
_custom.register_fake(_compute)
_custom.register_autograd(lambda ctx, grad: (grad, None, None, None, None, None), setup_context=_save)

WAYS: dict[str, Callable[..., Tensor]] = {
    "fasttfm": _operator.call,
    "dispatcher": _operator.dispatched,
    "custom_op": _custom,
}


def measure(runs: int) -> dict[str, Any]:
    """Microseconds by way and circumstance, above the computation's own."""
    x, plain, trained = torch.zeros(8, 8), torch.zeros(8), torch.nn.Parameter(torch.zeros(8))
    without, with_gradient = (Arguments(x, weight, None, 1e-5, 0.1, 3) for weight in (plain, trained))

    def microseconds(call: Callable[..., Tensor], arguments: Arguments) -> list[float]:
        run = partial(call, *arguments)  # with the garbage collection that callers have, which timeit turns off
        return [1e6 / _CALLS * each for each in timeit.repeat(run, gc.enable, repeat=runs, number=_CALLS)]

    bare = min(microseconds(_compute, without))

    def above(call: Callable[..., Tensor], arguments: Arguments) -> dict[str, float]:
        times = microseconds(call, arguments)
        return {"quickest": round(min(times) - bare, 2), "median": round(statistics.median(times) - bare, 2)}

    result: dict[str, Any] = {"computation_us": round(bare, 2)}
    for name, call in WAYS.items():
        result[name] = {"without_gradient_us": above(call, without), "with_gradient_us": above(call, with_gradient)}
    with torch.autocast("cpu", torch.bfloat16):
        result["fasttfm"]["autocast_without_gradient_us"] = above(WAYS["fasttfm"], without)
        result["fasttfm"]["autocast_with_gradient_us"] = above(WAYS["fasttfm"], with_gradient)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks.operator_overhead", __doc__)
    parser.add_argument(
        "--runs", type=InRange(1, 10**6), default=1000, help=f"runs of {_CALLS} calls (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(json.dumps(command.keep(args.results, "operator_overhead", measured=measure(args.runs)), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
