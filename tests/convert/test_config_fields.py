"""Every field of another tool's config.json may be of any type: it is taken, or refused in a line."""

import json
from pathlib import Path

import pytest

from fasttfm.convert import bart
from fasttfm.convert.config_json import read_config
from fasttfm.errors import UserError
from fasttfm_pretraining.interop import bert, gpt

WRONG = (None, [], {}, [[1]], "x", "", "64", -1, 0, 3.5, 1e300, True, 1 << 62, 10**30, "\ud800", float("nan"))
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16,
         "max_position_embeddings": 16, "type_vocab_size": 2, "hidden_act": "gelu", "pad_token_id": 0,
         "layer_norm_eps": 1e-5, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
         "embedding_size": 16, "num_hidden_groups": 1, "inner_group_num": 1}  # fmt: skip
GPT = {"vocab_size": 64, "n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 16, "n_inner": 32, "resid_pdrop": 0.1,
       "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}  # fmt: skip
MARIAN = {"d_model": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
          "decoder_ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.1, "num_beams": 4,
          "max_position_embeddings": 16, "activation_function": "relu", "length_penalty": 1.0, "suppress_tokens": [1],
          "unk_token_id": 1}  # fmt: skip


def _marian(given, path):
    return bart.bart_config(given, path, 64, "gelu"), bart.decoding(path.parent, given, 0, 1, 2)


KINDS = {
    "bert": (SIZES, bert._config),
    "albert": (SIZES, bert._config),
    "electra": (SIZES, bert._config),
    "gpt2": (GPT, gpt._config),
    "marian": (MARIAN, _marian),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_type_of_any_field_is_taken_or_refused_in_a_line(kind, tmp_path):
    whole, read = KINDS[kind]
    path: Path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **whole}))
    read(read_config(tmp_path, kind), path)
    refused = []
    for name in ("model_type", *whole):
        for value in WRONG:
            path.write_text(json.dumps({"model_type": kind, **whole, name: value}))
            try:
                read(read_config(tmp_path, kind), path)
            except UserError as error:
                refused.append(str(error))
    assert len(refused) > 5 * len(whole)
    assert all(str(tmp_path) in each and "\n" not in each for each in refused)
