"""Task heads: padding and packing change nothing, smoothing is over what may be chosen, and GPT-1's loss is that of
Hugging Face's models; those of BERTs are compared in test_task_heads.py."""

import dataclasses

import numpy as np
import pytest
import torch
from their_models import assert_same_gradients, saved

from fasttfm_pretraining.config.bert import BertClassifierConfig, BertConfig
from fasttfm_pretraining.config.gpt import GPTClassifierConfig
from fasttfm_pretraining.data.task_batches import Examples
from fasttfm_pretraining.data.task_inputs import Markers, Row, join
from fasttfm_pretraining.interop.gpt import read
from fasttfm_pretraining.models.gpt_heads import GPTClassifier
from fasttfm_pretraining.models.heads import Answerer, Classifier, choice_loss

SIZE = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 20, "dropout": 0.0, "attention_dropout": 0.0}


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("model_class", "config_class", "fields", "choices", "labels"),
    [
        (Answerer, BertConfig, {"pooler": False, "sentence_head": False}, 1, [[3, 3]] * 4),
        (Classifier, BertClassifierConfig, {"labels": 1}, 3, [0, 1, 2, 0]),
        (GPTClassifier, GPTClassifierConfig, {"labels": 2}, 1, [0, 1, 1, 0]),
    ],
    ids=["answers", "choices", "GPT"],
)
def test_padding_adds_nothing(model_class, config_class, fields, choices, labels, packed):
    torch.manual_seed(1)
    model = model_class(config_class(vocab_size=50, **SIZE, **fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    random = np.random.default_rng(3)
    rows = [[Row(random.integers(1, 50, length), 3) for _ in range(choices)] for length in (9, 4, 7, 8)]
    given = Examples(rows, np.array(labels))
    loss, nll = model.batch_loss(given.batch(range(4), 15), packed=packed, label_smoothing=0.1)
    alone = [model.batch_loss(given.batch([i]), label_smoothing=0.1) for i in range(4)]
    close(nll, sum(each[1] for each in alone))
    if model_class is GPTClassifier:  # the loss of the text is a mean over all tokens
        alone = [model.batch_loss(given.batch(range(4)), label_smoothing=0.1)]
    close(loss, sum(each[0] for each in alone))
    table = (model.body.embedding if model_class is GPTClassifier else model.body.embeddings.word).weight
    (mine,) = torch.autograd.grad(loss, table)
    (other,) = torch.autograd.grad(sum(each[0] for each in alone), table)
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    if model_class is not GPTClassifier:
        assert mine[0].abs().sum() == 0  # of the padding's embedding


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
        Classifier(BertClassifierConfig(vocab_size=50, **SIZE, pooler=False, sentence_head=False))


# GPT-1


@pytest.mark.parametrize("lm_weight", [0.5, 0.0])
def test_the_loss_is_computed_by_calling_the_model(lm_weight):
    """As FSDP requires, which gathers the weights before a call."""
    made, calls = GPTClassifier(GPTClassifierConfig(vocab_size=40, **SIZE, lm_weight=lm_weight)), []
    made.register_forward_pre_hook(lambda *_: calls.append(1))
    made.batch_loss(marked(choices=1).batch(range(3)))
    assert calls == [1]


def marked(choices: int) -> Examples:
    """Start, first, delimiter, second, extract, of several lengths; the markers are the last three of 40 tokens."""
    random = np.random.default_rng(4)
    markers = Markers(37, 38, 39)
    rows = [
        [
            join(markers, random.integers(1, 37, 3 + i).tolist(), random.integers(1, 37, 2 + choice).tolist(), 20)
            for choice in range(choices)
        ]
        for i in range(3)
    ]
    return Examples(rows, np.array([1, 0, 1]))


def test_choices_and_text_are_those_of_the_double_heads_model(tmp_path):
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "n_positions": 20, "n_layer": 2, "pad_token_id": 0, "summary_first_dropout": 0.0}
    theirs = saved("OpenAIGPTDoubleHeadsModel", tmp_path / "theirs", **sizes, num_labels=1).train()
    head, body = theirs.multiple_choice_head.summary, read(tmp_path / "theirs")
    ours = GPTClassifier(GPTClassifierConfig(**dataclasses.asdict(body.config), labels=1)).train()
    ours.body.load_state_dict(body.state_dict())
    ours.classifier.load_state_dict(head.state_dict())
    batch = marked(choices=2).batch(range(3))
    seen = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    expected = theirs(
        input_ids=batch.tokens.view(3, 2, -1),
        mc_token_ids=(batch.lengths - 1).view(3, 2),
        labels=batch.tokens.masked_fill(~seen, -100).view(3, 2, -1),
        mc_labels=batch.labels,
    )
    close(ours(batch), expected.mc_logits)
    loss, nll = ours.batch_loss(batch)
    close(nll / 3, expected.mc_loss.detach())
    both = expected.mc_loss + 0.5 * expected.loss
    close(loss / 3, both)
    (loss / 3).backward()
    both.backward()
    close(ours.classifier.weight.grad, head.weight.grad)
    assert_same_gradients(ours.body, theirs, read, tmp_path / "gradients")
