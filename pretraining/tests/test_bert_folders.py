"""Hugging Face's BERT, ALBERT and ELECTRA: equal logits and gradients from their folders, and theirs from ours."""

import json

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm_pretraining.config.bert import ElectraConfig
from fasttfm_pretraining.interop import bert as interop
from fasttfm_pretraining.interop.folders import cut_vocabulary
from fasttfm_pretraining.models.electra import Electra, mean_detection_loss

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}  # fmt: skip
LENGTHS = torch.tensor([9, 5, 7])


def batch():
    """Tokens, segments, attention mask."""
    torch.manual_seed(1)
    tokens, mask = torch.randint(1, 50, (3, 9)), torch.arange(9) < LENGTHS[:, None]
    return tokens.masked_fill(~mask, 0), (torch.arange(9) >= 4).long().expand(3, 9).contiguous(), mask


def saved(cls, config, folder, **options):
    torch.manual_seed(0)
    model = cls(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, **options)
    return model.eval()


def bert_config(**changes):
    return transformers.BertConfig(**{**SIZES, **changes})


def albert_config(**changes):
    return transformers.AlbertConfig(**{**SIZES, "embedding_size": 8, **changes})


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def named_gradients(model, folder):
    """Gradients under Hugging Face's names, by writing a model whose weights are its gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    interop.write(model, folder)
    return interop.read_tensors(folder)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("BertForSequenceClassification", "left out the weights classifier.bias and 1 other, for which"),
        ("AlbertForQuestionAnswering", "left out the weights qa_outputs.bias and 1 other, for which"),
        ("BertForPreTraining", ""),
        ("BertForMaskedLM", ""),
        ("AlbertForPreTraining", ""),
    ],
)
def test_heads_that_are_left_out_and_those_that_begin_anew_are_told(tmp_path, recwarn, name, left_out):
    config = bert_config() if name.startswith("Bert") else albert_config()
    saved(getattr(transformers, name), config, tmp_path)
    recwarn.clear()
    interop.read_pretraining(tmp_path)
    told = [str(each.message) for each in recwarn]
    assert len(told) == 2 * bool(left_out)
    for message, wanted in zip(
        told, ("has no head of masked tokens: this model's begins with fresh weights", left_out)
    ):
        assert wanted in message


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (transformers.BertForPreTraining, bert_config()),
        (transformers.AlbertForPreTraining, albert_config()),
        (transformers.AlbertForPreTraining, albert_config(num_hidden_groups=3, hidden_act="gelu")),
    ],
)
def test_logits_and_gradients_of_both_heads_are_theirs(cls, config, safe, tmp_path):
    theirs = saved(cls, config, tmp_path)
    if not safe:  # what older folders hold
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    ours = interop.read_pretraining(tmp_path)
    tokens, segments, mask = batch()
    said = ours(tokens, segments, LENGTHS)
    wanted = theirs(tokens, attention_mask=mask.long(), token_type_ids=segments)
    sentence = wanted[1]
    close(said.masked[mask], wanted.prediction_logits[mask])
    close(said.sentence, sentence)

    picked = torch.tensor([0, 3, 10, 20])
    said = ours(tokens, segments, LENGTHS, picked)
    labels, pairs = torch.tensor([3, 4, 5, 6]), torch.tensor([0, 1, 1])
    entropy = torch.nn.functional.cross_entropy
    (entropy(said.masked, labels) + entropy(said.sentence, pairs)).backward()
    (entropy(wanted.prediction_logits.flatten(0, 1)[picked], labels) + entropy(sentence, pairs)).backward()
    gradients = named_gradients(ours, tmp_path / "gradients")
    for name, parameter in theirs.named_parameters():
        close(gradients[name], parameter.grad)


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (transformers.BertModel, bert_config()),
        (transformers.BertForMaskedLM, bert_config(hidden_act="gelu_new")),
        (transformers.AlbertModel, albert_config()),
        (transformers.ElectraModel, transformers.ElectraConfig(**SIZES, embedding_size=8)),
        (transformers.ElectraForPreTraining, transformers.ElectraConfig(**SIZES, embedding_size=16)),
    ],
)
def test_the_body_alone_gives_their_hidden_states(cls, config, tmp_path):
    theirs = saved(cls, config, tmp_path)
    ours = interop.read_body(tmp_path)
    tokens, segments, mask = batch()
    inner = getattr(theirs, config.model_type, theirs)
    wanted = inner(tokens, attention_mask=mask.long(), token_type_ids=segments)
    hidden = ours(tokens, segments, LENGTHS)
    close(hidden[mask], wanted.last_hidden_state[mask])
    if ours.pooler is not None:
        close(ours.pooled(hidden, LENGTHS), wanted.pooler_output)


def test_ours_loads_there(tmp_path):
    for cls, config in (
        (transformers.BertForPreTraining, bert_config()),
        (transformers.BertModel, bert_config()),
        (transformers.AlbertForPreTraining, albert_config()),
        (transformers.AlbertForPreTraining, albert_config(num_hidden_groups=3)),
    ):
        theirs = saved(cls, config, tmp_path / "theirs")
        read = interop.read_body if cls is transformers.BertModel else interop.read_pretraining
        interop.write(read(tmp_path / "theirs"), tmp_path / "ours")
        repeated, told = cls.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(told.values()), told
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, repeated.state_dict()[name]), name
        assert json.loads((tmp_path / "ours" / "config.json").read_text())["architectures"] == [cls.__name__]


def electra_folders(tmp_path, **generator):
    small = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 12, "embedding_size": 8, **generator}
    discriminator = saved(
        transformers.ElectraForPreTraining, transformers.ElectraConfig(**SIZES, embedding_size=8), tmp_path / "d"
    )
    config = transformers.ElectraConfig(**{**SIZES, **small})
    generator = transformers.ElectraForMaskedLM(config)
    if config.embedding_size == 8:
        generator.electra.embeddings = discriminator.electra.embeddings
        generator.generator_lm_head.weight = generator.electra.embeddings.word_embeddings.weight
    generator.save_pretrained(tmp_path / "g")
    return discriminator, generator.eval()


def test_electra_is_two_folders(tmp_path):
    discriminator, generator = electra_folders(tmp_path)
    ours = interop.read_electra(tmp_path / "d", tmp_path / "g")
    tokens, segments, mask = batch()
    positions = torch.tensor([0, 3, 10, 20])
    said = ours(tokens, segments, LENGTHS, positions, tokens.flatten()[positions])
    options = {"attention_mask": mask.long(), "token_type_ids": segments}
    close(said.masked, generator(tokens, **options).logits.flatten(0, 1)[positions])
    wanted = discriminator(said.tokens, **options, labels=said.is_replaced.float())
    close(said.replaced[mask], wanted.logits[mask])
    loss = mean_detection_loss(said, LENGTHS)
    close(loss, wanted.loss)
    loss.backward()
    wanted.loss.backward()
    close(ours.replaced.output.weight.grad, discriminator.discriminator_predictions.dense_prediction.weight.grad)
    words = discriminator.electra.embeddings.word_embeddings.weight
    close(ours.discriminator.embeddings.word.weight.grad, words.grad)

    interop.write(ours, tmp_path / "again")
    for part, theirs in (("discriminator", discriminator), ("generator", generator)):
        repeated, told = type(theirs).from_pretrained(tmp_path / "again" / part, output_loading_info=True)
        assert not any(told.values()), told
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(tensor, repeated.state_dict()[name]), name


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder, config: config.update(model_type="gpt2"), "model_type is 'gpt2', it must be"),
        (lambda folder, config: config.pop("hidden_size"), "has no hidden_size"),
        (lambda folder, config: config.update(hidden_act="mish"), "hidden_act mish is not supported"),
        (lambda folder, config: config.update(intermediate_size=25), "copy both from one model"),
        (
            lambda folder, config: config.update(num_hidden_layers=4),
            "the layers bert.encoder.layer.0, 1, 2, where config.json's num_hidden_layers is 4",
        ),
        (lambda folder, config: config.update(num_hidden_layers=10**9), "layers 1000000000 must be at most 10,000"),
        (lambda folder, config: config.update(vocab_size=10**12), r"says \(1000000000000, 16\): copy both"),
        (lambda folder, config: config.update(intermediate_size=10**6), "copy both from one model"),
        (lambda folder, config: config.update(hidden_size=10**9), "d_model 1000000000 must be at most 1,000,000"),
        (lambda folder, config: config.update(max_position_embeddings=10**12), "copy both from one model"),
        (lambda folder, config: config.update(is_decoder=True), "is_decoder True is not supported"),
    ],
)
def test_a_wrong_folder_ends_in_one_line(spoil, message, tmp_path):
    saved(transformers.BertForPreTraining, bert_config(), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    spoil(tmp_path, config)
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as raised:
        interop.read_pretraining(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_generator_whose_head_has_another_activation_is_refused(tmp_path):
    sizes = {"vocab_size": 50, "d_model": 16, "heads": 2, "d_ff": 24, "layers": 1, "embedding_size": 8}
    model = Electra(ElectraConfig(**sizes, generator_size=0.5, activation="relu"))
    with pytest.raises(UserError, match="activation relu: the head of masked tokens"):
        interop.write(model, tmp_path)


def test_parts_of_two_electras_are_refused(tmp_path):
    electra_folders(tmp_path, intermediate_size=10)
    with pytest.raises(UserError, match=r"is not a generator of .*d_ff 10 must be 1 and 12"):
        interop.read_electra(tmp_path / "d", tmp_path / "g")


@pytest.mark.parametrize("kind", ["bert", "albert", "electra"])
def test_rows_behind_the_tokenizer_s_tokens_are_cut_off(tmp_path, kind):
    config, cls = {
        "bert": (bert_config(), transformers.BertForPreTraining),
        "albert": (albert_config(), transformers.AlbertForPreTraining),
        "electra": (transformers.ElectraConfig(**SIZES, embedding_size=8), transformers.ElectraForPreTraining),
    }[kind]
    saved(cls, config, tmp_path / "H")
    whole = (interop.read_electra if kind == "electra" else interop.read_pretraining)(tmp_path / "H")
    cut = cut_vocabulary(whole, 44, tmp_path / "H")
    assert cut.config.vocab_size == 44
    tokens = torch.randint(1, 44, (3, 9))
    if kind == "electra":
        close(cut.discriminator(tokens), whole.discriminator(tokens))
        return
    for mine, other, size in zip(cut(tokens), whole(tokens), (44, 2)):
        close(mine, other[..., :size])
