"""The pre-trained models: GPT and Llama, BERT, ALBERT and ELECTRA."""

from fasttfm.pretraining.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm.pretraining.config.gpt import GPTConfig
from fasttfm.pretraining.config.llama import LlamaConfig
from fasttfm.pretraining.models.albert import Albert, AlbertPretraining
from fasttfm.pretraining.models.bert import Bert, BertPretraining
from fasttfm.pretraining.models.electra import Electra
from fasttfm.pretraining.models.gpt import GPT
from fasttfm.pretraining.models.llama import Llama

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
]
