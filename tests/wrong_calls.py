"""Wrong calls of every public function and module: each argument is changed in every wrong way.

The meaning of an argument follows from its annotation. A wrong type or dtype must be refused; a wrong shape or number
must be refused or give a valid result.
"""

import inspect
import linecache
import math
import re
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

import fasttfm
import fasttfm.nn
from fasttfm import functional as F
from fasttfm.compat import flash_attn, losses, varlen

ROOT = Path(fasttfm.__file__).parent
SEED = torch.tensor([11])
MASKS = {"mask", "attn_mask"}


class Target(NamedTuple):
    """A function with valid arguments."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    signature: Callable[..., Any]


class Wrong(NamedTuple):
    name: str
    argument: str
    change: str
    always: bool
    """Whether it must be refused."""
    value: Any


def functions() -> dict[str, Target]:
    """Return every function of fasttfm.functional with all its arguments."""
    f = torch.randn
    heads = {"query": f(2, 2, 5, 8), "key": f(2, 2, 6, 8), "value": f(2, 2, 6, 8)}
    drop = {"dropout_p": 0.25, "seed": SEED, "site": 1}
    options = {"causal": False, "scale": 0.5, **drop}
    more = {"key_lengths": torch.tensor([6, 3]), "mask": f(5, 6) > 0, "causal_offset": 0, **options}
    scoring = {"window": (3, 1), "softcap": 2.0, "alibi_slopes": f(2).abs(), "sinks": f(2)}
    more |= scoring
    starts = torch.tensor([0, 4, 9])
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
    norm = {"x": f(2, 3, 16), "weight": f(16), "bias": f(16), "eps": 1e-5}
    rms = {"x": f(2, 3, 16), "weight": f(16), "eps": 1e-6}
    residual = {"residual": f(2, 3, 16)}
    loss = {"label_smoothing": 0.1, "ignore_index": -100, "reduction": "mean", "class_weights": f(5).abs()}
    target = torch.arange(6) % 5
    network = {"x": f(2, 3, 16), "weight1": f(32, 16), "bias1": f(32), "weight2": f(16, 32), "bias2": f(16)}
    cos, sin = F.rotary_tables(7, 8)
    cached = {"query": heads["query"][:, :, :2], "key_cache": f(6, 2, 4, 8), "value_cache": f(6, 2, 4, 8),
              "key": f(2, 2, 2, 8), "value": f(2, 2, 2, 8), "cache_lengths": torch.tensor([5, 2]),
              "cache_starts": torch.tensor([1, 0]), "block_table": torch.tensor([[3, 1], [0, 5]]),
              "alibi_slopes": f(2).abs(), "cos": cos, "sin": sin, "interleaved": False, "causal": True,
              "window": (3, 0), "softcap": 2.0, "sinks": f(2), "scale": 0.5, "return_lse": False}  # fmt: skip
    varlen_qkv = {"packed_qkv": f(9, 3, 2, 8), "query": None, **packed, "covered": False, "causal_offset": 0}
    calls: dict[str, dict[str, Any]] = {
        "attention": heads | more | {"deterministic": False},
        "attention_with_cache": cached,
        "attention_weights": {"query": heads["query"], "key": heads["key"]} | more,
        "scaled_dot_product_attention": heads
        | {"attn_mask": f(5, 6), "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
        "varlen_attention": {k: f(9, 2, 8) for k in ("query", "key", "value")}
        | packed | options | scoring | {"causal_offset": 0},
        "packed_qkv_attention": {"packed_qkv": f(2, 5, 3, 2, 8), "query": None, "key_lengths": torch.tensor([5, 3])}
        | options | {"mask": None},
        "varlen_packed_qkv_attention": varlen_qkv | options,
        "layer_norm": norm,
        "residual_layer_norm": norm | residual | drop | {"x_bias": f(16)},
        "rms_norm": rms,
        "residual_rms_norm": rms | residual | drop,
        "residual_add": {"x": f(2, 3, 16)} | residual | drop,
        "feed_forward": network | drop | {"activation": "relu"},
        "embed": {"tokens": target.view(2, 3), "weight": f(9, 16), "positions": f(4, 16), "scale": 2.0, "pad_id": 0,
                  "first_position": 1} | drop,
        "cross_entropy": {"logits": f(6, 5), "target": target, "row_weights": f(6)} | loss,
        "linear_cross_entropy": {"hidden": f(2, 3, 16), "weight": f(5, 16), "target": target.view(2, 3),
                                 "row_weights": f(2, 3), "low_memory": False} | loss,
        "rotary": {"x": f(2, 2, 5, 8), "cos": cos, "sin": sin, "positions": torch.arange(5), "interleaved": False},
        "rotary_tables": {"length": 5, "size": 8, "base": 1e4, "factor": 2.0, "bands": (3, 1.0, 4.0),
                          "dtype": torch.float32},
    }  # fmt: skip
    return {name: Target(getattr(F, name), call, getattr(F, name)) for name, call in calls.items()}


def signatures() -> dict[str, Target]:
    """Return every function of fasttfm.compat with all its arguments."""
    f = torch.randn
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    options = {"dropout_p": 0.25, "softmax_scale": 0.5, "causal": False, "window_size": (-1, -1), "softcap": 0.0,
               "alibi_slopes": None, "deterministic": False, "return_attn_probs": False}  # fmt: skip
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5} | options
    dense, packed = {name: f(2, 5, 2, 8) for name in "qkv"}, {name: f(9, 2, 8) for name in "qkv"}
    flash: dict[str, dict[str, Any]] = {
        "flash_attn_func": dense | options,
        "flash_attn_qkvpacked_func": {"qkv": f(2, 5, 3, 2, 8)} | options,
        "flash_attn_kvpacked_func": {"q": dense["q"], "kv": f(2, 5, 2, 2, 8)} | options,
        "flash_attn_varlen_func": {"q": packed["q"], "k": f(6, 3, 2, 8), "v": f(6, 3, 2, 8)}
        | lengths
        | {"block_table": torch.tensor([[3, 1], [0, 5]])},
        "flash_attn_varlen_qkvpacked_func": {"qkv": f(9, 3, 2, 8), "cu_seqlens": starts, "max_seqlen": 5} | options,
        "flash_attn_varlen_kvpacked_func": {"q": packed["q"], "kv": f(9, 2, 2, 8)} | lengths,
    }
    cos, sin = F.rotary_tables(9, 8)
    flash["flash_attn_with_kvcache"] = dense | {
        "k_cache": f(2, 9, 2, 8), "v_cache": f(2, 9, 2, 8), "cache_seqlens": torch.tensor([4, 2]),
        "cache_batch_idx": torch.tensor([1, 0]), "cache_leftpad": torch.tensor([1, 0]), "block_table": None,
        "rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": True, "softmax_scale": 0.5, "causal": False,
        "window_size": (-1, -1), "softcap": 0.0,
        "alibi_slopes": f(2).abs(), "return_softmax_lse": False,
    }  # fmt: skip
    targets = {name: Target(getattr(flash_attn, name), call, getattr(flash_attn, name)) for name, call in flash.items()}
    arguments = {"cu_seq_q": starts, "cu_seq_k": starts, "max_q": 5, "max_k": 5, "scale": 0.5, "window_size": (-1, -1),
                 "enable_gqa": False, "block_table": None, "seqused_k": torch.tensor([3, 5]),
                 "dropout_p": 0.25}  # fmt: skip
    query = {name: f(9, 2, 8) for name in ("query", "key", "value")}
    loss = {"target": torch.arange(6) % 5, "weight": f(5).abs(), "reduction": "mean", "ignore_index": -100,
            "label_smoothing": 0.0}  # fmt: skip
    more = {
        "varlen_attn": (varlen.varlen_attn, query | arguments),
        "losses.cross_entropy": (losses.cross_entropy, {"input": f(6, 5)} | loss),
        "losses.linear_cross_entropy": (
            losses.linear_cross_entropy,
            {"input": f(6, 16), "linear_weight": f(5, 16), "linear_bias": f(5)} | loss,
        ),
    }
    return targets | {name: Target(function, call, function) for name, (function, call) in more.items()}


def modules() -> dict[str, Target]:
    """Return the forward pass of every module of fasttfm.nn."""
    nn, f = fasttfm.nn, torch.randn
    x, y = f(2, 5, 16), f(2, 6, 16)
    pad_x, pad_y = torch.zeros(2, 5).bool(), torch.zeros(2, 6).bool()
    square, cross = f(5, 5) > 1, f(5, 6) > 1
    layer = {"dim_feedforward": 32, "batch_first": True}

    def encoder() -> torch.nn.Module:
        return nn.TransformerEncoderLayer(16, 2, **layer)

    def decoder() -> torch.nn.Module:
        return nn.TransformerDecoderLayer(16, 2, **layer)

    inner = {"tgt": x, "memory": y, "tgt_mask": square, "memory_mask": cross, "tgt_key_padding_mask": pad_x,
             "memory_key_padding_mask": pad_y, "memory_is_causal": False}  # fmt: skip
    calls: dict[str, tuple[torch.nn.Module, dict[str, Any]]] = {
        "LayerNorm": (nn.LayerNorm(16), {"input": x}),
        "RMSNorm": (nn.RMSNorm(16), {"x": x}),
        "FeedForward": (nn.FeedForward(16, 32), {"x": x}),
        "PositionalEncoding": (nn.PositionalEncoding(16, batch_first=True), {"x": x, "first_position": 0}),
        "MultiheadAttention": (
            nn.MultiheadAttention(16, 2, batch_first=True),
            {"query": x, "key": y, "value": y, "key_padding_mask": pad_y, "need_weights": True, "attn_mask": cross,
             "average_attn_weights": True, "is_causal": False},
        ),
        "TransformerEncoderLayer": (
            encoder(), {"src": x, "src_mask": square, "src_key_padding_mask": pad_x, "is_causal": False}
        ),
        "TransformerDecoderLayer": (decoder(), inner | {"tgt_is_causal": False}),
        "TransformerEncoder": (
            nn.TransformerEncoder(encoder(), 1),
            {"src": x, "mask": square, "src_key_padding_mask": pad_x, "is_causal": None},
        ),
        "TransformerDecoder": (nn.TransformerDecoder(decoder(), 1), inner | {"tgt_is_causal": None}),
        "Transformer": (
            nn.Transformer(16, 2, 1, 1, **layer),
            {"src": y, "tgt": x, "src_mask": f(6, 6) > 1, "tgt_mask": square, "memory_mask": cross,
             "src_key_padding_mask": pad_y, "tgt_key_padding_mask": pad_x, "memory_key_padding_mask": pad_y},
        ),
    }  # fmt: skip
    return {f"nn.{name}": Target(module, call, type(module).forward) for name, (module, call) in calls.items()}


def constructors() -> dict[str, Target]:
    """Return the constructor of every module of fasttfm.nn."""
    nn = fasttfm.nn
    layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "dropout": 0.1, "activation": "relu",
             "layer_norm_eps": 1e-5, "batch_first": True, "norm_first": False, "bias": True}  # fmt: skip
    calls: dict[str, dict[str, Any]] = {
        "FeedForward": {"d_model": 16, "d_ff": 32, "dropout": 0.1, "activation": "relu", "bias": True},
        "PositionalEncoding": {"d_model": 16, "dropout": 0.1, "max_length": 50, "variant": "paper"},
        "MultiheadAttention": {"embed_dim": 16, "num_heads": 2, "dropout": 0.1, "bias": True, "kdim": None},
        "TransformerEncoderLayer": layer,
        "TransformerDecoderLayer": layer,
        "Transformer": {"num_encoder_layers": 1, "num_decoder_layers": 1} | layer,
    }
    parts = {"Encoder": nn.TransformerEncoderLayer(**layer), "Decoder": nn.TransformerDecoderLayer(**layer)}
    for kind, part in parts.items():
        calls[f"Transformer{kind}"] = {f"{kind.lower()}_layer": part, "num_layers": 1}
    made = {name: getattr(nn, name) for name in calls}
    return {f"nn.{name}()": Target(kind, calls[name], kind.__init__) for name, kind in made.items()}


def wrong_calls() -> Iterator[tuple[Target, Wrong]]:
    torch.manual_seed(0)
    for name, target in (functions() | signatures() | modules() | constructors()).items():
        hints = get_type_hints(target.signature)
        alone = sum(isinstance(value, Tensor) for value in target.arguments.values()) == 1
        for argument, value in target.arguments.items():
            kinds = _kinds(hints[argument])
            for change, always, changed in _changes(argument, value, kinds):
                if change == "meta" and alone and not isinstance(target.call, torch.nn.Module):  # all on meta
                    continue
                yield target, Wrong(name, argument, change, always, changed)


def _kinds(hint: Any) -> set[Any]:
    return set(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else {hint}


def _changes(argument: str, value: Any, kinds: set[Any]) -> Iterator[tuple[str, bool, Any]]:
    """Yield (change, whether it must be refused, value)."""
    optional = type(None) in kinds
    if not optional:
        yield "None", True, None
    yield "a list", True, [1.0, 2.0] if value is None or not isinstance(value, Tensor) else value.tolist()
    yield "an object", True, object()
    yield "a dict", True, {}
    if Tensor in kinds:
        yield "a string", True, "x"
        yield "a number", True, 3.5
        if not isinstance(value, Tensor):
            return
        yield "numpy", True, value.numpy()
        yield "complex", True, value.to(torch.complex64)
        yield "int8", True, value.to(torch.int8)
        whole, mask = value.dtype in (torch.int32, torch.int64), argument in MASKS or argument.endswith("_mask")
        if not mask:
            yield "bool", True, value.to(torch.bool)
        yield "floats" if whole else "whole numbers", True, value.to(torch.float32 if whole else torch.int64)
        yield "meta", True, value.to("meta")
        yield "sparse", False, value.float().to_sparse() if value.dim() else value
        yield "nested", True, torch.nested.nested_tensor([value, value])
        yield "rank 0", False, value.flatten()[0]
        yield "a rank more", False, value[None]
        yield "two ranks more", False, value[None, None]
        for dim in range(value.dim()):
            yield f"longer in {dim}", False, torch.cat([value, value.narrow(dim, 0, 1)], dim)
            yield f"empty in {dim}", False, value.narrow(dim, 0, 0)
    elif bool in kinds:
        yield "a string", True, "yes"
        yield "two", True, 2
    elif int in kinds:
        for wrong in (1.5, "1", torch.ones(2)):
            yield f"{wrong!r}"[:12], True, wrong
        yield "negative", argument.startswith(("num_", "site")), -1
        if argument == "site":
            yield "beyond 32 bits", True, 1 << 31
    elif float in kinds:
        yield "a string", True, "1"
        yield "a tensor", True, torch.ones(2)
        yield "complex", True, 1j
        for number in (math.nan, math.inf, -1.0):
            positive = argument in ("dropout_p", "dropout", "label_smoothing", "base", "factor")
            yield f"{number}", positive or not math.isfinite(number), number
    elif str in kinds:
        yield "another", True, "nonsense"
        yield "a number", True, 3


def fault(target: Target, wrong: Wrong) -> str | None:
    """Return what is wrong with the answer to a wrong call; None if it is right.

    Right are one-line errors of ours that name the argument, and finite results if the value is allowed.
    torch.use_deterministic_algorithms() must be on: it fills uninitialized memory with NaN.
    """
    arguments = {**target.arguments, wrong.argument: wrong.value}
    try:
        output = target.call(**arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
        path = Path(frame.f_code.co_filename)
        text = str(error)
        if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "kernels"):
            return f"ends in {path.name}:{line}: {type(error).__name__}: {text[:100]!r}"
        if not linecache.getline(str(path), line).strip().startswith("raise"):
            return f"is torch's, at {path.name}:{line}: {type(error).__name__}: {text[:100]!r}"
        if "\n" in text:
            return f"has several lines: {text[:100]!r}"
        either = wrong.change == "meta" or not wrong.always  # if two arguments disagree, either may be named
        names = set(target.arguments) if either else {wrong.argument}
        return None if names & set(re.findall(r"\w+", text)) else f"does not name it: {text[:150]!r}"
    except Exception as error:
        return f"is a {type(error).__name__}: {str(error)[:100]!r}"
    if wrong.always:
        return "is taken"
    for x in output if isinstance(output, tuple) else (output,):
        numbers = wrong.argument.endswith("eps")  # torch takes a negative one, and the formula need not have a value
        if isinstance(x, Tensor) and (x.is_meta or (x.isnan().any() and not numbers)):
            return f"gives {'meta' if x.is_meta else 'no numbers'}"
    return None


def parameters_of(target: Target) -> set[str]:
    return set(inspect.signature(target.signature).parameters) - {"self"}
