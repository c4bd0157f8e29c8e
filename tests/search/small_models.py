"""Transformers with random weights whose outputs vary by sentence, and sources for them."""

import random

import torch

from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search.batches import multiply_in_int8

from .table_model import EOS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def model_of(kind: str, vocab_size: int, width: int = 64, heads: int = 4, std: float = 3.0, **fields) -> Transformer:
    """kind: fp32, bf16, fp16 or int8."""
    torch.manual_seed(8)
    sizes = {"d_ff": 4 * width, "encoder_layers": 1, "decoder_layers": 2, **fields}
    model = Transformer(TransformerConfig(vocab_size=vocab_size, d_model=width, heads=heads, **sizes))
    with torch.no_grad():
        norm = model.decoder.norm or model.decoder.layers[-1].norm3
        norm.weight.normal_(std=std)
    multiply_in_int8(model, kind == "int8")
    return model.to(DTYPES.get(kind, torch.float32))


def sources_of(vocab_size: int, count: int) -> list[list[int]]:
    """Sources of up to 30 tokens and end-of-sentence."""
    draw = random.Random(4)
    return [[*(draw.randrange(4, vocab_size) for _ in range(draw.randint(1, 30))), EOS] for _ in range(count)]
