"""Scores agree with sacreBLEU itself and say how they were computed."""

import pytest
import sacrebleu

from fasttfm.data.scoring import bleu, chrf, compound_split_bleu
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
