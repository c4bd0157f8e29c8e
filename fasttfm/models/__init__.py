"""Complete models built from fasttfm's modules."""

from fasttfm.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm.config.gpt import GPTConfig
from fasttfm.config.llama import LlamaConfig
from fasttfm.config.model import TransformerConfig
from fasttfm.models.albert import Albert, AlbertPretraining
from fasttfm.models.bert import Bert, BertPretraining
from fasttfm.models.electra import Electra
from fasttfm.models.gpt import GPT
from fasttfm.models.llama import Llama
from fasttfm.models.time_series import TimeSeriesTransformer
from fasttfm.models.transformer import Transformer

__all__ = [
    "GPT",
    "Albert",
    "AlbertConfig",
    "AlbertPretraining",
    "Bert",
    "BertConfig",
    "BertPretraining",
    "Electra",
    "ElectraConfig",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "TimeSeriesTransformer",
    "Transformer",
    "TransformerConfig",
]
