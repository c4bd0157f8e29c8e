"""Compares implementations of attention on long causal rows on sm_90: results, then times.

    python -m benchmarks.queue.long_rows

Prints a line per decision (functional/tuning.py): between the portable kernel and the Gluon kernel with each of its
tiles, then between the fastest of these and cuDNN, for both passes; also with dropout, in a window and with packed
sequences. Last, the number of tensor maps that the driver refused. bfloat16, up to 1,024 columns over all heads.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from fasttfm import functional as F
from fasttfm.cli.parser import Parser
from fasttfm.functional import tuning
from fasttfm.kernels import launch
from fasttfm.system import timing

_SHAPES = ((16, 1024, 64), (4, 4096, 64), (16, 1024, 96), (16, 1024, 128), (4, 4096, 256))
"""B, L, D."""
_CASES: list[tuple[str, tuple[int, int, int], dict[str, Any]]] = [
    *(
        (words, shape, options)
        for shape in _SHAPES
        for words, options in (("", {}), (" with dropout", {"dropout_p": 0.1}))
    ),
    (" in a window", (4, 4096, 64), {"window": (1023, 0)}),
    (" packed", (16, 1024, 64), {}),
]
_SECONDS = 0.5


def _tell(name: str, run: tuning.Work, word: str) -> None:
    """Tune each decision of the work whose name contains `word`, and print a line for it; the fastest stays in use."""
    device = torch.device("cuda")
    clock, chip = timing.DeviceClock(device).microseconds, launch.chip(device)
    for decision, work in tuning.decisions_of([run], chip).items():
        if word in decision[0]:
            _, line = tuning.tune(decision, work, chip, clock, seconds=_SECONDS)
            print(f"{name}: {line}", flush=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, starts: tuple[Any, ...] = (), **options: Any) -> tuple[Tensor, ...]:
    attention: Any = F.varlen_attention if starts else F.attention
    return (attention(q, k, v, *starts, causal=True, **options),)


def main(argv: Sequence[str] | None = None) -> int:
    Parser(prog="python -m benchmarks.queue.long_rows", description=(__doc__ or "").split("\n")[0]).parse_args(argv)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for words, (batch, length, width), options in _CASES:
            shape = (batch, length, 1024 // width, width)
            q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
            attend: Any = partial(_attend, **options)
            if words == " packed":
                q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
                starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * length
                attend = partial(_attend, starts=(starts, starts, length, length))

            def both(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
                return torch.autograd.grad(_attend(q, k, v), (q, k, v), gradient)

            name, gradient = f"{length} x {width}{words}", torch.randn_like(q)
            with F.backend("triton"):
                _tell(f"forward {name}", partial(attend, q, k, v), "hopper")
                inputs = [x.requires_grad_() for x in (q, k, v)]
                run = partial(torch.autograd.grad, attend(q, k, v), inputs, gradient, retain_graph=True)
                _tell(f"backward {name}", run, "hopper")
            if not words:
                _tell(f"both {name}", partial(both, q, k, v, gradient), "library")
    refused = [str(warning.message) for warning in caught if "no tensor map" in str(warning.message)]
    print(*set(refused), f"tensor maps refused: {len(refused)}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
