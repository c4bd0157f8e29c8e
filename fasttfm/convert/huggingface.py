"""Hugging Face transformers models on fasttfm's operators.

    register()                                                        # once
    model = AutoModel.from_config(config, attn_implementation="fasttfm")

    accelerate(model)                                                 # or an existing model

Needs the package transformers (version 5), which fasttfm does not install.
"""

import functools
import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "fasttfm.convert.huggingface needs the package transformers, 5.20 or newer: pip install transformers",
        name="transformers",
    ) from None

if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 20):
    raise ImportError(
        f"fasttfm.convert.huggingface needs transformers 5.20 or newer; {transformers.__version__} is installed: "
        "pip install --upgrade transformers"
    )

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils.output_capturing import _active_collector

from fasttfm import functional as F
from fasttfm.convert.huggingface_layers import fused_class, note, why_left
from fasttfm.convert.replace import Line, Report, replace_modules
from fasttfm.functional.attention.call import grouped


def register() -> None:
    """Register attn_implementation="fasttfm" with transformers, and its mask: bool, True where a query may attend.

    Models with hard-coded attention (BLOOM, Falcon, BigBird) raise ValueError when created with that name: transformers
    would silently run eager attention, so PreTrainedModel.get_correct_attn_implementation() is wrapped.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, boolean_mask)
    check: Any = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, _WRAPPED):
        return

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
        if is_init_check and requested_attention == NAME and (kind := _hard_coded(type(self.config))):
            raise ValueError(f"attention {NAME!r}: {kind} hard-codes its attention; use 'eager' or accelerate()")
        return check(self, requested_attention, is_init_check)

    setattr(checked, _WRAPPED, True)
    PreTrainedModel.get_correct_attn_implementation = checked


_WRAPPED = "_fasttfm_checks"
"""Attribute that marks the wrapped method; functools.wraps() copies it to further wrappers."""


def accelerate(model: PreTrainedModel, dry_run: bool = False) -> Report:
    """Switch a model, in place, to fasttfm's attention, norms and fused layers.

    BERT, BART and Marian: residual, dropout and LayerNorm in one pass, and the feed-forward network as one operator if
    its activation is ReLU, GELU or SiLU. T5 and GPT-2: that network. T5, Llama and models with the same code: RMSNorm.
    Parts whose attention needs unsupported features (a paged cache) keep their attention.
    Returns replace_modules' report with lines for the attention and for each layer replaced or left, with the reason.
    """
    register()
    report = replace_modules(model, dry_run)
    report.lines[:0] = _set_attention(model, dry_run)
    for name, module in model.named_modules():
        kind, reason = type(module), why_left(module)
        if reason:
            report.lines.append(Line(name, kind.__name__, "left", reason))
        elif fused := fused_class(module):
            report.lines.append(Line(name, kind.__name__, fused.__name__, note(module)))
            if not dry_run:
                module.__class__ = fused
    return report


def _set_attention(model: PreTrainedModel, dry_run: bool) -> list[Line]:
    """Set our attention on all parts of the model that can use it; returns report lines."""
    before = model.config._attn_implementation
    left: list[Line] = []
    kept: dict[int, tuple[Any, str]] = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and id(part.config) not in kept and (reason := _why_own_attention(part)):
            attention = part.config._attn_implementation
            kept[id(part.config)] = part.config, attention
            left.append(Line(name, f"attention {attention}", "left", reason))
    if id(model.config) in kept:
        return left
    if not dry_run:
        model.set_attn_implementation(NAME)
        for config, attention in kept.values():
            config._attn_implementation_internal = attention
    return [Line("", f"attention {before}", f"attention {NAME}"), *left]


def boolean_mask(
    *, config: Any, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **options: Any
) -> Tensor | None:
    """sdpa_mask(): (B, 1, L, S) bool, True where a query may attend, or None if every query attends every key.

    Causal masks are always materialized, because eager attention treats a missing mask as no mask. A mask equivalent
    to the causal flag, with or without sliding_window, is marked, so that attention_forward() can drop it. Models that
    do not declare support for boolean masks get eager's additive floats.
    """
    sizes = {"q_length": q_length, "kv_length": kv_length, "config": config}
    if not _takes_bool_masks(type(config)):
        return eager_mask(**sizes, **options)
    mask = sdpa_mask(**sizes, allow_is_causal_skip=allow_is_causal_skip, **options)
    if not allow_is_causal_skip or q_length == 1:
        return mask
    window = None
    if mask is None:
        mask = sdpa_mask(**sizes, allow_is_causal_skip=False, **options)
    elif _slides(config, **options):
        window = options["local_size"] - 1, None  # transformers' window includes the query's own position
    else:
        return mask
    if mask is not None and not torch.compiler.is_compiling() and not mask.is_inference():
        setattr(mask, _MARK, (mask._version, window))
    return mask


def _slides(
    config: Any,
    local_size: int | None = None,
    attention_mask: Tensor | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    **options: Any,
) -> bool:
    """Return whether a causal mask is exactly a sliding window, without padding."""
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size is None or local_size != window or local_size == chunk or torch.compiler.is_compiling():
        return False
    return bool(q_offset == kv_offset) and (attention_mask is None or bool(attention_mask.all()))


_MARK = "_fasttfm_causal"
"""Attribute of a causal mask: its version at creation, which in-place changes increment, and its window."""


def _causal_options(mask: Tensor | None, query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return F.attention()'s causal and window if the mask is marked and unchanged; otherwise nothing."""
    if mask is None or torch.compiler.is_compiling() or not hasattr(mask, _MARK):
        return {}
    version, window = getattr(mask, _MARK)
    if version != mask._version or not mask.shape[2] == mask.shape[3] == query.shape[2] == key.shape[2]:
        return {}
    return {"causal": True, "window": window}


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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with transformers' interface: query (B, H, L, D), key and value (B, H or fewer, S, D).

    Returns output (B, L, H, D), and the weights if output_attentions is set.
    attention_mask: bool, True attends, or additive floats; None: every query attends every key, as in eager attention.
    Sliding windows are part of the mask. position_bias (T5) is added to the scores, softcap (Gemma 2) bounds them.
    s_aux (H,) (gpt-oss) or sinks (B, H, L, 1): scores of a key without a value. indices (B, L, N) (DeepSeek V3.2): keys
    that a query may attend.
    Raises ValueError for is_causal without a mask, and for unsupported arguments that would change the result, such as
    a paged cache.
    """
    _refuse(module, options)
    if is_causal and attention_mask is None and query.shape[2] > 1:
        raise ValueError(
            f"attention {NAME!r}: {type(module).__name__} asks for causal attention without a mask, which eager "
            "attention would ignore: give a mask, or use 'sdpa'"
        )
    causal = _causal_options(attention_mask, query, key) if sinks is None else {}  # causal would hide the sinks' key
    if causal:
        attention_mask = None
    if indices is not None:
        selected = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=indices.device)
        attention_mask = _combined(selected.scatter(-1, indices.long(), True)[:, None], attention_mask)
    mask = attention_mask if position_bias is None else _combined(position_bias, attention_mask)
    if sinks is not None:  # differ per query: append a zero key and value whose score is the bias
        bias = _combined(query.new_zeros(1, 1, 1, key.shape[2]), mask)
        rows = torch.broadcast_shapes(bias.shape[:-1], sinks.shape[:-1])
        mask = torch.cat([bias.expand(*rows, -1), sinks.to(bias.dtype).expand(*rows, 1)], -1)
        key, value = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    arguments: dict[str, Any] = {"mask": mask, "dropout_p": dropout if module.training else 0.0, "scale": scaling}
    arguments |= {"softcap": softcap or 0.0, "sinks": s_aux, **causal}
    if options.get("output_attentions") or _weights_collected():
        weights = F.attention_weights(query, key, **arguments)
        output = (grouped(weights, value.shape[1]) @ value).view(*query.shape[:3], value.shape[3])
        return output.transpose(1, 2).contiguous(), weights if sinks is None else weights[..., :-1]
    return F.attention(query, key, value, **arguments).transpose(1, 2), None


_IGNORED = frozenset({
    "sliding_window",  # part of the mask
    "output_attentions", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",  # FlashAttention's: part of the mask
    "deterministic",
})  # fmt: skip
"""Arguments that do not affect the result of transformers' eager attention."""
_REFUSED = frozenset({"cache", "block_indices"})
"""Arguments that affect the result: a paged cache, block-sparse attention."""


def _refuse(module: nn.Module, options: dict[str, Any]) -> None:
    """Raise ValueError for options that do or may affect the result.

    These are tensors, floats, and the parameters of eager_attention_forward() in the module's own file.
    """
    for name, value in options.items():
        if value is None or name in _IGNORED:
            continue
        if isinstance(value, Tensor | float) or name in _REFUSED or name in _eager_parameters(type(module).__module__):
            raise ValueError(f"attention {NAME!r} has no {name}, which {type(module).__name__} needs: use 'eager'")


@torch.compiler.assume_constant_result
@functools.cache
def _eager_parameters(module: str) -> frozenset[str]:
    """Return the parameter names of a modeling file's eager attention."""
    eager = getattr(sys.modules.get(module), "eager_attention_forward", None)
    return frozenset() if eager is None else frozenset(inspect.signature(eager).parameters) - {"kwargs"}


def _combined(first: Tensor, second: Tensor | None) -> Tensor:
    """Combine two masks: bool if both are, otherwise additive floats."""
    if second is None:
        return first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    for mask, bias in ((first, second), (second, first)):
        if mask.dtype == torch.bool:
            return bias.masked_fill(~mask, -torch.inf)
    return first + second


def _weights_collected() -> bool:
    """Return whether transformers collects attention weights without passing output_attentions on (GPT-2)."""
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


NAME = "fasttfm"
WITH_TABLES = frozenset({
    "deepseek_ocr2_sam_vision_model", "git", "sam_hq_vision_model", "sam_vision_model",
    "unlimited_ocr_sam_vision_model",
})  # fmt: skip
"""Model types with a table of attention classes in addition to attention selected by name."""
NEEDS = {"minimax_m3_vl_text": "block_indices"}
"""Model types of transformers 5.23 -> required attention argument that ours lacks."""


def _why_own_attention(part: PreTrainedModel) -> str:
    """Return why a model or submodel must keep its attention; '' if ours can replace it."""
    if kind := _hard_coded(type(part.config)) if part._can_set_attn_implementation() else type(part).__name__:
        return f"{kind} hard-codes its attention"
    option = NEEDS.get(part.config.model_type)
    return f"{type(part).__name__} needs {option}, which attention {NAME!r} lacks" if option else ""


def _hard_coded(config: type[Any]) -> str:
    """Return the name of a model class with this config whose attention cannot be selected by name; '' if none."""
    for family in _families(PreTrainedModel, config):
        if config.model_type in WITH_TABLES or not family._can_set_attn_implementation():
            return family.__name__
    return ""


@torch.compiler.assume_constant_result
@functools.cache
def _takes_bool_masks(config: type[Any]) -> bool:
    """Return whether all models with this config declare support for SDPA or any attention backend.

    Other models may add the mask to the scores in their own code.
    """
    return all(each._supports_sdpa or each._supports_attention_backend for each in _families(PreTrainedModel, config))


def _families(base: type[PreTrainedModel], config: type[Any]) -> list[type[PreTrainedModel]]:
    """Return the topmost subclasses of base whose config_class is config; users' subclasses inherit their attention."""
    families: list[type[PreTrainedModel]] = []
    for kind in base.__subclasses__():
        families += [kind] if kind.config_class is config else _families(kind, config)
    return families
