"""Attention's kernels for sm_90 in Gluon on long causal rows: their numbers, then their times.

    python -m benchmarks.queue.long_rows

A line for each decision (functional/tuning.py) between the kernel of every chip and one in Gluon by each of its tiles,
one for what SDPA's cuDNN takes, and how many tensor maps the driver refused. bfloat16, 1,024 columns of all heads.
"""

import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import command
from fasttfm import functional as F
from fasttfm.cli.parser import Parser
from fasttfm.functional import tuning
from fasttfm.kernels import choices, launch
from fasttfm.system import timing

_SHAPES = ((16, 1024, 64), (4, 4096, 64), (16, 1024, 128))
"""B, L, D."""
_SECONDS = 0.5


def _tell(name: str, run: tuning.Work, peer: Callable[[], object] | None) -> None:
    device = torch.device("cuda")
    clock, chip = timing.DeviceClock(device).microseconds, launch.chip(device)
    for decision, work in tuning.decisions_of([run], chip).items():
        if "hopper" in decision[0]:
            _, line = tuning.tune(decision, work, chip, clock, seconds=_SECONDS)
            print(f"{name}: {line}", flush=True)
    choices.keep(chip, {})
    if peer is not None:
        print(f"{name}: SDPA's cuDNN {timing.measure({'': peer}, clock, seconds=_SECONDS)['']} us", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    Parser(prog="python -m benchmarks.queue.long_rows", description=(__doc__ or "").split("\n")[0]).parse_args(argv)
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for (batch, length, width), rate in itertools.product(_SHAPES, (0.0, 0.1)):
            q, k, v = (
                torch.randn(batch, length, 1024 // width, width, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
                for _ in range(3)
            )

            def ours(q: Tensor, k: Tensor, v: Tensor, rate: float) -> tuple[Tensor, ...]:
                return (F.attention(q, k, v, causal=True, dropout_p=rate),)

            def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            name = f"{length} x {width}" + " with dropout" * (rate > 0.0)
            _tell(f"forward {name}", partial(ours, q, k, v, rate), None if rate else partial(cudnn, q, k, v))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            (output,), gradient = ours(q, k, v, rate), torch.randn_like(q)
            run, peer = (
                partial(torch.autograd.grad, x, inputs, gradient, retain_graph=True)
                for x in (output, output if rate else cudnn(q, k, v))
            )
            _tell(f"backward {name}", run, None if rate else peer)
    refused = [each for each in said if "no tensor map" in str(each.message)]
    print(*{str(each.message) for each in refused}, f"tensor maps refused: {len(refused)}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
