"""torch.compile of the modules as one graph, also by Inductor, for training and inference."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from fasttfm.nn import DecoderCache

from .twins import hides_some, padding

N, S, L, E, H, F = 2, 5, 4, 16, 2, 24
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.inductor])]


def compiled(module: Any, backend: str, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend, **options)


def gradients(module: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.sin().sum(), list(module.parameters())))


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transformer_compiles_for_training(backend: str) -> None:
    model = fasttfm.nn.Transformer(E, H, 1, 1, F, 0.0, batch_first=True)
    src, tgt = torch.randn(N, S, E), torch.randn(N, L, E)
    options = {"tgt_is_causal": True, "src_key_padding_mask": padding(S, 3), "memory_key_padding_mask": padding(S, 3)}
    expected, got = model(src, tgt, **options), compiled(model, backend)(src, tgt, **options)
    close(got, expected)
    close(gradients(model, got), gradients(model, expected))


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_is_drawn_anew_in_a_compiled_layer(backend: str) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, F, 0.5, batch_first=True)
    x, run = torch.randn(N, S, E), compiled(layer, backend)
    assert not torch.equal(run(x), run(x))
    layer.eval()
    close(run(x), layer(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_encoder_with_padding_compiles_for_inference(backend: str) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(E, H, F, 0.1, batch_first=True)
    encoder = fasttfm.nn.TransformerEncoder(layer, 2).eval()
    x, mask = torch.randn(1, 9, E), torch.rand(1, 9) > 0.5
    mask[..., 0] = True  # padding that does not lie at the end
    run = compiled(encoder, backend)
    close(run(x, mask=None, src_key_padding_mask=mask), encoder(x, src_key_padding_mask=mask))
    with torch.no_grad():
        keep = ~padding(9, 4)
        x = torch.randn(2, 9, E)
        close(run(x, src_key_padding_mask=~keep)[keep], encoder(x, src_key_padding_mask=~keep)[keep])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("need_weights", "backend"),
    [
        (False, "aot_eager"),
        (True, "aot_eager"),
        pytest.param(True, "inductor", marks=[pytest.mark.slow, pytest.mark.inductor]),
    ],
)
def test_attention_with_extra_keys_compiles(need_weights: bool, backend: str) -> None:
    mha = fasttfm.nn.MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=7)
    given = torch.randn(L, N, E), torch.randn(S, N, 6), torch.randn(S, N, 7)
    options = {"attn_mask": hides_some(L, S), "key_padding_mask": hides_some(N, S), "need_weights": need_weights}
    expected, got = mha(*given, **options), compiled(mha, backend)(*given, **options)
    close(got, expected)
    close(gradients(mha, got[0]), gradients(mha, expected[0]))


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_lengths_need_no_other_graph(backend: str) -> None:
    decoder = fasttfm.nn.TransformerDecoder(fasttfm.nn.TransformerDecoderLayer(E, H, F, 0.0, batch_first=True), 1)
    run = compiled(decoder, backend, dynamic=True)
    graphs = []
    for target, source in ((L, S), (6, 7), (9, 3)):
        x, memory = torch.randn(N, target, E), torch.randn(N, source, E)
        close(run(x, memory, tgt_is_causal=True), decoder(x, memory, tgt_is_causal=True))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_compiled_decoder_takes_a_cache(backend: str) -> None:
    decoder = fasttfm.nn.TransformerDecoder(fasttfm.nn.TransformerDecoderLayer(E, H, F, batch_first=True), 1).eval()
    tgt, memory, cache = torch.randn(N, L, E), torch.randn(N, S, E), DecoderCache(capacity=8)
    run = compiled(decoder, backend)
    pieces = [run(piece, memory, cache=cache) for piece in tgt.split(1, 1)]
    close(torch.cat(pieces, 1), decoder(tgt, memory, tgt_is_causal=True))
