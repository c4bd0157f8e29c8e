"""Ensembles, and minimum Bayes risk decoding."""

import itertools
from dataclasses import replace

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.search import DecodingConfig, score_ids, search_ids
from fasttfm.search.batches import evaluating, inference
from fasttfm.search.capacity import search_bytes
from fasttfm.search.ensemble import Ensemble
from fasttfm.translate.mbr import minimum_bayes_risk
from fasttfm.translate.translator import Translator

from .small_models import model_of
from .table_model import EOS, TableModel, penalty

SOURCES = [[number, 10, EOS] for number in range(20, 32)]


class Other(TableModel):
    """Another table."""

    def logits(self, source, target):
        return super().logits(source + 1000, target)


def test_a_beam_that_holds_everything_finds_the_best_of_the_mean():
    models = [TableModel(6), Other(6, end=1.0), Other(6, spread=1.0)]
    settings = DecodingConfig(beam=16, nbest=3, max_len_a=0.0, max_len_b=3, min_len=0)

    def log_probability(source, target):
        total = 0.0
        for position, token in enumerate((*target, EOS)):
            each = torch.stack(
                [torch.tensor(model.logits(source, target[:position])).double().log_softmax(0) for model in models]
            )
            total += each.exp().mean(0).log()[token].item()
        return total

    for source, results in zip(SOURCES, search_ids(Ensemble(models), SOURCES, settings), strict=True):
        outputs = [target for length in range(4) for target in itertools.product((4, 5), repeat=length)]
        scores = [log_probability(source[0], target) / penalty(len(target) + 1, settings) for target in outputs]
        best = sorted(zip(scores, outputs, strict=True), reverse=True)[:3]
        assert [each.tokens for each in results] == [list(target) for _, target in best]
        assert [each.score for each in results] == pytest.approx([score for score, _ in best], abs=1e-5)


def test_incompatible_models_are_refused():
    with pytest.raises(ValueError, match="share vocabularies"):
        Ensemble([TableModel(6), TableModel(7)])
    with pytest.raises(ValueError, match="no models"):
        Ensemble([])


@pytest.mark.parametrize("beam", [1, 4])
def test_transformers_search_and_score_together(beam):
    models = [model_of("fp32", 60, 32, std=std) for std in (1.0, 3.0)]
    settings = DecodingConfig(beam=beam, nbest=beam, max_len_b=5)
    twice = search_ids(Ensemble([models[0], models[0]]), SOURCES, settings)
    single = search_ids(models[0], SOURCES, settings)
    assert [[each.tokens for each in some] for some in twice] == [[each.tokens for each in some] for some in single]
    results = search_ids(Ensemble(models), SOURCES, settings)
    assert results != single
    pairs = [(source, each) for source, some in zip(SOURCES, results, strict=True) for each in some]
    scores = score_ids(Ensemble(models), [source for source, _ in pairs], [each.tokens for _, each in pairs])
    assert [each.log_probability for _, each in pairs] == pytest.approx(scores, abs=1e-3)
    assert search_ids(Ensemble(models), SOURCES[:1], settings)[0] == results[0], "whatever the batch"


@pytest.mark.parametrize("entered", [inference, lambda model: evaluating(model, torch.device("cpu"))])
def test_every_module_keeps_its_training_mode(entered):
    models = [model_of("fp32", 20).eval(), model_of("fp32", 20)]
    models[1].encoder.eval()
    ensemble = Ensemble(models)  # in training mode, as any new module
    before = [each.training for each in ensemble.modules()]
    assert {*before} == {True, False}
    with entered(ensemble):
        assert not any(each.training for each in ensemble.modules())
    assert [each.training for each in ensemble.modules()] == before


def test_memory_is_estimated_for_all_models(monkeypatch):
    models, settings = [model_of("fp32", 60) for _ in range(2)], DecodingConfig(max_len_b=5)
    needed = search_bytes(models[0].config, settings, 1, len(SOURCES[0]), 4)
    monkeypatch.setattr("fasttfm.search.capacity.available_bytes", lambda: needed * 3 // 2)
    search_ids(models[0], SOURCES[:1], settings)
    with pytest.raises(UserError, match="--beam 4 needs about"):
        search_ids(Ensemble(models), SOURCES[:1], settings)


def test_the_sample_that_the_others_agree_with_is_chosen():
    texts = ["a dog runs", "a dog ran", "the weather is fine", "a dog runs", "two cats"]
    chosen = minimum_bayes_risk(texts)
    assert [index for index, _ in chosen][:2] == [0, 1]
    assert {index for index, _ in chosen} == {0, 1, 2, 4}, "each text once"
    assert [value for _, value in chosen] == sorted((value for _, value in chosen), reverse=True)
    assert chosen[0][1] > 100 / 4, "its copy agrees fully"
    assert minimum_bayes_risk(["alone"]) == [(0, 0.0)]


def test_minimum_bayes_risk_uses_samples_and_is_reproducible(translator):
    config = replace(translator.config, mbr_samples=6, max_len_b=4)
    tokenizer = translator.target_tokenizer
    mbr = Translator(translator.model, tokenizer, tokenizer, config)
    results = mbr.translate_nbest(["a dog", "", "men"])
    assert [len(each) for each in results] == [1, 1, 1]
    assert results == mbr.translate_nbest(["a dog", "", "men"])
    samples = Translator(translator.model, tokenizer, tokenizer, replace(config, mbr_samples=0, sampling=True, nbest=6))
    texts = [each.text for each in samples.translate_nbest(["a dog"])[0]]
    (index, agreement), *_ = minimum_bayes_risk(texts)
    assert (results[0][0].text, results[0][0].score) == (texts[index], agreement)
