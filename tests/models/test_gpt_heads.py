"""GPT-1's fine-tuning: its loss by hand, its padding, and a body whose vocabulary grows by the markers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fasttfm.config.gpt import GPTConfig
from fasttfm.config.tasks import GPTClassifierConfig
from fasttfm.data.task_batches import Examples
from fasttfm.data.task_inputs import Markers, Row, join
from fasttfm.models.gpt import GPT
from fasttfm.models.gpt_heads import GPTClassifier

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
