"""Streaming yields the tokens and the text of an ordinary search."""

from dataclasses import replace

import pytest
import torch

from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.errors import UserError
from fasttfm.search import DecodingConfig
from fasttfm.search.device.engine import BURST
from fasttfm.search.streaming import stream_ids, stream_text
from fasttfm.translate.terminology import Terminology
from fasttfm.translate.translator import Translator

from .small_models import model_of
from .table_model import EOS, Diverged, TableModel

pytestmark = pytest.mark.usefixtures("either_engine")
LINES = ["a dog runs", "", "two men sit in a small boat", " \t", "zwei Männer", "the green grass"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [{"max_len_b": 12}, {"sampling": True, "sampling_topk": 20}, {"no_repeat_ngram": 2, "max_len_b": 3}],
    ids=str,
)
def test_pieces_together_are_the_translation_and_no_mode_stays_set(tokenizer, settings, dtype):
    model = model_of("fp32", len(tokenizer), 32).to(dtype).train()
    config = DecodingConfig(**{"beam": 1, "max_len_b": 8, **settings})
    translator, longest = Translator(model, tokenizer, tokenizer, config), 0
    for position, (line, prefix) in enumerate(zip(LINES, ["", "", "zwei", "", "Männer", ""], strict=True)):
        expected = translator.translate_nbest([line], [prefix], numbers=[position])[0][0].text
        pieces = []
        for piece in translator.stream(line, prefix, number=position + 1):
            assert model.training
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            pieces.append(piece)
        assert "".join(pieces) == expected
        assert "" not in pieces
        longest = max(longest, len(pieces))
    assert longest > 1


def test_a_vocabulary_with_a_target_prefix_streams_it(translator, tokenizer):
    pieces = tokenizer.pieces(range(len(tokenizer)))
    vocabulary = Vocabulary(
        pieces=[*pieces[:4], "__de__", *pieces[5:]], prefix=["__de__"], silent=["__de__"], codes=True
    )
    target = Tokenizer(tokenizer.model, vocabulary)
    one = Translator(translator.model, tokenizer, target, replace(translator.config, beam=1, max_len_b=12))
    plain = Translator(translator.model, tokenizer, tokenizer, one.config)
    translations = one.translate(LINES)
    assert ["".join(one.stream(line)) for line in LINES] == translations != plain.translate(LINES)


def test_tokens_come_before_the_next_ones_are_computed(either_engine):
    """One by one; on a device burst by burst."""
    burst = BURST if either_engine == "device" else 1
    model = TableModel(vocab_size=12, end=-30.0)
    config = DecodingConfig(beam=1, max_len_a=0.0, max_len_b=12)
    stream = stream_ids(model, [5, EOS], config)
    next(stream)
    assert len(model.rows_computed) == burst
    assert len(list(stream)) == 11


def test_a_character_spelled_in_bytes_comes_whole(tokenizer):
    whole = list(stream_text(tokenizer.encode("a 日本 👩\u200d👧 \u2028b"), tokenizer))
    assert "".join(whole) == "a 日本 👩\u200d👧  b"
    assert len(whole) > 6
    assert not any("\ufffd" in piece for piece in whole)
    assert "".join(stream_text(tokenizer.encode("b\ufffd c\ufffd"), tokenizer)) == "b\ufffd c\ufffd"
    broken = tokenizer.encode("日")[:-1]
    assert "".join(stream_text(broken, tokenizer)) == tokenizer.decode(broken)
    assert list(stream_text(tokenizer.encode("\u200b"), tokenizer)) == [], "a translation without text is empty"


def test_unsupported_options_are_refused(translator, tokenizer):
    with pytest.raises(ValueError, match="only one hypothesis can be streamed"):
        translator.stream("a dog")
    translator.config = replace(translator.config, beam=1)
    terms = Terminology([("dog", ["Hund"])], tokenizer)
    with pytest.raises(ValueError, match="with terminology cannot be streamed"):
        Translator(translator.model, tokenizer, tokenizer, translator.config, terminology=terms).stream("a dog")
    with pytest.raises(UserError, match="training diverged"):
        list(Translator(Diverged(len(tokenizer)), tokenizer, tokenizer, translator.config).stream("a dog"))
