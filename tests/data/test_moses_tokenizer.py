"""Moses tokens with BPE codes of fastBPE and subword-nmt, against a plain byte-pair encoding."""

import itertools
import pickle
import sys

import pytest
from plain_bpe import apply, fastbpe_file, learn, subword_nmt_file

from fasttfm.data.demo import demo_pairs
from fasttfm.data.moses_tokenizer import MosesTokenizer, MosesVocabulary
from fasttfm.errors import UserError
from fasttfm.search.streaming import stream_text

sacremoses = pytest.importorskip("sacremoses")
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
HARD = [
    "",
    "It's a well-known fact: “the dog’s bowl” – it costs 3.50 € (or so)…",
    "R&D <b>costs</b> [more] | less, e.g. at example.com",
    "aaaaa banana banananana Mississippi",
    "Dr. Müller isst Äpfel.",
    "\u2581 中文 @@ </w> @-@",
]


@pytest.fixture(scope="module")
def text():
    return [english for english, _ in itertools.islice(demo_pairs(), 100)]


def moses(lines, language="en", dashes=True):
    normalize = sacremoses.MosesPunctNormalizer(language).normalize
    tokenize = sacremoses.MosesTokenizer(language).tokenize
    return [" ".join(tokenize(normalize(line), aggressive_dash_splits=dashes)) for line in lines]


@pytest.fixture(scope="module")
def codes(text):
    return learn(moses(text + HARD), 300)


def vocabulary(codes, lines, **changes):
    pieces = {piece for line in moses(lines) for word in line.split() for piece in apply(codes, word)}
    made = MosesVocabulary.inferred("en", [*SPECIAL, *sorted(pieces)], prefix=[], silent=["<s>"])
    return MosesVocabulary(**{**{name: getattr(made, name) for name in made.__dataclass_fields__}, **changes})


@pytest.mark.sample(1)
@pytest.mark.parametrize("written", [subword_nmt_file, fastbpe_file])
def test_pieces_match_a_plain_encoding_and_text_round_trips(text, codes, written):
    tokenizer = MosesTokenizer(written(codes).encode(), vocabulary(codes, text + HARD))
    for line, prepared in zip(text + HARD, moses(text + HARD), strict=True):
        expected = [piece for word in prepared.split() for piece in apply(codes, word)]
        assert tokenizer.pieces(tokenizer.encode(line)) == expected
        assert all(map(tokenizer.cuts_into, expected))
    assert [tokenizer.decode(tokenizer.encode(line)) for line in text] == text
    assert tokenizer.decode(tokenizer.encode(HARD[2])).endswith("[more] | less, e.g. at example.com")
    assert tokenizer.encode_lines(text[:9]) == [tokenizer.encode(line) for line in text[:9]]
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text[0]) == tokenizer.encode(text[0])


def test_streamed_text_never_changes(text, codes):
    tokenizer = MosesTokenizer(subword_nmt_file(codes).encode(), vocabulary(codes, text + HARD))
    assert "&apos;@@" in tokenizer.vocabulary.pieces
    for line in ["It's the dog's \"bowl\" (or the cat's), isn't it?", *text[:20]]:
        ids = tokenizer.encode(line)
        parts = list(stream_text(ids, tokenizer))
        assert "".join(parts) == tokenizer.decode(ids) == line
        assert len(parts) > 3


def test_text_is_preprocessed_as_in_the_vocabulary(codes):
    plain = {"normalized": False, "split_dashes": False, "escaped": False, "lowercase": True}
    tokenizer = MosesTokenizer(subword_nmt_file(codes).encode(), vocabulary(codes, HARD, **plain))
    tokens = sacremoses.MosesTokenizer("en").tokenize(HARD[1], escape=False)
    expected = [piece for word in tokens for piece in apply(codes, word.lower())]
    assert tokenizer._cut(HARD[1]) == expected
    assert "’" in "".join(expected)
    assert "well-known" in "".join(expected).replace("@@", "")
    made = MosesVocabulary.inferred("de", [*SPECIAL, "hund", "’", "'", "&", "@"], prefix=[])
    assert (made.normalized, made.split_dashes, made.escaped, made.lowercase) == (False, False, False, True)


def test_damaged_codes_and_a_missing_package_are_named(monkeypatch, codes):
    empty = MosesVocabulary.inferred("en", SPECIAL, prefix=[])
    for content, words in (
        (b"#version: 0.2\na b\nabc\n", "line 3 is not a pair of subwords: 'abc'"),
        (b"a b x\n", "line 1 is not a pair"),
        (b"\xff\n", "UTF-8"),
    ):
        with pytest.raises(ValueError, match=words):
            MosesTokenizer(content, empty)
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    with pytest.raises(UserError, match=r'pip install "./fasttfm\[moses\]"'):
        MosesTokenizer(subword_nmt_file(codes).encode(), empty)
