"""Validation does not affect training, and its loss does not depend on the batches."""

import copy
import math

import pytest
import torch

from fasttfm.data.prepared import PreparedData
from fasttfm.errors import UserError
from fasttfm.models import Transformer
from fasttfm.search import DecodingConfig
from fasttfm.training.run import train
from fasttfm.training.translation import Validation, Validator
from fasttfm.translate.translator import Translator

from .runs import CPU


def make(data, config, **changes):
    torch.manual_seed(11)
    settings = {"max_tokens": 64, "label_smoothing": 0.1, "decoding": None, "device": CPU, **changes}
    return Validator(data, **settings), Transformer(config.model)


def test_translations_begin_with_the_language_code_of_an_imported_model(tiny_data, tiny_config):
    data = PreparedData.open(tiny_data)
    data.target_tokenizer = copy.copy(data.target_tokenizer)
    data.target_tokenizer.prefix = data.target_tokenizer.encode("a")[:1]
    decoding = DecodingConfig(beam=2, max_len_b=3)
    validator, model = make(data, tiny_config(), decoding=decoding)
    model.eval()
    translator = Translator(model, data.source_tokenizer, data.target_tokenizer, decoding)
    assert validator(model).outputs == translator.translate(data.valid_source_text)


def test_loss_is_the_mean_over_all_target_tokens_whatever_the_batches(tiny_data, tiny_config):
    """An untrained model whose output layer is zero gives every token the same probability."""
    data = PreparedData.open(tiny_data)
    (validator, model), (other, _) = (make(data, tiny_config(), **changes) for changes in ({}, {"max_tokens": 1000}))
    assert len(validator._batches) > len(other._batches)
    assert validator(model).nll == pytest.approx(other(model).nll, rel=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    score = validator(model)
    assert score.nll == pytest.approx(math.log(model.config.vocab_size), rel=1e-5)
    assert score.perplexity == pytest.approx(model.config.vocab_size, rel=1e-4)
    assert score.bleu is None


def test_validation_draws_no_random_number_and_leaves_the_mode(tiny_data, tiny_config):
    data = PreparedData.open(tiny_data)
    validator, model = make(data, tiny_config(), decoding=DecodingConfig(beam=1, max_len_b=3))
    model.train()
    before = torch.get_rng_state()
    first, second = validator(model), validator(model)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second


def test_better_is_higher_bleu_then_lower_loss():
    def rank(bleu, nll):
        return Validation(loss=1.0, nll=nll, bleu=bleu).rank

    assert rank(20.0, 3.0) > rank(19.0, 2.0)
    assert rank(0.0, 2.0) > rank(0.0, 3.0)
    assert rank(None, 2.0) > rank(None, 3.0)
    assert rank(0.0, 2.0) > rank(0.99, 3.0), "below 1 BLEU is noise"
    assert rank(1.0, 3.0) > rank(0.99, 2.0)
    for nll, told in ((3.0, "perplexity 20.09"), (1e7, "perplexity 1.01e+304")):
        assert told in str(Validation(loss=nll, nll=nll, bleu=None))


def test_an_unknown_bleu_tokenizer_is_refused_before_training(tiny_data, tiny_values, tmp_path):
    with pytest.raises(UserError, match="'13b' is unknown: choose from 13a, intl"):
        train(tiny_values(valid_bleu_tokenizer="13b"), tiny_data, tmp_path / "MODEL")
