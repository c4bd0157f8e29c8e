"""BERT, ALBERT and ELECTRA themselves: the papers' sizes, padded and packed rows, sharing, what a loss is."""

import dataclasses

import pytest
import torch

from fasttfm.config import build, gather
from fasttfm_pretraining.config.bert import AlbertConfig, BertConfig, ElectraConfig
from fasttfm_pretraining.models.bert import Bert, Packing
from fasttfm_pretraining.models.electra import sample
from fasttfm_pretraining.models.kinds import CLASSES

SMALL = {"vocab_size": 31, "d_model": 16, "heads": 2, "d_ff": 24, "layers": 3, "max_length": 12, "init_std": 0.3}
SMALL |= {"dropout": 0.0, "attention_dropout": 0.0}


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def rows():
    """Tokens, segments and lengths of three padded rows."""
    torch.manual_seed(1)
    lengths = torch.tensor([8, 3, 5])
    padding = torch.arange(8) >= lengths[:, None]
    return torch.randint(1, 31, (3, 8)).masked_fill(padding, 0), torch.randint(0, 2, (3, 8)), lengths


@pytest.mark.parametrize(
    ("kind", "name", "size", "count"),
    [
        ("bert", "bert-base", 30522, 109_482_240),
        ("albert", "albert-base", 30000, 11_683_584),
        ("electra", "electra-small", 30522, 13_483_008),  # what transformers' ElectraModel has
        ("bert", "bert-tiny", 2000, None),
        ("albert", "albert-tiny", 2000, None),
        ("electra", "electra-tiny", 2000, None),
    ],
)
def test_a_preset_is_the_model_that_it_is_named_after(kind, name, size, count):
    config = build(gather(name, kind=kind), {"vocab_size": size})
    assert config.data.objective == {"bert": "mlm+nsp", "albert": "mlm+sop", "electra": "electra"}[kind]
    assert config.data.row_length <= config.model.max_length
    if count is not None:  # a paper's
        assert (config.training.decayed, config.training.schedule) == ("matrices", "linear")
        assert config.training.label_smoothing == 0.0
    with torch.device("meta"):
        model = CLASSES[kind](config.model)
    assert count in (None, parameters(model.discriminator if kind == "electra" else model.body))
    if kind == "electra":
        assert model.generator.embeddings is model.discriminator.embeddings
    if name == "electra-small":
        assert round(parameters(model) / 1e6) == 14  # Clark et al. 2020, table 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", ["none", "attention", "ffn", "all"])
def test_packed_and_padded_rows_are_the_same(share):
    config = AlbertConfig(**SMALL, embedding_size=8, share=share)
    torch.manual_seed(0)
    model = Bert(config).double()
    tokens, segments, lengths = rows()
    padded = model(tokens, segments, lengths)
    packing = Packing.from_lengths(lengths, 8, int(lengths.sum()))
    packed = model(packing.pack_tokens(tokens), packing.pack_tokens(segments), packing)
    torch.testing.assert_close(packed[0], packing.pack(padded))
    torch.testing.assert_close(model.pooled(packed, packing), model.pooled(padded, lengths))
    for row, length in enumerate(lengths):  # neither padding nor a neighbour is seen
        alone = model(tokens[row : row + 1, :length], segments[row : row + 1, :length])
        torch.testing.assert_close(alone[0], padded[row, :length])


def test_layers_that_share_parameters_share_no_mask():
    model = Bert(AlbertConfig(**{**SMALL, "dropout": 0.5}, embedding_size=8, share="all"))
    seen = []
    for layer in set(model.encoder.layers):
        layer.register_forward_pre_hook(lambda _, inputs, options: seen.append(options["seed"]), with_kwargs=True)
    model(*rows())
    assert len(seen) == len(model.encoder.layers)
    assert len({each.first_site for each in seen}) == len(seen)
    assert all(each.seed is seen[0].seed for each in seen)


def test_a_row_beyond_the_positions_is_refused_and_leaves_the_mode():
    model = Bert(BertConfig(**SMALL)).train()
    with pytest.raises(ValueError, match="13 tokens: this model has positions for 12"):
        model.attention_weights(torch.ones(1, 13, dtype=torch.int64))
    assert model.training


def test_attention_weights_are_of_every_layer_and_leave_padding_out():
    tokens, segments, lengths = rows()
    for share in ("none", "all"):
        weights = Bert(BertConfig(**SMALL, share=share)).attention_weights(tokens, segments, lengths)
        assert [tuple(each.shape) for each in weights] == [(3, 2, 8, 8)] * 3
        torch.testing.assert_close(weights[2].sum(-1), torch.ones(3, 2, 8))
        assert weights[2][1, :, :, 3:].abs().max() == 0


def test_the_generator_samples_from_its_distribution():
    torch.manual_seed(0)
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    counts = torch.bincount(sample(shares.log().expand(20_000, 4)), minlength=4)
    expected = shares * 20_000
    assert ((counts - expected) ** 2 / expected).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001
    assert (counts > 0).all()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BertConfig, {"heads": 3}, "not a multiple of heads"),
        (BertConfig, {"share": "some"}, "share 'some' is unknown"),
        (BertConfig, {"activation": "mish"}, "activation 'mish' is unknown"),
        (BertConfig, {"pooler": False}, "sentence_head needs pooler"),
        (BertConfig, {"layers": 0}, "layers 0 must be"),
        (ElectraConfig, {"share": "all"}, "ELECTRA's layers are not shared"),
        (ElectraConfig, {"generator_size": 0.0}, "generator_size 0.0 must be a finite number greater than 0"),
        (ElectraConfig, {"heads": 8, "generator_size": 0.3}, "choose another"),
    ],
)
def test_a_wrong_value_is_refused(config, changes, message):
    fields = {name: value for name, value in SMALL.items() if name in {f.name for f in dataclasses.fields(config)}}
    with pytest.raises(ValueError, match=message):
        config(**{**fields, **changes})
