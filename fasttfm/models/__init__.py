"""Complete models built from fasttfm's modules."""

from fasttfm.config.gpt import GPTConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.models.gpt import GPT
from fasttfm.models.time_series import TimeSeriesTransformer
from fasttfm.models.transformer import Transformer

__all__ = ["GPT", "GPTConfig", "TimeSeriesTransformer", "Transformer", "TransformerConfig"]
