"""Shortlists: restricted searches, IBM model 1, and the vocabulary map file."""

import random

import numpy as np
import pytest
import torch

from fasttfm.data.lexicon import estimate
from fasttfm.data.prepared import ParallelTokens
from fasttfm.errors import UserError
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.batches import inference
from fasttfm.search.streaming import stream_ids
from fasttfm.search.tasks import allowed_tokens
from fasttfm.translate import Shortlist
from tests.search.small_models import model_of, sources_of
from tests.search.table_model import EOS

VOCABULARY = 700
SOURCES = sources_of(VOCABULARY, 14)
ALLOWED = [sorted(random.Random(n).sample(range(4, VOCABULARY), 40 + 25 * n)) for n in range(len(SOURCES))]
PREFIXES = [[5, 9, 7][: number % 4] for number in range(len(SOURCES))]
SETTINGS = {
    "beam": DecodingConfig(beam=4, nbest=3, max_len_b=3, batch_tokens=128),
    "greedy": DecodingConfig(beam=1, max_len_b=3, batch_tokens=128),
    "sampling": DecodingConfig(sampling=True, nbest=2, max_len_b=3, batch_tokens=128),
    "diverse": DecodingConfig(beam=4, diverse_beam_groups=2, max_len_b=3, batch_tokens=128),
}


@pytest.fixture(scope="module")
def model():
    return model_of("fp32", VOCABULARY)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "width", "name"),
    [
        *(("fp32", 64, name) for name in SETTINGS),
        *((kind, width, "beam") for kind in ("bf16", "int8") for width in (64, 512)),
    ],
)
def test_each_sentence_is_restricted_to_its_own_list(kind, width, name):
    model, config = model_of(kind, VOCABULARY, width), SETTINGS[name]
    together = search_ids(model, SOURCES, config, prefixes=PREFIXES, allowed=ALLOWED)
    alone = [
        search_ids(model, [source], config, prefixes=[prefix], numbers=[number], allowed=[allowed])[0]
        for number, (source, prefix, allowed) in enumerate(zip(SOURCES, PREFIXES, ALLOWED, strict=True))
    ]
    assert together == alone
    for best, prefix, allowed in zip(together, PREFIXES, ALLOWED, strict=True):
        for each in best:
            assert each.tokens[: len(prefix)] == prefix
            assert set(each.tokens) <= {*allowed, *prefix}
    free = search_ids(model, SOURCES, config, prefixes=PREFIXES)
    assert sum(a[0].tokens != b[0].tokens for a, b in zip(free, together, strict=True)) > len(SOURCES) / 2


def test_probability_is_renormalized_over_the_list(model):
    source, allowed = SOURCES[3], ALLOWED[3]
    config = DecodingConfig(beam=1, max_len_a=0.0, max_len_b=1, min_len=1)
    ((best, *_),) = search_ids(model, [source], config, allowed=[allowed])
    with inference(model):
        logits = model(torch.tensor([source]), torch.tensor([[2, *best.tokens]]))[0].float()  # (2, V)
    kept = torch.tensor([EOS, *allowed])
    expected = logits[:, kept].log_softmax(dim=1)
    first = expected[0, kept.tolist().index(best.tokens[0])]
    assert best.log_probability == pytest.approx((first + expected[1, 0]).item(), abs=1e-4)


def test_required_phrases_occur_even_if_no_list_has_them(model):
    outside = [n for n in range(4, VOCABULARY) if n not in ALLOWED[0]][:2]
    config = DecodingConfig(beam=4, max_len_b=5)
    ((best, *_),) = search_ids(model, SOURCES[:1], config, allowed=ALLOWED[:1], required=[[[outside]]])
    assert any(best.tokens[n : n + 2] == outside for n in range(len(best.tokens)))
    assert set(best.tokens) <= {*ALLOWED[0], *outside}


def test_streaming_equals_the_search(model):
    ((best, *_),) = search_ids(model, SOURCES[:1], SETTINGS["greedy"], allowed=ALLOWED[:1])
    assert list(stream_ids(model, SOURCES[0], SETTINGS["greedy"], allowed=ALLOWED[0])) == best.tokens


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_an_empty_list_is_reported(model, settings):
    with pytest.raises(UserError, match=r"no translation can be found: .* a shortlist, .* leave no token"):
        search_ids(model, SOURCES[:2], settings, allowed=[[5], []])


def test_missing_lists_are_refused(model):
    with pytest.raises(ValueError, match="give one for each"):
        search_ids(model, SOURCES[:2], SETTINGS["beam"], allowed=ALLOWED[:1])
    with pytest.raises(ValueError, match="some have none"):
        allowed_tokens([[5], None])


# The shortlist itself


def cipher_pairs() -> ParallelTokens:
    """Source token n is always translated as n + 40, in any order; every target also contains token 99."""
    draw = random.Random(3)
    lines = [[draw.randrange(4, 40) for _ in range(draw.randint(1, 8))] for _ in range(400)]
    return ParallelTokens.from_lists(lines, [[*draw.sample([n + 40 for n in line], len(line)), 99] for line in lines])


def test_the_lexicon_finds_a_cipher_also_if_it_is_counted_in_parts(monkeypatch):
    lexicon = estimate(cipher_pairs(), 100, 100, iterations=5)
    best = lexicon.best(1)
    assert {source: int(targets[0]) for source, targets in best.items()} == {n: n + 40 for n in range(4, 40)}
    np.testing.assert_allclose(np.bincount(lexicon.sources, lexicon.probabilities)[4:40], 1.0)
    monkeypatch.setattr("fasttfm.data.lexicon._LINKS", 50)
    parts = estimate(cipher_pairs(), 100, 100, iterations=5)
    np.testing.assert_allclose(lexicon.probabilities, parts.probabilities, rtol=1e-9)


def test_one_iteration_by_hand():
    """Two pairs (a b -> x y), (a -> x): uniform shares of 1/3 (a, b, NULL) and of 1/2 (a, NULL)."""
    lexicon = estimate(ParallelTokens.from_lists([[4, 5], [4]], [[6, 7], [6]]), 8, 8, iterations=1)
    table = {(int(s), int(t)): p for s, t, p in zip(lexicon.sources, lexicon.targets, lexicon.probabilities)}
    assert table == pytest.approx({(4, 6): 5 / 7, (4, 7): 2 / 7, (5, 6): 1 / 2, (5, 7): 1 / 2})


def test_a_saved_file_is_loaded_unchanged_and_truncation_is_detected(tokenizer, tmp_path):
    lines = ["a dog runs", "two men sit"]
    targets = ["ein Hund", "zwei Männer sitzen"]
    pairs = ParallelTokens.from_lists(*([tokenizer.encode(each) for each in side] for side in (lines, targets)))
    shortlist = Shortlist.from_pairs(pairs, tokenizer, tokenizer, best=3, frequent=2)
    shortlist.save(tmp_path / "vmap.txt", tokenizer, tokenizer)
    read = Shortlist.load(tmp_path / "vmap.txt", tokenizer, tokenizer)
    for line in lines:
        ids = tokenizer.encode(line)
        assert read.tokens(ids) == shortlist.tokens(ids)
        assert set(ids) <= set(read.tokens(ids)), "a token may always be copied"
    assert len(read.always) == 2
    whole = (tmp_path / "vmap.txt").read_bytes().splitlines(keepends=True)
    for count in range(len(whole)):
        (tmp_path / "vmap.txt").write_bytes(b"".join(whole[:count]))
        with pytest.raises(UserError, match="it seems to be truncated"):
            Shortlist.load(tmp_path / "vmap.txt", tokenizer, tokenizer)


def test_a_tab_token_is_left_out_of_the_file(tokenizer, tmp_path):
    """German Multi30k has one, which would make the file unreadable."""

    class Odd:
        def __len__(self):
            return len(tokenizer)

        def pieces(self, ids):
            return ["\t" if number == 20 else piece for number, piece in zip(ids, tokenizer.pieces(ids), strict=True)]

    Shortlist([20, 30], {(20,): [40], (21,): [20, 41]}).save(tmp_path / "vmap.txt", Odd(), Odd())
    assert Shortlist.load(tmp_path / "vmap.txt", Odd(), Odd()).tokens([20, 21]) == [30, 41]


def test_runs_of_source_tokens_are_read(tokenizer, tmp_path):
    """They occur in CTranslate2's files."""
    one, two, three = tokenizer.pieces([10, 11, 12])
    (tmp_path / "vmap.txt").write_text(f"\t{three}\n{one} {two}\t{one}\n", encoding="utf-8")
    shortlist = Shortlist.load(tmp_path / "vmap.txt", tokenizer, tokenizer)
    assert (shortlist.tokens([10, 11]), shortlist.tokens([11, 10])) == ([10, 12], [12])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no tab\n", "line 1: must be source tokens, a tab and target tokens"),
        ("\tnopiece\n", "is not a token"),
        ("", "has no tokens for every sentence"),
        ("a\ta\n", "has no tokens for every sentence"),
        ("\ta\na\ta", "its last line has no end, it seems to be truncated"),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(text, message, tokenizer, tmp_path):
    (tmp_path / "vmap.txt").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        Shortlist.load(tmp_path / "vmap.txt", tokenizer, tokenizer)
