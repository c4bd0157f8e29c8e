"""Searches and scoring with a real Transformer: caches and batches do not change results."""

import random

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, score_ids, search_ids
from fasttfm.search.coverage import cross_attention

BOS, EOS = 2, 3
VOCABULARY = 24


def sources(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[*draw.choices(range(4, VOCABULARY), k=draw.randint(1, 9)), EOS] for _ in range(count)]


@pytest.fixture(params=["post-norm", "pre-norm"])
def model(request) -> Transformer:
    """Random weights, wider than usual so that outputs differ in length and words."""
    torch.manual_seed(7)
    size = {"d_model": 32, "heads": 4, "d_ff": 64, "encoder_layers": 2, "decoder_layers": 2}
    pre = request.param == "pre-norm"
    kind = {"norm_first": True, "final_norm": True} if pre else {"share_embeddings": "none"}
    model = Transformer(TransformerConfig(vocab_size=VOCABULARY, **size, **kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    return model.eval()


@pytest.mark.parametrize("layer", [1, 2])
def test_cross_attention_is_the_mean_over_the_heads_of_a_layer(model, layer):
    batch, targets = sources(5, seed=1500), sources(5, seed=1501)
    actual = cross_attention(model, batch, targets, DecodingConfig(alignment_layer=layer))
    for source, target, weights in zip(batch, targets, actual, strict=True):
        every = model.attention_weights(torch.tensor([source]), torch.tensor([[BOS, *target]]))["cross"]
        torch.testing.assert_close(weights, every[layer - 1][0].mean(0))


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [({}, False), ({"diverse_beam_groups": 2}, False), ({}, True)],
    ids=["plain", "diverse", "phrases"],
)
def test_scores_of_a_search_equal_those_of_scoring(model, changes, phrases):
    """The sums of the cached search equal one pass over source and target, constrained or not."""
    batch = sources(12, seed=4500)
    settings = DecodingConfig(beam=4, nbest=2, max_len_b=5, **changes)
    required = [[[source[:2][:1] * 2], [[7], [8, 9]]] for source in batch] if phrases else None
    actual = search_ids(model, batch, settings, required=required)
    assert actual == search_ids(model, batch, settings, required=required, max_tokens=1), "whatever the batch"
    pairs = [(source, each.tokens, each.log_probability) for source, some in zip(batch, actual) for each in some]
    scores = score_ids(model, [source for source, _, _ in pairs], [tokens for _, tokens, _ in pairs])
    assert scores == pytest.approx([found for _, _, found in pairs], abs=1e-4)


def test_scoring_does_not_depend_on_batches_and_refuses_mismatched_lists(model):
    batch = sources(20, seed=7000)
    targets = [source[:-1] for source in batch]
    alone = score_ids(model, batch, targets, max_tokens=1)
    assert score_ids(model, batch, targets, max_tokens=10_000) == alone, "to the last bit"
    assert max(alone) < 0
    with pytest.raises(ValueError, match="20 sources but 1 targets"):
        score_ids(model, batch, targets[:1])


def test_a_model_with_nan_is_refused_by_searches_and_scoring(model):
    with torch.no_grad():
        model.encoder.layers[0].linear1.bias.fill_(torch.nan)
    batch = sources(2, seed=8000)
    for settings in (DecodingConfig(beam=1), DecodingConfig(beam=3), DecodingConfig(sampling=True)):
        with pytest.raises(UserError, match=r"are not numbers \(NaN\)"):
            search_ids(model, batch, settings)
    with pytest.raises(UserError, match=r"are not numbers \(NaN\)"):
        score_ids(model, batch, [ids[:-1] for ids in batch])
