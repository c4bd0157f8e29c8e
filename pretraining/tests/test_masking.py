"""What is hidden: the right share of the right tokens, words and phrases whole, the same in every run."""

import numpy as np
import pytest

from fasttfm.errors import UserError
from fasttfm_pretraining.data.masking import ELECTRA_SHARES, Masker, MaskingVocabulary, Phrases, read_phrases

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


def test_the_same_generator_hides_the_same():
    first, repeated = (masked(Masker(VOCABULARY, whole_words=True), rows=20) for _ in range(2))
    assert all(np.array_equal(a, b) for one, other in zip(first, repeated) for a, b in zip(one, other))
    assert any(not np.array_equal(first[0].positions, row.positions) for row in first[1:])


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


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), (b"\xff\xfe", "is not UTF-8"), (b"a\n\n", "no phrase of more than one token")],
)
def test_a_wrong_list_of_phrases_ends_in_one_line(content, message, tmp_path):
    path = tmp_path / "phrases.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_phrases(path, lambda text: [ord(character) for character in text])
