"""Hugging Face's Llama: equal logits, gradients and generated text from its folders, and theirs from ours."""

import json

import pytest
import torch
from causal_folders import assert_equal_and_goes_back, assert_several_files_are_read

from fasttfm import functional as F
from fasttfm.errors import UserError
from fasttfm.models.packing import Packing
from fasttfm_pretraining.config.sampling import Sampling
from fasttfm_pretraining.decoding.continuation import continue_ids
from fasttfm_pretraining.interop.llama import read, write

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "initializer_range": 0.3, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
"""As Llama 3.1's: of a head of 16 channels at base 100, pairs of all three kinds."""
CHANGES = (
    {},
    {"num_key_value_heads": 1, "tie_word_embeddings": True},
    {"num_key_value_heads": 4, "head_dim": 6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    {"head_dim": 16, "rope_parameters": {"rope_theta": 100.0, **LLAMA3}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.5}},
)


def theirs(folder, **changes):
    """A model with random weights, norms too, saved."""
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("changes", CHANGES)
def test_logits_and_gradients_are_equal_and_ours_goes_back(changes, tmp_path):
    their_model = theirs(tmp_path / "theirs", **changes)
    assert_equal_and_goes_back(their_model, read, write, tmp_path, rtol=1e-4, atol=1e-4)


def test_weights_in_several_files_are_read(tmp_path):
    assert_several_files_are_read(theirs(tmp_path / "one"), read, tmp_path)


@pytest.mark.sample(2)
@pytest.mark.parametrize("changes", CHANGES)
def test_generated_text_is_that_of_transformers(changes, tmp_path):
    their_model = theirs(tmp_path, **changes)
    prompt = [3, 5, 8, 2, 30]
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = their_model.generate(torch.tensor([prompt]), **options)[0, 5:].tolist()
    assert continue_ids(read(tmp_path), prompt, 40, 1, Sampling(temperature=0), None) == [expected]


def test_packed_and_padded_rows_are_those_of_each_alone(tmp_path):
    theirs(tmp_path)
    model, lengths = read(tmp_path), torch.tensor([9, 5, 7])
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
    theirs(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    del given["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(given | {"rope_theta": 500.0, "rope_scaling": scaling}))
    their_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert their_model.config.rope_parameters["rope_theta"] == 500.0
    tokens = torch.randint(0, 37, (1, 40))
    torch.testing.assert_close(read(tmp_path)(tokens), their_model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
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
        ({"num_hidden_layers": 4}, "where config.json's num_hidden_layers is 4"),
        ({"num_hidden_layers": 2}, "where config.json's num_hidden_layers is 2"),
        ({"intermediate_size": 41}, "another model"),
        ({"vocab_size": 10**12}, "another vocabulary"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(changes, said, tmp_path):
    theirs(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | changes))
    with pytest.raises(UserError, match=said):
        read(tmp_path)


def test_a_folder_becomes_a_model_that_writes_after_its_own_first_token(tmp_path, capsys):
    from fasttfm.cli.main import main

    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({each: number for number, each in enumerate(alphabet)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    their_model = theirs(tmp_path / "H", vocab_size=258)
    made.save(str(tmp_path / "H" / "tokenizer.json"))
    assert main(["lm", "import", str(tmp_path / "H"), "--out", str(tmp_path / "M")]) == 0
    capsys.readouterr()
    words = ["--prompt", "abc", "--tokens", "12", "--temperature", "0", "--json"]
    assert main(["lm", "generate", str(tmp_path / "M"), *words]) == 0
    (text,) = json.loads(capsys.readouterr().out)["texts"]
    prompt = torch.tensor([[256, *made.encode("abc").ids]])
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 257, "pad_token_id": 257}
    assert text == made.decode(their_model.generate(prompt, **options)[0].tolist())
