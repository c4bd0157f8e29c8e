"""Tags go where their words went, each once, nested as they were."""

import contextlib
import html
import random
import re
import time
from html.parser import HTMLParser

import pytest
import torch

from fasttfm.decoding import DecodingConfig
from fasttfm.decoding.alignment import PARTS
from fasttfm.decoding.markup import Marked, translate_marked
from fasttfm.decoding.markup_blocks import split_blocks
from fasttfm.decoding.markup_tags import Tags
from fasttfm.decoding.translator import Translation, Translator, paired
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


@pytest.mark.parametrize(
    ("line", "texts"),
    [
        ("<li>A</li><li>B</li>", ["A", "B"]),
        ("<p>a <b>dog</b></p> <p>b</p>", ["a <b>dog</b>", "b"]),
        ("one<br>two<br/>three", ["one", "two", "three"]),
        ("<b>one<br>two</b>", ["one", "two"]),
        ("<i><b><p>one</p>two</b></i> three", ["one", "two", " three"]),
        ("<script>if (a < b) { '</b>' }</script><style>p > b {}</style>text", ["text"]),
        ("<!DOCTYPE html><html><head><title>t</title></head><body>x</body></html>", ["t", "x"]),
        ("<TABLE><tr><td>1</td><TD>2</TD></tr></TABLE>", ["1", "2"]),
        ("<select><option value='a>b'>x</option><option>y</option></select>", ["x", "y"]),
        ("a dog", ["a dog"]),
        ("", []),
    ],
)
def test_the_text_of_each_block_is_translated_by_itself(line, texts):
    pieces = split_blocks(line)
    assert "".join(pieces) == line
    assert [piece for piece in pieces[::2] if piece] == texts


class Echo:
    """A translator that writes what it reads in capitals, word by word."""

    first_cut_line = None

    def __init__(self):
        self.read: list[tuple[str, str]] = []

    def translate_stream(self, lines, prefixes=None):
        for line, prefix in paired(lines, prefixes):
            self.read.append((line, prefix))
            links = tuple((word, word) for word in range(len(PARTS.findall(line))))
            yield [Translation(prefix + line.upper(), 0.0, 0.0, links)]


class Document(HTMLParser):
    """What a document holds, as a parser of HTML sees it: tags in order, and the words of each block."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.blocks = [], [[]]
        self.feed(text)
        self.close()

    def block(self, tag):
        if tag in ("p", "li", "ul", "td", "br", "div"):
            self.blocks.append([])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, attributes))
        self.block(tag)

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")
        self.block(tag)

    def handle_data(self, data):
        self.blocks[-1] += data.upper().split()


def document(draw: random.Random, depth: int = 0) -> str:
    """A random balanced document, of blocks and inline elements in any order."""
    parts = []
    for _ in range(draw.randint(0, 4)):
        kind, number = draw.random(), draw.randrange(10**6)
        if kind < 0.45 or depth > 4:
            parts.append(draw.choice(["dog", " a ", " big", ", ", "x &amp; y", " the end. ", "H"]))
        elif kind < 0.55:
            parts.append(draw.choice(["<br>", f'<br class="{number}">', f"<img alt='{number}'>"]))
        else:
            name = draw.choice(["p", "li", "ul", "td", "div", "b", "i", "a", "span"])
            parts.append(f'<{name} id="{number}">{document(draw, depth + 1)}</{name}>')
    return "".join(parts)


def test_ten_thousand_documents_keep_their_tags_and_each_block_its_text():
    draw = random.Random(1)
    lines = [document(draw) for _ in range(10_000)]
    assert sum("<p" in line and "<b" in line for line in lines) > 500
    for line, (translation,) in zip(lines, translate_marked(Echo(), lines), strict=True):
        before, after = Document(line), Document(translation.text)
        assert sorted(map(str, after.tags)) == sorted(map(str, before.tags)), line
        assert nested(after.tags), line
        assert ["".join(block) for block in after.blocks] == ["".join(block) for block in before.blocks], line


def nested(tags) -> bool:
    """Whether every element is closed inside the one that it was opened in."""
    around = []
    for tag in tags:
        if isinstance(tag, tuple):
            if tag[0] not in ("br", "img"):
                around.append(tag[0])
        elif not around or around.pop() != tag[1:]:
            return False
    return not around


def test_a_prefix_is_that_of_a_lines_first_text():
    echo = Echo()
    results = [best.text for (best,) in translate_marked(echo, ["<p>a</p><p>b</p>", "", "c"], ["x", "", "z"])]
    assert results == ["<p>xA</p><p>B</p>", "", "zC"]
    with pytest.raises(UserError, match="fewer prefixes than lines"):
        list(translate_marked(Echo(), ["<p>a</p><p>b</p>", "c"], ["x"]))
    with pytest.raises(UserError, match="more prefixes than lines"):
        list(translate_marked(Echo(), ["<p>a</p>"], ["x", "y"]))


def test_tags_may_be_nested_in_thousands():
    line = "<b>" * 5000 + "one" + "</b>" * 5000
    assert insert(line, "eins") == line.replace("one", "eins")


REFERENCE = re.compile(
    r"""<!--.*?--> | <\?.*?\?> | <![A-Za-z][^<>]*> | </?(?P<name>[A-Za-z_][\w:.-]*)(?:[^<>"']|"[^"]*"|'[^']*')*>""",
    re.VERBOSE | re.DOTALL,
)
SIGNS = ["<", ">", '"', "'", "a", "b ", "<!--", "-->", "<?", "?>", "<!d", "/", "=", "-", "!", " ", "<a", "\n"]


def test_tags_are_those_that_a_regular_expression_finds():
    draw = random.Random(1)
    for _ in range(20_000):
        text = "".join(draw.choices(SIGNS, k=draw.randint(0, 25)))
        place, tags, found = 0, Tags(text), []
        while tag := tags.find(place):
            place = tag.end
            found.append((tag.begin, tag.end, tag.name))
        assert found == [(*match.span(), match["name"] or "") for match in REFERENCE.finditer(text)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("unit", ["<!--", "<?", '<a "', "<a '<b \"", "<a", "<!d", "<script>", "<b></b>"])
def test_a_megabyte_of_tags_that_do_not_end_takes_seconds(unit):
    """A regular expression looks for the end of each anew: minutes."""
    begin = time.process_time()
    with contextlib.suppress(UserError):
        [Marked.parse(text) for text in split_blocks(unit * ((1 << 20) // len(unit)))[::2]]
    assert time.process_time() - begin < 60
