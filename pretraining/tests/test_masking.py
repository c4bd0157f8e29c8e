"""Rows of documents, and what is hidden in them: the right share of the right tokens, nothing lost, pairs half true,
the same in every run whatever the division among ranks."""

from collections import Counter

import numpy as np
import pytest
import torch

from fasttfm.config.training import TrainingConfig
from fasttfm.errors import UserError
from fasttfm.training.updates import Updates
from fasttfm_pretraining.config.bert import BertConfig
from fasttfm_pretraining.data.documents import Documents
from fasttfm_pretraining.data.masked_rows import MaskedBatches
from fasttfm_pretraining.data.masking import ELECTRA_SHARES, Masker, MaskingVocabulary, Phrases, read_phrases
from fasttfm_pretraining.models.bert import BertPretraining

SIZE = 60
VOCABULARY = MaskingVocabulary(
    size=SIZE,
    begin=2,
    end=3,
    mask=4,
    is_special=np.arange(SIZE) < 5,
    begins_word=(np.arange(SIZE) % 3 == 0) | (np.arange(SIZE) < 5),  # 6, 9, 12, ... begin words of up to three pieces
)
ROW = np.array([2, *np.arange(5, 59), 3])


def masked(masker, row=ROW, rows=2000):
    return [masker(row, np.random.default_rng([0, number])) for number in range(rows)]


def chi_square(counts, expected):
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    return float(((counts - expected) ** 2 / expected).sum())


def test_15_percent_are_hidden_80_10_10_and_every_place_is_as_likely():
    rows = masked(Masker(VOCABULARY))
    assert {len(row.labels) for row in rows} == {8}  # 15% of 54
    kinds, indices, drawn = np.zeros(3), np.zeros(len(ROW)), np.zeros(SIZE)
    for row in rows:
        assert (row.labels == ROW[row.positions]).all()
        untouched = np.delete(np.arange(len(ROW)), row.positions)
        assert (row.tokens[untouched] == ROW[untouched]).all()
        seen = row.tokens[row.positions]
        kinds += [(seen == 4).sum(), ((seen != 4) & (seen != row.labels)).sum(), (seen == row.labels).sum()]
        np.add.at(indices, row.positions, 1)
        np.add.at(drawn, seen[(seen != 4) & (seen != row.labels)], 1)
    total, kept_by_chance = kinds.sum(), 0.1 / 55  # a random token is the original one now and then
    expected = total * np.array([0.8, 0.1 - kept_by_chance, 0.1 + kept_by_chance])
    assert chi_square(kinds, expected) < 13.82  # 2 degrees of freedom, p = 0.001
    assert indices[[0, -1]].tolist() == [0, 0]  # markers
    # 54 places, 53 degrees of freedom, p = 0.001; a row's are drawn without repetition, which can only lessen it
    assert chi_square(indices[1:-1], np.full(54, total / 54)) < 90.6
    assert drawn[:5].sum() == 0
    assert chi_square(drawn[5:], np.full(55, drawn.sum() / 55)) < 91.9  # 54 degrees of freedom


def test_a_generator_s_input_is_85_percent_masks_and_the_rest_stays():
    rows = masked(Masker(VOCABULARY, shares=ELECTRA_SHARES))
    hidden = sum(int((row.tokens == 4).sum()) for row in rows)
    total = sum(len(row.labels) for row in rows)
    assert chi_square([hidden, total - hidden], [0.85 * total, 0.15 * total]) < 10.83
    assert all(((row.tokens == 4) | (row.tokens == ROW)).all() for row in rows)


def test_whole_words_are_hidden_whole():
    for row in masked(Masker(VOCABULARY, whole_words=True), rows=300):
        hidden = set(row.positions.tolist())
        assert 6 <= len(hidden) <= 8
        for position in hidden:
            first = position
            while first > 1 and not VOCABULARY.begins_word[ROW[first]]:
                first -= 1
            last = position + 1
            while last < len(ROW) - 1 and not VOCABULARY.begins_word[ROW[last]]:
                last += 1
            assert set(range(first, last)) <= hidden


def test_a_word_longer_than_the_budget_is_hidden_all_the_same():
    row = np.array([2, 6, 7, 8, 10, 11, 3])  # one word of five pieces, a budget of one
    assert Masker(VOCABULARY, whole_words=True)(row, np.random.default_rng(0)).positions.tolist() == [1, 2, 3, 4, 5]


def test_phrases_are_hidden_whole_the_longest_first():
    phrases = Phrases([[10, 11], [10, 11, 12, 13], [30, 31, 32], [7]])
    assert len(phrases) == 3  # one token is not a phrase
    assert phrases.spans([10, 11, 12, 13, 10, 11, 30, 31]) == [(0, 4), (4, 6)]
    rows = masked(Masker(VOCABULARY, phrases=phrases), rows=400)
    both = [set((row.labels).tolist()) for row in rows]
    for phrase in ({10, 11, 12, 13}, {30, 31, 32}):
        touched = [hidden & phrase for hidden in both if hidden & phrase]
        assert len(touched) > 20
        assert all(each == phrase for each in touched)
    assert any(5 in hidden for hidden in both)  # single tokens are hidden too


def test_with_whole_words_a_phrase_takes_the_rest_of_its_last_word():
    masker = Masker(VOCABULARY, whole_words=True, phrases=Phrases([[9, 10, 11, 12]]))
    row = np.array([2, 9, 10, 11, 12, 13, 15, 3])
    for seed in range(20):
        hidden = set(masker(row, np.random.default_rng(seed)).positions.tolist())
        assert hidden in ({1, 2, 3, 4, 5}, {6}, {1, 2, 3, 4, 5, 6})


def test_a_row_of_markers_stays():
    row = Masker(VOCABULARY)(np.array([2, 3]), np.random.default_rng(0))
    assert len(row.labels) == 0
    assert row.tokens.tolist() == [2, 3]


def test_phrases_are_read_a_line_each_and_a_wrong_list_ends_in_one_line(tmp_path):
    path = tmp_path / "phrases.txt"
    for content, message in (
        (None, "no such file"), (b"\xff\xfe", "is not UTF-8"), (b"a\n\n", "no phrase of more than one token")
    ):  # fmt: skip
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            read_phrases(path, list)
    path.write_text("ab\nc\ndef\n")
    assert len(read_phrases(path, list)) == 2


# Rows of documents

LINE = 5
WIDE = 1000
WORDS = MaskingVocabulary(
    size=WIDE, begin=2, end=3, mask=4, is_special=np.arange(WIDE) < 5, begins_word=np.arange(WIDE) % 2 == 0
)


def in_memory(documents):
    """Documents in memory."""
    return Documents.from_lists(documents, 3)


def row_of(made, number, epoch):
    return made.row(number, np.random.default_rng([made.seed, epoch, number]))


def corpus(documents=40, length=90):
    random = np.random.default_rng(0)
    return in_memory([random.integers(6 + 20 * n, 26 + 20 * n, length + n % 3) for n in range(documents)])


def batches(given=None, **changes):
    options = {"row_length": 32, "max_tokens": 256, "seed": 7, "line": LINE, **changes}
    return MaskedBatches(given or corpus(), Masker(WORDS), **options)


def test_every_token_of_the_documents_is_in_one_row():
    made = batches()
    seen = []
    for indices in made.epoch(3):
        for number in indices:
            row, second, label = row_of(made, int(number), 3)
            assert (row[0], row[-1], second, label) == (2, 3, len(row), 0)
            assert len(row) <= 32
            seen += row[1:-1].tolist()
    wanted = np.delete(made.corpus.read(0, made.corpus.tokens), made.corpus.offsets[1:] - 1)
    left_out = Counter(wanted.tolist()) - Counter(seen)
    assert not Counter(seen) - Counter(wanted.tolist())
    assert made.skipped <= left_out.total() <= 3 * made.skipped  # ends of documents that are too short for a row
    assert 0 < made.skipped < 40


def test_a_batch_holds_what_its_rows_say():
    for pairs in (None, "nsp", "sop"):
        made = batches(pairs=pairs)
        for indices in made.epoch(0):
            batch = made.batch(indices, 0)
            assert batch.cells <= 256
            assert batch.source_tokens + batch.target_tokens == batch.lengths.sum()
            original = batch.tokens.flatten().clone()
            original[batch.positions] = batch.labels
            for position, number in enumerate(indices):
                row, second, label = row_of(made, int(number), 0)
                assert original.view(batch.shape)[position].tolist() == [*row, *[0] * (batch.shape[1] - len(row))]
                if pairs is not None:
                    kinds = [0] * second + [1] * (len(row) - second) + [0] * (batch.shape[1] - len(row))
                    assert batch.segments[position].tolist() == kinds
                    assert batch.sentence_labels[position] == label
                    assert row[second - 1] == 3


def test_chance_follows_from_seed_epoch_and_row_alone():
    made, repeated = batches(pairs="nsp"), batches(pairs="nsp")
    assert all(np.array_equal(one, other) for one, other in zip(made.epoch(2), repeated.epoch(2), strict=True))
    indices = made.epoch(2)[0]
    whole = repeated.batch(indices, 2)
    parts = [made.batch(indices[:3], 2), made.batch(indices[3:], 2)]
    assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
    assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
    assert not torch.equal(whole.tokens, made.batch(indices, 3).tokens)
    assert not torch.equal(whole.tokens, batches(pairs="nsp", seed=8).batch(indices, 2).tokens)


def test_half_of_the_next_sentences_are_of_another_document():
    made, labels = batches(pairs="nsp"), []
    for epoch in range(12):
        for number in range(len(made.spans.begins)):
            row, second, label = row_of(made, number, epoch)
            documents = {int(token - 6) // 20 for token in row[second:-1]} | {int(row[1] - 6) // 20}
            assert (len(documents) == 1) == (label == 0)
            labels.append(label)
    share = np.mean(labels)
    assert abs(share - 0.5) < 3.3 * 0.5 / len(labels) ** 0.5  # p = 0.001


def test_half_of_the_pairs_are_exchanged_and_make_the_text_put_back():
    made, labels = batches(pairs="sop"), []
    for number in range(len(made.spans.begins)):
        row, second, label = row_of(made, number, 0)
        first, last = row[1 : second - 1].tolist(), row[second:-1].tolist()
        text = made.corpus.read(int(made.spans.begins[number]), int(made.spans.ends[number])).tolist()
        assert (last + first if label else first + last) == text
        labels.append(label)
    assert 0.3 < np.mean(labels) < 0.7


def test_a_pair_is_cut_at_a_line_or_else_at_a_word():
    text = [11] * 8 + [LINE] + [11] * 8
    made = batches(in_memory([text] * 4), pairs="sop")
    for number in range(4):
        row, second, label = row_of(made, number, 0)
        first = row[1 : second - 1] if label == 0 else row[second:-1]
        assert first.tolist() == text[:9]
    made = batches(in_memory([[11] * 9 + [12] * 8]), pairs="sop")  # even numbers begin words
    cuts = set()
    for epoch in range(30):
        row, second, label = row_of(made, 0, epoch)
        cuts.add(len(row[1 : second - 1]) if label == 0 else len(row[second:-1]))
    assert cuts <= set(range(9, 17))
    assert len(cuts) > 2


def test_one_document_lends_its_other_spans():
    made = batches(in_memory([np.arange(6, 300)]), pairs="nsp")
    for epoch in range(5):
        for number in range(len(made.spans.begins)):
            row, second, label = row_of(made, number, epoch)
            begin = made.corpus.read(0, made.corpus.tokens)[made.spans.begins[number]]
            inside = begin <= row[second] < begin + 29
            assert inside == (label == 0)
    alone = batches(in_memory([np.arange(6, 20)]), pairs="nsp")  # nothing else to lend
    assert {row_of(alone, 0, epoch)[2] for epoch in range(10)} == {0, 1}


@pytest.mark.parametrize("update_freq", [1, 2])
def test_an_update_of_rows_of_unknown_tokens_alone_changes_nothing(update_freq):
    made = batches(in_memory([np.ones(20, np.int64)] * 4))
    assert made.batch(made.epoch(0)[0]).target_tokens == 0
    sizes = {"d_model": 16, "heads": 2, "d_ff": 16, "layers": 1, "max_length": 32, "pooler": False}
    model = BertPretraining(BertConfig(vocab_size=WIDE, sentence_head=False, **sizes))
    before = [each.detach().clone() for each in model.parameters()]
    config = TrainingConfig(precision="fp32", update_freq=update_freq)
    assert Updates(model, made, config, torch.device("cpu")).perform()
    assert all(map(torch.equal, model.parameters(), before))


def test_documents_without_a_row_are_refused():
    with pytest.raises(ValueError, match="no document has a span of 4 tokens"):
        batches(in_memory([[7, 8, 9]]))
