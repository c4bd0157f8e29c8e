"""Cost of a kernel's launch for the host: found by fasttfm's key, and by Triton itself.

    python -m benchmarks.launch_overhead

No device takes part: a driver that starts nothing stands in for that of an H200 (kernels/proof/stand_in.py), so what
a real one takes to start a kernel comes on top, for both alike. The kernels are compiled for sm_90 first, a second or
so each.
The two ways take turns; each time is the quickest of many short runs, and the median over the runs is kept beside it.
Appends one line to benchmarks/results/launch-overhead.jsonl.
"""

import functools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from benchmarks import command

_CALLS = 50  # in a run: less than a millisecond
CHIP = "sm_90"


def calls() -> dict[str, Callable[[], object]]:
    """Name -> what launches one kernel of that name, as a training step of paper-base does."""
    from fasttfm.kernels import cross_entropy, layer_norm, residual_add
    from fasttfm.kernels.attention import forward as attention
    from fasttfm.kernels.attention import short as attention_short

    def tensor(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    rows, weight, seed = tensor(64, 512), tensor(512), torch.zeros(1, dtype=torch.int64)
    short, long, lse = tensor(2, 8, 27, 64), tensor(2, 8, 200, 64), torch.zeros(2, 8, 27)
    target = torch.zeros(64, dtype=torch.int64)
    dropout: dict[str, Any] = {"dropout_p": 0.1, "seed": seed}
    masked = {"key_lengths": torch.tensor([27, 20]), "causal": True, "scale": 0.125, **dropout}
    smoothed: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": -100}
    return {
        "attention, short rows, forward": lambda: attention_short.forward(short, short, short, **masked),
        "attention, short rows, backward": lambda: attention_short.backward(short, short, short, short, lse, **masked),
        "attention, long rows, forward": lambda: attention.forward(long, long, long, **masked),
        "residual + dropout + LayerNorm, forward": lambda: layer_norm.residual_layer_norm(
            rows, weight, rows, weight, weight, 1e-5, **dropout
        ),
        "residual + dropout": lambda: residual_add.residual_add(rows, rows, **dropout),
        "cross entropy": lambda: cross_entropy.forward(rows, target, **smoothed),
    }


def launches() -> dict[str, tuple[Any, tuple, tuple, dict]]:
    """Name -> kernel, grid, arguments and constants of each call's launch."""
    from fasttfm.kernels.jit import Kernel

    result: list[tuple[Any, tuple, tuple, dict]] = []
    run = Kernel.run

    def logged(self: Any, *arguments: Any, grid: tuple, warmup: bool, **constants: Any) -> Any:
        result.append((self, grid, arguments, constants))
        return run(self, *arguments, grid=grid, warmup=warmup, **constants)

    with mock.patch.object(Kernel, "run", logged):
        for call in calls().values():
            call()
    return dict(zip(calls(), result, strict=True))


def microseconds(ways: dict[str, Callable[[], object]], runs: int) -> dict[str, dict[str, float]]:
    """The quickest run and the median one of each way, for one call."""

    def repeat(call: Callable[[], object]) -> None:
        for _ in range(_CALLS):
            call()

    seconds, _ = command.in_turns({name: functools.partial(repeat, call) for name, call in ways.items()}, runs)
    times = {name: [each / _CALLS * 1e6 for each in taken] for name, taken in seconds.items()}
    return {n: {"quickest": round(min(t), 2), "median": round(statistics.median(t), 2)} for n, t in times.items()}


def _launch(kernel: Any, grid: tuple, arguments: tuple, constants: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants)


def measure(runs: int) -> dict[str, Any]:
    """Microseconds by kernel and way."""
    from fasttfm.kernels.jit import OPTIONS
    from fasttfm.kernels.proof.stand_in import stand_in

    calls()  # imports every kernel that is launched
    stand_in(CHIP)
    result = {}
    for name, (kernel, grid, arguments, constants) in launches().items():
        named = {key: value for key, value in constants.items() if key not in OPTIONS}
        ways: dict[str, Callable[[], object]] = {
            "fasttfm": functools.partial(_launch, kernel, grid, arguments, named),
            "triton": functools.partial(kernel.run, *arguments, grid=grid, warmup=False, **constants),
        }
        result[name] = {"arguments": len(kernel.arg_names), **microseconds(ways, runs)}
    return result


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("launch_overhead", __doc__)
    parser.add_argument("--runs", type=int, default=500, help=f"runs of {_CALLS} launches (default: %(default)s)")
    args = parser.parse_args(argv)
    os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is imported
    torch.set_num_threads(1)
    record = command.keep(args.results, "launch_overhead", chip=CHIP, measured=measure(args.runs))
    print(json.dumps(record, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
