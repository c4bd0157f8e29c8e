"""Drop-in replacements of torch.nn's Transformer modules: change the import, keep code, weights and optimizer.

docs/replace-torch-nn.md lists each argument and the intended differences.
"""

from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.models.cache import AttentionCache, DecoderCache
from fasttfm.models.packing import Packing
from fasttfm.nn.attention import MultiheadAttention
from fasttfm.nn.decoder import TransformerDecoder, TransformerDecoderLayer
from fasttfm.nn.encoder import TransformerEncoder, TransformerEncoderLayer
from fasttfm.nn.modules import FeedForward, LayerNorm, PositionalEncoding, RMSNorm
from fasttfm.nn.transformer import Transformer

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttentionCache",
    "DecoderCache",
    "FeedForward",
    "LayerNorm",
    "MultiheadAttention",
    "Packing",
    "PositionalEncoding",
    "RMSNorm",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
]
