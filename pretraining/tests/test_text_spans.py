"""Where tokens stand in a text: whatever the tokenizer, the spans of all tokens make up the text."""

import itertools

import pytest

from fasttfm_pretraining.data.text_tokenizer import ByteTokenizer, ImportedTokenizer, train_text_tokenizer

TEXT = "A dog runs.\nZwei M\u00e4nner \u4e2d sitzen,  am Meer.\n\nEnd"


def tokenizers():
    return [
        train_text_tokenizer(["a dog runs over the grass", "zwei Maenner sitzen am Meer"] * 4, 330),
        ByteTokenizer(),
    ]


@pytest.mark.parametrize("number", [0, 1], ids=["pieces", "bytes"])
def test_spans_cover_the_text_in_order(number):
    tokenizer = tokenizers()[number]
    ids, spans = tokenizer.encode_with_spans(TEXT)
    assert ids == tokenizer.encode(TEXT)
    assert len(ids) == len(spans)
    assert "".join(TEXT[begin:end] for begin, end in spans) == TEXT
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    place = TEXT.index("M\u00e4nner")
    inside = [i for i, (begin, end) in enumerate(spans) if begin < place + 6 and end > place]
    assert tokenizer.decode(ids[inside[0] : inside[-1] + 1]).strip().endswith("nner")


def test_spans_of_an_imported_tokenizer_are_its_offsets():
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "[SEP]", "dog", "runs", "."])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.normalizer = tokenizers.normalizers.Lowercase()
    ids, spans = ImportedTokenizer(model.to_str()).encode_with_spans("Dog  runs.")
    assert ids == [2, 3, 4]
    assert [tuple(span) for span in spans] == [(0, 3), (5, 9), (9, 10)]
