"""Complete models built from fasttfm's modules."""

from fasttfm.models.config import TransformerConfig
from fasttfm.models.transformer import Transformer

__all__ = ["Transformer", "TransformerConfig"]
