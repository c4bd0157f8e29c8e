"""Tokenizers: ids, round trips, reproducible training, limits of the vocabulary size, spellings of a letter."""

import re
import unicodedata

import pytest

from fasttfm.data.demo import demo_pairs
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK, Tokenizer, Vocabulary, train_tokenizer
from fasttfm.data.unicode_forms import has_invisible, has_text
from fasttfm.errors import Stopped, UserError


@pytest.fixture(scope="module")
def lines() -> list[str]:
    pairs = demo_pairs()
    return [line for _ in range(1000) for line in next(pairs)]


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def tokenizer(request, lines: list[str]) -> Tokenizer:
    return train_tokenizer(lines, vocab_size=800, model_type=request.param)


def test_the_special_ids_are_0_to_3_and_text_never_has_them(tokenizer: Tokenizer, lines: list[str]):
    assert tokenizer.pieces([PAD, UNK, BOS, EOS]) == ["<pad>", "<unk>", "<s>", "</s>"]
    assert len(tokenizer) == 800
    ids = {i for sentence in tokenizer.encode_lines([*lines, "<s> </s> <pad>"]) for i in sentence}
    assert min(ids) > EOS


def test_any_text_round_trips(tokenizer: Tokenizer, lines: list[str]):
    strange = ["Ｆｕｌｌ width？", "𝔊 … „Zitat“ ﬁ ½", "日本語の文。", "a\u2028b\tc", "e\u0301 und é", "🙂🙂"]
    for line in [*lines[:200], *strange, "\u2581a \u2581 b\u2581", "\u2581"]:
        assert tokenizer.decode(tokenizer.encode(line)) == line


def test_decoded_text_is_always_one_line(tokenizer: Tokenizer):
    ids = [i for text in ("a\nb", "c\rd") for i in tokenizer.encode(text)]
    assert tokenizer.decode(ids).splitlines() == [tokenizer.decode(ids)]
    assert tokenizer.decode([BOS, *tokenizer.encode("gut"), EOS, PAD, PAD]) == "gut"
    assert tokenizer.decode([]) == ""
    assert tokenizer.encode("") == []
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_training_is_reproducible(lines: list[str], model_type):
    first, second = (train_tokenizer(lines, vocab_size=700, model_type=model_type).model for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("size", "model_type", "limit"),
    [(50_000, "bpe", "at most"), (50_000, "unigram", "at most"), (100, "bpe", "alone need")],
)
def test_an_impossible_vocabulary_size_is_reported_with_the_limit_which_works(lines, size, model_type, limit):
    with pytest.raises(UserError, match=rf"--vocab-size {size:,}: .* {limit} [\d,]+") as error:
        train_tokenizer(lines[:300], vocab_size=size, model_type=model_type)
    possible = int(re.search(rf"{limit} ([\d,]+)", str(error.value)).group(1).replace(",", ""))
    assert len(train_tokenizer(lines[:300], vocab_size=possible, model_type=model_type)) == possible


def test_long_lines_are_split_for_training(lines: list[str]):
    words = " ".join(lines)
    assert len(words) > 50_000
    for model_type in ("bpe", "unigram"):
        assert len(train_tokenizer([words], vocab_size=800, model_type=model_type)) == 800


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), Stopped("stop", 15), UserError("cut off")])
def test_exceptions_while_reading_lines_pass_through_sentencepiece(lines: list[str], error):
    def interrupted():
        yield from lines[:50]
        raise error

    with pytest.raises(type(error)) as raised:
        train_tokenizer(interrupted(), vocab_size=800)
    assert raised.value is error


def test_an_imported_vocabulary_numbers_the_pieces_and_is_saved_next_to_the_model(tmp_path):
    plain = train_tokenizer(["a dog runs", "two dogs run"], vocab_size=274)
    pieces = plain.pieces(range(len(plain)))
    turned = [*pieces[:4], "__de__", *pieces[:3:-1]]
    tokenizer = Tokenizer(plain.model, Vocabulary(pieces=turned, prefix=["__de__"], silent=["__de__"], codes=True))
    ids = tokenizer.encode("a dog")
    assert tokenizer.pieces(ids) == plain.pieces(plain.encode("a dog"))
    assert [tokenizer.piece_id(piece) for piece in tokenizer.pieces(ids)] == ids
    assert tokenizer.piece_id("not a piece") is None
    assert tokenizer.decode([*tokenizer.prefix, *ids, EOS]) == "a dog"
    assert tokenizer.encode(">>xyz<< a dog") == [UNK, *ids]
    tokenizer.save(tmp_path / "spm.model")
    restored = Tokenizer.load(tmp_path / "spm.model")
    assert (restored.vocabulary, restored.encode("two dogs")) == (tokenizer.vocabulary, tokenizer.encode("two dogs"))
    for call in (lambda: restored.spans("a"), lambda: restored.decoded_spans(ids)):
        with pytest.raises(UserError, match="imported"):
            call()
    for content in ("{", "{}", '{"pieces": ["a"], "prefix": []}', '{"pieces": [1, 2, 3, 4], "prefix": []}'):
        (tmp_path / "spm.vocabulary.json").write_text(content)
        with pytest.raises(UserError, match="is damaged"):
            Tokenizer.load(tmp_path / "spm.model")


# NFC and NFD spellings of letters, and invisible characters

LINES = [
    "Ein Hund läuft über die Straße.",
    "Tiếng Việt có dấu",
    "한국어 문장",
    "ελληνικά άέή",
    "café naïve Ångström",
] * 20


@pytest.fixture(scope="module")
def nfc() -> Tokenizer:
    return train_tokenizer(LINES, vocab_size=400, normalization="nfc")


def test_an_nfc_vocabulary_encodes_both_spellings_the_same(nfc: Tokenizer):
    for line in LINES[:5]:
        apart = unicodedata.normalize("NFD", line)
        assert apart != line
        assert nfc.encode(apart) == nfc.encode(line)
        assert nfc.decode(nfc.encode(apart)) == line
    plain = train_tokenizer(LINES, vocab_size=400)
    assert plain.encode(unicodedata.normalize("NFD", LINES[0])) != plain.encode(LINES[0])


def test_invisible_characters_are_no_text():
    assert has_text("a\u200b")
    assert not has_text(" \u200b\ufeff\t")
    assert has_invisible("a\ufeffb")
    assert not has_invisible("ab é")
    assert has_text("\u0646\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"), "Persian is spelt with joiners"
