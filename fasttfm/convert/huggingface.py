"""Hugging Face transformers on fasttfm's operators.

    register()                                                        # once
    model = AutoModel.from_config(config, attn_implementation="fasttfm")

    accelerate(model)                                                 # or a model that exists already

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
from fasttfm.functional.attention.layout import grouped


def register() -> None:
    """Makes attn_implementation="fasttfm" known to transformers, with its mask: bool, True where a query may attend.

    A model that writes its attention out (BLOOM, Falcon, BigBird) is refused with a ValueError when it is made by that
    name: PreTrainedModel.get_correct_attn_implementation() is wrapped, because transformers would compute as eager.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, boolean_mask)
    check: Any = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, _WRAPPED):
        return

    @functools.wraps(check)
    def checked(self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False) -> str:
        if is_init_check and requested_attention == NAME and (kind := written_out(type(self.config))):
            raise ValueError(f"attention {NAME!r}: {kind} writes its attention out; use 'eager' or accelerate()")
        return check(self, requested_attention, is_init_check)

    setattr(checked, _WRAPPED, True)
    PreTrainedModel.get_correct_attn_implementation = checked


_WRAPPED = "_fasttfm_checks"
"""Attribute of a method that is wrapped; whoever wraps it once more with functools.wraps() copies it."""


def accelerate(model: PreTrainedModel, dry_run: bool = False) -> Report:
    """Turns model, in place, to fasttfm's attention and LayerNorm, and its layers where transformers' are known.

    Of BERT, BART and Marian, residual connections, dropout and LayerNorm become one pass, and the feed-forward network
    one operator where its activation is ReLU or GELU; of T5 and GPT-2 that network; of T5, Llama and all that normalise
    as they do, the RMSNorm. A part that needs what our attention has not (a paged cache) keeps the attention it has.
    Returns replace_modules' report, with a line for the attention and for each layer exchanged, or left and why.
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
    """Has the parts of model that ask for their attention by name ask for ours, and returns a line of each other."""
    before = model.config._attn_implementation
    left: list[Line] = []
    kept: dict[int, tuple[Any, str]] = {}
    for name, part in model.named_modules():
        if isinstance(part, PreTrainedModel) and id(part.config) not in kept and (reason := own_attention(part)):
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
    """sdpa_mask(): (B, 1, L, S) bool, True where a query may attend, or None where every query attends every key.

    A causal mask is always made, because a missing one is none to eager attention; one that says no more than the
    causal flag, or than that and sliding_window, is marked, so that attention_forward() need not read it. A model that
    does not say that it takes such masks gets eager's floats, which are added.
    """
    sizes = {"q_length": q_length, "kv_length": kv_length, "config": config}
    if not takes_bool_masks(type(config)):
        return eager_mask(**sizes, **options)
    mask = sdpa_mask(**sizes, allow_is_causal_skip=allow_is_causal_skip, **options)
    if not allow_is_causal_skip or q_length == 1:
        return mask
    window = None
    if mask is None:
        mask = sdpa_mask(**sizes, allow_is_causal_skip=False, **options)
    elif _slides(config, **options):
        window = options["local_size"] - 1, None  # a query counts among the keys of its window there
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
    """Return whether a mask that may be causal is so in a sliding window, and hides no padding."""
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if local_size is None or local_size != window or local_size == chunk or torch.compiler.is_compiling():
        return False
    return bool(q_offset == kv_offset) and (attention_mask is None or bool(attention_mask.all()))


_MARK = "_fasttfm_causal"
"""Attribute of a mask that is causal: its version when it was made, which a change in place raises, and its window."""


def _looks(mask: Tensor | None, query: Tensor, key: Tensor) -> dict[str, Any]:
    """F.attention()'s causal and window where mask, as boolean_mask() made it, says no more of queries and keys."""
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
    """Attention as transformers calls it: query (B, H, L, D), key and value (B, H or fewer, S, D);
    returns (B, L, H, D).

    attention_mask: bool, True attends, or floats that are added; without one every query attends every key, as in eager
    attention; a window is in it, and is the operator's own where the mask says no more. position_bias (T5) is added to
    the scores, softcap (Gemma 2) bounds them. s_aux (H,) (gpt-oss) or sinks (B, H, L, 1) are scores of a key without a
    value. indices (B, L, N) (DeepSeek V3.2): keys that a query may attend. The weights come second where
    output_attentions asks for them.
    Raises ValueError for is_causal without a mask, and for an argument that would change the result and is not known
    here, such as a paged cache.
    """
    _refuse(module, options)
    if is_causal and attention_mask is None and query.shape[2] > 1:
        raise ValueError(
            f"attention {NAME!r}: {type(module).__name__} asks for causal attention without a mask, which eager "
            "attention would not give: give a mask, or use 'sdpa'"
        )
    looks = _looks(attention_mask, query, key) if sinks is None else {}  # a causal flag hides the sinks' key
    if looks:
        attention_mask = None
    if indices is not None:
        chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=indices.device)
        attention_mask = _both(chosen.scatter(-1, indices.long(), True)[:, None], attention_mask)
    mask = attention_mask if position_bias is None else _both(position_bias, attention_mask)
    if sinks is not None:  # each query's own: a key and a value of zeros, whose score is what is added
        seen = query.new_zeros(1, 1, 1, key.shape[2]) if mask is None else _as_floats(mask, query.dtype)
        rows = torch.broadcast_shapes(seen.shape[:-1], sinks.shape[:-1])
        mask = torch.cat([seen.expand(*rows, -1), sinks.to(seen.dtype).expand(*rows, 1)], -1)
        key, value = (nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
    dropout = dropout if module.training else 0.0
    arguments: dict[str, Any] = {"mask": mask, "dropout_p": dropout, "scale": scaling, **looks}
    arguments |= {"softcap": softcap or 0.0, "sinks": s_aux}
    if options.get("output_attentions") or _recorded():
        weights = F.attention_weights(query, key, **arguments)
        output = (grouped(weights, value.shape[1]) @ value).view(*query.shape[:3], value.shape[3])
        return output.transpose(1, 2).contiguous(), weights if sinks is None else weights[..., :-1]
    return F.attention(query, key, value, **arguments).transpose(1, 2), None


_CARRIED = frozenset({
    "sliding_window",  # the mask has it
    "output_attentions", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",  # FlashAttention's: the mask has them
    "deterministic",
})  # fmt: skip
"""Arguments that do not change what transformers' own eager attention computes."""
_REFUSED = frozenset({"cache", "block_indices"})
"""Arguments that change the result: a paged cache, sparse attention by blocks."""


def _refuse(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that would change the result, or that might: a tensor, a number with a fraction,
    or whatever the eager attention of the module's own file names among its parameters."""
    for name, value in options.items():
        if _changes(module, name, value):
            raise ValueError(f"attention {NAME!r} has no {name}, which {type(module).__name__} needs: use 'eager'")


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


def _both(first: Tensor, second: Tensor | None) -> Tensor:
    """Two masks as one: bool where both are, else floats that are added."""
    if second is None:
        return first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    for kept, added in ((first, second), (second, first)):
        if kept.dtype == torch.bool:
            return added.masked_fill(~kept, -torch.inf)
    return first + second


def _as_floats(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """mask as what is added to scores."""
    return mask.new_zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask


def _recorded() -> bool:
    """Return whether the weights are wanted by a model that does not tell its attention so (GPT-2)."""
    collected = _active_collector.get()
    return collected is not None and any("attentions" in key for key in collected)


NAME = "fasttfm"
WITH_TABLES = frozenset({
    "deepseek_ocr2_sam_vision_model", "git", "sam_hq_vision_model", "sam_vision_model",
    "unlimited_ocr_sam_vision_model",
})  # fmt: skip
"""Types of models whose files have a table of attention classes beside others that take it by name."""
NEEDS = {"minimax_m3_vl_text": "block_indices"}
"""Types of models of transformers 5.23 whose attention needs an argument that ours has not, and which."""


def own_attention(part: PreTrainedModel) -> str:
    """Say why ours cannot stand for the attention of a model or a part of one; '' where it can."""
    if kind := written_out(type(part.config)) if part._can_set_attn_implementation() else type(part).__name__:
        return f"{kind} writes its attention out"
    option = NEEDS.get(part.config.model_type)
    return f"{type(part).__name__} needs {option}, which attention {NAME!r} has not" if option else ""


def written_out(config: type[Any]) -> str:
    """Name of a class of models configured by config that does not take its attention by name; '' where all do."""
    for family in _families(PreTrainedModel, config):
        if config.model_type in WITH_TABLES or not family._can_set_attn_implementation():
            return family.__name__
    return ""


@torch.compiler.assume_constant_result
@functools.cache
def takes_bool_masks(config: type[Any]) -> bool:
    """Return whether the models configured by config say that they take SDPA's masks, or those of any attention.

    A model that says neither may add its mask to scores in code of its own.
    """
    return all(each._supports_sdpa or each._supports_attention_backend for each in _families(PreTrainedModel, config))


def _families(base: type[PreTrainedModel], config: type[Any]) -> list[type[PreTrainedModel]]:
    """The classes derived from base that are configured by config while what they are derived from is not.

    What a user derives from them computes attention as they do, and its source may be out of reach.
    """
    families: list[type[PreTrainedModel]] = []
    for kind in base.__subclasses__():
        families += [kind] if kind.config_class is config else _families(kind, config)
    return families
