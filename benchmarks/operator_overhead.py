"""Cost of an operator's call on the host, above the computation that it calls.

    python -m benchmarks.operator_overhead

The computation is one torch.empty_like, which is subtracted, so no device takes part. Beside fasttfm's registration
stand the ways that PyTorch offers: through the dispatcher with the same registration, torch.autograd.Function and
torch.library.custom_op. Each time is the quickest of many short runs, since whatever else the machine does only adds to
it; the median over the runs is kept beside it. Appends one line to benchmarks/results/operator-overhead.jsonl.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
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


def _save(ctx: Any, args: tuple, output: Tensor) -> None:
    ctx.save_for_backward(args[0], args[1])
    ctx.options = args[3:]


def _backward(ctx: Any, grad: Tensor) -> tuple:
    return grad, None, None, None, None, None


def _empty(call: Arguments) -> Tensor:
    return torch.empty_like(call.x)


_operator = Operator(
    "overhead",
    Arguments,
    "Tensor",
    _empty,
    _empty,
    save=lambda call, output: (call.x, call.weight, call.eps, call.dropout_p, call.site),
    saved=_Saved,
    backward=lambda saved, wanted, grad: {"x": grad},
    autocast=lambda call, dtype: call,
)
_SCHEMA = str(_operator.dispatched._schema).removeprefix("fasttfm::overhead")


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        output = _compute(*args)
        _save(ctx, args, output)
        return output

    backward = staticmethod(_backward)


_custom = torch.library.custom_op("fasttfm_overhead::custom", _compute, mutates_args=(), schema=_SCHEMA)
_custom.register_fake(_compute)
_custom.register_autograd(
    lambda ctx, grad: _backward(ctx, grad), setup_context=lambda ctx, inputs, output: _save(ctx, inputs, output)
)

WAYS: dict[str, Callable[..., Tensor]] = {
    "fasttfm": _operator.call,
    "dispatcher": _operator.dispatched,
    "autograd_function": _Function.apply,
    "custom_op": _custom,
}


def microseconds(call: Callable[..., Tensor], arguments: Arguments, runs: int) -> tuple[float, float]:
    """The quickest run and the median one, for one call."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(_CALLS):
            call(*arguments)
        times.append((time.perf_counter() - start) / _CALLS * 1e6)
    return min(times), statistics.median(times)


def measure(runs: int) -> dict[str, Any]:
    """Microseconds by way and circumstance, above the computation's own."""
    x, plain, trained = torch.zeros(8, 8), torch.zeros(8), torch.nn.Parameter(torch.zeros(8))
    without = Arguments(x, plain, None, 1e-5, 0.1, 3)
    with_gradient = Arguments(x, trained, None, 1e-5, 0.1, 3)
    bare, _ = microseconds(_compute, without, runs)

    def above(call: Callable[..., Tensor], arguments: Arguments) -> dict[str, float]:
        quickest, median = microseconds(call, arguments, runs)
        return {"quickest": round(quickest - bare, 2), "median": round(median - bare, 2)}

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
