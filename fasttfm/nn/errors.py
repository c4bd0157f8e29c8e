"""Argument checks shared by the modules."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.errors import ArgumentError, ArgumentTypeError


def check_dropout(dropout: float) -> None:
    """Raise ArgumentError unless dropout is a probability."""
    if not 0.0 <= dropout <= 1.0:
        raise ArgumentError(f"dropout is {dropout} but must be a probability in [0, 1]")


def check_sizes(**sizes: int | None) -> None:
    """Raise ArgumentError for a negative size; None is skipped."""
    for name, size in sizes.items():
        if size is not None and size < 0:
            raise ArgumentError(f"{name} is {size} but must not be negative")


def check_layer(d_model: int, nhead: int, dim_feedforward: int, dropout: float, layer_norm_eps: float) -> None:
    """Raise ArgumentError for sizes that no encoder or decoder layer can have."""
    check_dropout(dropout)
    if not math.isfinite(layer_norm_eps):
        raise ArgumentError(f"layer_norm_eps is {layer_norm_eps} but must be finite")
    check_sizes(dim_feedforward=dim_feedforward)
    if d_model <= 0 or nhead <= 0 or d_model % nhead:
        raise ArgumentError(f"d_model {d_model} must be divisible by nhead {nhead}, and both greater than 0")


def check_tensor(name: str, tensor: Tensor, width: int, argument: str, weight: Tensor) -> None:
    """Raise unless tensor (..., width) can be multiplied by weight; argument: the constructor's name for the width."""
    if tensor.device != weight.device:
        raise ArgumentError(f"{name} is on {tensor.device} but the module is on {weight.device}: move one of them")
    if tensor.shape[-1:] != (width,):
        raise ArgumentError(f"{name} {tuple(tensor.shape)} must be {width} wide in the last dimension ({argument})")
    if tensor.dtype != weight.dtype and not autocasts(tensor):
        raise ArgumentTypeError(
            f"{name} has dtype {tensor.dtype} but the module has {weight.dtype}: convert one of them, or use autocast"
        )


def autocasts(x: Tensor) -> bool:
    """Return whether autocast is on for x's device; it does not know meta."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def refuse_scripting(module: nn.Module) -> Any:
    """Refuse torch.jit.script, as __prepare_scriptable__ of a module. Raises RuntimeError."""
    raise RuntimeError(
        f"fasttfm.nn.{type(module).__name__} cannot be scripted: call fasttfm.restore_modules(model) first, which "
        "makes its modules torch.nn's again, parameters and all"
    )
