"""Hugging Face transformers on fasttfm's operators.

    register()                                                        # once
    model = AutoModel.from_config(config, attn_implementation="fasttfm")

    accelerate(model)                                                 # or a model that exists already

Needs the package transformers (version 5), which fasttfm does not install.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.utils.output_capturing import _active_collector

from fasttfm import functional as F
from fasttfm.interop.huggingface_layers import FUSED, note, why_left
from fasttfm.interop.replace import Line, Report, replace_modules

NAME = "fasttfm"


def register() -> None:
    """Makes attn_implementation="fasttfm" known to transformers, with its mask: bool, True where a query may attend."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, boolean_mask)


def accelerate(model: PreTrainedModel, dry_run: bool = False) -> Report:
    """Turns model, in place, to fasttfm's attention and LayerNorm, and its layers where transformers' are known.

    Of BERT, BART and Marian, residual connections, dropout and LayerNorm become one pass, and the feed-forward network
    one operator where its activation is ReLU; of T5 the network with ReLU. Returns replace_modules' report, with a line
    for the attention and for each layer exchanged, or left and why.
    """
    register()
    report = replace_modules(model, dry_run)
    before = model.config._attn_implementation
    if not model._can_set_attn_implementation():
        reason = f"{type(model).__name__} does not ask transformers for its attention by name"
        report.lines.insert(0, Line("", f"attention {before}", "left", reason))
    else:
        if not dry_run:
            model.set_attn_implementation(NAME)
        report.lines.insert(0, Line("", f"attention {before}", f"attention {NAME}"))
    for name, module in model.named_modules():
        kind, reason = type(module), why_left(module)
        if reason:
            report.lines.append(Line(name, kind.__name__, "left", reason))
        elif kind in FUSED:
            report.lines.append(Line(name, kind.__name__, FUSED[kind].__name__, note(module)))
            if not dry_run:
                module.__class__ = FUSED[kind]
    return report


def boolean_mask(
    *, batch_size: int, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **options: Any
) -> Tensor | None:
    """sdpa_mask(): (B, 1, L, S) bool, or None where the causal flag says all; which is only where L is S, or 1.

    A model that then keeps the last queries alone would lose its causality, so attention_forward() takes a missing mask
    over more keys than queries for an error.
    """
    skip = allow_is_causal_skip and q_length in (1, kv_length)
    return sdpa_mask(batch_size, q_length, kv_length, allow_is_causal_skip=skip, **options)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query (B, H, L, D), key and value (B, H or fewer, S, D); returns (B, L, H, D).

    attention_mask: bool, True attends, or floats that are added; without one, attention is causal where the module is.
    position_bias (T5) is added to the scores. The weights come second where output_attentions asks for them.
    Raises ValueError for an argument that would change the result and is not known here, such as softcap.
    """
    _refuse_unknown(module, options)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    causal = attention_mask is None and query.shape[2] > 1 and _is_causal(module, is_causal, query, key)
    if position_bias is None:
        mask = attention_mask
    elif attention_mask is None:
        mask = position_bias
    elif attention_mask.dtype == torch.bool:
        mask = position_bias.masked_fill(~attention_mask, -torch.inf)
    else:
        mask = position_bias + attention_mask
    dropout = dropout if module.training else 0.0
    arguments: dict[str, Any] = {"mask": mask, "causal": causal, "dropout_p": dropout, "scale": scaling}
    if options.get("output_attentions") or _recorded():
        weights = F.attention_weights(query, key, **arguments)
        return (weights @ value).transpose(1, 2).contiguous(), weights
    return F.attention(query, key, value, **arguments).transpose(1, 2), None


def _is_causal(module: nn.Module, given: bool | None, query: Tensor, key: Tensor) -> bool:
    """Whether attention without a mask is causal. Raises ValueError where nothing tells."""
    causal = getattr(module, "is_causal", None) if given is None else given
    if causal is None:
        raise ValueError(
            f"{type(module).__name__} was given no attention mask and does not say whether it is causal: set "
            f"is_causal on it, or use attention 'eager' instead of {NAME!r}"
        )
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{type(module).__name__} is causal over {query.shape[2]} queries and {key.shape[2]} keys without an "
            f"attention mask, so attention {NAME!r} cannot know which keys a query sees: give a mask, or use 'eager'"
        )
    return bool(causal)


_CARRIED = frozenset({
    "sliding_window",  # the mask has it
    "output_attentions", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",  # FlashAttention's: the mask has them
    "deterministic",
})  # fmt: skip
"""Arguments that do not change what transformers' own eager attention computes."""
_REFUSED = frozenset({"softcap", "s_aux", "sinks", "cache", "indices", "block_indices"})
"""Arguments that change the result: a cap on scores, attention sinks, a paged cache, sparse attention."""


def _refuse_unknown(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that would change the result, or that might: a tensor, a number with a fraction,
    or whatever the eager attention of the module's own file names among its parameters."""
    for name, value in options.items():
        if value is None or name in _CARRIED:
            continue
        might = isinstance(value, Tensor | float) or name in _eager_parameters(type(module).__module__)
        if name in _REFUSED or might:
            raise ValueError(f"attention {NAME!r} has no {name}, which {type(module).__name__} needs: use 'eager'")


@torch.compiler.assume_constant_result
@functools.cache
def _eager_parameters(file: str) -> frozenset[str]:
    """The parameters of a modeling file's eager attention."""
    eager = getattr(sys.modules.get(file), "eager_attention_forward", None)
    return frozenset() if eager is None else frozenset(inspect.signature(eager).parameters) - {"kwargs"}


def _recorded() -> bool:
    """Whether the weights are wanted by a model that does not tell its attention so (GPT-2)."""
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)
