"""Another tool's tokenizer.json, and where the tokens of any tokenizer stand in a text."""

import itertools
import json

import numpy as np
import pytest

from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.text_tokenizer import ByteTokenizer, ImportedTokenizer, train_text_tokenizer

tokenizers = pytest.importorskip("tokenizers")


def byte_level(**names: str) -> ImportedTokenizer:
    """All bytes, and the special tokens of GPT-2 and BERT, or those with the names of end and mask."""
    vocabulary = {piece: number for number, piece in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([names.get("end", "<|endoftext|>"), names.get("mask", "[MASK]")])
    made.add_special_tokens([names["begin"]] if "begin" in names else [])
    return ImportedTokenizer(made.to_str())


def test_a_unigram_model_cuts_no_text_into_a_special_token():
    """ALBERT's form: special tokens are pieces of the model, with the best of scores."""
    pieces = [("<unk>", 0.0), ("[SEP]", 0.0), ("[MASK]", 0.0), *((each, -3.0) for each in "\u2581[]MASKitab")]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.add_special_tokens(["[SEP]", "[MASK]"])
    tokenizer = ImportedTokenizer(made.to_str())
    ids = tokenizer.encode("a [MASK] it")
    assert min(ids) > 2
    assert tokenizer.decode(ids) == "a [MASK] it"
    assert (tokenizer.begin, tokenizer.end, tokenizer.mask) == (1, 1, 2)


@pytest.mark.parametrize("text", ["a <|endoftext|> b", "<|endoftext|>", "[MASK] it"])
def test_special_tokens_written_in_a_text_stay_text(text):
    tokenizer = byte_level()
    assert (tokenizer.end, tokenizer.mask) == (256, 257)
    for ids in (tokenizer.encode(text), tokenizer.encode_with_spans(text)[0]):
        assert max(ids) < 256
        assert tokenizer.decode(ids) == text


def test_numbers_without_a_token_are_counted_and_have_no_text():
    content = json.loads(byte_level().content)
    content["model"]["vocab"] |= {"<|endoftext|>": 256, "[MASK]": 257, "zz": 260}
    tokenizer = ImportedTokenizer(json.dumps(content))
    assert len(tokenizer) == len(tokenizer.pieces()) == 261
    assert tokenizer.textless(264) == [258, 259, 261, 262, 263]


def test_a_file_that_tells_of_truncation_and_padding_cuts_and_pads_nothing():
    made = tokenizers.Tokenizer.from_str(byte_level().content)
    made.enable_truncation(8)
    made.enable_padding(length=12)
    tokenizer = ImportedTokenizer(made.to_str())
    assert len(tokenizer.encode("a" * 30)) == len(tokenizer.encode_with_spans("a" * 30)[0]) == 30
    assert len(tokenizer.encode("a")) == 1


def test_markers_of_any_name_are_found_and_never_masked():
    vocabulary = masking_vocabulary(byte_level(end="<eos>", mask="<mask>", begin="<bos>"))
    assert (vocabulary.end, vocabulary.mask, vocabulary.begin) == (256, 257, 258)
    assert np.flatnonzero(vocabulary.is_special).tolist() == [256, 257, 258]
    of_bytes = masking_vocabulary(ByteTokenizer())
    assert np.flatnonzero(of_bytes.is_special).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(of_bytes.begins_word).tolist() == [5 + ord("\n"), 5 + ord(" ")]
    llama = byte_level(end="</s>", mask="<s>")  # whose documents begin with a token of their own
    assert (llama.end, llama.begin) == (256, 257)


TEXT = "A dog runs.\nZwei M\u00e4nner \u4e2d sitzen,  am Meer.\n\nEnd"
TOKENIZERS = {
    "pieces": lambda: train_text_tokenizer(["a dog runs over the grass", "zwei Maenner sitzen am Meer"] * 4, 330),
    "bytes": ByteTokenizer,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spans_cover_the_text_in_order(name):
    tokenizer = TOKENIZERS[name]()
    ids, spans = tokenizer.encode_with_spans(TEXT)
    assert ids == tokenizer.encode(TEXT)
    assert len(ids) == len(spans)
    assert "".join(TEXT[begin:end] for begin, end in spans) == TEXT
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    place = TEXT.index("M\u00e4nner")
    inside = [i for i, (begin, end) in enumerate(spans) if begin < place + 6 and end > place]
    assert tokenizer.decode(ids[inside[0] : inside[-1] + 1]).strip().endswith("nner")


def test_spans_of_an_imported_tokenizer_are_its_offsets():
    words = {word: number for number, word in enumerate(["[UNK]", "[SEP]", "dog", "runs", "."])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.normalizer = tokenizers.normalizers.Lowercase()
    ids, spans = ImportedTokenizer(model.to_str()).encode_with_spans("Dog  runs.")
    assert ids == [2, 3, 4]
    assert [tuple(span) for span in spans] == [(0, 3), (5, 9), (9, 10)]
