"""The fused passes of a CPU (decoder step, encoder): the modules' numbers; modules that are not plain are called."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fasttfm.cpu import int8, step_passes
from fasttfm.cpu.step_cache import StepCache
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search import DecodingConfig, decoder, search_ids
from fasttfm.search.batches import inference, multiply_in_int8
from fasttfm.search.decoder import decoder_of

pytestmark = pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.whole)], ids=str
)
LENGTHS = torch.tensor([10, 130, 1, 97, 40, 96])  # on both sides of ENCODER_LOOP


def model_of(dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    torch.manual_seed(2)
    size = {"d_model": 48, "heads": 3, "d_ff": 96, "encoder_layers": 2, "decoder_layers": 2, "final_norm": False}
    model = Transformer(TransformerConfig(vocab_size=90, **(size | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.5, 0.5)
    return model.to(dtype).eval()


def steps(model: Transformer, fused: bool | None = None, *, batch_invariant: bool = True) -> list[torch.Tensor]:
    """Logits of a search that widens, permutes rows, drops a sentence and outgrows its first positions."""
    source = torch.arange(4, 34).view(3, 10)
    lengths = torch.tensor([10, 7, 4])
    results = []
    with inference(model, batch_invariant=batch_invariant):
        cache = decoder_of(model).start_cache(
            model.encode(source, lengths), lengths, rows_per_sentence=1, beam=2, max_length=50
        )
        if fused is not None:
            assert isinstance(cache, StepCache) == fused
        results.append(decoder_of(model).step(torch.tensor([1, 0, 1]), cache).clone())  # 0: padding
        rows = [0, 0, 1, 1, 2, 2]
        for step in range(40):
            cache.go_on(torch.tensor(rows), torch.tensor([0, 1] * (len(rows) // 2), dtype=torch.int32))
            results.append(decoder_of(model).step(4 + torch.arange(len(rows)) + step, cache).clone())
            rows = [1, 0, 2, 2, 5, 5] if step < 19 else [1, 1, 4, 5] if step == 19 else [1, 1, 2, 3]
    return results


@dtypes
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("activation", "width", "heads"), [("relu", 48, 3), ("gelu", 30, 6), ("gelu_tanh", 128, 2), ("silu", 42, 3)]
)
@pytest.mark.sample(8)
def test_logits_are_those_of_the_modules(monkeypatch, dtype, batch_invariant, norm_first, activation, width, heads):
    size = {"d_model": width, "heads": heads, "activation": activation}
    model = model_of(dtype, norm_first=norm_first, final_norm=norm_first, **size)
    results = steps(model, True, batch_invariant=batch_invariant)
    monkeypatch.setattr(decoder, "fuses_step", lambda *_: False)
    expected = steps(model, False, batch_invariant=batch_invariant)
    assert len({tuple(each.flatten().tolist()) for each in results}) == len(results)
    for position, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
        difference = (ours - theirs).abs().mean() / theirs.abs().mean()
        assert float(difference) < 4 * torch.finfo(dtype).eps, position


@pytest.mark.parametrize("norm_first", [False, True])
def test_int8_logits_are_close_to_those_of_the_modules(monkeypatch, norm_first):
    model = model_of(norm_first=norm_first, final_norm=norm_first)
    in_float32 = torch.cat(steps(model, True))
    multiply_in_int8(model)
    results = torch.cat(steps(model, True))
    monkeypatch.setattr(decoder, "fuses_step", lambda *_: False)
    expected = torch.cat(steps(model, False))
    scale = float(in_float32.abs().mean())
    assert float((expected - in_float32).abs().mean()) < 0.03 * scale
    assert float((results - in_float32).abs().mean()) < 0.03 * scale
    assert torch.equal(results, in_float32) == (int8.route() is None)  # without int8 products float32 is used


SEEN: list[str] = []
HOOKED = (
    "encoder",
    "encoder.layers.1.linear1",
    "encoder.norm",
    "source_embedding",
    "decoder.layers.1.linear1",
    "output",
)
CHANGES: dict[str, Callable[[Any], object]] = {
    **{
        f"a hook on {at}": lambda m, at=at: m.get_submodule(at).register_forward_hook(lambda *_: SEEN.append(at))
        for at in HOOKED
    },
    "an activation of its own": lambda m: setattr(m.encoder.layers[0], "activation", torch.tanh),
    "another norm": lambda m: setattr(m.encoder.layers[1], "norm2", nn.LayerNorm(48, bias=False)),
    "another dtype": lambda m: m.encoder.layers[0].norm1.double(),
    "another order": lambda m: setattr(m.encoder.layers[1], "norm_first", False),
    "other heads": lambda m: setattr(m.encoder.layers[1].self_attn, "num_heads", 6),
    "another width": lambda m: (
        setattr(m.encoder.layers[1], "linear1", nn.Linear(48, 192)),
        setattr(m.encoder.layers[1], "linear2", nn.Linear(192, 48)),
    ),
    "an encode() of its own": lambda m: setattr(m, "encode", functools.partial(Transformer.encode, m)),
    "wrapped": lambda m: setattr(m.encoder.layers, "1", nn.Sequential(m.encoder.layers[1])),
    "other heads of a decoder": lambda m: setattr(m.decoder.layers[1].multihead_attn, "num_heads", 6),
    "an output of another dtype": lambda m: m.output.bfloat16(),
    "an output of another vocabulary": lambda m: setattr(m, "output", nn.Linear(48, 400)),
}  # fmt: skip
OF_DECODERS = ("a hook on decoder.layers.1.linear1", "a hook on output", *list(CHANGES)[-3:])


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_is_not_plain_is_called(change):
    model = model_of(norm_first=True, final_norm=True, share_embeddings="none")
    steps(model, True)
    CHANGES[change](model)
    SEEN.clear()
    with inference(model, batch_invariant=True):
        assert decoder_of(model).fuses_encoder == (change in OF_DECODERS and "dtype" not in change)
    if "hook" in change or change in OF_DECODERS:
        steps(model, False if change in OF_DECODERS else None)
        assert SEEN or "hook" not in change


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_an_activation_that_changes_between_two_searches_is_noticed(stack):
    model = model_of()
    before = torch.cat(steps(model, True))
    getattr(model, stack).layers[1].activation = nn.functional.silu
    after = torch.cat(steps(model, True))
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.equal(after, torch.cat(steps(copy.deepcopy(model), True)))


def test_positions_that_another_search_has_added_are_read():
    """A recorded step of two rows reads the table of its time: four positions, of which the last step needs a fifth."""
    results = []
    for most in (4, 64):
        model = model_of(max_length=most)
        with inference(model, batch_invariant=True):
            cache = decoder_of(model).start_cache(model.encode(torch.full((1, 4), 7)), None, beam=2, max_length=9)
            for position, rows in enumerate([[0], [0, 0], [0], [0, 0], [0, 1]]):
                if position:
                    cache.go_on(torch.tensor(rows), torch.arange(len(rows), dtype=torch.int32))
                if position == 2:
                    model.target_positions.rows(5, torch.device("cpu"))
                logits = decoder_of(model).step(torch.full((len(rows),), 4 + position), cache)
        results.append(logits)
    torch.testing.assert_close(*results)


def sources() -> torch.Tensor:
    source = 4 + torch.arange(6 * 130).view(6, 130) * 7 % 86
    return source.masked_fill(torch.arange(130) >= LENGTHS[:, None], 0)


def encoded(model: Transformer, *given: torch.Tensor | None) -> torch.Tensor:
    with inference(model, batch_invariant=True):
        decoder = decoder_of(model)
        assert decoder.fuses_encoder
        return decoder.encode(*given)


@pytest.mark.parametrize("norm_first", [False, True])
@dtypes
def test_the_encoder_equals_the_modules(dtype, norm_first):
    model = model_of(dtype, norm_first=norm_first, final_norm=norm_first)
    actual = encoded(model, sources(), LENGTHS)
    with torch.no_grad():
        expected = model.double().encode(sources(), LENGTHS)
    real = torch.arange(130) < LENGTHS[:, None]
    assert not actual[~real].any()
    difference = (actual[real].double() - expected[real]).abs().max() / expected[real].abs().mean()
    assert float(difference) < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("int8", [False, True])
def test_a_sentence_has_the_same_bits_alone_and_without_lengths(int8):
    model = model_of()
    multiply_in_int8(model, int8)
    together = encoded(model, sources(), LENGTHS)
    for number, length in enumerate(LENGTHS.tolist()):
        alone = sources()[number : number + 1, :length]
        assert torch.equal(encoded(model, alone, LENGTHS[number : number + 1])[0], together[number, :length])
        assert torch.equal(encoded(model, alone, None)[0], together[number, :length])


@pytest.mark.parametrize("token", [-1, 90])
def test_a_source_token_that_the_model_lacks_is_refused(token):
    with pytest.raises(ValueError, match=f"tokens reach from .*{token}"):
        search_ids(model_of(), [[5, token, 3]], DecodingConfig())
