"""Kernels of other projects, executed from their PTX on a CPU and compared with PyTorch.

    TRITON_INTERPRET=0 python -m tests.executed.foreign --packages /folder/of/site-packages [--chip sm_90]

Runs the cases of every package that is installed or in the folder of --packages (such as a checkout), forward and
backward, and names missing packages. Records a line per package and chip in benchmarks/results/foreign.jsonl: version
of the package, number of passing cases, and the outcome of every other case. Exit status 1 if a case fails, unless
Triton does not compile it for the chip.
"""

import importlib.metadata
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from benchmarks import command
from benchmarks.measure.records import Record
from ptx_check import FaultyKernel, Unsupported, executed
from tests.executed import foreign_serving
from tests.executed.foreign_serving import Pairs, bare_module, compared, variant

CHIPS = ("sm_60", "sm_80", "sm_90", "sm_100")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2}
UNCOMPILED = "not compiled: "
_MANY_CONFIGURATIONS = ("fla_", "cce_", "torchao_", "mamba_")


def liger_rms_norm() -> Pairs:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    ours = lambda x, w: LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)  # noqa: E731
    return compared(ours, lambda x, w: F.rms_norm(x, (96,), w, 1e-6), (6, 96), (96,))


def liger_layer_norm() -> Pairs:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    ours = lambda x, w, b: LigerLayerNormFunction.apply(x, w, b, 1e-6)  # noqa: E731
    return compared(ours, lambda x, w, b: F.layer_norm(x, (96,), w, b, 1e-6), (6, 96), (96,), (96,))


def liger_swiglu() -> Pairs:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return compared(LigerSiLUMulFunction.apply, lambda a, b: F.silu(a) * b, (5, 130), (5, 130))


def liger_geglu() -> Pairs:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    theirs = lambda a, b: F.gelu(a, approximate="tanh") * b  # noqa: E731
    return compared(LigerGELUMulFunction.apply, theirs, (5, 130), (5, 130))


def liger_cross_entropy() -> Pairs:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    target = torch.arange(7) * 11
    target[2] = -100

    def ours(x: torch.Tensor) -> torch.Tensor:
        result = LigerCrossEntropyFunction.apply(x, target, None, -100)
        return (result[0] if isinstance(result, tuple) else result).reshape(1)

    return compared(ours, lambda x: F.cross_entropy(x, target).reshape(1), (7, 130))


def _joined(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def flash_layer_norm() -> Pairs:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    def theirs(x, w, b, residual):
        return _joined(F.layer_norm(x + residual, (96,), w, b, 1e-6), x + residual)

    ours = lambda x, w, b, residual: _joined(*layer_norm_fn(x, w, b, residual, prenorm=True))  # noqa: E731
    return compared(ours, theirs, (6, 96), (96,), (96,), (6, 96))


def flash_layer_norm_of_two() -> Pairs:
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    def theirs(x, w, b, x1, w1, b1):
        return _joined(F.layer_norm(x + x1, (80,), w, b, 1e-6), F.layer_norm(x + x1, (80,), w1, b1, 1e-6))

    def ours(x, w, b, x1, w1, b1):
        return _joined(*layer_norm_fn(x, w, b, x1=x1, weight1=w1, bias1=b1))

    return compared(ours, theirs, (5, 80), (80,), (80,), (5, 80), (80,), (80,))


def flash_rms_norm_with_dropout() -> Pairs:
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    kept: list[torch.Tensor] = []

    def ours(x, w, residual):
        out, mask, _ = rms_norm_fn(x, w, None, residual, dropout_p=0.3, return_dropout_mask=True)
        kept.append(mask)
        return out

    theirs = lambda x, w, residual: F.rms_norm(x * kept[0] / 0.7 + residual, (96,), w, 1e-6)  # noqa: E731
    return compared(ours, theirs, (6, 96), (96,), (6, 96))


def flash_cross_entropy() -> Pairs:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    target = torch.arange(7) * 11
    target[2] = -100

    def theirs(x: torch.Tensor) -> torch.Tensor:
        squares = 0.01 * torch.logsumexp(x, -1).square() * (target != -100)
        return F.cross_entropy(x, target, reduction="none", label_smoothing=0.1) + squares

    ours = lambda x: cross_entropy_loss(x, target, label_smoothing=0.1, lse_square_scale=0.01)[0]  # noqa: E731
    return compared(ours, theirs, (7, 130))


def _flash_rotary(interleaved: bool) -> Pairs:
    from flash_attn.ops.triton.rotary import apply_rotary

    angles = torch.arange(9)[:, None] * torch.linspace(1, 0.1, 16)
    cos, sin = angles.cos(), angles.sin()

    class Rotary(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return apply_rotary(x, cos, sin, interleaved=interleaved)

        @staticmethod
        def backward(ctx, gradient):
            return apply_rotary(gradient, cos, sin, interleaved=interleaved, conjugate=True)

    def theirs(x):
        turned, rest = x[..., :32], x[..., 32:]
        pairs = turned.unflatten(-1, (16, 2) if interleaved else (2, 16))
        a, b = pairs.unbind(-1 if interleaved else -2)
        c, s = cos[:, None], sin[:, None]
        both = torch.stack([a * c - b * s, a * s + b * c], -1 if interleaved else -2)
        return torch.cat([both.flatten(-2), rest], -1)

    return compared(Rotary.apply, theirs, (2, 9, 3, 40))


def _flash_attention(causal: bool, keys: int, width: int) -> Pairs:
    """flash_attn's attention in Triton, for AMD: it compiles for NVIDIA without one compiler hint."""
    from flash_attn.flash_attn_triton_amd.interface_fa import bwd, fwd

    options = (width**-0.5, causal, -1, -1, 0.0)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse, *_ = fwd(q, k, v, None, None, 0.0, *options, False)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, gradient):
            q, k, v, out, lse = ctx.saved_tensors
            gradients = [torch.empty_like(x) for x in (q, k, v)]
            bwd(gradient.contiguous(), q, k, v, out, lse, *gradients, None, 0.0, *options, False)
            return tuple(gradients)

    def theirs(*given: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in given)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    def without_hint(kernel: JITFunction, *given: Any, waves_per_eu: int = 0, **options: Any) -> Any:
        return run(kernel, *given, **options)

    run = JITFunction.run
    shapes = (1, keys if causal else 50, 2, width), (1, keys, 2, width), (1, keys, 2, width)
    with mock.patch.object(JITFunction, "run", without_hint):
        yield from compared(Attention.apply, theirs, *shapes, dtype=torch.float16)


def flash_linear() -> Pairs:
    # Triton 3 has no triton.ops, which provides the pruning of configurations
    name, pruned = "triton.ops.matmul_perf_model", lambda configs, *_, **__: configs[:2]
    model = bare_module(name, early_config_prune=pruned, estimate_matmul_time=lambda **_: 1.0)
    sys.modules |= {"triton.ops": bare_module("triton.ops"), name: model}
    from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act

    class Linear(torch.autograd.Function):
        """relu(x @ w.T + b) squared; backward is the gradient of x without the derivative of the activation."""

        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(w)
            return triton_linear_act(x, w, b, activation="squared_relu", save_act_input=True)[0]

        @staticmethod
        def backward(ctx, gradient):
            return triton_dgrad_act(gradient.contiguous(), *ctx.saved_tensors), None, None

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, b):
            ctx.save_for_backward(w)
            return F.relu(F.linear(x, w, b)).square()

        @staticmethod
        def backward(ctx, gradient):
            return gradient @ ctx.saved_tensors[0], None, None

    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(256, 64, generator=generator).half() / 8, torch.randn(256, generator=generator).half()
    ours = lambda x: Linear.apply(x, weight, bias)  # noqa: E731
    theirs = lambda x: Plain.apply(x, weight.float(), bias.float())  # noqa: E731
    return compared(ours, theirs, (256, 64), dtype=torch.float16)


def _recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, beta: Any = None) -> Any:
    """Linear attention as a recurrence: q, k, v (B, T, H, D); kept (B, T, H, D): decay of the state; beta (B, T, H):
    of the delta rule."""
    state, outputs = 0.0, []
    for t in range(q.shape[1]):
        state = kept[:, t, :, :, None] * state
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - (state * k[:, t, :, :, None]).sum(-2) if t else value)
        state = state + k[:, t, :, :, None] * value[:, :, None]
        outputs.append((q[:, t, :, :, None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1)


_STEPS = (1, 70, 2, 32)


def fla_retention() -> Pairs:
    from fla.ops.retention import chunk_retention

    kept = (1 - 2.0 ** (-5 - torch.arange(2.0)))[:, None].expand(_STEPS)
    return compared(
        lambda q, k, v: chunk_retention(q, k, v)[0],
        lambda q, k, v: _recurrence(q, k, v, kept), *[_STEPS] * 3, dtype=torch.float16,
    )  # fmt: skip


def fla_gla() -> Pairs:
    from fla.ops.gla import chunk_gla

    return compared(
        lambda q, k, v, g: chunk_gla(q, k, v, F.logsigmoid(g))[0],
        lambda q, k, v, g: _recurrence(q, k, v, g.sigmoid()), *[_STEPS] * 4, dtype=torch.float16,
    )  # fmt: skip


def fla_delta_rule() -> Pairs:
    from fla.ops.delta_rule import chunk_delta_rule

    def theirs(q, k, v, b):
        return _recurrence(q, F.normalize(k, dim=-1), v, torch.ones(_STEPS), b.sigmoid())

    return compared(
        lambda q, k, v, b: chunk_delta_rule(q, F.normalize(k, dim=-1), v, b.sigmoid())[0],
        theirs, *[_STEPS] * 3, _STEPS[:3], dtype=torch.float16,
    )  # fmt: skip


def fla_hgrn() -> Pairs:
    from fla.ops.hgrn import fused_recurrent_hgrn

    def theirs(x, g):
        state, outputs = 0.0, []
        for t in range(x.shape[1]):
            state = g[:, t].sigmoid() * state + x[:, t]
            outputs.append(state)
        return torch.stack(outputs, 1)

    return compared(lambda x, g: fused_recurrent_hgrn(x, F.logsigmoid(g))[0], theirs, (2, 30, 50), (2, 30, 50))


def fla_attention() -> Pairs:
    from fla.ops.attn import parallel_attn

    def theirs(*given: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in given)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return compared(parallel_attn, theirs, *[_STEPS] * 3, dtype=torch.float16)


PACKAGES: dict[str, tuple[Callable[[], Pairs], ...]] = {
    "liger_kernel": (liger_rms_norm, liger_layer_norm, liger_swiglu, liger_geglu, liger_cross_entropy),
    "flash_attn": (
        flash_layer_norm, flash_layer_norm_of_two, flash_rms_norm_with_dropout, flash_cross_entropy,
        variant("flash_rotary_of_halves", _flash_rotary, False), variant("flash_rotary_of_pairs", _flash_rotary, True),
        variant("flash_attention_causal", _flash_attention, True, 130, 64),
        variant("flash_attention_of_odd_sizes", _flash_attention, False, 77, 40), flash_linear,
    ),
    "fla": (fla_retention, fla_gla, fla_delta_rule, fla_hgrn, fla_attention),
    **foreign_serving.PACKAGES,
}  # fmt: skip


def found_version(package: str) -> str | None:
    """The version of a package, None if it is not installed.

    Its modules will be imported without its __init__, which may need compiled extensions and other packages.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).read_text(encoding="utf-8")
    match = re.search(r"^__version__ = [\"'](.+)[\"']", text, re.MULTILINE)
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = match[1] if match else "unknown"
    if package not in sys.modules:
        folders = list(spec.submodule_search_locations or ())
        sys.modules[package] = bare_module(package, __path__=folders, __spec__=spec, __file__=None, __version__=version)
    return version


def forget(package: str) -> None:
    """Unloads a package that was imported without its __init__, so that it queries the device again."""
    if sys.modules[package].__file__ is None:
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]


def outcome(case: Callable[[], Pairs], chip: str) -> str:
    """Runs a case on a chip: passed, or the failure. Kernels with dozens of configurations run one of them, others
    all."""
    try:
        with executed(chip, configs=1 if case.__name__.startswith(_MANY_CONFIGURATIONS) else None) as machine:
            for actual, expected in case():
                tolerance = TOLERANCE[actual.dtype]
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    except FaultyKernel as error:
        return f"fault: {error.faults[0]}"
    except Unsupported as error:
        return f"refused: {error}"
    except (CompilationError, OutOfResources) as error:
        return f"{UNCOMPILED}{str(error.__cause__ or error).strip().splitlines()[-1]}"
    except AssertionError as error:
        return f"wrong: {str(error).splitlines()[0]}"
    return "passed" if machine.launches else "wrong: launches no kernel"


def _about(record: Record) -> tuple[str, str, str]:
    return record["package"], record["version"], record["chip"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("tests.executed.foreign", __doc__)
    parser.add_argument("--packages", type=Path, help="a folder that packages were installed in")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="one, or several in turn (default: all)")
    args = parser.parse_args(argv)
    if args.packages:
        sys.path.append(str(args.packages))
    failed = 0
    for package, cases in PACKAGES.items():
        version = found_version(package)
        if version is None:
            print(f"{package} is not installed")
            continue
        for chip in args.chip or CHIPS:
            forget(package)
            began = time.process_time()
            outcomes = {case.__name__: outcome(case, chip) for case in cases}
            others = {name: each for name, each in outcomes.items() if each != "passed"}
            record: dict[str, Any] = {"package": package, "version": version, "chip": chip, "cases": len(cases)}
            record |= {"passed": len(cases) - len(others), "others": others}
            record["cpu_seconds"] = round(time.process_time() - began, 1)
            command.keep(args.results, "foreign", key=_about, **record)
            passed = f"{record['passed']} of {record['cases']} cases pass"
            print(f"{package} {version}, {chip}: {passed} {others or ''}", flush=True)
            failed += sum(not each.startswith(UNCOMPILED) for each in others.values())
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
