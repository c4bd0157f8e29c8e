"""Complete models built from fasttfm's modules; fasttfm_pretraining.models has GPT, Llama and BERT's family."""

from fasttfm.config.model import TransformerConfig
from fasttfm.models.time_series import TimeSeriesTransformer
from fasttfm.models.transformer import Transformer

__all__ = ["TimeSeriesTransformer", "Transformer", "TransformerConfig"]
