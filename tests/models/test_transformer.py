"""The Transformer: its size, its equality with torch.nn, padding, dropout and step-by-step decoding."""

from functools import partial

import pytest
import torch
from torch import nn

from fasttfm import reference
from fasttfm.cpu import training_passes
from fasttfm.functional import backend
from fasttfm.models import Transformer, stack
from fasttfm.search.decoder import decoder_of

from . import test_layer_node

PAD, EOS = 0, 3
tiny = partial(test_layer_node.tiny, vocab_size=50, heads=4, dropout=0.0, max_length=32)


def batch(lengths=(7, 4), targets=(5, 6)):
    """source, target and their lengths."""
    source, target, _, *both = test_layer_node.batch_of((lengths, targets))
    return source, target, *both


# ------------------------------------------------------------------------------------------------------- size


@pytest.mark.parametrize(("preset", "count"), [("paper-base", 63_082_496), ("paper-big", 214_245_376)])
def test_the_papers_models_have_the_papers_number_of_parameters(preset, count):
    # section 6.2, table 3: 65 and 213 million, with a shared vocabulary of about 37,000
    with torch.device("meta"):
        model = Transformer.from_preset(preset, vocab_size=37_000)
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, "not a multiple of heads"),
        ({"dropout": 1.5}, "dropout 1.5"),
        ({"d_model": 0}, "d_model 0"),
        ({"activation": "tanh"}, "activation 'tanh'"),
        ({"final_norm": True}, "final_norm needs norm_first"),
        ({"source_vocab_size": 70}, "share_embeddings"),
        ({"pad_id": 50}, "pad_id 50"),
        ({"pad_id": 40, "source_vocab_size": 40, "share_embeddings": "none"}, "pad_id 40"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps"),
        ({"positional_encoding": "learned", "first_position": 2}, "first_position 2 needs sinusoids"),
    ],
)
def test_a_wrong_configuration_is_refused_naming_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


# ------------------------------------------------------------------------------------------- equality with torch.nn


def torch_twin(model: Transformer) -> nn.Transformer:
    """torch.nn.Transformer with the same weights; its encoder and decoder carry the same parameter names."""
    config = model.config
    twin = nn.Transformer(
        config.d_model, config.heads, config.encoder_layers, config.decoder_layers, config.d_ff, dropout=0.0,
        activation=config.activation, batch_first=True, norm_first=config.norm_first,
        layer_norm_eps=config.layer_norm_eps,
    ).double()  # fmt: skip
    if not config.final_norm:  # torch's stacks always end in a norm; the paper's post-norm stacks do not
        twin.encoder.norm = twin.decoder.norm = None
    wanted = {k: v for k, v in model.state_dict().items() if k.startswith(("encoder.", "decoder."))}
    twin.load_state_dict(wanted)
    return twin


def compare_with_torch_nn(model: Transformer) -> None:
    """Assert equal logits and equal gradients of every parameter."""
    source, target, source_lengths, target_lengths = batch()
    logits = model(source, target, source_lengths, target_lengths)

    twin = torch_twin(model)
    table = reference.positional_encoding(32, 16).double()
    embedding = model.target_embedding.weight.detach().clone().requires_grad_()

    def embed(tokens):
        x = embedding[tokens] * 4.0 + table[: tokens.shape[1]]
        return x * (tokens != PAD)[..., None]

    source_padding, target_padding = source == PAD, target == PAD
    causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    masks = {"src_key_padding_mask": source_padding, "memory_key_padding_mask": source_padding, "tgt_mask": causal}
    hidden = twin(embed(source), embed(target), tgt_key_padding_mask=target_padding, **masks)
    expected = hidden @ embedding.T
    real = ~target_padding
    torch.testing.assert_close(logits[real], expected[real], rtol=1e-6, atol=1e-6)

    probe = torch.randn(expected[real].shape, dtype=torch.float64)
    (logits[real] * probe).sum().backward()
    (expected[real] * probe).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    # of the embedding, padding's row too: it has a gradient as an output class, none as an input
    expected = {name: p.grad for name, p in twin.named_parameters()} | {"target_embedding.weight": embedding.grad}
    torch.testing.assert_close(gradients, expected, rtol=1e-6, atol=1e-6)


def randomized(model: Transformer) -> Transformer:
    """Move biases and norms away from 0 and 1, so that mixing them up is noticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_model_computes_what_torch_nn_computes_forward_and_backward(norm_first, activation):
    model = tiny(norm_first=norm_first, final_norm=norm_first, activation=activation)
    compare_with_torch_nn(randomized(model.double()))


def test_loss_is_torch_cross_entropy_over_the_real_target_tokens():
    model = tiny().double()
    source, target, source_lengths, target_lengths = batch()
    out = torch.cat([target[:, 1:], torch.zeros(2, 1, dtype=torch.int64)], dim=1)
    out[torch.arange(2), target_lengths - 1] = EOS
    loss, nll, tokens = model.loss(source, target, out, source_lengths, target_lengths, label_smoothing=0.1)
    logits = model(source, target, source_lengths, target_lengths)
    for value, smoothing in ((loss, 0.1), (nll, 0.0)):
        expected = nn.functional.cross_entropy(
            logits.flatten(0, 1), out.flatten(), ignore_index=PAD, reduction="sum", label_smoothing=smoothing
        )
        torch.testing.assert_close(value, expected)
    assert tokens == target_lengths.sum()
    assert not nll.requires_grad


# --------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("pad_id", [PAD, 49])
def test_padding_as_an_input_takes_no_gradient_even_if_attended(pad_id):
    """As an output class, in a shared table, it has one."""
    model = tiny(share_embeddings="none", pad_id=pad_id).double()
    source, target, *_ = batch()  # padded with PAD, without lengths
    model(source, target).square().sum().backward()
    for table in (model.source_embedding, model.target_embedding):
        assert table.weight.grad[PAD].eq(0).all() == (pad_id == PAD)


def test_a_sentence_longer_than_the_position_table_extends_it():
    model, long = tiny(max_length=4).eval(), tiny(max_length=64).eval()
    source, target, *_ = batch((20,), (15,))
    with torch.inference_mode():
        torch.testing.assert_close(model(source, target), long(source, target))
    model.source_positions.table.copy_(long.source_positions.table[:40])  # as DDP broadcasts buffers
    torch.testing.assert_close(model(source, target), long(source, target))


# --------------------------------------------------------------------------------------------------------- dropout


@pytest.mark.parametrize("index", ["dropout", "embedding_dropout", "attention_dropout", "relu_dropout"])
def test_each_dropout_place_acts_in_training_only_and_follows_the_seed(index):
    off = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout", "relu_dropout"), 0.0)
    model = tiny(**{**off, index: 0.4})
    plain = tiny(**off)
    source, target, *lengths = batch()

    def run(seed):
        torch.manual_seed(seed)
        return model(source, target, *lengths)

    first, repeated, other = run(3), run(3), run(4)
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)
    model.eval()
    torch.testing.assert_close(run(3), plain(source, target, *lengths))


@pytest.mark.sample(2)
@pytest.mark.parametrize("has_nodes", [True, False])
@pytest.mark.parametrize("choice", ["torch", "triton"])
def test_layers_in_eval_mode_drop_nothing(choice, has_nodes, monkeypatch):
    """As of a part that is frozen while the rest trains."""
    if not has_nodes:
        monkeypatch.setattr(stack, "may_run", lambda: False)
    plain, rates = tiny(), dict.fromkeys(("dropout", "attention_dropout", "relu_dropout"), 0.4)
    model, (source, _, lengths, _) = tiny(**rates, embedding_dropout=0.0), batch()
    with backend(choice):
        for mode in (True, False, True):
            model.encoder.layers.train(mode)
            is_same = torch.allclose(model.encode(source, lengths), plain.encode(source, lengths), atol=1e-5)
            assert is_same != mode


def test_no_two_dropouts_share_a_mask(monkeypatch):
    model = tiny(dropout=0.5, attention_dropout=0.5, relu_dropout=0.5)
    sites, drawn = [], training_passes.drawn
    monkeypatch.setattr(training_passes, "drawn", lambda *call: (sites.append(int(call[3])), drawn(*call))[1])
    source, target, *lengths = batch()
    model(source, target, *lengths)
    assert len(sites) == 2 + 2 * 4 + 2 * 6  # embeddings; encoder and decoder layers
    assert len(set(sites)) == len(sites)


# -------------------------------------------------------------------------------------------------- step by step


@pytest.fixture(params=["torch", "triton"])
def route(request):
    """Plain PyTorch in float64; interpreted kernels in float32, with prepared steps."""
    with backend(request.param):
        yield request.param


def close(step, full):
    torch.testing.assert_close(step, full.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("norm_first", [False, True])
def test_decoding_step_by_step_gives_the_full_pass(norm_first, route):
    model = tiny(norm_first=norm_first, final_norm=norm_first).eval()
    model = model.double() if route == "torch" else model
    source, target, source_lengths, _ = batch(targets=(6, 6))
    full = model(source, target, source_lengths)
    cache = decoder_of(model).start_cache(model.encode(source, source_lengths), source_lengths, max_length=6)
    for position in range(6):
        step = decoder_of(model).step(target[:, position], cache)
        close(step, full[:, position])
        assert (getattr(cache, "_step", None) is not None) == (route == "triton" and position > 0)
    with pytest.raises(ValueError, match="is full"):
        decoder_of(model).step(target[:, 0], cache)


def test_attention_weights_come_from_every_layer_and_head_and_sum_to_one():
    model = tiny(norm_first=True, final_norm=True)
    source, target, source_lengths, target_lengths = batch()
    weights = model.attention_weights(source, target, source_lengths, target_lengths)
    shapes = {"encoder": (2, 4, 7, 7), "decoder": (2, 4, 6, 6), "cross": (2, 4, 6, 7)}
    for kind, shape in shapes.items():
        assert [tuple(w.shape) for w in weights[kind]] == [shape, shape]
        for layer in weights[kind]:
            torch.testing.assert_close(layer.sum(-1), torch.ones(shape[:-1]))
    assert weights["cross"][0][1, :, :, 4:].eq(0).all()  # padded keys
    assert weights["decoder"][1][:, :, 0, 1:].eq(0).all()  # the future


# ------------------------------------------------------------------------------------------------- initial weights


def test_initial_weights():
    """Xavier: square projections by themselves, and scaled embeddings; torch: as torch.nn's modules begin."""
    sizes = {"d_model": 64, "vocab_size": 2000, "d_ff": 128}
    model, theirs = tiny(**sizes), tiny(**sizes, init="torch")
    attention = model.encoder.layers[0].self_attn
    bound = (6 / (64 + 64)) ** 0.5
    assert 0.95 * bound < attention.in_proj_weight.abs().max() <= bound
    assert attention.in_proj_bias.eq(0).all()
    assert model.encoder.layers[0].linear1.bias.eq(0).all()
    assert theirs.encoder.layers[0].linear1.bias.ne(0).any()
    for each, spread, error in ((model, 64**-0.5, 0.002), (theirs, 1.0, 0.01)):
        assert abs(each.target_embedding.weight[1:].std() - spread) < error
    assert model.target_embedding.weight[PAD].eq(0).all()
