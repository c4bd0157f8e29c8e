"""Public operators, each with a Triton and a PyTorch backend that are tested against reference.py."""

import zlib

import torch

from fasttfm.functional.attention.api import (
    attention,
    attention_weights,
    packed_qkv_attention,
    varlen_attention,
    varlen_packed_qkv_attention,
)
from fasttfm.functional.attention.paged import attention_with_cache
from fasttfm.functional.attention.sdpa import scaled_dot_product_attention
from fasttfm.functional.backends import backend
from fasttfm.functional.cross_entropy import cross_entropy
from fasttfm.functional.dropout import draw_seed
from fasttfm.functional.embedding import embed
from fasttfm.functional.feed_forward import feed_forward
from fasttfm.functional.linear_cross_entropy import linear_cross_entropy
from fasttfm.functional.onlookers import formulas
from fasttfm.functional.residual_add import residual_add
from fasttfm.functional.residual_norm import (
    layer_norm,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
)
from fasttfm.functional.rotary import rotary, rotary_tables

__all__ = [
    "attention",
    "attention_weights",
    "attention_with_cache",
    "backend",
    "cross_entropy",
    "draw_seed",
    "embed",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "packed_qkv_attention",
    "residual_add",
    "residual_layer_norm",
    "residual_rms_norm",
    "rms_norm",
    "rotary",
    "rotary_tables",
    "scaled_dot_product_attention",
    "varlen_attention",
    "varlen_packed_qkv_attention",
]

# torch.compile caches graphs on disk, which hold operator schemas: other schemas need another cache key.
_schemas = "".join(str(packet.default._schema) for packet in formulas)
torch.compiler.config.cache_key_tag += f" fasttfm {zlib.crc32(_schemas.encode())}"
