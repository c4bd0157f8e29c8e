"""Hugging Face transformers on fasttfm's operators.

    register()                                                        # once
    model = AutoModel.from_config(config, attn_implementation="fasttfm")

    accelerate(model)                                                 # or a model that exists already

Needs the package transformers (version 5), which fasttfm does not install.
"""

from __future__ import annotations

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
    AttentionMaskInterface.register(NAME, sdpa_mask)


def accelerate(model: PreTrainedModel, dry_run: bool = False) -> Report:
    """Turns model, in place, to fasttfm's attention and LayerNorm, and its layers where transformers' are known.

    Of BERT, BART and Marian, residual connections, dropout and LayerNorm become one pass, and the feed-forward network
    one operator where its activation is ReLU; of T5 the network with ReLU. Returns replace_modules' report, with a line
    for the attention and for each layer exchanged, or left and why.
    """
    register()
    report = replace_modules(model, dry_run)
    before = model.config._attn_implementation
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
    """
    for name in ("softcap", "s_aux", "cache"):
        if options.get(name) is not None:
            raise ValueError(f"attention 'fasttfm' has no {name}, which {type(module).__name__} needs: use 'eager'")
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and query.shape[2] > 1
    if position_bias is None:
        mask = attention_mask
    elif attention_mask is None:
        mask = position_bias
    elif attention_mask.dtype == torch.bool:
        mask = position_bias.masked_fill(~attention_mask, -torch.inf)
    else:
        mask = position_bias + attention_mask
    arguments: dict[str, Any] = {"mask": mask, "causal": causal, "dropout_p": dropout, "scale": scaling}
    if options.get("output_attentions") or _recorded():
        weights = F.attention_weights(query, key, **arguments)
        return (weights @ value).transpose(1, 2).contiguous(), weights
    return F.attention(query, key, value, **arguments).transpose(1, 2), None


def _recorded() -> bool:
    """Whether the weights are wanted by a model that does not tell its attention so (GPT-2)."""
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)
