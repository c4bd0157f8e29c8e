"""Scores agree with sacreBLEU itself and say how they were computed."""

import pytest
import sacrebleu

from fasttfm.data.scoring import bleu, chrf, compound_split_bleu, compound_tokens
from fasttfm.errors import UserError

REFERENCES = ["Der alte Mann kauft ein Haus am See.", "Die SPD-Politikerin kam um 14:30 Uhr.", "Das ist gut so, oder?"]
HYPOTHESES = ["Der alte Mann kauft das Haus am See.", "die SPD-Politikerin kam um 14.30 Uhr.", "Das ist gut so, oder?"]


def test_bleu_and_chrf_are_sacrebleus():
    ours = bleu(HYPOTHESES, REFERENCES)
    assert ours.value == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES]).score)
    assert ours.signature.startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert chrf(HYPOTHESES, REFERENCES).value == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score)
    assert bleu(REFERENCES, REFERENCES).value == pytest.approx(100)


def test_lower_case_forgives_case_alone():
    lower = bleu(HYPOTHESES, REFERENCES, lowercase=True)
    assert lower.value > bleu(HYPOTHESES, REFERENCES).value
    assert "case:lc" in lower.signature


def test_compounds_count_by_their_parts():
    # One part of the compound is right: whole words see none of it.
    references = ["Die SPD-Politikerin kam heute mit dem Zug nach Berlin"]
    hypotheses = ["Die CDU-Politikerin kam heute mit dem Zug nach Berlin"]
    split, whole = compound_split_bleu(hypotheses, references), bleu(hypotheses, references)
    spaced = [line.replace("-", " ##AT##-##AT## ") for line in (*hypotheses, *references)]
    assert split.value == pytest.approx(sacrebleu.corpus_bleu(spaced[:1], [spaced[1:]], tokenize="none").score)
    assert split.value > whole.value
    assert "tok:13a+compound-split" in split.signature


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("Die SPD-Politikerin kam.", "Die SPD ##AT##-##AT## Politikerin kam ."),
        ("Das 10-Jahres-Ziel (2-1)", "Das 10 ##AT##-##AT## Jahres ##AT##-##AT## Ziel ( 2 ##AT##-##AT## 1 )"),
        ("um 14:30 Uhr, 1.000,50 Euro - 5 %!", "um 14 : 30 Uhr , 1.000,50 Euro - 5 % !"),
        ("Nord- und Süd-Korea", "Nord- und Süd ##AT##-##AT## Korea"),
        ("ein -minus und Ende-", "ein -minus und Ende-"),
        # matches do not overlap: the letter between two hyphens belongs to the first
        ("E-U-Recht A-b-c", "E ##AT##-##AT## U-Recht A ##AT##-##AT## b-c"),
        ("US-$-Kurs, 4-fach", "US- $ -Kurs , 4 ##AT##-##AT## fach"),
    ],
)
def test_compound_tokens_are_those_of_get_ende_bleu(line: str, tokens: str):
    """Worked out by hand: Moses' rules for punctuation and numbers, then the script's one substitution."""
    assert compound_tokens(line) == tokens.split()


def test_compound_split_bleu_of_given_output_is_what_multi_bleu_gives():
    """4 of 5 tokens, 3 of 4 pairs, 2 of 3 triples, 1 of 2 fours; without any four it is 0, as nothing is smoothed."""
    assert compound_split_bleu(["der SPD-Mann kam"], ["die SPD-Mann kam"]).value == pytest.approx(
        100 * ((4 / 5) * (3 / 4) * (2 / 3) * (1 / 2)) ** 0.25
    )
    assert compound_split_bleu(["der SPD-Mann ging"], ["die SPD-Mann kam"]).value == 0


def test_a_tokenizer_that_is_not_installed_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "MeCab", None)
    monkeypatch.delitem(__import__("sys").modules, "sacrebleu.tokenizers.tokenizer_ja_mecab", raising=False)
    with pytest.raises(UserError, match=r"ja-mecab is not installed: install it with pip install sacrebleu\[ja\]"):
        bleu(HYPOTHESES, REFERENCES, tokenize="ja-mecab")


def test_unequal_counts_are_refused():
    with pytest.raises(ValueError, match="2 hypotheses for 3 references"):
        bleu(HYPOTHESES[:2], REFERENCES)
    with pytest.raises(ValueError, match="0 hypotheses for 0 references"):
        chrf([], [])
