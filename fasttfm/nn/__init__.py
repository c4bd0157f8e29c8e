"""torch.nn's Transformer modules on fasttfm's operators: change the import, keep the code, the weights, the optimizer.

docs/replace-torch-nn.md tells what each argument does here, and what is different on purpose.
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
