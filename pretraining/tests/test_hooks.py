"""Hooks, and so adapters, on any linear layer, norm or embedding take effect: no shortcut reads parameters past it."""

import numpy as np
import pytest
import torch
from torch import nn

from fasttfm.nn import RMSNorm
from fasttfm_pretraining.config.bert import BertClassifierConfig, BertConfig, ElectraConfig
from fasttfm_pretraining.config.gpt import GPTClassifierConfig
from fasttfm_pretraining.config.llama import LlamaConfig
from fasttfm_pretraining.data.task_batches import Examples
from fasttfm_pretraining.data.task_inputs import Row
from fasttfm_pretraining.models.bert import BertPretraining
from fasttfm_pretraining.models.electra import Electra
from fasttfm_pretraining.models.gpt_heads import GPTClassifier
from fasttfm_pretraining.models.heads import Answerer, Classifier
from fasttfm_pretraining.models.llama import Llama

SIZES = {"vocab_size": 40, "d_model": 16, "heads": 2, "d_ff": 24, "layers": 1, "max_length": 12}
TOKENS = torch.arange(16).view(2, 8)
POSITIONS = torch.tensor([1, 9])
BATCH = Examples([[Row(row.numpy(), 4)] for row in TOKENS], np.array([1, 0])).batch(range(2))
MODELS = {
    "bert": (BertPretraining, BertConfig, {}, lambda model: model(TOKENS)),
    "electra": (Electra, ElectraConfig, {}, lambda model: model(TOKENS, None, None, POSITIONS, POSITIONS)),
    "classifier": (Classifier, BertClassifierConfig, {}, lambda model: model(BATCH)),
    "answers": (Answerer, BertConfig, {"pooler": False, "sentence_head": False}, lambda model: model(BATCH)),
    "gpt classifier": (GPTClassifier, GPTClassifierConfig, {}, lambda model: model.batch_loss(BATCH)),
    "llama": (Llama, LlamaConfig, {}, lambda model: model(TOKENS)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_every_linear_layer_norm_and_embedding_is_called(kind):
    cls, config, changes, run = MODELS[kind]
    model, called = cls(config(**SIZES, **changes)), set()
    kinds = nn.Linear | nn.LayerNorm | RMSNorm | nn.Embedding
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    run(model)
    assert called == set(names) != set()
