"""The pre-trained models: GPT and Llama, BERT, ALBERT and ELECTRA."""

from fasttfm_pretraining.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm_pretraining.config.gpt import GPTConfig
from fasttfm_pretraining.config.llama import LlamaConfig
from fasttfm_pretraining.models.bert import Bert, BertPretraining
from fasttfm_pretraining.models.electra import Electra
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.llama import Llama

__all__ = [
    "GPT",
    "AlbertConfig",
    "Bert",
    "BertConfig",
    "BertPretraining",
    "Electra",
    "ElectraConfig",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
]
