"""Sampled segmentations: their distribution, pieces that are never split, reproducibility from a seed."""

import io
import itertools
import math
import multiprocessing
from collections import Counter

import numpy as np
import pytest
import sentencepiece as spm

from fasttfm.data import sampling
from fasttfm.data.demo import demo_pairs
from fasttfm.data.sampling import SubwordSampler
from fasttfm.data.tokenizer import UNK, Tokenizer, train_tokenizer

STRANGE = [
    "",
    " ",
    "Ｆｕｌｌ width？",
    "𝔊 … „Zitat“ ﬁ",
    "日本語の文。",
    "e\u0301 und é",
    "🙂🙂 👩\u200d👩\u200d👧",
    "שלום מאה",
]
OWN = {"bpe": 0.0, "unigram": 1e6}
"""The amount that reproduces SentencePiece's own segmentation."""


@pytest.fixture(scope="module")
def lines() -> list[str]:
    pairs = demo_pairs()
    return [line for _ in range(1000) for line in next(pairs)]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def model_type(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def tokenizer(model_type: str, lines: list[str]) -> Tokenizer:
    return train_tokenizer(lines, vocab_size=800, model_type=model_type)


def encoded(tokenizer: Tokenizer, lines: list[str]) -> list[np.ndarray]:
    return [np.array(ids, dtype=np.uint16) for ids in tokenizer.encode_lines(lines)]


def draw(sampler: SubwordSampler, ids: list[np.ndarray], seed: int = 1, epoch: int = 0) -> list[list[int]]:
    return [sampler.sample(each, seed, epoch, i).tolist() for i, each in enumerate(ids)]


def test_a_sample_depends_on_its_key_and_text_alone(tokenizer, lines, monkeypatch):
    """In any order, with any cache, in any process."""
    ids = encoded(tokenizer, [*lines[:200], *STRANGE])
    whole = draw(SubwordSampler(tokenizer, 0.2), ids, 3, 7)
    monkeypatch.setattr(sampling, "_MOST_CACHED", 100)
    sampler = SubwordSampler(tokenizer, 0.2)
    for position in reversed(range(len(ids))):
        assert sampler.sample(ids[position], 3, 7, position).tolist() == whole[position]
    assert len(sampler._cache) <= 100
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(draw, (sampler, ids, 3, 7)) == whole
    assert whole not in (draw(sampler, ids, 3, 8), draw(sampler, ids, 4, 7))


def assert_follows(actual: list[list[int]], expected: dict[tuple[int, ...], float]) -> None:
    """Every count is within 5 standard deviations of its expectation."""
    counts, n = Counter(map(tuple, actual)), len(actual)
    assert set(counts) <= set(expected)
    for outcome, probability in expected.items():
        assert abs(counts[outcome] - n * probability) <= 5 * math.sqrt(n * probability * (1 - probability)) + 1


@pytest.mark.parametrize("word", ["schläft", "the garden"])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 1.0])
def test_unigram_samples_follow_powers_of_the_models_probabilities(lines, word, alpha):
    tokenizer = train_tokenizer(lines, vocab_size=800, model_type="unigram")
    ids, score = tokenizer._processor.PieceToId, tokenizer._processor.GetScore
    text, weights = "▁" + word.replace(" ", "▁"), {}
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        positions = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(text)]
        actual = tuple(ids(text[start:end]) for start, end in itertools.pairwise(positions))
        if UNK not in actual:
            weights[actual] = math.exp(alpha * sum(map(score, actual)))
    assert len(weights) > 5
    total = sum(weights.values())
    actual = draw(SubwordSampler(tokenizer, alpha), encoded(tokenizer, [word]) * 20_000)
    assert_follows(actual, {outcome: weight / total for outcome, weight in weights.items()})


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_bpe_samples_follow_algorithm_1_of_bpe_dropout(lines, p):
    tokenizer = train_tokenizer(lines, vocab_size=800)
    processor = tokenizer._processor

    def outcomes(split: tuple[str, ...]) -> Counter:
        merges = [
            (-processor.GetScore(processor.PieceToId(left + right)), position)
            for position, (left, right) in enumerate(itertools.pairwise(split))
            if processor.PieceToId(left + right) != UNK
        ]
        actual: Counter = Counter()
        for dropped, (_, position) in enumerate(sorted(merges)):
            made = (*split[:position], split[position] + split[position + 1], *split[position + 2 :])
            for outcome, probability in outcomes(made).items():
                actual[outcome] += p**dropped * (1 - p) * probability
        actual[tuple(map(processor.PieceToId, split))] += p ** len(merges)
        return actual

    expected = outcomes(tuple("▁garden"))
    assert len(expected) > 8
    assert sum(expected.values()) == pytest.approx(1)
    assert_follows(draw(SubwordSampler(tokenizer, p), encoded(tokenizer, ["garden"]) * 20_000), expected)


def trained(lines: list[str], model_type: str, **options) -> Tokenizer:
    written = io.BytesIO()
    spm.SentencePieceTrainer.Train(
        sentence_iterator=iter(lines), model_writer=written, model_type=model_type, pad_id=0, unk_id=1, bos_id=2,
        eos_id=3, minloglevel=2, num_threads=1, **options,
    )  # fmt: skip
    return Tokenizer(written.getvalue())


SYMBOLS = ["<2de>", "garden", "\u2581<2fr>"]
ODD = {
    "bytes": ({"byte_fallback": True}, STRANGE),
    "symbols": (
        {"user_defined_symbols": SYMBOLS},
        ["<2de> the garden<2de>house", "gardening gar den", "<2fr> the garden"],
    ),
    "unknown": ({}, ["the 日本 garden 日", "日日 is"]),
    "across words": ({"split_by_whitespace": False}, []),
    "suffixes": ({"treat_whitespace_as_suffix": True}, []),
}
"""Options of SentencePiece, and text before the lines of training."""


@pytest.mark.parametrize("kind", ODD)
def test_the_text_stays_and_symbols_and_unknown_characters_are_never_split_or_produced(model_type, lines, kind):
    options, text = ODD[kind]
    tokenizer = trained(lines[:600], model_type, vocab_size=700, **options)
    ids = encoded(tokenizer, [*text, *lines[:200]])
    own = [each.tolist() for each in ids]
    kept = {UNK, *map(tokenizer._processor.PieceToId, options.get("user_defined_symbols", []))}
    assert kept.intersection(*own[: len(text)]) or kind not in ("symbols", "unknown")
    assert draw(SubwordSampler(tokenizer, OWN[model_type]), ids) == own
    for amount in (0.1, 0.5, 1.0):
        drawn = draw(SubwordSampler(tokenizer, amount), ids)
        assert drawn != own
        assert list(map(tokenizer.decode, drawn)) == list(map(tokenizer.decode, ids))
        for new, old in zip(drawn, own, strict=True):
            assert [i for i in new if i in kept] == [i for i in old if i in kept]


def test_other_models_and_amounts_are_refused(lines, tokenizer, model_type):
    with pytest.raises(ValueError, match="needs a unigram model, or a bpe model"):
        SubwordSampler(trained(lines, "char", vocab_size=60), 0.1)
    for amount in (-0.1, math.nan, math.inf, *([1.1] if model_type == "bpe" else [])):
        with pytest.raises(ValueError, match="needs a probability"):
            SubwordSampler(tokenizer, amount)
