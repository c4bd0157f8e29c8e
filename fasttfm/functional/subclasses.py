"""The gate for classes derived from Tensor: which of them operators and modules read.

A derived class may give its memory another meaning. One that torch's functions ask (__torch_function__) is not asked by
a kernel, which would read the memory for what it is not: it is refused. One that the dispatcher asks
(__torch_dispatch__) is asked about operators too, and computes or refuses them itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

PLAIN_TENSORS = frozenset({Tensor, Parameter})
"""Classes of tensors that hide nothing."""
_TRACED = "torch._subclasses."
"""Module of torch's fake and functional tensors, with which graphs are traced."""
_INSTEAD = {
    "BlockMask": "give what its mask_mod says as causal or window, or create_mask() of it as mask",
    "CausalBias": "it must be of (L, S) and without causal; a module takes is_causal=True in its place",
    "DTensor": "give to_local() of it, or full_tensor()",
    "MaskedTensor": "give get_data() of it, and mask for what it hides",
    "NestedTensor": "give values() of it, for attention to varlen_attention() with its offsets()",
}
"""By the names of classes, what an operator takes in their place."""


def ordinary(*tensors: Tensor | None) -> bool:
    """Return whether all are tensors that operators read: no DTensor, quantised, masked or nested tensor, and none of a
    class with a meaning of its own."""
    for x in tensors:
        kind = type(x)
        if x is not None and (x.is_nested or not (kind is Tensor or kind is Parameter or _is_read(kind))):
            return False
    return True


def _is_read(kind: type) -> bool:
    """Return whether the memory of a derived class is all that there is to it, or it is made to trace operators."""
    return kind.__module__.startswith(_TRACED) or not (_asks_dispatcher(kind) or _asks_functions(kind))


def _asks_dispatcher(kind: Any) -> bool:
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def _asks_functions(kind: Any) -> bool:
    own, torchs = (getattr(each.__torch_function__, "__func__", each.__torch_function__) for each in (kind, Tensor))
    return own not in (torchs, torch._C._disabled_torch_function_impl)


def instead(x: Any) -> str:
    """Say what to give in place of an argument of this class; '' where nothing is known."""
    name = type(x).__name__ if not getattr(x, "is_nested", False) else "NestedTensor"
    return _INSTEAD.get(name, "")


def unread(x: Tensor, failed: bool = False) -> str:
    """Say why an operator does not read a tensor, and what to do; '' where it does, or the tensor's class computes
    operators itself. failed: it did not."""
    kind = type(x)
    if kind in PLAIN_TENSORS and not x.is_nested:
        return "" if x.layout is torch.strided else f"has layout {x.layout}: a strided tensor is needed"
    if advice := instead(x):
        return f"is a {'nested tensor' if x.is_nested else kind.__name__}: {advice}"
    if _is_read(kind) or (_asks_dispatcher(kind) and not failed):
        return ""
    return f"is a {kind.__name__}, which fasttfm does not know: give as_subclass(torch.Tensor) of what it stands for"
