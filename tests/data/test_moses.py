"""German tokens are those of Moses' tokenizer, as sacremoses has ported it."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fasttfm.data.moses import ABBREVIATIONS, moses_tokens

TABLE = [
    ('Er sagte: "Das ist z.B. gut", und ging.', 'Er sagte : " Das ist z.B. gut " , und ging .'),
    (
        "Dr. Müller wohnt in der Hauptstr. 5, ca. 3 km entfernt.",
        "Dr. Müller wohnt in der Hauptstr . 5 , ca. 3 km entfernt .",
    ),
    ("Am 3. Oktober 1990, d.h. vor 1.000,50 Tagen...", "Am 3. Oktober 1990 , d.h. vor 1.000,50 Tagen ..."),
    ("Ludwig XIV. war König; A. Merkel nicht.", "Ludwig XIV. war König ; A. Merkel nicht ."),
    ("Das kostet 3,5 Mio. Euro, usw.", "Das kostet 3,5 Mio. Euro , usw."),
    ("Wie geht's? Gut!", "Wie geht ' s ? Gut !"),
    ("50% der 2,Stimmen ,5 und 4, 6", "50 % der 2 , Stimmen , 5 und 4 , 6"),
    ("„Süd-Korea“ – das ist’s …", "„ Süd-Korea “ – das ist ’ s …"),
    ("E-Mail an a_b@c.de (http://x.de/y?z=1).", "E-Mail an a _ b @ c.de ( http : / / x.de / y ? z = 1 ) ."),
    ("Warte.. nein.... doch . . .", "Warte .. nein .... doch . . ."),
    ("Ende. weiter Ende. Weiter Ende.", "Ende. weiter Ende . Weiter Ende ."),
    ("½ Liter, x² und Ⅻ,5 m³", "½ Liter , x ² und Ⅻ,5 m ³"),
    ("Preis: 5€/$6; [siehe] {dort} <hier> | & #1 `so`", "Preis : 5 € / $ 6 ; [ siehe ] { dort } < hier > | & # 1 `so`"),
    ("", ""),
    ("  viele   Leerzeichen\tund Tabs  ", "viele Leerzeichen und Tabs"),
    ("Der SPD-Mann (10-Jahres-Plan) -- US-$-Kurs", "Der SPD-Mann ( 10-Jahres-Plan ) -- US- $ -Kurs"),
    ("S. Bach u. Co., vgl. S. 12 ff. und Nr. 7", "S. Bach u. Co. , vgl. S. 12 ff. und Nr. 7"),
    ("Sie hieß Ü. Özil. Ö. Und ß.", "Sie hieß Ü . Özil . Ö . Und ß ."),
]
"""Line -> MosesTokenizer("de").tokenize(line, escape=False) of sacremoses 0.2.0, joined."""


@pytest.mark.parametrize(("line", "tokens"), TABLE)
def test_tokens_are_those_that_moses_made(line, tokens):
    assert moses_tokens(line) == tokens.split()


@pytest.fixture(scope="module")
def moses():
    return pytest.importorskip("sacremoses").MosesTokenizer("de")


WORDS = st.sampled_from([*sorted(ABBREVIATIONS), "Haus", "haus", "z.B", "3", "1,5", "½", "Süd", "x²", "Ⅻ", "ß", "é"])
SIGNS = st.sampled_from([*" .,'`-\"!?;:%€$&|<>[](){}/_#@*+=~^„“”‚‘’–—…»«°§\u00a0", "..", "...", ". ", ", ", "--"])


@given(st.lists(WORDS | SIGNS, max_size=12).map("".join))
def test_tokens_of_any_words_and_signs_are_those_of_moses(moses, line):
    assert moses_tokens(line) == moses.tokenize(line, escape=False)


def test_tokens_of_real_text_are_those_of_moses(moses, corpora: Path):
    with gzip.open(corpora / "wmt_news_ende" / "test.de.gz", "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            assert moses_tokens(line) == moses.tokenize(line, escape=False)
