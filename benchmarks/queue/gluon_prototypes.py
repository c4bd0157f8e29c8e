"""Runs Gluon prototypes for long rows on sm_90, given as a folder: whether they end, are right, and how fast they are.

    python -m benchmarks.queue.gluon_prototypes FOLDER             on a device, beside SDPA
    python -m benchmarks.queue.gluon_prototypes FOLDER --compile   compiles what that launches

FOLDER holds gluon_forward.py and gluon_backward_keys.py, whose build() compiles a kernel. Causal, bfloat16, D 64 and
128; numbers (against float64) before times; a line for each. They leave when the kernels have their like.
"""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import command
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError
from fasttfm.timing import DeviceClock

_FORWARD = {64: (128, 2, 240, 24), 128: (128, 2, 240, 24)}
_KEYS = {64: (64, 2, 240, 24), 128: (64, 2, 240, 24)}
"""D -> tile, stages and registers of build()."""
_SHAPES = ((16, 1024), (4, 4096))
"""B, L with 1,024 columns of all heads."""
_ERROR = 0.02
"""Of the largest number."""
_PROGRAMS = 132


def _map(tensor: Tensor, rows: int) -> Any:
    """The tensor map of (rows, D) tiles of (B * H * L, D)."""
    from triton.experimental.gluon.language import NVMMASharedLayout, bfloat16
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    block = [rows, tensor.shape[1]]
    return TensorDescriptor.from_tensor(tensor, block, NVMMASharedLayout.get_default_for(block, bfloat16))


def _forward(module: Any, D: int) -> Callable[..., None]:
    tile, stages, consumer, producer = _FORWARD[D]
    kernel = module.build(D, tile, stages, consumer, producer)
    constants = (D, tile, 2, stages, 64, consumer, producer, False, False, module.five(tile))

    def launch(q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor, heads: int, L: int) -> None:
        nothing, scale = lse.view(torch.int32), D**-0.5 * math.log2(math.e)
        maps = _map(q, 64), _map(k, tile), _map(v, tile)
        seed = lse.view(torch.int64)
        kernel[(_PROGRAMS, 1, 1)](*maps, output, lse, nothing, 1, seed, 0, 0, 1.0, L, heads, scale, *constants)

    return launch


def _keys(module: Any, D: int) -> Callable[..., None]:
    tile, stages, consumer, producer = _KEYS[D]
    kernel = module.build(D, tile, stages, consumer, producer)
    constants = (D, tile, stages, consumer, producer)

    def launch(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        lse: Tensor,
        delta: Tensor,
        dk: Tensor,
        dv: Tensor,
        heads: int,
        L: int,
    ) -> None:
        maps = _map(q, tile), _map(g, tile), _map(k, 64), _map(v, 64)
        kernel[(_PROGRAMS, 1, 1)](*maps, lse, delta, dk, dv, L, heads, D**-0.5 * math.log2(math.e), *constants)

    return launch


def _tell(name: str, found: Sequence[Tensor], exact: Sequence[Tensor], *runs: Callable[[], object]) -> None:
    """A line: the largest error, and, where it is small, ours and the peer's times."""
    torch.cuda.synchronize()
    error = max(((x.double() - y).abs().max() / y.abs().max()).item() for x, y in zip(found, exact))
    if not error <= _ERROR:
        print(f"{name}: wrong, error {error:.3g}", flush=True)
        return
    clock = DeviceClock(torch.device("cuda"))
    times = [sorted(clock.microseconds(run) for _ in range(7))[3] for run in runs]
    print(f"{name}: {times[0]:.1f} us, SDPA cuDNN {times[1]:.1f} us, error {error:.3g}", flush=True)


def _measure(forward: Callable[..., None], keys: Callable[..., None], B: int, L: int, D: int) -> None:
    """Numbers of the first four heads, then times; a fault ends the process, as a device's error does."""
    heads, few = B * 1024 // D, 4 * L
    q, k, v, g = (torch.randn(heads * L, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    exact = [x[:few].view(4, L, D).double().requires_grad_() for x in (q, k, v)]
    hidden = torch.ones(L, L, dtype=torch.bool, device="cuda").triu(1)
    right = (exact[0] @ exact[1].mT * D**-0.5).masked_fill(hidden, -math.inf).softmax(-1) @ exact[2]
    gradients = torch.autograd.grad(right, exact, g[:few].view(4, L, D).double())
    output, lse = torch.empty_like(q), torch.empty(heads * L, device="cuda")
    peers = [x.view(B, -1, L, D).detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):

        def sdpa() -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(*peers, is_causal=True)  # type: ignore[arg-type, misc]

        peer = sdpa()
        run = partial(forward, q, k, v, output, lse, heads, L)
        run()
        _tell(f"forward {L} x {D}", [output[:few].view(4, L, D)], [right.detach()], run, sdpa)
        delta, dk, dv = (output.float() * g).sum(-1), torch.empty_like(k), torch.empty_like(v)
        run = partial(keys, q, k, v, g, lse, delta, dk, dv, heads, L)
        run()
        found = [x[:few].view(4, L, D) for x in (dk, dv)]
        theirs = partial(torch.autograd.grad, peer, peers, g.view_as(peer), retain_graph=True)
        _tell(f"keys {L} x {D}", found, gradients[1:], run, theirs)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.queue.gluon_prototypes", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of gluon_forward.py and gluon_backward_keys.py")
    parser.add_argument("--compile", action="store_true", help="compile what would be launched")
    args = parser.parse_args(argv)
    if not (args.folder / "gluon_forward.py").is_file():
        raise UserError(f"{args.folder} holds no gluon_forward.py: give the folder of the prototypes")
    sys.path.insert(0, str(args.folder.resolve()))
    forward, keys = map(importlib.import_module, ("gluon_forward", "gluon_backward_keys"))
    torch.manual_seed(0)
    for D in _FORWARD:
        runs = _forward(forward, D), _keys(keys, D)
        for B, L in () if args.compile else _SHAPES:
            _measure(*runs, B, L, D)
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main))
