"""Searches and scoring with a real Transformer: caches and batches do not change results."""

import random

import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, score_ids, search_ids, translate_ids
from fasttfm.search.batches import padded
from fasttfm.search.coverage import cross_attention
from fasttfm.search.hypotheses import length_penalty

BOS, EOS = 2, 3
VOCABULARY = 24
CPU = torch.device("cpu")


def sources(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[*draw.choices(range(4, VOCABULARY), k=draw.randint(1, 9)), EOS] for _ in range(count)]


def make_model(**changes) -> Transformer:
    torch.manual_seed(7)
    size = {"d_model": 32, "heads": 4, "d_ff": 64, "encoder_layers": 2, "decoder_layers": 2}
    return Transformer(TransformerConfig(vocab_size=VOCABULARY, **{**size, **changes}))


@pytest.fixture(scope="module")
def random_model() -> Transformer:
    """Random weights, wider than usual so that outputs differ in length and words."""
    model = make_model(share_embeddings="none")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    return model.eval()


@pytest.fixture(scope="module")
def trained_model() -> Transformer:
    """Trained briefly to reverse its source: often right, rarely certain."""
    model = make_model(norm_first=True, final_norm=True, dropout=0.0)
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(200):
        batch = sources(32, seed=step + 1)
        source, source_lengths = padded(batch, CPU)
        target_in, target_lengths = padded([[BOS, *ids[-2::-1]] for ids in batch], CPU)
        target_out, _ = padded([[*ids[-2::-1], EOS] for ids in batch], CPU)
        loss, _, tokens = model.loss(source, target_in, target_out, source_lengths, target_lengths)
        adam.zero_grad()
        (loss / tokens).backward()
        adam.step()
    return model.eval()


@pytest.fixture(params=["random", "trained"])
def model(request, random_model, trained_model) -> Transformer:
    return random_model if request.param == "random" else trained_model


def test_padding_fills_up_to_a_length_on_the_grid():
    ids, lengths = padded([[5, 3], [7, 8, 9, 3]], CPU)
    assert ids.tolist() == [[5, 3, 0, 0], [7, 8, 9, 3]]
    assert lengths.tolist() == [2, 4]
    assert ids.dtype == torch.int64
    ids, lengths = padded([[5] * 17, [3]], CPU)
    assert (ids.shape, lengths.tolist()) == ((2, 18), [17, 1])
    assert int((ids != 0).sum()) == 18
    with pytest.raises(ValueError, match="no tokens"):
        padded([[5], []], CPU)


@pytest.mark.parametrize("layer", [1, 2])
def test_a_model_that_reverses_its_source_attends_in_reverse(trained_model, layer):
    """Targets are aligned with the source tokens that they copy."""
    batch = sources(60, seed=1500)
    targets = [source[-2::-1] for source in batch]
    right = total = 0
    for source, weights in zip(
        batch, cross_attention(trained_model, batch, targets, DecodingConfig(alignment_layer=layer))
    ):
        words = len(source) - 1
        right += (weights[:words, :words].argmax(dim=1) == torch.arange(words - 1, -1, -1)).sum().item()
        total += words
    assert right > 0.33 * total, "a fifth would be chance"


def greedy_without_cache(model: Transformer, source: list[int], longest: int) -> list[int]:
    target: list[int] = []
    with torch.inference_mode():
        while len(target) < longest:
            logits = model(torch.tensor([source]), torch.tensor([[BOS, *target]]))[0, -1]
            token = EOS + int(logits[EOS:].argmax())
            if token == EOS:
                break
            target.append(token)
    return target


def test_greedy_search_with_caches_is_greedy_search_without(model):
    batch = sources(12, seed=3000)
    settings = DecodingConfig(beam=1, max_len_b=5)
    expected = [greedy_without_cache(model, source, len(source) - 1 + 5) for source in batch]
    assert translate_ids(model, batch, settings) == expected


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
    pairs = [
        (source, hypothesis) for source, hypotheses in zip(batch, actual, strict=True) for hypothesis in hypotheses
    ]
    scores = score_ids(model, [source for source, _ in pairs], [hypothesis.tokens for _, hypothesis in pairs])
    assert scores == pytest.approx([hypothesis.log_probability for _, hypothesis in pairs], abs=1e-4)


def test_probabilities_of_all_targets_sum_to_one(random_model):
    """All targets of at most one token, and all longer ones."""
    source = sources(1, seed=6000)[0]
    targets = [[], *([token] for token in range(VOCABULARY))]
    ended = torch.tensor(score_ids(random_model, [source] * len(targets), targets)).exp()
    with torch.inference_mode():
        first = random_model(torch.tensor([source]), torch.tensor([[BOS]]))[0, 0].softmax(0)
        both = torch.tensor([[BOS, token] for token in range(VOCABULARY)])
        second = random_model(torch.tensor([source] * VOCABULARY), both)[:, 1].softmax(1)[:, EOS]
    torch.testing.assert_close(ended[0], first[EOS])
    # Scoring accepts <unk> and padding, which searches never choose.
    torch.testing.assert_close(ended[1:][4:], (first * second)[4:], rtol=1e-4, atol=1e-7)


def test_scoring_does_not_depend_on_batches_and_refuses_mismatched_lists(model):
    batch = sources(20, seed=7000)
    targets = [source[:-1] for source in batch]
    alone = score_ids(model, batch, targets, max_tokens=1)
    assert score_ids(model, batch, targets, max_tokens=10_000) == alone, "to the last bit"
    assert max(alone) < 0
    with pytest.raises(ValueError, match="20 sources but 1 targets"):
        score_ids(model, batch, targets[:1])


def test_a_model_with_nan_is_refused_by_searches_and_scoring():
    model = make_model()
    with torch.no_grad():
        model.encoder.layers[0].linear1.bias.fill_(torch.nan)
    batch = sources(2, seed=8000)
    for settings in (DecodingConfig(beam=1), DecodingConfig(beam=3), DecodingConfig(sampling=True)):
        with pytest.raises(UserError, match=r"are not numbers \(NaN\)"):
            search_ids(model, batch, settings)
    with pytest.raises(UserError, match=r"are not numbers \(NaN\)"):
        score_ids(model, batch, [ids[:-1] for ids in batch])


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.25), (torch.float16, 0.03)])
def test_in_half_precision_the_batch_decides_only_between_nearly_equal_words(trained_model, dtype, error):
    """Only the last bits of products depend on the batch; attending to padding would change far more.

    However batched, 9 translations in 10 are those of a batch of one, log-probabilities agree with float32 within
    `error`, and in float32 a translation is no further below the best than two such errors explain.
    """
    model = make_model(norm_first=True, final_norm=True, dropout=0.0)
    model.load_state_dict(trained_model.state_dict())
    model.to(dtype)
    batch, settings = sources(60, seed=1000), DecodingConfig(max_len_b=10, batch_invariant=False)
    best = search_ids(trained_model, batch, settings)
    batchings = [
        [hypotheses[0] for hypotheses in search_ids(model, batch, settings, max_tokens=max_tokens)]
        for max_tokens in (1, 100, 10_000)
    ]
    for outputs in batchings:
        assert sum(output.tokens == single.tokens for output, single in zip(outputs, batchings[0], strict=True)) >= 54
        exact = score_ids(trained_model, batch, [output.tokens for output in outputs])
        for output, log_probability, hypotheses in zip(outputs, exact, best, strict=True):
            assert output.log_probability == pytest.approx(log_probability, abs=error)
            penalty = length_penalty(len(output.tokens) + 1, settings)
            assert log_probability / penalty >= hypotheses[0].score - 2 * error / penalty
