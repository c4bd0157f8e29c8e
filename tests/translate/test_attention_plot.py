"""Attention plots: labels, fonts, panels; tests/cli/test_translate.py draws one from the command line."""

import pytest
import torch

from fasttfm.data.tokenizer import Tokenizer, Vocabulary
from fasttfm.search import DecodingConfig
from fasttfm.translate.attention_plot import Attention, _fonts_for, _readable, attention_of, draw_attention
from fasttfm.translate.translator import Translator
from tests.search.small_models import model_of


def attention(heads: int = 2) -> Attention:
    source, read = ["▁a", "▁$x$", "</s>"], ["<s>", "▁ein", "犬"]
    torch.manual_seed(1)
    weights = {
        kind: [torch.rand(heads, 3, 3).softmax(-1) for _ in range(2)] for kind in ("encoder", "cross", "decoder")
    }
    return Attention(weights=weights, source=source, read=read, written=[*read[1:], "</s>"], translation="ein")


def test_characters_without_a_font_are_escaped():
    assert _readable("▁犬a", frozenset("犬")) == "▁\\u72aca"


def test_characters_without_any_font_are_reported():
    families, unknown = _fonts_for(frozenset("aß▁\ue123"))
    assert families[0] == "DejaVu Sans"
    assert unknown <= {"\ue123"}, "letters are in the font that comes with matplotlib"
    assert "Last Resort" not in " ".join(families)


def test_there_is_a_row_per_kind_and_layer_and_a_column_per_head(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    grids = []
    subplots = Figure.subplots

    def watched(self, *shape, **rest):
        grids.append(shape)
        return subplots(self, *shape, **rest)

    monkeypatch.setattr(Figure, "subplots", watched)
    draw_attention(attention(heads=3), tmp_path / "all.png")
    draw_attention(attention(heads=3), tmp_path / "one.png", layers=[2])
    assert grids == [(6, 3), (3, 3)]


@pytest.mark.filterwarnings("error")
def test_dollar_signs_and_other_scripts_draw_without_warnings(tmp_path):
    draw_attention(attention(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_language_codes_of_an_imported_model_are_read_and_written(tokenizer):
    pieces = tokenizer.pieces(range(len(tokenizer)))
    sides = [
        Tokenizer(tokenizer.model, Vocabulary(pieces=[*pieces[:4], code, *pieces[5:]], prefix=[code], silent=[code]))
        for code in ("__en__", "__de__")
    ]
    translator = Translator(model_of("fp32", len(tokenizer), 32), *sides, DecodingConfig(max_len_b=8))
    attention = attention_of(translator, "a dog")
    assert (attention.source[0], attention.written[0]) == ("__en__", "__de__")
    assert attention.translation == translator.translate(["a dog"])[0]
    assert attention.weights["cross"][0].shape[1:] == (len(attention.written), len(attention.source))
