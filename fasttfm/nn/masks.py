"""Conversion of torch.nn's masks (True or -inf is masked) to fasttfm.functional's single mask (True attends)."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional.signature import is_flag
from fasttfm.functional.subclasses import instead, ordinary, unread


def check_mask(
    name: str, mask: Tensor | None, shapes: tuple[tuple[int, ...], ...], device: torch.device | None = None
) -> None:
    """Raise unless mask is None, or bool or floating, of one of the shapes and on device if given."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ArgumentTypeError(f"{name} is a {type(mask).__name__}: {instead(mask) or 'a tensor is needed'}")
    if not ordinary(mask):
        raise ArgumentTypeError(f"{name} {unread(mask, failed=True)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ArgumentTypeError(f"{name} has dtype {mask.dtype}: only bool (True hides) and floating types are allowed")
    if tuple(mask.shape) not in shapes:
        allowed = " or ".join(str(shape) for shape in shapes)
        raise ArgumentError(f"{name} {tuple(mask.shape)} must be {allowed}")
    if device is not None and mask.device != device:
        raise ArgumentError(f"{name} is on {mask.device} but the input is on {device}: move one of them")


def check_stack_mask(name: str, mask: Tensor | None, x: Tensor, layers: Iterable[torch.nn.Module]) -> None:
    """Raise unless mask is None or fits self-attention over x; skipped if the layers have no self_attn.num_heads."""
    heads = getattr(getattr(next(iter(layers), None), "self_attn", None), "num_heads", None)
    if mask is None or heads is None or x.dim() not in (2, 3):
        return
    batch = x.shape[0 if batch_first(layers) else 1] if x.dim() == 3 else 1
    length = length_of(x, layers)
    check_mask(name, mask, ((length, length), (batch * heads, length, length)), x.device)


def merged(attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int) -> Tensor | None:
    """Combine attn_mask (L, S) or (B * H, L, S) and key_padding_mask (B, S) to one that broadcasts to (B, H, L, S).

    Bool if both are bool, else floats to add to the scores.
    """
    if attn_mask is not None:
        batch = attn_mask.shape[0] // heads
        attn_mask = attn_mask.unflatten(0, (batch, heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
    if key_padding_mask is not None:
        key_padding_mask = key_padding_mask[:, None, None, :]
    if attn_mask is None:
        return _attends(key_padding_mask)
    if key_padding_mask is None:
        return _attends(attn_mask)
    if attn_mask.dtype == torch.bool and key_padding_mask.dtype == torch.bool:
        return ~(attn_mask | key_padding_mask)
    if attn_mask.dtype == torch.bool:
        return key_padding_mask.masked_fill(attn_mask, -math.inf)
    if key_padding_mask.dtype == torch.bool:
        return attn_mask.masked_fill(key_padding_mask, -math.inf)
    return attn_mask + key_padding_mask


def _attends(mask: Tensor | None) -> Tensor | None:
    return ~mask if mask is not None and mask.dtype == torch.bool else mask


def with_extra_keys(mask: Tensor | None, extra: int) -> Tensor | None:
    """Extend a torch.nn mask (..., S) by keys that all queries attend to."""
    return None if mask is None else torch.nn.functional.pad(mask, (0, extra))


def causal_mask(queries: int, keys: int, device: torch.device, offset: int = 0) -> Tensor:
    """Causal mask (L, S) bool, True is masked; the position of query i is i + offset."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).triu_(1 + offset)


def detect_causal(mask: Tensor | None, is_causal: bool | None, length: int) -> bool:
    """Return is_causal unless None, else whether mask is the square causal mask of this length.

    Comparing the mask synchronizes with the device, as in torch.nn; pass is_causal to avoid it. While tracing, the mask
    is not compared but applied, with the same result; so is one that requires a gradient, which only applying it gives.
    """
    if is_causal is not None:
        is_flag("is_causal", is_causal)
        return is_causal
    if mask is None or mask.is_meta or not ordinary(mask) or tuple(mask.shape) != (length, length):
        return False
    if mask.requires_grad or torch.compiler.is_compiling():
        return False
    causal = causal_mask(length, length, mask.device)
    if not mask.is_floating_point():
        return torch.equal(mask, causal)
    return torch.equal(mask, torch.zeros_like(mask).masked_fill_(causal, -math.inf))


def batch_first(layers: Iterable[torch.nn.Module]) -> bool:
    """Return batch_first of the first layer, False if it has none."""
    first = next(iter(layers), None)
    return getattr(getattr(first, "self_attn", None), "batch_first", False)


def length_of(x: Tensor, layers: Iterable[torch.nn.Module]) -> int:
    """The length L of x (B, L, E), (L, B, E) or unbatched (L, E), by the layout of the layers."""
    if x.dim() == 0:  # the layers raise
        return 0
    return x.shape[1 if x.dim() == 3 and batch_first(layers) else 0]
