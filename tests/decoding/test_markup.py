"""Tags go where their words went, each once, nested as they were."""

from __future__ import annotations

import html
import random
import re

import pytest
import torch

from fasttfm.decoding import DecodingConfig
from fasttfm.decoding.alignment import PARTS
from fasttfm.decoding.markup import Marked, translate_marked
from fasttfm.decoding.translator import Translator
from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig

STRAIGHT = tuple((word, word) for word in range(20))


def insert(line: str, translation: str, links=STRAIGHT) -> str:
    parts = len(PARTS.findall(Marked.parse(line).text)), len(PARTS.findall(translation))
    return Marked.parse(line).insert(translation, tuple(each for each in links if each < parts and each[1] < parts[1]
                                                        and each[0] < parts[0]))  # fmt: skip


@pytest.mark.parametrize(
    ("line", "translation", "links", "expected"),
    [
        ("a <b>big</b> dog", "ein großer Hund", STRAIGHT, "ein <b>großer</b> Hund"),
        ("a <b>big</b> dog", "ein Hund großer", ((0, 0), (1, 2), (2, 1)), "ein Hund <b>großer</b>"),
        ("<p>a dog</p>", "der ein Hund", ((0, 1), (1, 2)), "<p>der ein Hund</p>"),
        ("<i>the <b>dog</b></i>.", "der Hund.", STRAIGHT, "<i>der <b>Hund</b></i>."),
        ("see <a href='x>y'>this</a>, ok", "sieh das, ok", STRAIGHT, "sieh <a href='x>y'>das</a>, ok"),
        ("one<br/>two", "eins zwei", STRAIGHT, "eins <br/>zwei"),
        ("one<br> two", "eins zwei", STRAIGHT, "eins<br> zwei"),
        ("one <x id='1'/>", "eins", STRAIGHT, "eins<x id='1'/>"),
        ("<x/>one", "eins", STRAIGHT, "<x/>eins"),
        ("<b></b>", "", (), "<b></b>"),
        ("a <b>b</b> c", "x", (), "<b></b>x"),
        ("1 &lt; 2 &amp; <b>3</b>", "1 < 2 & 3", STRAIGHT, "1 &lt; 2 &amp; <b>3</b>"),
        ("a < b", "a < b", (), "a &lt; b"),
        ("a <!-- <b> --> b", "a b", STRAIGHT, "a <!-- <b> -->b"),
        # one word linked across the sentence does not make all of it bold
        ("<b>red</b> dogs bark at night", "rote Hunde bellen nachts rot", ((0, 0), (1, 1), (2, 2), (4, 3), (0, 4)),
         "<b>rote</b> Hunde bellen nachts rot"),
    ],
)  # fmt: skip
def test_tags_stand_around_what_their_words_are_linked_to(line, translation, links, expected):
    assert insert(line, translation, links) == expected


def test_an_empty_element_separates_words_and_a_pair_of_tags_does_not():
    assert Marked.parse("one<br/>two H<sub>2</sub>O a&#10;b").text == "one two H2O a b"


@pytest.mark.parametrize(
    ("line", "message"),
    [("<b>dog", "<b> is not closed"), ("dog</b>", "</b> closes nothing"), ("<b><i>x</b></i>", "</b> closes nothing")],
)
def test_tags_that_are_not_balanced_are_refused(line, message):
    with pytest.raises(UserError, match=message):
        Marked.parse(line)


def tree(draw: random.Random, depth: int = 0) -> str:
    """A random balanced line; the tags have numbers."""
    parts = []
    for _ in range(draw.randint(0, 4)):
        kind = draw.random()
        number = draw.randrange(10**6)
        if kind < 0.5 or depth > 3:
            parts.append(draw.choice(["dog", "a ", " big", ", ", "&amp;", " < ", "H", ". ", "東京", " \u00a0 "]))
        elif kind < 0.65:
            parts.append(draw.choice([f"<x id='{number}'/>", f"<br n='{number}'>", f"<!-- {number} -->"]))
        else:
            parts.append(f"<g{number}>{tree(draw, depth + 1)}</g{number}>")
    return "".join(parts)


TAG = re.compile(r"<!--.*?-->|<[a-z/][^<>]*>")


def nesting(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Every tag with those around it; fails where they are not balanced."""
    around: list[str] = []
    results = []
    for tag in TAG.findall(text):
        if tag.startswith("</"):
            assert around.pop() == f"<{tag[2:]}"
        else:
            results.append((tag, tuple(around)))
            if tag.startswith("<g"):
                around.append(tag)
    assert not around
    return sorted(results)


@pytest.mark.parametrize("seed", range(20))
def test_every_tag_comes_once_in_the_elements_it_was_in_and_the_text_stays(seed):
    draw = random.Random(seed)
    for _ in range(100):
        line = tree(draw)
        marked = Marked.parse(line)
        translation = "".join(
            draw.choices(["Hund", " ", ", ", "<b>", "&amp;", "</g1>", "犬", "\u2028"], k=draw.randint(0, 9))
        )
        sizes = len(PARTS.findall(marked.text)), len(PARTS.findall(translation))
        links = ()
        if all(sizes):
            links = tuple(
                sorted({(draw.randrange(sizes[0]), draw.randrange(sizes[1])) for _ in range(draw.randint(0, 12))})
            )
        results = marked.insert(translation, links)
        assert nesting(results) == nesting(line)
        assert html.unescape(TAG.sub("", results)) == html.unescape(html.escape(translation, quote=False))


def test_a_stream_keeps_lines_and_stops_at_a_bad_one(tokenizer):
    torch.manual_seed(1)
    size = {"d_model": 16, "heads": 2, "d_ff": 32, "encoder_layers": 1, "decoder_layers": 1}
    model = Transformer(TransformerConfig(vocab_size=len(tokenizer), **size))
    settings = DecodingConfig(beam=2, max_len_b=5)
    translator = Translator(model, tokenizer, tokenizer, settings, aligned=PARTS)
    lines = ["a <b>dog</b>", "", "<br/>", "<i>two</i> men <b>sit</b>"]
    results = [translations[0].text for translations in translate_marked(translator, lines)]
    plain = Translator(model, tokenizer, tokenizer, settings).translate(["a dog", "", "", "two men sit"])
    assert [html.unescape(TAG.sub("", text)) for text in results] == plain
    assert [sorted(TAG.findall(text)) for text in results] == [sorted(TAG.findall(line)) for line in lines]
    stream = translate_marked(translator, [*lines, "<b>", "a"])
    assert [next(stream)[0].text for _ in lines] == results
    with pytest.raises(UserError, match="line 5: <b> is not closed"):
        next(stream)


def test_tags_may_be_nested_in_thousands():
    line = "<b>" * 5000 + "one" + "</b>" * 5000
    assert insert(line, "eins") == line.replace("one", "eins")
