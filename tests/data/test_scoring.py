"""Scores match sacreBLEU's, with signatures."""

import pytest
import sacrebleu

from fasttfm.data.scoring import (
    PAIRED_TESTS,
    bleu,
    chrf,
    compare,
    compound_split_bleu,
    compound_tokens,
    script_without_words,
    ter,
    tokenizer_of,
)  # fmt: skip

REFERENCES = ["Der alte Mann kauft ein Haus am See.", "Die SPD-Politikerin kam um 14:30 Uhr.", "Das ist gut so, oder?"]
HYPOTHESES = ["Der alte Mann kauft das Haus am See.", "die SPD-Politikerin kam um 14.30 Uhr.", "Das ist gut so, oder?"]


@pytest.mark.parametrize(
    ("score", "theirs"),
    [(bleu, sacrebleu.corpus_bleu), (chrf, sacrebleu.corpus_chrf), (ter, sacrebleu.corpus_ter)],
)
def test_scores_are_sacrebleus(score, theirs):
    for lines in (HYPOTHESES, REFERENCES):
        assert score(lines, REFERENCES).value == pytest.approx(theirs(lines, [REFERENCES]).score)


def test_lowercase_ignores_case_only():
    lower = bleu(HYPOTHESES, REFERENCES, lowercase=True)
    assert lower.value > bleu(HYPOTHESES, REFERENCES).value
    assert "case:lc" in lower.signature
    plain = bleu(HYPOTHESES, REFERENCES).signature
    assert plain.startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("Die SPD-Politikerin kam.", "Die SPD ##AT##-##AT## Politikerin kam ."),
        ("Das 10-Jahres-Ziel (2-1)", "Das 10 ##AT##-##AT## Jahres ##AT##-##AT## Ziel ( 2 ##AT##-##AT## 1 )"),
        ("um 14:30 Uhr, 1.000,50 Euro - 5 %!", "um 14 : 30 Uhr , 1.000,50 Euro - 5 % !"),
        ("Nord- und Süd-Korea", "Nord- und Süd ##AT##-##AT## Korea"),
        # matches do not overlap: the letter between two hyphens belongs to the first
        ("E-U-Recht A-b-c", "E ##AT##-##AT## U-Recht A ##AT##-##AT## b-c"),
        ("US-$-Kurs, 4-fach", "US- $ -Kurs , 4 ##AT##-##AT## fach"),
    ],
)
def test_compound_tokens_are_those_of_get_ende_bleu(line: str, tokens: str):
    """Derived by hand from Moses' rules for punctuation and numbers, and the script's substitution."""
    assert compound_tokens([line]) == [tokens]


def test_compound_split_bleu_is_multi_bleu():
    """4 of 5 unigrams, 3 of 4 bigrams, 2 of 3 trigrams, 1 of 2 4-grams; 0 without 4-grams, as there is no smoothing."""
    assert compound_split_bleu(["der SPD-Mann kam"], ["die SPD-Mann kam"]).value == pytest.approx(
        100 * ((4 / 5) * (3 / 4) * (2 / 3) * (1 / 2)) ** 0.25
    )
    assert compound_split_bleu(["der SPD-Mann ging"], ["die SPD-Mann kam"]).value == 0


@pytest.mark.parametrize(
    ("lines", "tokenizer"),
    [
        (["Ein Hund läuft.", "犬"], "13a"),
        (["犬が走る。", "はい"], "char"),
        (["一只狗在跑。", "OK"], "zh"),
        (["สุนัขวิ่ง"], "char"),
        (["123", ""], "13a"),
    ],
)
def test_the_tokenizer_depends_on_the_script(lines, tokenizer):
    assert tokenizer_of(lines, packages=False) == tokenizer
    assert (script_without_words(lines) is None) == (tokenizer == "13a")


@pytest.mark.parametrize("test", PAIRED_TESTS)
def test_a_clear_difference_is_significant_and_a_swapped_line_is_not(test):
    references = [f"Satz {n} ist ein Beispiel für {n * 7} Wörter hier" for n in range(30)]
    worse = [line.replace("ein Beispiel", "kein Fall") for line in references]
    clear = compare(references, worse, references, test=test, with_ter=True)
    assert all(each.p_value < 0.01 for each in clear.values())
    assert (clear["bleu"].system, clear["ter"].system) == (pytest.approx(100), 0)
    one, other = ([*worse[:n], references[n], *worse[n + 1 :]] for n in (14, 20))
    assert compare(one, other, references, test=test)["bleu"].p_value > 0.05


def test_several_references_match_sacrebleu_and_unequal_counts_are_refused():
    hypotheses, first, second = ["a dog runs over the grass"], ["a dog walks on the grass"], ["one dog runs over grass"]
    ours = bleu(hypotheses, [first, second])
    assert ours.value == sacrebleu.corpus_bleu(hypotheses, [first, second]).score > bleu(hypotheses, first).value
    assert "nrefs:2" in ours.signature
    for score, given, references in (
        (bleu, hypotheses, [first, second * 2]),
        (bleu, first, REFERENCES),
        (chrf, [], []),
    ):
        with pytest.raises(ValueError, match=rf"{len(given)} hypotheses for \d references"):
            score(given, references)
