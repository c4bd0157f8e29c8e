"""Hugging Face's GPT-2 and GPT-1: equal logits and gradients from their folders, and theirs from ours."""

import dataclasses
import json

import pytest
import torch
from causal_folders import assert_equal_and_goes_back, assert_several_files_are_read
from convert.their_folders import tokenizer_json

from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm_pretraining.interop.causal import import_folder
from fasttfm_pretraining.interop.gpt import read, write
from fasttfm_pretraining.models.gpt import GPT

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 37, "n_positions": 16, "n_embd": 16, "n_layer": 3, "n_head": 2}
DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def theirs(kind, folder, **changes):
    """A model with random weights, saved."""
    torch.manual_seed(1)
    if kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**SIZES, **DROPOUT, **changes}))
    else:
        model = transformers.OpenAIGPTLMHeadModel(transformers.OpenAIGPTConfig(**{**SIZES, **DROPOUT, **changes}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt"])
def test_logits_and_gradients_are_equal_and_ours_goes_back(kind, tmp_path):
    assert_equal_and_goes_back(theirs(kind, tmp_path / "theirs"), read, write, tmp_path)


@pytest.mark.parametrize("kind", ["gpt2", "openai-gpt"])
def test_weights_in_several_files_are_read(kind, tmp_path):
    assert_several_files_are_read(theirs(kind, tmp_path / "one"), read, tmp_path)


def test_other_sizes_and_activations_survive_the_way_there_and_back(tmp_path):
    their_model = theirs("gpt2", tmp_path / "theirs", n_inner=40, activation_function="relu", layer_norm_epsilon=1e-3)
    ours = read(tmp_path / "theirs")
    assert (ours.config.d_ff, ours.config.activation, ours.config.layer_norm_eps) == (40, "relu", 1e-3)
    write(ours, tmp_path / "ours")
    repeated = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    tokens = torch.randint(0, 37, (2, 9))
    torch.testing.assert_close(repeated(tokens).logits, their_model(tokens).logits)


def test_an_activation_that_gpt_1_has_not_is_refused(tmp_path):
    theirs("openai-gpt", tmp_path / "theirs")
    ours = read(tmp_path / "theirs")
    ours = GPT(dataclasses.replace(ours.config, activation="gelu"))  # their "gelu" is the formula with tanh
    with pytest.raises(UserError, match="activation gelu: Hugging Face's GPT-1 has gelu_tanh, relu alone"):
        write(ours, tmp_path / "ours")


def test_a_folder_becomes_a_model_directory(tmp_path, capsys):
    their_model = theirs("gpt2", tmp_path / "theirs")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        import_folder(tmp_path / "theirs", tmp_path / "M")
    (tmp_path / "theirs" / "tokenizer.json").write_text(tokenizer_json())
    path = tmp_path / "theirs" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sliding_window": 4}))
    assert main(["lm", "import", str(path.parent), "--out", str(tmp_path / "M")]) == 0
    told = capsys.readouterr().out
    for line in (
        f"{path}: the fields sliding_window are unknown: they were left out",
        f"{path.parent}: left out 22 rows of the vocabulary behind the tokenizer's 15 tokens",
    ):
        assert f"note: {line}\n" in told
        assert f"- {line}\n" in (tmp_path / "M" / "README.md").read_text()
    tokens = torch.randint(0, 15, (2, 9))
    model = GPT.from_pretrained(tmp_path / "M")
    torch.testing.assert_close(model(tokens), their_model(tokens).logits[..., :15], rtol=1e-5, atol=1e-5)


def test_what_is_no_gpt_ends_in_one_line(tmp_path):
    theirs("gpt2", tmp_path / "M")
    described = json.loads((tmp_path / "M" / "config.json").read_text())
    for changes, said in (
        ({"model_type": "llama"}, "llama"),
        ({"scale_attn_by_inverse_layer_idx": True}, "not supported"),
        ({"activation_function": "mish"}, "mish"),
        ({"embd_pdrop": 0.3}, "must be the same"),
        ({"n_layer": 4}, r"have the layers h\.0, 1, 2, where config\.json's n_layer is 4"),
        ({"n_layer": 2}, r"have the layers h\.0, 1, 2, where config\.json's n_layer is 2"),
        ({"n_embd": 20}, "another"),
        ({"n_layer": 10**9}, "layers 1000000000 must be at most 10,000"),
        ({"n_embd": 10**9}, "d_model 1000000000 must be at most 1,000,000"),
        ({"n_inner": 10**6}, "another model"),
        ({"n_positions": 10**12}, "another model"),
        ({"vocab_size": 10**12}, "another vocabulary"),
    ):
        (tmp_path / "M" / "config.json").write_text(json.dumps(described | changes))
        with pytest.raises(UserError, match=said):
            read(tmp_path / "M")
    with pytest.raises(UserError, match=r"config\.json"):
        read(tmp_path / "none")
