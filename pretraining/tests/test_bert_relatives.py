"""RoBERTa and DistilBERT: equal logits and hidden states from the folders that transformers saves."""

import json

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm_pretraining.interop import bert as interop

transformers = pytest.importorskip("transformers")

ROBERTA = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 22, "type_vocab_size": 1, "layer_norm_eps": 1e-5, "initializer_range": 0.2,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": 50, "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 20,
    "initializer_range": 0.2,
}  # fmt: skip
LENGTHS = torch.tensor([9, 5, 7])


def saved(kind, folder, head="ForMaskedLM", **changes):
    """A model with random weights, biases too."""
    torch.manual_seed(0)
    if kind == "roberta":
        model = getattr(transformers, f"Roberta{head}")(transformers.RobertaConfig(**{**ROBERTA, **changes}))
    else:
        model = getattr(transformers, f"DistilBert{head}")(transformers.DistilBertConfig(**{**DISTILBERT, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return model.eval()


def rows(pad):
    """Tokens and their mask."""
    torch.manual_seed(1)
    tokens, mask = torch.randint(2, 50, (3, 9)), torch.arange(9) < LENGTHS[:, None]
    return tokens.masked_fill(~mask, pad), mask


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_masked_logits_are_equal_with_padding_and_with_pairs(kind, tmp_path):
    theirs = saved(kind, tmp_path)
    ours = interop.read_pretraining(tmp_path)
    tokens, mask = rows(ours.config.pad_id)
    segments = (torch.arange(9) >= 4).long().expand(3, 9)
    expected = theirs(tokens, attention_mask=mask.long()).logits
    for each in (None, segments):  # theirs has no segments
        logits = ours(tokens, each, LENGTHS).masked
        torch.testing.assert_close(logits[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert ours.config.max_length == 20


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_a_bare_body_is_read_and_goes_out_as_a_bert(kind, tmp_path):
    theirs = saved(kind, tmp_path / "H", "Model")
    ours = interop.read_body(tmp_path / "H")
    tokens, mask = rows(ours.config.pad_id)
    expected = theirs(tokens, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(ours(tokens, None, LENGTHS)[mask], expected[mask], rtol=1e-5, atol=1e-5)
    interop.write(ours, tmp_path / "B")
    repeated = transformers.AutoModel.from_pretrained(tmp_path / "B")
    assert type(repeated).__name__ == "BertModel"
    again = repeated.eval()(tokens, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(again[mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_gradients_are_equal(tmp_path):
    theirs = saved("distilbert", tmp_path)
    ours = interop.read_pretraining(tmp_path)
    tokens, _ = rows(0)
    theirs(tokens).logits.square().mean().backward()
    ours(tokens).masked.square().mean().backward()
    expected = theirs.distilbert.transformer.layer[1].ffn.lin1.weight.grad
    torch.testing.assert_close(ours.body.encoder.layers[1].linear1.weight.grad, expected, rtol=1e-5, atol=1e-6)
    expected = theirs.distilbert.embeddings.word_embeddings.weight.grad
    torch.testing.assert_close(ours.body.embeddings.word.weight.grad[1:], expected[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("roberta", {"max_position_embeddings": 2}, "leaves no position"),
        ("roberta", {"type_vocab_size": 2}, "type_vocab_size 2"),
        ("roberta", {"hidden_size": 32}, "configuration says"),
        ("roberta", {"hidden_act": "relu"}, "hidden_act relu: the head of masked tokens of an ELECTRA or RoBERTa"),
        ("distilbert", {"dim": None}, "dim|hidden_size"),
        ("distilbert", {"n_layers": 4}, "the layers bert.encoder.layer.0, 1, 2, where"),
        ("distilbert", {"activation": "mish"}, "mish"),
    ],
)
def test_what_does_not_fit_ends_in_one_line(kind, changes, said, tmp_path):
    saved(kind, tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | changes))
    with pytest.raises(UserError, match=said):
        interop.read_pretraining(tmp_path)
