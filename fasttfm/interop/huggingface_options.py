"""Arguments of transformers' models for attention beside queries, keys, values and mask, with the refused ones."""

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.interop.huggingface_classes import NAME

_CARRIED = frozenset({
    "sliding_window",  # the mask has it
    "output_attentions", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",  # FlashAttention's: the mask has them
    "deterministic",
})  # fmt: skip
"""Arguments that do not change what transformers' own eager attention computes."""
_REFUSED = frozenset({"cache", "block_indices"})
"""Arguments that change the result: a paged cache, sparse attention by blocks."""


def refuse(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that would change the result, or that might: a tensor, a number with a fraction,
    or whatever the eager attention of the module's own file names among its parameters."""
    for name, value in options.items():
        if _changes(module, name, value):
            needs = f"attention {NAME!r} has no {name}, which {type(module).__name__} needs"
            raise ValueError(f"{needs}: use 'eager' or accelerate()")


def _changes(module: nn.Module, name: str, value: Any) -> bool:
    if value is None or name in _CARRIED:
        return False
    return isinstance(value, Tensor | float) or name in _REFUSED or name in _eager_parameters(type(module).__module__)


@torch.compiler.assume_constant_result
@functools.cache
def _eager_parameters(file: str) -> frozenset[str]:
    """The parameters of a modeling file's eager attention."""
    eager = getattr(sys.modules.get(file), "eager_attention_forward", None)
    return frozenset() if eager is None else frozenset(inspect.signature(eager).parameters) - {"kwargs"}
