"""Kernels of other projects, executed from their PTX on a CPU and held against PyTorch.

    TRITON_INTERPRET=0 python -m tests.executed.foreign --packages /folder/of/site-packages [--chip sm_90]

Runs the cases of each package that is installed, or lies in the folder, forward and backward; of a package that is not
there it says so. Puts a line for each package and chip into benchmarks/results/foreign.jsonl: the package's version,
how many cases pass, and of each other case what became of it. Ends with status 1 where a case does not pass.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import command
from ptx_check import FaultyKernel, Unsupported, executed

CHIPS = ("sm_80", "sm_90", "sm_100")
Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""What a kernel gives, and what PyTorch does."""


def _compared(ours: Callable, theirs: Callable, *shapes: tuple[int, ...]) -> Pairs:
    """Outputs and gradients of two functions of tensors of these shapes."""
    results = []
    for function in (ours, theirs):
        generator = torch.Generator().manual_seed(1)
        given = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
        result = function(*given)
        (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
        results.append([result.detach(), *(x.grad for x in given)])
    yield from zip(*results)


def liger_rms_norm() -> Pairs:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    ours = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)  # noqa: E731
    return _compared(ours, lambda x, w: F.rms_norm(x, (96,), w, 1e-6), (6, 96), (96,))


def liger_layer_norm() -> Pairs:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    ours = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6)  # noqa: E731
    return _compared(ours, lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6), (6, 96), (96,), (96,))


def liger_swiglu() -> Pairs:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return _compared(LigerSiLUMulFunction.apply, lambda a, b: F.silu(a) * b, (5, 130), (5, 130))


def liger_geglu() -> Pairs:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    theirs = lambda a, b: F.gelu(a, approximate="tanh") * b  # noqa: E731
    return _compared(LigerGELUMulFunction.apply, theirs, (5, 130), (5, 130))


def liger_cross_entropy() -> Pairs:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    target = torch.arange(7) * 11
    target[2] = -100

    def ours(x: torch.Tensor) -> torch.Tensor:
        found = LigerCrossEntropyFunction.apply(x, target, None, -100)
        return (found[0] if isinstance(found, tuple) else found).reshape(1)

    return _compared(ours, lambda x: F.cross_entropy(x, target).reshape(1), (7, 130))


PACKAGES: dict[str, tuple[Callable[[], Pairs], ...]] = {
    "liger_kernel": (liger_rms_norm, liger_layer_norm, liger_swiglu, liger_geglu, liger_cross_entropy),
}


def outcome(case: Callable[[], Pairs], chip: str) -> str:
    """Run a case on a chip: passed, or what became of it."""
    try:
        with executed(chip):
            for actual, expected in case():
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    except FaultyKernel as error:
        return f"fault: {error.faults[0]}"
    except Unsupported as error:
        return f"refused: {error}"
    except AssertionError as error:
        return f"wrong: {str(error).splitlines()[0]}"
    return "passed"


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.executed.foreign", __doc__)
    parser.add_argument("--packages", type=Path, help="a folder that packages were installed in")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="one, or several in turn (default: all)")
    args = parser.parse_args(argv)
    if args.packages:
        sys.path.append(str(args.packages))
    failed = 0
    for package, cases in PACKAGES.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} is not installed")
            continue
        for chip in args.chip or CHIPS:
            began = time.process_time()
            found = {case.__name__: outcome(case, chip) for case in cases}
            others = {name: what for name, what in found.items() if what != "passed"}
            told: dict[str, Any] = {"package": package, "version": version, "chip": chip, "cases": len(cases)}
            told |= {"passed": len(cases) - len(others), "others": others}
            told["cpu_seconds"] = round(time.process_time() - began, 1)
            command.keep(args.results, "foreign", key=lambda record: (record["package"], record["chip"]), **told)
            print(
                f"{package} {version}, {chip}: {told['passed']} of {told['cases']} cases pass {others or ''}",
                flush=True,
            )
            failed += len(others)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
