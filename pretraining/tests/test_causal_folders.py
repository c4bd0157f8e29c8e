"""Hugging Face's GPT-2, GPT-1 and Llama: equal logits and gradients from their folders, and theirs from ours."""

import dataclasses
import json

import pytest
import torch
from convert.their_folders import tokenizer_json
from their_models import assert_same_gradients, saved
from torch.nn.functional import cross_entropy

from fasttfm import functional as F
from fasttfm.cli.main import main
from fasttfm.errors import UserError
from fasttfm.models.packing import Packing
from fasttfm_pretraining.config.sampling import Sampling
from fasttfm_pretraining.decoding.continuation import continue_ids
from fasttfm_pretraining.interop import gpt, llama
from fasttfm_pretraining.interop.causal import import_folder
from fasttfm_pretraining.models.gpt import GPT

transformers = pytest.importorskip("transformers")

NAMES = {"gpt2": "GPT2LMHeadModel", "openai-gpt": "OpenAIGPTLMHeadModel", "llama": "LlamaForCausalLM"}
FILES = {"gpt2": gpt, "openai-gpt": gpt, "llama": llama}
"""Kind -> the module that reads and writes its folders."""
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
"""As Llama 3.1's: of a head of 16 channels at base 100, pairs of all three kinds."""
LLAMAS = (
    ("llama", {}),
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 6, "rope_parameters": {"rope_theta": 5e5}}),
    ("llama", {"head_dim": 16, "rope_parameters": {"rope_theta": 100.0, **LLAMA3}}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}}),
)


def theirs(kind, folder, **changes):
    return saved(NAMES[kind], folder, **changes)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {}),
        ("gpt2", {"n_inner": 40, "activation_function": "relu", "layer_norm_epsilon": 1e-3}),
        ("openai-gpt", {}),
        *LLAMAS,
    ],
)
def test_logits_and_gradients_are_equal_and_ours_goes_back(kind, changes, tmp_path):
    their_model, files = theirs(kind, tmp_path / "theirs", **changes), FILES[kind]
    tolerance = 1e-4 if kind == "llama" else 1e-5
    ours = files.read(tmp_path / "theirs")
    if "n_inner" in changes:
        assert (ours.config.d_ff, ours.config.activation, ours.config.layer_norm_eps) == (40, "relu", 1e-3)
    tokens = torch.randint(0, 37, (3, 12))
    expected, logits = their_model(tokens, labels=tokens), ours(tokens)
    torch.testing.assert_close(logits, expected.logits, rtol=tolerance, atol=tolerance)
    files.write(ours, tmp_path / "ours")
    repeated, told = type(their_model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    for (name, one), other in zip(their_model.named_parameters(), repeated.parameters(), strict=True):
        assert torch.equal(one, other), name
    torch.testing.assert_close(repeated.eval()(tokens).logits, expected.logits)
    expected.loss.backward()
    cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    near = {"rtol": 10 * tolerance, "atol": tolerance}
    assert_same_gradients(ours, their_model, files.read, tmp_path / "gradients", **near)


def test_an_activation_that_gpt_1_has_not_is_refused(tmp_path):
    theirs("openai-gpt", tmp_path / "theirs")
    ours = gpt.read(tmp_path / "theirs")
    ours = GPT(dataclasses.replace(ours.config, activation="gelu"))  # their "gelu" is the formula with tanh
    with pytest.raises(UserError, match="activation gelu: Hugging Face's GPT-1 has gelu_tanh, relu alone"):
        gpt.write(ours, tmp_path / "ours")


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


WRONG = {
    "gpt2": [
        ({"model_type": "llama"}, "llama"),
        ({"scale_attn_by_inverse_layer_idx": True}, "not supported"),
        ({"activation_function": "mish"}, "mish"),
        ({"embd_pdrop": 0.3}, "must be the same"),
        ({"n_layer": 4}, r"have the layers h\.0, 1, 2, where config\.json's n_layer is 4"),
        ({"n_layer": 10**9}, "layers 1000000000 must be at most 10,000"),
        ({"n_embd": 10**9}, "d_model 1000000000 must be at most 1,000,000"),
        ({"n_inner": 10**6}, "another model"),
        ({"vocab_size": 10**12}, "another vocabulary"),
    ],
    "llama": [
        ({"model_type": "mistral"}, "mistral"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "has no factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'yarn' is not"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters have another rope_type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "rotary_high_turns 1.0 must be above"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "rotary_factor 0.5 must be at least 1"),
        ({"num_key_value_heads": 3}, "not a multiple of kv_heads 3"),
        ({"head_dim": 7}, "7 channels"),
        ({"intermediate_size": 41}, "another model"),
    ],
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_ends_in_one_line(kind, tmp_path):
    theirs(kind, tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    for changes, said in WRONG[kind]:
        (tmp_path / "config.json").write_text(json.dumps(given | changes))
        with pytest.raises(UserError, match=said):
            FILES[kind].read(tmp_path)
    with pytest.raises(UserError, match=r"config\.json"):
        FILES[kind].read(tmp_path / "none")


# Llama alone


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "changes"), LLAMAS)
def test_generated_text_is_that_of_transformers(kind, changes, tmp_path):
    their_model = theirs(kind, tmp_path, **changes)
    prompt = [3, 5, 8, 2, 30]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = their_model.generate(torch.tensor([prompt]), **options)[0, 5:].tolist()
    assert continue_ids(llama.read(tmp_path), prompt, 40, 1, Sampling(temperature=0), None) == [expected]


def test_packed_and_padded_rows_are_those_of_each_alone(tmp_path):
    theirs("llama", tmp_path)
    model, lengths = llama.read(tmp_path), torch.tensor([9, 5, 7])
    tokens = torch.randint(0, 37, (3, 9))
    packing = Packing.from_lengths(lengths, 9, 21)
    packed, padded = model(packing.pack_tokens(tokens), packing)[0], model(tokens, lengths)
    for row, (begin, end) in enumerate(zip(packing.starts.tolist(), packing.starts.tolist()[1:])):
        alone = model(tokens[row : row + 1, : end - begin])[0]
        torch.testing.assert_close(packed[begin:end], alone, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(padded[row, : end - begin], alone, rtol=1e-4, atol=1e-5)
    scored = model.log_probabilities([[3, 5, 7, 9], [1, 2]], [2, 1])
    rows = model(torch.tensor([[3, 5, 7]]))[0].log_softmax(-1)
    torch.testing.assert_close(scored[0], rows[1, 7] + rows[2, 9], rtol=1e-4, atol=1e-4)


def test_all_kinds_of_pairs_are_scaled_as_llama3_does():
    """A pair that is kept, two between and five that are slowed, or the tests of whole models would notice little."""
    plain, scaled = (
        F.rotary_tables(2, 16, base=100.0, **scaling, dtype=torch.float64)[1][1].arcsin()
        for scaling in ({}, {"factor": 4.0, "bands": (32, 1.0, 4.0)})
    )
    assert (plain / scaled).tolist() == pytest.approx([1.0, 1.40, 2.48, *[4.0] * 5], abs=0.01)


@pytest.mark.parametrize("scaling", [LLAMA3, {"type": "linear", "factor": 2.5}])
def test_folders_of_transformers_4_are_read(scaling, tmp_path):
    """Whose config.json has rope_theta and rope_scaling."""
    theirs("llama", tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    del given["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(given | {"rope_theta": 500.0, "rope_scaling": scaling}))
    their_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert their_model.config.rope_parameters["rope_theta"] == 500.0
    tokens = torch.randint(0, 37, (1, 40))
    torch.testing.assert_close(llama.read(tmp_path)(tokens), their_model(tokens).logits, rtol=1e-4, atol=1e-4)
