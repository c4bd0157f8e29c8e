"""Time and memory of the loss over large vocabularies, fused with the product that makes its logits and plain.

    python -m benchmarks.vocabulary_loss

Loss and both gradients of --rows hidden states of --width, for V = 8,000, 32,000 and 128,000, float32 on the CPU, one
thread unless OMP_NUM_THREADS says otherwise. The two take turns, each for --rounds rounds, and the least time counts.
Memory is the most that torch's allocator held above what was there before, gradients included. Prints a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as nnF

from benchmarks import command
from benchmarks.measure.clocks import host_peak_bytes
from benchmarks.measure.text_table import aligned
from fasttfm import functional as F
from fasttfm.cli.parser import Parser

VOCABULARIES = (8_000, 32_000, 128_000)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Summed loss without the logits of all rows at once."""
    return F.linear_cross_entropy(hidden, weight, target, label_smoothing=0.1)[0]


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The same in two calls of PyTorch, which keep the logits and their gradient."""
    return nnF.cross_entropy(nnF.linear(hidden, weight), target, label_smoothing=0.1, reduction="sum")


WAYS: dict[str, Loss] = {"fused": fused, "plain": plain}


def measure(rows: int, width: int, vocabulary: int, rounds: int) -> dict[str, tuple[float, int]]:
    """Name -> least seconds of loss and gradients, and the most bytes held meanwhile."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(vocabulary, width) * width**-0.5).requires_grad_()
    target = torch.randint(vocabulary, (rows,))

    def gradients(loss: Loss) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(hidden, weight, target), (hidden, weight))

    ways = {name: partial(gradients, loss) for name, loss in WAYS.items()}
    seconds, _ = command.in_turns(ways, rounds, warm_up=False)
    return {name: (min(seconds[name]), host_peak_bytes(way)) for name, way in ways.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.vocabulary_loss", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1600, help="hidden states (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of a hidden state (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both (default: %(default)s)")
    args = parser.parse_args(argv)
    lines = [("V", *(f"{name}, {unit}" for name in WAYS for unit in ("ms", "MiB")))]
    for vocabulary in VOCABULARIES:
        results = measure(args.rows, args.width, vocabulary, args.rounds)
        cells = (cell for s, size in results.values() for cell in (f"{s * 1e3:.1f}", f"{size / 2**20:.1f}"))
        lines.append((f"{vocabulary:,}", *cells))
    print(aligned(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
