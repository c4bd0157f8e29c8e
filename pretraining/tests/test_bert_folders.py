"""Hugging Face's BERT, ALBERT, ELECTRA, RoBERTa and DistilBERT: equal logits and gradients from their folders, and
theirs from ours."""

import json

import pytest
import torch
from their_models import assert_same_gradients, saved, saved_electra
from torch.nn.functional import cross_entropy

from fasttfm.errors import UserError
from fasttfm_pretraining.config.bert import ElectraConfig
from fasttfm_pretraining.interop import bert as interop
from fasttfm_pretraining.interop.folders import cut_vocabulary
from fasttfm_pretraining.models.electra import Electra, mean_detection_loss

transformers = pytest.importorskip("transformers")

LENGTHS = torch.tensor([9, 5, 7])


def batch(name, pad):
    """Tokens, segments or None, attention mask; and theirs as the arguments of a call."""
    torch.manual_seed(1)
    tokens, mask = torch.randint(2, 50, (3, 9)), torch.arange(9) < LENGTHS[:, None]
    tokens = tokens.masked_fill(~mask, pad)
    given = {"input_ids": tokens, "attention_mask": mask.long()}
    if name.startswith(("Roberta", "DistilBert")):
        return tokens, None, mask, given
    segments = (torch.arange(9) >= 4).long().expand(3, 9).contiguous()
    return tokens, segments, mask, given | {"token_type_ids": segments}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def assert_same_model(theirs, folder):
    """Their class reads the folder, and finds theirs."""
    repeated, told = type(theirs).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, repeated.state_dict()[name]), name
    assert json.loads((folder / "config.json").read_text())["architectures"] == [type(theirs).__name__]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BertForPreTraining", {}),
        ("AlbertForPreTraining", {}),
        ("AlbertForPreTraining", {"num_hidden_groups": 3, "hidden_act": "gelu"}),
        ("RobertaForMaskedLM", {}),
        ("DistilBertForMaskedLM", {}),
    ],
)
def test_logits_and_gradients_are_theirs_and_ours_goes_back(name, changes, tmp_path):
    theirs = saved(name, tmp_path / "H", **changes)
    if changes or name == "BertForPreTraining":
        interop.write(interop.read_pretraining(tmp_path / "H"), tmp_path / "back")
        assert_same_model(theirs, tmp_path / "back")
    else:  # what older folders hold
        torch.save(theirs.state_dict(), tmp_path / "H" / "pytorch_model.bin")
        (tmp_path / "H" / "model.safetensors").unlink()
    ours = interop.read_pretraining(tmp_path / "H")
    assert ours.config.max_length == 20
    tokens, segments, mask, given = batch(name, ours.config.pad_id)
    said, wanted = ours(tokens, segments, LENGTHS), theirs(**given)
    logits = wanted[0]
    close(said.masked[mask], logits[mask])
    if segments is None:  # theirs has none
        close(ours(tokens, torch.ones_like(tokens), LENGTHS).masked[mask], logits[mask])

    picked, labels, pairs = torch.tensor([0, 3, 10, 20]), torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 1])
    said = ours(tokens, segments, LENGTHS, picked)
    mine, other = cross_entropy(said.masked, labels), cross_entropy(logits.flatten(0, 1)[picked], labels)
    if said.sentence is not None:
        close(said.sentence, wanted[1])
        mine, other = mine + cross_entropy(said.sentence, pairs), other + cross_entropy(wanted[1], pairs)
    mine.backward()
    other.backward()
    # one embedding of segments of theirs is both of ours
    ignored = "segment" if segments is None else "nothing"
    assert_same_gradients(ours, theirs, interop.read_pretraining, tmp_path / "gradients", ignored=ignored)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("BertModel", {}),
        ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
        ("AlbertModel", {}),
        ("ElectraModel", {}),
        ("ElectraForPreTraining", {"embedding_size": 16}),
        ("RobertaModel", {}),
        ("DistilBertModel", {}),
    ],
)
def test_the_body_alone_gives_their_hidden_states(name, changes, tmp_path):
    theirs = saved(name, tmp_path / "H", **changes)
    ours = interop.read_body(tmp_path / "H")
    tokens, segments, mask, given = batch(name, ours.config.pad_id)
    wanted = getattr(theirs, theirs.config.model_type, theirs)(**given)
    hidden = ours(tokens, segments, LENGTHS)
    close(hidden[mask], wanted.last_hidden_state[mask])
    if ours.pooler is not None:
        close(ours.pooled(hidden, LENGTHS), wanted.pooler_output)
    if name.endswith("Model") and name != "ElectraModel":  # relatives go out as BERTs
        interop.write(ours, tmp_path / "B")
        repeated = transformers.AutoModel.from_pretrained(tmp_path / "B").eval()
        assert type(repeated).__name__ == (name if name == "AlbertModel" else "BertModel")
        close(repeated(**given).last_hidden_state[mask], wanted.last_hidden_state[mask])


def test_electra_is_two_folders(tmp_path):
    discriminator, generator = saved_electra(tmp_path)
    ours = interop.read_electra(tmp_path / "d", tmp_path / "g")
    tokens, segments, mask, given = batch("Electra", 0)
    positions = torch.tensor([0, 3, 10, 20])
    said = ours(tokens, segments, LENGTHS, positions, tokens.flatten()[positions])
    close(said.masked, generator(**given).logits.flatten(0, 1)[positions])
    wanted = discriminator(**{**given, "input_ids": said.tokens}, labels=said.is_replaced.float())
    close(said.replaced[mask], wanted.logits[mask])
    loss = mean_detection_loss(said, LENGTHS)
    close(loss, wanted.loss)
    loss.backward()
    wanted.loss.backward()
    close(ours.replaced.output.weight.grad, discriminator.discriminator_predictions.dense_prediction.weight.grad)
    words = discriminator.electra.embeddings.word_embeddings.weight
    close(ours.discriminator.embeddings.word.weight.grad, words.grad)
    interop.write(ours, tmp_path / "again")
    assert_same_model(discriminator, tmp_path / "again" / "discriminator")
    assert_same_model(generator, tmp_path / "again" / "generator")


def test_parts_that_make_no_electra_are_refused(tmp_path):
    saved_electra(tmp_path, intermediate_size=10)
    with pytest.raises(UserError, match=r"is not a generator of .*d_ff 10 must be 1 and 12"):
        interop.read_electra(tmp_path / "d", tmp_path / "g")
    sizes = {"vocab_size": 50, "d_model": 16, "heads": 2, "d_ff": 24, "layers": 1, "embedding_size": 8}
    with pytest.raises(UserError, match="activation relu: the head of masked tokens"):
        interop.write(Electra(ElectraConfig(**sizes, generator_size=0.5, activation="relu")), tmp_path / "out")


WRONG = {
    "BertForPreTraining": [
        ({"model_type": "gpt2"}, "model_type is 'gpt2', it must be"),
        ({"hidden_size": None}, "hidden_size: None must be an integer"),
        ({"hidden_act": "mish"}, "hidden_act mish is not supported"),
        ({"intermediate_size": 25}, "copy both from one model"),
        ({"num_hidden_layers": 4}, "the layers bert.encoder.layer.0, 1, 2, where config.json's num_hidden_layers is 4"),
        ({"vocab_size": 10**12}, r"says \(1000000000000, 16\): copy both"),
        ({"is_decoder": True}, "is_decoder True is not supported"),
    ],
    "RobertaForMaskedLM": [
        ({"max_position_embeddings": 2}, "leaves no position"),
        ({"type_vocab_size": 2}, "type_vocab_size 2"),
        ({"hidden_act": "relu"}, "hidden_act relu: the head of masked tokens of an ELECTRA or RoBERTa"),
    ],
    "DistilBertForMaskedLM": [
        ({"dim": None}, "dim|hidden_size"),
        ({"activation": "mish"}, "mish"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_ends_in_one_line(name, tmp_path):
    saved(name, tmp_path)
    path = tmp_path / "config.json"
    given = json.loads(path.read_text())
    for changes, message in WRONG[name]:
        path.write_text(json.dumps(given | changes))
        with pytest.raises(UserError, match=message) as raised:
            interop.read_pretraining(tmp_path)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["BertForPreTraining", "AlbertForPreTraining", "ElectraForPreTraining"])
def test_rows_behind_the_tokenizer_s_tokens_are_cut_off(tmp_path, name):
    saved(name, tmp_path)
    is_electra = name.startswith("Electra")
    whole = (interop.read_electra if is_electra else interop.read_pretraining)(tmp_path)
    cut = cut_vocabulary(whole, 44, tmp_path)
    assert cut.config.vocab_size == 44
    tokens = torch.randint(1, 44, (3, 9))
    if is_electra:
        close(cut.discriminator(tokens), whole.discriminator(tokens))
        return
    for mine, other, size in zip(cut(tokens), whole(tokens), (44, 2)):
        close(mine, other[..., :size])
