"""GPT-1's fine-tuning: its loss by hand and by Hugging Face, its padding, a vocabulary that grows by the markers."""

import dataclasses

import numpy as np
import pytest
import torch

from fasttfm.convert.weight_files import read_tensors
from fasttfm_pretraining.config.gpt import GPTClassifierConfig, GPTConfig
from fasttfm_pretraining.data.task_batches import Examples
from fasttfm_pretraining.data.task_inputs import Markers, Row, join
from fasttfm_pretraining.interop.gpt import read, write
from fasttfm_pretraining.models.gpt import GPT
from fasttfm_pretraining.models.gpt_heads import GPTClassifier

SIZE = {"d_model": 16, "heads": 2, "d_ff": 24, "layers": 2, "max_length": 20, "dropout": 0.0, "attention_dropout": 0.0}


def model(**fields) -> GPTClassifier:
    torch.manual_seed(1)
    made = GPTClassifier(GPTClassifierConfig(vocab_size=40, **SIZE, **fields))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def examples(choices: int = 1) -> Examples:
    random = np.random.default_rng(2)
    rows = [[Row(random.integers(1, 40, length), length) for _ in range(choices)] for length in (7, 4, 6)]
    return Examples(rows, np.array([1, 0, 1]))


@pytest.mark.parametrize("choices", [1, 2])
def test_the_loss_is_the_task_s_and_half_of_the_text_s(choices):
    made = model(labels=2 if choices == 1 else 1)
    batch = examples(choices).batch(range(3))
    loss, nll = made.batch_loss(batch)
    scores, text, predicted = [], 0.0, 0
    for row, length in zip(batch.tokens, batch.lengths):
        tokens = row[None, :length]
        hidden = made.body.hidden(tokens)
        scores.append(made.classifier(hidden[0, -1]))
        logits = made.body(tokens)[0, :-1]
        text += torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum")
        predicted += int(length) - 1
    task = torch.nn.functional.cross_entropy(torch.stack(scores).view(3, 2), batch.labels, reduction="sum")
    torch.testing.assert_close(nll, task.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, task + 0.5 * 3 * text / predicted, rtol=1e-5, atol=1e-5)
    without = GPTClassifier(dataclasses.replace(made.config, lm_weight=0.0))
    without.load_state_dict(made.state_dict())
    torch.testing.assert_close(without.batch_loss(batch)[0], task, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lm_weight", [0.5, 0.0])
def test_the_loss_is_computed_by_calling_the_model(lm_weight):
    """As FSDP requires, which gathers the weights before a call."""
    made, calls = model(lm_weight=lm_weight), []
    made.register_forward_pre_hook(lambda *_: calls.append(1))
    made.batch_loss(examples().batch(range(3)))
    assert calls == [1]


def theirs_and_ours(cls, folder, head, **fields):
    """A GPT-1 of Hugging Face with random weights and no dropout, and ours with its weights; head: name of theirs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
    config = transformers.OpenAIGPTConfig(**sizes, **dropout, num_labels=fields["labels"], pad_token_id=0)
    torch.manual_seed(1)
    theirs = getattr(transformers, cls)(config).train()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(folder)
    body = read(folder)
    ours = GPTClassifier(GPTClassifierConfig(**dataclasses.asdict(body.config), **fields)).train()
    ours.body.load_state_dict(body.state_dict())
    torch.nn.init.zeros_(ours.classifier.bias)
    ours.classifier.load_state_dict(theirs.get_submodule(head).state_dict(), strict=False)
    return theirs, ours


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


def assert_same_gradients(theirs, ours, head, folder):
    """Of every parameter, by writing a body whose weights are its gradients."""
    torch.testing.assert_close(
        ours.classifier.weight.grad, theirs.get_submodule(head).weight.grad, rtol=1e-5, atol=1e-5
    )
    with torch.no_grad():
        for parameter in ours.body.parameters():
            parameter.copy_(parameter.grad)
    write(ours.body, folder)
    gradients = read_tensors(folder)
    for name, parameter in theirs.transformer.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
        torch.testing.assert_close(gradients[f"transformer.{name}"], parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


def test_choices_and_text_are_those_of_the_double_heads_model(tmp_path):
    head = "multiple_choice_head.summary"
    theirs, ours = theirs_and_ours("OpenAIGPTDoubleHeadsModel", tmp_path / "theirs", head, labels=1)
    batch = marked(choices=2).batch(range(3))
    seen = torch.arange(batch.tokens.shape[1]) < batch.lengths[:, None]
    expected = theirs(
        input_ids=batch.tokens.view(3, 2, -1),
        mc_token_ids=(batch.lengths - 1).view(3, 2),
        labels=batch.tokens.masked_fill(~seen, -100).view(3, 2, -1),
        mc_labels=batch.labels,
    )
    torch.testing.assert_close(ours(batch), expected.mc_logits, rtol=1e-5, atol=1e-5)
    loss, nll = ours.batch_loss(batch)
    torch.testing.assert_close(nll / 3, expected.mc_loss.detach(), rtol=1e-5, atol=1e-5)
    both = expected.mc_loss + 0.5 * expected.loss
    torch.testing.assert_close(loss / 3, both, rtol=1e-5, atol=1e-5)
    (loss / 3).backward()
    both.backward()
    assert_same_gradients(theirs, ours, head, tmp_path / "gradients")


def test_classes_are_those_of_the_sequence_classifier(tmp_path):
    theirs, ours = theirs_and_ours(
        "OpenAIGPTForSequenceClassification", tmp_path / "theirs", "score", labels=3, lm_weight=0.0
    )
    batch = marked(choices=1).batch(range(3))
    expected = theirs(input_ids=batch.tokens, labels=batch.labels)
    torch.testing.assert_close(ours(batch), expected.logits, rtol=1e-5, atol=1e-5)
    loss, _ = ours.batch_loss(batch)
    torch.testing.assert_close(loss / 3, expected.loss, rtol=1e-5, atol=1e-5)
    (loss / 3).backward()
    expected.loss.backward()
    assert_same_gradients(theirs, ours, "score", tmp_path / "gradients")


def test_padding_adds_nothing():
    made, given = model(), examples()
    whole, alone = made(given.batch(range(3), 12)), [made(given.batch([i])) for i in range(3)]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=1e-5, atol=1e-5)
    loss, _ = made.batch_loss(given.batch(range(3), 12))
    torch.testing.assert_close(loss, made.batch_loss(given.batch(range(3)))[0], rtol=1e-5, atol=1e-5)


def test_start_delimiter_and_extract_stand_where_gpt_1_has_them():
    start, delimiter, extract = 40, 41, 42
    row = join(Markers(start, delimiter, extract), [5, 6], [7], 20)
    assert row.tokens.tolist() == [start, 5, 6, delimiter, 7, extract]


def test_a_body_of_fewer_tokens_has_the_same_hidden_states():
    torch.manual_seed(3)
    body = GPT(GPTConfig(vocab_size=37, **SIZE))
    made = model()
    wide = torch.cat([body.embedding.weight.detach(), made.body.embedding.weight.detach()[37:]])
    weights = body.state_dict() | {"embedding.weight": wide, "output.weight": wide}
    made.body.load_state_dict(weights)
    tokens = torch.randint(0, 37, (2, 6))
    torch.testing.assert_close(made.body.hidden(tokens), body.hidden(tokens))
