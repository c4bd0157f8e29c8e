"""Replaces flash_attn by fasttfm: fasttfm.compat.flash_attn, rotary(), cross_entropy() and the residual norms.

flash_attn itself is not imported, only the plain PyTorch helpers of its tests.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.compat import flash_attn as ours


def install(folder: Path) -> None:
    """Install the replacement as `flash_attn`, for the tests of the checkout in folder."""
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    properties = types.SimpleNamespace(total_memory=1 << 40, multi_processor_count=1, gcnArchName="")
    torch.cuda.get_device_properties = lambda *_: properties  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_: None  # distinct functions, which torch.compile must tell apart
    torch.cuda.synchronize = lambda *_: None
    package = _module("flash_attn")
    package.__path__ = []
    for name in vars(ours):
        if name.startswith("flash_attn_"):
            setattr(package, name, _window_of_numbers(getattr(ours, name)))
    _module("flash_attn.flash_attn_interface", _get_block_size_n=lambda *_: 1 << 30, USE_TRITON_ROCM=False)
    for name in ("layers", "losses", "ops", "ops.triton", "utils"):
        _module(f"flash_attn.{name}").__path__ = []
    _load(folder, "bert_padding")
    for name in ("utils.torch", "utils.library"):
        _load(folder, name)
    _module("flash_attn.ops.triton.rotary", apply_rotary=_none("apply_rotary"))
    rotary = _load(folder, "layers.rotary")
    rotary.apply_rotary_emb = apply_rotary_emb
    rotary.apply_rotary_emb_qkv_ = apply_rotary_emb_qkv_
    rotary.apply_rotary_emb_kv_ = apply_rotary_emb_kv_
    _module("flash_attn.losses.cross_entropy", CrossEntropyLoss=CrossEntropyLoss)
    norms = _load(folder, "ops.triton.layer_norm")
    norms.layer_norm_fn = layer_norm_fn


def _module(name: str, **contents: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(contents)
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


def _load(folder: Path, name: str) -> Any:
    file = folder.joinpath("flash_attn", *name.split(".")).with_suffix(".py")
    spec = importlib.util.spec_from_file_location(f"flash_attn.{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[f"flash_attn.{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _none(name: str) -> Callable[..., Any]:
    def skip(*arguments: Any, **options: Any) -> Any:
        pytest.skip(f"no counterpart in fasttfm: {name}")

    return skip


def _window_of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to accept windows as tensors, which the tests pass."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if isinstance(window := options.get("window_size"), Tensor):
            options["window_size"] = tuple(window.tolist())
        return function(*arguments, **options)

    return call


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Apply rotary() to x (B, L, H, D), or packed (T, H, D); inplace is ignored."""
    if cu_seqlens is None:
        offsets = torch.as_tensor(seqlen_offsets).view(-1, 1) + torch.arange(x.shape[1])
        return F.rotary(x.transpose(1, 2), cos, sin, offsets.expand(x.shape[0], -1), interleaved=interleaved).transpose(
            1, 2
        )
    lengths = cu_seqlens.diff()
    offset = torch.as_tensor(seqlen_offsets).expand(len(lengths))
    positions = torch.cat([torch.arange(n) + o for n, o in zip(lengths.tolist(), offset.tolist())])
    return F.rotary(x, cos, sin, positions, interleaved=interleaved)


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Apply rotary() to the queries and keys of qkv (B, L, 3, H, D), or (B, L, Hq + 2 Hk, D)."""
    tables = ((cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k))
    if num_heads_q is None:
        q, k, v = qkv.unbind(2)
    else:
        others = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, others, others], dim=2)
    q, k = (apply_rotary_emb(x, *t, interleaved, seqlen_offsets=seqlen_offsets) for x, t in zip((q, k), tables))
    return torch.stack([q, k, v], 2) if num_heads_q is None else torch.cat([q, k, v], 2)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Apply rotary() to the keys of kv (B, S, 2, H, D)."""
    k, v = kv.unbind(2)
    return torch.stack([apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=seqlen_offsets), v], 2)


class CrossEntropyLoss(torch.nn.Module):
    """cross_entropy() with the arguments of flash_attn's module."""

    def __init__(self, label_smoothing: float = 0.0, inplace_backward: bool = False, **others: Any) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing  # the loss takes no memory of its caller: inplace_backward is ignored
        for name, off in (("logit_scale", 1.0), ("lse_square_scale", 0.0), ("return_z_loss", False)):
            if others.get(name, off) != off:
                pytest.skip(f"no counterpart in fasttfm: {name}")

    def forward(self, logits: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Tensor:
        if precomputed_lse is not None:
            pytest.skip("no counterpart in fasttfm: precomputed_lse")
        return F.cross_entropy(logits, target, label_smoothing=self.label_smoothing)[0]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    **others: Any,
) -> Any:
    """residual_layer_norm() and residual_rms_norm() with the arguments of flash_attn's function."""
    for name, value in others.items():
        if value is not None and value is not False:
            pytest.skip(f"no counterpart in fasttfm: {name}")
    if residual_in_fp32:
        pytest.skip("no counterpart in fasttfm: residual_in_fp32")
    if residual is None:
        if prenorm or dropout_p:
            residual = torch.zeros_like(x)
        else:
            return F.rms_norm(x, weight, eps) if is_rms_norm else F.layer_norm(x, weight, bias, eps)
    seed = F.draw_seed()
    options: dict[str, Any] = {"dropout_p": dropout_p, "seed": seed if dropout_p else None}
    if is_rms_norm:
        y, s = F.residual_rms_norm(x, residual, weight, eps, **options)
    else:
        y, s = F.residual_layer_norm(x, residual, weight, bias, eps, **options)
    outputs = (y, s) if prenorm else (y,)
    if return_dropout_mask:
        rows = x.numel() // x.shape[-1]
        mask = torch.ones(rows, x.shape[-1], dtype=torch.bool)
        if dropout_p:
            mask = reference.keep_mask((1, rows, x.shape[-1]), dropout_p, seed)[0]
        outputs = (*outputs, mask.view(x.shape), None)
    return outputs if len(outputs) > 1 else outputs[0]
