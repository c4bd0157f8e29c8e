"""The fused encoder pass: the modules' numbers, each sentence by itself."""

import pytest
import torch
from torch import nn

from fasttfm.cpu import step_passes
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search.batches import inference, multiply_in_int8
from fasttfm.search.decoder import decoder_of

pytestmark = pytest.mark.skipif(not step_passes.usable(), reason="numba is not installed")
LENGTHS = torch.tensor([10, 130, 1, 97, 40, 96])  # on both sides of ENCODER_LOOP


def model_of(dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    torch.manual_seed(2)
    size = {"d_model": 48, "heads": 3, "d_ff": 96, "encoder_layers": 2, "decoder_layers": 1}
    model = Transformer(TransformerConfig(vocab_size=90, **(size | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.5, 0.5)
    return model.to(dtype).eval()


def sources() -> torch.Tensor:
    source = 4 + torch.arange(6 * 130).view(6, 130) * 7 % 86
    return source.masked_fill(torch.arange(130) >= LENGTHS[:, None], 0)


def encoded(model: Transformer, *given: torch.Tensor | None, fused: bool = True) -> torch.Tensor:
    with inference(model, batch_invariant=True):
        decoder = decoder_of(model)
        assert decoder.fuses_encoder == fused
        return decoder.encode(*given)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda each: str(each)[6:])
def test_it_equals_the_modules(dtype, norm_first):
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


@pytest.mark.parametrize(
    "spoiled", ["stack", "layer", "norm", "embedding", "activation", "other dtype", "class", "wrapped"]
)
def test_modules_that_are_not_plain_are_called(spoiled):
    model = model_of(norm_first=True, final_norm=True)
    encoder, seen = model.encoder, []
    modules = {
        "stack": encoder, "layer": encoder.layers[1].linear1, "norm": encoder.norm, "embedding": model.source_embedding,
    }  # fmt: skip
    if spoiled in modules:
        modules[spoiled].register_forward_hook(lambda *_: seen.append(spoiled))
    elif spoiled == "activation":
        encoder.layers[0].activation = nn.functional.gelu
    elif spoiled == "other dtype":
        encoder.layers[0].norm1.double()
    elif spoiled == "class":
        encoder.layers[0].linear2 = nn.Sequential(encoder.layers[0].linear2)
    else:  # wrapped by a module without parameters of its own
        encoder.layers[1] = nn.Sequential(encoder.layers[1])
    with inference(model, batch_invariant=True):
        fused = decoder_of(model).fuses_encoder
    assert not fused
    if spoiled in modules:
        encoded(model, sources(), LENGTHS, fused=False)
        assert seen


def test_an_empty_batch_has_an_empty_output():
    assert encoded(model_of(), torch.empty(0, 3, dtype=torch.int64), torch.empty(0, dtype=torch.int64)).shape == (
        0,
        3,
        48,
    )
