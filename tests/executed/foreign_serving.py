"""Kernels of other projects for serving and scans, executed by foreign.py besides those of layers and attention.

Modules are imported without the __init__ of their packages, which need extensions and devices: bare().
"""

import importlib.machinery
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Results of a kernel and of PyTorch."""


def variant(name: str, case: Callable[..., Pairs], *args: Any, **options: Any) -> Callable[[], Pairs]:
    """A case with arguments, under a name of its own in the record."""
    named = partial(case, *args, **options)
    vars(named)["__name__"] = name
    return named


def compared(ours: Callable, theirs: Callable, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Pairs:
    """Yields outputs and gradients of both functions for tensors of these shapes; PyTorch computes in float32."""
    results = []
    for function, computed in ((ours, dtype), (theirs, torch.float32)):
        generator = torch.Generator().manual_seed(1)
        inputs = [torch.randn(shape, generator=generator).to(dtype).to(computed).requires_grad_() for shape in shapes]
        result = function(*inputs)
        (result * torch.linspace(-1, 1, result.numel()).reshape(result.shape)).sum().backward()
        results.append([result.detach(), *(x.grad for x in inputs)])
    for actual, expected in zip(*results):
        yield actual, expected.to(actual.dtype)


def bare_module(name: str, **content: Any) -> ModuleType:
    """A module with this name and content."""
    module = ModuleType(name)
    vars(module).update(content)
    return module


def bare(name: str) -> None:
    """Imports the packages of a dotted name without running their __init__."""
    parent, _, _ = name.rpartition(".")
    if parent:
        bare(parent)
    if name not in sys.modules:
        spec = importlib.machinery.PathFinder.find_spec(name, sys.modules[parent].__path__ if parent else None)
        if spec is None:
            raise ModuleNotFoundError(f"there is no package {name}")
        folders = list(spec.submodule_search_locations or ())
        sys.modules[name] = bare_module(name, __path__=folders, __spec__=spec, __file__=None)


def _drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def _cut_cross_entropy(softcap: float | None) -> Pairs:
    from cut_cross_entropy.linear_cross_entropy import linear_cross_entropy

    target = torch.arange(70) * 3 % 300
    target[5] = -100

    def theirs(hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        logits = hidden @ table.T
        return F.cross_entropy(logits if softcap is None else softcap * torch.tanh(logits / softcap), target)[None]

    def ours(hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, table, target, softcap=softcap, filter_eps=None)[None]

    return compared(ours, theirs, (70, 64), (300, 64), dtype=torch.float16)


def _paged_decode(heads: int, keys_heads: int) -> Pairs:
    """One query per sequence over keys in scattered pages of one token, in up to four splits."""
    bare("sglang.kernels.ops.attention")
    bare("sglang.srt")
    off = SimpleNamespace(get=lambda: False)
    switches = SimpleNamespace(SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS=off, SGLANG_MLA_DECODE_TUNE=off)
    asked = dict.fromkeys(("is_hip", "is_gfx95_supported", "is_gfx1250_supported"), lambda: False)
    asked["get_device_core_count"] = lambda index: 100
    sys.modules["sglang.srt.environ"] = bare_module("sglang.srt.environ", envs=switches)
    sys.modules["sglang.srt.utils"] = bare_module("sglang.srt.utils", **asked)
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    lengths, splits = (70, 33, 1), 4
    pool = torch.randperm(200, generator=torch.Generator().manual_seed(3))[: sum(lengths)]
    keys, values = _drawn(200, keys_heads, 64, dtype=torch.float16), _drawn(200, keys_heads, 64).half()
    query = torch.randn(3, heads, 64, generator=torch.Generator().manual_seed(9)).half()
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    out = torch.empty(3, heads, 64, dtype=torch.float16)
    decode_attention_fwd(
        query, keys, values, out, starts, pool, torch.empty(3, heads, splits, 64), torch.empty(3, heads, splits),
        torch.full((3,), splits, dtype=torch.int32), splits, 0.125, 1.0, 1.0,
    )  # fmt: skip
    for i, places in enumerate(pool.split(lengths)):
        k, v = (x[places].float().transpose(0, 1).repeat_interleave(heads // keys_heads, 0) for x in (keys, values))
        expected = torch.softmax(query[i].float()[:, None] @ k.transpose(1, 2) * 0.125, -1) @ v
        yield out[i], expected[:, 0].half()


def torchao_int8_product() -> Pairs:
    bare("torchao.prototype.quantized_training")
    # its module registers an operator, which fails the second time: it is imported again for each chip
    with mock.patch.multiple(torch.library, Library=mock.Mock(), impl=lambda *_: lambda function: function):
        from torchao.prototype.quantized_training.int8_mm import scaled_int8_mm_cuda

    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-127, 128, shape, generator=generator).to(torch.int8) for shape in ((70, 96), (96, 50)))
    rows, columns = torch.linspace(0.001, 0.002, 70), torch.linspace(0.01, 0.02, 50)
    for scale in (columns, columns[:1]):
        yield scaled_int8_mm_cuda(a, b, rows, scale), (a.float() @ b.float()) * rows[:, None] * scale


NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
       0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0)  # fmt: skip
"""The 16 levels of NormalFloat (Dettmers et al. 2023, appendix E)."""


def bitsandbytes_nf4() -> Pairs:
    """Quantizes weights to four bits and back, to the nearest level relative to the largest value of a block."""
    bare("bitsandbytes.backends.triton")
    from bitsandbytes.backends.triton.ops import dequantize_4bit, quantize_4bit

    weights = _drawn(60, 64)
    packed, largest = quantize_4bit(weights, 64, "nf4", torch.uint8)
    yield largest, weights.abs().amax(1)
    levels = torch.tensor(NF4)
    nearest = ((weights / weights.abs().amax(1, keepdim=True))[..., None] - levels).abs().argmin(-1)
    high, low = nearest.flatten().view(-1, 2).unbind(1)
    yield packed.flatten().float(), (high * 16 + low).float()
    yield dequantize_4bit(packed, largest, 64, "nf4", weights.shape, torch.float32), levels[nearest] * largest[:, None]


def _xformers_rms_norm(add: bool) -> Pairs:
    bare("xformers.ops._triton")
    bare("xformers.triton")
    from xformers.ops._triton.rmsnorm_kernels import _rms_norm_add_forward, _rms_norm_forward

    x, y, weight = _drawn(5, 300), _drawn(5, 300).flip(0).contiguous(), _drawn(300)
    total = x + y
    for w in (weight, None):
        expected = F.rms_norm(total if add else x, (300,), w, 1e-6)
        yield (_rms_norm_add_forward(x.clone(), y, w, 1e-6) if add else _rms_norm_forward(x, w, 1e-6)), expected


def _mamba_chunks(**options: Any) -> Pairs:
    """The state space model of Mamba-2 in chunks of 32 against its recurrence (Dao and Gu 2024, equation 16)."""
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    decay = -torch.linspace(0.5, 1.5, 2)

    def ours(x, steps, b, c):
        return mamba_chunk_scan_combined(x, steps, decay, b, c, 32, dt_softplus=True, **options)

    def theirs(x, steps, b, c):
        steps, state, outputs = F.softplus(steps), 0.0, []
        for t in range(x.shape[1]):
            kept = torch.exp(steps[:, t] * decay)[..., None, None]
            state = kept * state + (steps[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
            outputs.append((state * c[:, t, :, None]).sum(-1))
        out = torch.stack(outputs, 1)
        return out + x * options["D"][:, None] if "D" in options else out

    shapes = (1, 70, 2, 32), (1, 70, 2), (1, 70, 1, 32), (1, 70, 1, 32)
    return compared(ours, theirs, *shapes, dtype=torch.float16)


PACKAGES: dict[str, tuple[Callable[[], Pairs], ...]] = {
    "cut_cross_entropy": (
        variant("cce_loss", _cut_cross_entropy, None),
        variant("cce_loss_with_a_soft_cap", _cut_cross_entropy, 5.0),
    ),
    "sglang": (
        variant("sglang_paged_decode", _paged_decode, 4, 4),
        variant("sglang_paged_decode_of_shared_keys", _paged_decode, 8, 2),
    ),
    "torchao": (torchao_int8_product,),
    "bitsandbytes": (bitsandbytes_nf4,),
    "xformers": (
        variant("xformers_rms_norm", _xformers_rms_norm, False),
        variant("xformers_rms_norm_of_a_sum", _xformers_rms_norm, True),
    ),
    "mamba_ssm": (
        variant("mamba_chunk_scan", _mamba_chunks),
        variant("mamba_chunk_scan_with_a_skip", _mamba_chunks, D=torch.tensor([0.5, 2.0])),
    ),
}
