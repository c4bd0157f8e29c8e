"""Builds every architecture of transformers from a configuration at minimal size, with inputs."""

import copy
import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

LIMIT = 4_000_000
"""Maximum number of parameters."""
SIZES = """
2: num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers
2: encoder_num_hidden_layers decoder_num_hidden_layers depth num_hidden_groups num_experts_per_tok moe_topk
2: num_local_experts_per_tok num_codebooks num_conv_pos_embedding_groups type_vocab_size
4: num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads
4: encoder_num_attention_heads decoder_num_attention_heads num_experts n_routed_experts num_local_experts rotary_dim
4: moe_num_experts
32: hidden_size d_model n_embd embedding_size encoder_hidden_size decoder_hidden_size cross_attention_hidden_size
32: projection_dim dim conv_dim emb_dim input_embedding_size word_embed_proj_dim embedding_dim embed_dim
32: hidden_size_per_layer_input
24: intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim moe_intermediate_size
24: ffn_hidden_size shared_expert_intermediate_size mlp_dim feed_forward_size dim_feedforward
8: head_dim d_kv kv_channels attention_head_size qk_nope_head_dim qk_rope_head_dim v_head_dim patch_size num_mel_bins
8: q_lora_rank kv_lora_rank
64: max_position_embeddings n_positions max_target_positions max_source_positions seq_length
67: vocab_size vocab_size_per_layer_input
16: image_size
0: pad_token_id
1: eos_token_id forced_eos_token_id
2: bos_token_id decoder_start_token_id
"""
SMALL = {
    name: int(size)
    for size, names in (line.split(":") for line in SIZES.strip().splitlines())
    for name in names.split()
}
QUIET = ("dropout", "dropout_rate", "layerdrop", "drop_path_rate")


def classes() -> dict[str, type]:
    """Return a class for each model type: the bare model, else a generative one, else the first."""
    results: dict[str, Any] = {}
    order = ("MODEL_MAPPING_NAMES", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES")
    others = sorted(n for n in vars(auto) if n.startswith("MODEL_") and n.endswith("_NAMES") and n not in order)
    for table in (*order, *others):
        for kind, names in getattr(auto, table).items():
            results.setdefault(kind, names[0] if isinstance(names, tuple | list) else names)
    return dict(sorted(results.items()))


def small_configuration(kind: type, depth: int = 0) -> Any:
    """Return a configuration of class kind with the sizes of SMALL, sub-configurations included."""
    names = inspect.signature(kind).parameters
    values: dict[str, Any] = {}
    for name, value in SMALL.items():
        if name in names or name in getattr(kind, "attribute_map", {}):
            default = getattr(kind, name, names[name].default if name in names else None)
            if isinstance(default, int | type(None)) or name in ("image_size", "patch_size"):
                values[name] = value
    values |= {n: 0.0 for n in names if any(q in n for q in QUIET) and isinstance(names[n].default, float)}
    for name, part in getattr(kind, "sub_configs", {}).items():
        if depth < 3 and isinstance(part, type) and part.__name__ != "AutoConfig":
            values[name] = small_configuration(part, depth + 1)
    for less in ((), ("num_key_value_heads", "head_dim"), tuple(values)):
        try:
            return kind(**{n: v for n, v in values.items() if n not in less})
        except Exception as error:
            failure = error
    raise failure


def shrunk(config: Any) -> Any:
    """Reduce every size of a configuration in place, sub-configurations included; sizes not in SMALL become 32."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            shrunk(value)
        elif isinstance(value, bool) or name.startswith("_") or name.endswith(("_id", "_index", "_ids")):
            continue
        elif isinstance(value, int):
            setattr(config, name, SMALL.get(name, min(value, 32)))
        elif isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
            setattr(config, name, value[: SMALL["num_hidden_layers"]])  # kinds of layers
        elif isinstance(value, list | tuple) and value and all(type(v) is int for v in value) and max(value) > 64:
            setattr(config, name, type(value)(max(8, 32 * v // max(value) // 8 * 8) for v in value))
    return config


class NotBuilt(Exception):
    """A model that cannot be compared, with the reason."""


def make(name: str) -> Any:
    """Build a class of transformers: small, random, in eval mode, with eager attention."""
    kind: Any = getattr(transformers, name, None)
    try:
        configured = getattr(kind, "config_class", None) is not None
    except ImportError as error:  # transformers' placeholder for a missing package
        raise NotBuilt(brief(error)) from error
    if kind is None or not configured:
        raise NotBuilt("needs a package that is not installed")
    try:
        config = small_configuration(kind.config_class)
        size = _parameters(kind, config)
        if size > LIMIT:
            config = shrunk(kind.config_class())
            size = _parameters(kind, config)
        if size > LIMIT:
            raise NotBuilt(f"{size / 1e6:.0f} M parameters with the usual sizes made small")
        model = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"cannot be made small: {brief(error)}") from error
    model.source_config = config
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                width = max(1, parameter.shape[-1] if parameter.dim() else 1)
                parameter.add_(torch.randn_like(parameter) * (0.3 / width**0.5))
    return model


def _parameters(kind: Any, config: Any) -> int:
    with torch.device("meta"):
        model = kind._from_config(copy.deepcopy(config), attn_implementation="eager")
    return sum(p.numel() for p in model.parameters())


def brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:120]}"


def batches(model: Any) -> dict[str, tuple[dict[str, Any], dict[int, torch.Tensor]]]:
    """Return batches without padding and padded right and left: inputs, and length -> positions to compare."""
    wanted = inspect.signature(model.forward).parameters
    torch.manual_seed(1)
    if "input_ids" in wanted:
        ids = torch.randint(5, 60, (3, 9))
        ids[:, -1] = ids[0, 8] = ids[1, 3] = ids[2, 5] = 1  # end tokens, at which some models pool
        more: dict[str, Any] = {}
        if "decoder_input_ids" in wanted:
            more["decoder_input_ids"] = torch.randint(5, 60, (3, 7))
        if "bbox" in wanted:
            more["bbox"] = torch.randint(0, 8, (3, 9, 4)).sort(-1).values
        if "pixel_values" in wanted and wanted["pixel_values"].default is inspect.Parameter.empty:
            more["pixel_values"] = torch.randn(3, 3, 16, 16)
        result: dict[str, Any] = {"unpadded": ({"input_ids": ids} | more, {})}
        if "attention_mask" in wanted:
            result["unpadded"][0]["attention_mask"] = torch.ones_like(ids)
            right = torch.arange(9) < torch.tensor([9, 4, 6])[:, None]
            for side, rows in (("right", right), ("left", right.flip(1))):
                inputs = {"input_ids": ids.where(rows, 0), "attention_mask": rows.long()}
                result[side] = (inputs | more, {9: rows})
        return result
    others: dict[str, tuple[str, tuple[int, ...]]] = {
        "pixel_values": ("pictures", (2, 3, 16, 16)), "input_features": ("sound", (2, 8, 64)),
        "input_values": ("sound", (2, 1600)),
    }  # fmt: skip
    for name, (what, shape) in others.items():
        if name in wanted:
            return {what: ({name: torch.randn(shape)}, {})}
    raise NotBuilt(f"takes {', '.join(list(wanted)[:3])}")
