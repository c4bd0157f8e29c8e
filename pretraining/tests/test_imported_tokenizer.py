"""Another tool's tokenizer.json: special tokens written in a text, and numbers without a token."""

import json

import numpy as np
import pytest

from fasttfm_pretraining.data.masking_vocabulary import masking_vocabulary
from fasttfm_pretraining.data.text_tokenizer import ImportedTokenizer

tokenizers = pytest.importorskip("tokenizers")


def byte_level() -> ImportedTokenizer:
    """All bytes, and the special tokens of GPT-2 and BERT."""
    vocabulary = {piece: number for number, piece in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>", "[MASK]"])
    return ImportedTokenizer(made.to_str())


def unigram() -> ImportedTokenizer:
    """ALBERT's form: special tokens are pieces of the model, with the best of scores."""
    pieces = [("<unk>", 0.0), ("[SEP]", 0.0), ("[MASK]", 0.0), *((each, -3.0) for each in "\u2581[]MASKitab")]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    made.add_special_tokens(["[SEP]", "[MASK]"])
    return ImportedTokenizer(made.to_str())


def test_a_unigram_model_cuts_no_text_into_a_special_token():
    tokenizer = unigram()
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


def test_markers_of_any_name_are_never_masked():
    content = byte_level().content.replace("[MASK]", "<mask>").replace("<|endoftext|>", "<eos>")
    made = tokenizers.Tokenizer.from_str(content)
    made.add_special_tokens(["<bos>"])
    vocabulary = masking_vocabulary(ImportedTokenizer(made.to_str()))
    assert (vocabulary.end, vocabulary.mask, vocabulary.begin) == (256, 257, 258)
    assert np.flatnonzero(vocabulary.is_special).tolist() == [256, 257, 258]


def test_llama_s_documents_begin_with_their_own_token():
    made = tokenizers.Tokenizer.from_str(byte_level().content.replace("[MASK]", "<s>").replace("<|endoftext|>", "</s>"))
    tokenizer = ImportedTokenizer(made.to_str())
    assert (tokenizer.end, tokenizer.begin) == (256, 257)
