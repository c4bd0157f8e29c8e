"""Task heads: loss and gradients equal Hugging Face's from the same weights; padding and packing change nothing."""

import dataclasses

import numpy as np
import pytest
import torch

from fasttfm_pretraining.config.bert import BertClassifierConfig, BertConfig
from fasttfm_pretraining.data.task_batches import Examples
from fasttfm_pretraining.data.task_inputs import Row
from fasttfm_pretraining.interop.bert import read_body
from fasttfm_pretraining.models.heads import Answerer, Classifier, choice_loss

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}  # fmt: skip
OURS = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 20, "dropout": 0.0, "attention_dropout": 0.0}


def examples(count: int, choices: int, labels: np.ndarray, longest: int = 9, even: bool = True) -> Examples:
    random = np.random.default_rng(3)
    lengths = [longest if even else int(random.integers(4, longest + 1)) for _ in range(count)]
    rows = [[Row(random.integers(1, 50, length), 3) for _ in range(choices)] for length in lengths]
    return Examples(rows, labels)


def build(folder, cls, head, model_class, config_class, pooler, **fields):
    """Their model and ours with its weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = getattr(transformers, cls)(transformers.BertConfig(**SIZES, num_labels=fields.get("labels", 2)))
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(folder)
    body = read_body(folder)
    given = dataclasses.asdict(body.config) | {"pooler": pooler, "sentence_head": False, **fields}
    ours = model_class(config_class(**given))
    ours.body.load_state_dict(body.state_dict())
    getattr(ours, head).load_state_dict((theirs.qa_outputs if head == "span" else theirs.classifier).state_dict())
    return ours.train(), theirs.train()


def same_gradients(ours, theirs, head):
    theirs_head = theirs.qa_outputs if head == "span" else theirs.classifier
    pairs = [
        (getattr(ours, head).weight, theirs_head.weight),
        (ours.body.embeddings.word.weight, theirs.bert.embeddings.word_embeddings.weight),
        (ours.body.embeddings.segment.weight, theirs.bert.embeddings.token_type_embeddings.weight),
        (ours.body.encoder.layers[0].linear1.weight, theirs.bert.encoder.layer[0].intermediate.dense.weight),
        (ours.body.encoder.layers[1].norm2.bias, theirs.bert.encoder.layer[1].output.LayerNorm.bias),
    ]
    if len(theirs_head.bias) > 1:  # one that all choices share changes no probability: its gradient is rounding alone
        pairs.append((getattr(ours, head).bias, theirs_head.bias))
    for mine, other in pairs:
        assert other.grad.abs().sum() > 0
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


def assert_same(ours, theirs, batch, head, rows, **given):
    """Loss, scores and gradients of rows; given: what theirs takes beside the batch's tokens, segments and mask."""
    real = (torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]).long()
    inputs = {"input_ids": batch.tokens, "token_type_ids": batch.segments, "attention_mask": real}
    if batch.tokens.shape[0] > rows:  # choices
        inputs = {name: x.view(rows, -1, x.shape[1]) for name, x in inputs.items()}
    loss, nll = ours.batch_loss(batch)
    assert nll.item() == pytest.approx(loss.item())
    expected = theirs(**inputs, **given)
    torch.testing.assert_close(loss / rows, expected.loss, rtol=1e-5, atol=1e-5)
    scores = (expected.start_logits, expected.end_logits) if head == "span" else (expected.logits,)
    found = ours(batch) if head == "span" else (ours(batch),)
    torch.testing.assert_close(tuple(found), scores, rtol=1e-5, atol=1e-5)
    (loss / rows).backward()
    expected.loss.backward()
    same_gradients(ours, theirs, head)


def test_answers_equal_bert_for_question_answering(tmp_path):
    ours, theirs = build(tmp_path, "BertForQuestionAnswering", "span", Answerer, BertConfig, False)
    batch = examples(4, 1, np.array([[3, 5], [0, 0], [8, 8], [4, 7]])).batch(range(4))
    places = {"start_positions": batch.labels[:, 0], "end_positions": batch.labels[:, 1]}
    assert_same(ours, theirs, batch, "span", 4, **places)


@pytest.mark.parametrize(
    ("kind", "labels", "choices", "wanted"),
    [
        ("SequenceClassification", 2, 1, [0, 1, 1, 1]),
        ("SequenceClassification", 3, 1, [0, 1, 1, 2]),
        ("MultipleChoice", 1, 4, [0, 3, 1]),
    ],
)
def test_classes_and_choices_equal_bert_s(tmp_path, kind, labels, choices, wanted):
    name = f"BertFor{kind}"
    ours, theirs = build(tmp_path, name, "classifier", Classifier, BertClassifierConfig, True, labels=labels)
    batch = examples(len(wanted), choices, np.array(wanted), even=False).batch(range(len(wanted)))
    assert_same(ours, theirs, batch, "classifier", len(wanted), labels=batch.labels)


def drawn(model_class, config_class, **fields):
    torch.manual_seed(1)
    model = model_class(config_class(vocab_size=50, **OURS, **fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("packed", [False, True])
def test_padding_adds_nothing_to_answers(packed):
    model = drawn(Answerer, BertConfig, pooler=False, sentence_head=False)
    given = examples(5, 1, np.array([[3, 3]] * 5), even=False)
    loss, _ = model.batch_loss(given.batch(range(5), 13), packed=packed, label_smoothing=0.1)
    alone = sum(model.batch_loss(given.batch([i]), label_smoothing=0.1)[0] for i in range(5))
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)
    (mine,) = torch.autograd.grad(loss, model.body.embeddings.word.weight)
    (other,) = torch.autograd.grad(alone, model.body.embeddings.word.weight)
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert mine[0].abs().sum() == 0  # of the padding's embedding


@pytest.mark.parametrize("packed", [False, True])
def test_padding_adds_nothing_to_choices(packed):
    model = drawn(Classifier, BertClassifierConfig, labels=1)
    given = examples(4, 3, np.array([0, 1, 2, 0]), even=False)
    loss, _ = model.batch_loss(given.batch(range(4), 15), packed=packed)
    alone = sum(model.batch_loss(given.batch([i]))[0] for i in range(4))
    torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)


def test_smoothing_is_over_what_may_be_chosen():
    scores = torch.tensor([[1.0, 2.0, -torch.inf], [0.5, 0.0, 1.0]], dtype=torch.float32, requires_grad=True)
    labels = torch.tensor([1, 0])
    loss, nll = choice_loss(scores, labels, 0.2)
    first = torch.nn.functional.cross_entropy(scores[:1, :2], labels[:1], label_smoothing=0.2)
    second = torch.nn.functional.cross_entropy(scores[1:], labels[1:], label_smoothing=0.2)
    torch.testing.assert_close(loss, first + second)
    torch.testing.assert_close(nll, torch.nn.functional.cross_entropy(scores.detach(), labels, reduction="sum"))
    loss.backward()
    assert scores.grad.isfinite().all()
    assert scores.grad[0, 2] == 0


def test_a_body_without_what_the_head_reads_is_refused():
    with pytest.raises(ValueError, match="pooler"):
        Answerer(BertConfig(vocab_size=50, **OURS))
    with pytest.raises(ValueError, match="pooler"):
        Classifier(BertClassifierConfig(vocab_size=50, **OURS, pooler=False, sentence_head=False))
