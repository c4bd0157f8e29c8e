"""Learned positions: formulas, gradients and sequences longer than the table."""

import model_dirs
import pytest
import torch

from fasttfm.errors import UserError
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, translate_ids
from fasttfm.search.scoring import score_ids
from fasttfm.translate import Translator

SIZES = {"d_model": 16, "heads": 2, "d_ff": 16, "encoder_layers": 1, "decoder_layers": 1}


def tiny(**fields):
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 20, "max_length": 6, **fields}
    return Transformer(TransformerConfig(**sizes, positional_encoding="learned")).eval()


def by_formula(model, source, target):
    """Logits with inputs embedding * sqrt(d) + position."""
    x = model.source_embedding(source) * 16**0.5 + model.source_positions.weight[: source.shape[1]]
    y = model.target_embedding(target) * 16**0.5 + model.target_positions.weight[: target.shape[1]]
    return model.output(model.decoder(y, model.encoder(x)))


def test_each_side_adds_its_own_table_and_trains_it():
    model = tiny()
    source, target = torch.randint(4, 20, (2, 6)), torch.randint(4, 20, (2, 5))
    torch.testing.assert_close(model(source, target), by_formula(model, source, target))
    tables = [model.source_positions.weight, model.target_positions.weight]
    gradients = torch.autograd.grad(model(source, target).square().sum(), tables)
    expected = torch.autograd.grad(by_formula(model, source, target).square().sum(), tables)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(*tables)
    assert not gradients[1][5].any()  # no target is that long


@pytest.mark.parametrize("packed", [False, True])
def test_padding_may_be_longer_than_the_table_and_a_sentence_may_not(packed):
    model = tiny()
    lengths = torch.tensor([6, 3])
    source = torch.zeros(2, 8, dtype=torch.int64)
    for row, length in enumerate(lengths):
        source[row, :length] = torch.randint(4, 20, (int(length),))
    sums = (9, 9) if packed else None

    def loss(x, lengths):
        return model.loss(x, x, x, lengths, lengths, packed_tokens=sums)[0]

    torch.testing.assert_close(loss(source, lengths), loss(source[:, :6], lengths))
    source[0, 6] = 5
    sums = (10, 10) if packed else None
    with pytest.raises(ValueError, match="a sequence has 7 tokens: this model has positions for 6"):
        loss(source, torch.tensor([7, 3]))


@pytest.mark.parametrize("beam", [1, 3])
def test_a_search_ends_at_the_last_position(beam):
    model = tiny()
    model.output.weight.data[3] -= 100.0  # make the end unlikely
    config = DecodingConfig(beam=beam, max_len_a=0.0, max_len_b=50, allow_unk=True)
    (written,) = translate_ids(model, [[5, 6, 3]], config)
    assert len(written) <= 5  # and the beginning of sentence
    for source, target in (([4] * 6 + [3], []), ([4, 3], [4] * 6)):
        with pytest.raises(UserError, match=r"has 7 tokens with its markers: this model has learned positions for 6"):
            score_ids(model, [source], [target])
    with pytest.raises(UserError, match="a source has 7 tokens"):
        translate_ids(model, [[4] * 6 + [3]], config)
    pieces = model_dirs.tokenizer()  # longer lines are cut
    assert Translator(tiny(vocab_size=len(pieces)), pieces, pieces).config.max_source_length == 5
