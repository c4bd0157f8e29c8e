"""The tensor subclasses that operators and modules accept.

A subclass may reinterpret its memory. One with its own __torch_function__ is refused: a kernel would read the raw
memory without asking it. One with its own __torch_dispatch__ is asked by the dispatcher, and computes or refuses the
operator itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN_TENSORS = frozenset({Tensor, Parameter})
"""Exact classes whose memory is what it seems."""
_INSTEAD = {
    "BlockMask": "give what its mask_mod says as causal or window, or create_mask() of it as mask",
    "CausalBias": "it must be of (L, S) and without causal; a module takes is_causal=True in its place",
    "DTensor": "give to_local() of it, or full_tensor()",
    "MaskedTensor": "give get_data() of it, and mask for what it hides",
    "NestedTensor": "give values() of it, for attention to varlen_attention() with its offsets()",
}
"""Advice by class name: what to pass instead."""


def ordinary(*tensors: Tensor | None) -> bool:
    """Return whether operators can read all of these: no DTensor, quantised, masked or nested tensor, and no subclass
    that reinterprets its memory."""
    for x in tensors:
        kind = type(x)
        if x is not None and (x.is_nested or not (kind is Tensor or kind is Parameter or _is_read(kind))):
            return False
    return True


def _is_read(kind: Any) -> bool:
    """Return whether a subclass overrides neither protocol, or is one of torch's fake and functional tensors."""
    own, torchs = (getattr(each.__torch_function__, "__func__", each.__torch_function__) for each in (kind, Tensor))
    asks_functions = own not in (torchs, torch._C._disabled_torch_function_impl)
    return kind.__module__.startswith("torch._subclasses.") or not (_asks_dispatcher(kind) or asks_functions)


def _asks_dispatcher(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def instead(x: Any) -> str:
    """Advice on what to pass instead of this argument, by its class; '' if there is none."""
    name = type(x).__name__ if not getattr(x, "is_nested", False) else "NestedTensor"
    return _INSTEAD.get(name, "")


def unread(x: Tensor, failed: bool = False) -> str:
    """The reason operators cannot read this tensor, with advice; '' if they can, or its class handles operators.

    failed: its class was asked, and did not compute the operator.
    """
    kind = type(x)
    if kind in PLAIN_TENSORS and not x.is_nested:
        return "" if x.layout is torch.strided else f"has layout {x.layout}: a strided tensor is needed"
    if advice := instead(x):
        return f"is a {'nested tensor' if x.is_nested else kind.__name__}: {advice}"
    if _is_read(kind) or (_asks_dispatcher(kind) and not failed):
        return ""
    return f"is a {kind.__name__}, which fasttfm does not know: give as_subclass(torch.Tensor) of what it stands for"
