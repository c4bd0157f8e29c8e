"""torch.compile and torch.export of the modules as one graph, for training and inference and at every length."""

from typing import Any

import pytest
import torch
from public_surface import first, input_count, modules

import fasttfm.nn
from fasttfm.nn import DecoderCache

from .twins import hides_some, padding

N, S, L, E, H, F = 2, 5, 4, 16, 2, 24
BACKENDS = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.whole, pytest.mark.slow, pytest.mark.inductor])]


def compiled(module: Any, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, backend=backend)


def close(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["Transformer", "attention", "attention with weights"])
def test_a_module_compiles_for_training(name: str, backend: str) -> None:
    hidden = padding(S, 3)
    if name == "Transformer":
        module: Any = fasttfm.nn.Transformer(E, H, 1, 1, F, 0.0, batch_first=True)
        shapes: Any = (N, S, E), (N, L, E)
        options = {"tgt_is_causal": True, "src_key_padding_mask": hidden, "memory_key_padding_mask": hidden}
    else:
        module = fasttfm.nn.MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=7)
        shapes = (L, N, E), (S, N, 6), (S, N, 7)
        options = {"attn_mask": hides_some(L, S), "key_padding_mask": hidden, "need_weights": "weights" in name}
    inputs = [torch.randn(shape) for shape in shapes]
    expected, got = module(*inputs, **options), compiled(module, backend)(*inputs, **options)
    close(got, expected)
    close(*(torch.autograd.grad(first(y).sin().sum(), list(module.parameters())) for y in (got, expected)))


@pytest.mark.sample(1)
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
@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_a_compiled_decoder_takes_a_cache(backend: str) -> None:
    decoder = fasttfm.nn.TransformerDecoder(fasttfm.nn.TransformerDecoderLayer(E, H, F, batch_first=True), 1).eval()
    tgt, memory, cache = torch.randn(N, L, E), torch.randn(N, S, E), DecoderCache(capacity=8)
    run = compiled(decoder, backend)
    pieces = [run(piece, memory, cache=cache) for piece in tgt.split(1, 1)]
    close(torch.cat(pieces, 1), decoder(tgt, memory, tgt_is_causal=True))


# ------------------------------------------------------------------------------------------------------ dynamic lengths

LENGTHS = (11, 3, 2, 1, 15, 16, 17, 40, 100, 600)
"""Both sides of every backend threshold; the first, used for tracing, differs from all other sizes."""


def inputs(name: str, length: int, more: int = 0) -> list[torch.Tensor]:
    """The module's inputs; those after the first are `more` positions longer."""
    generator = torch.Generator().manual_seed(length)
    lengths = [length, *[length + more] * (input_count(name) - 1)]
    return [torch.randn(2, each, 16, generator=generator) for each in lengths]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", modules())
@pytest.mark.parametrize("named", [False, True])
def test_an_exported_module_is_right_at_every_length(name: str, named: bool) -> None:
    module = modules()[name].eval()
    length = torch.export.Dim("length", min=1, max=600) if named else torch.export.Dim.AUTO
    example = inputs(name, LENGTHS[0])
    dynamic = tuple({1: length} for _ in example)
    exported = torch.export.export(module, tuple(example), dynamic_shapes=dynamic).module()
    for count in LENGTHS:
        given = inputs(name, count)
        torch.testing.assert_close(first(exported(*given)), first(module(*given)), rtol=1e-4, atol=1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", modules())
def test_a_compiled_module_is_one_graph_for_every_length(name: str) -> None:
    torch._dynamo.reset()
    module = modules()[name]
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph

    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=count)
    for length in [length for length in LENGTHS if length > 1]:  # torch specializes on 1
        given = inputs(name, length, more=4)
        torch.testing.assert_close(first(compiled(*given)), first(module(*given)), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
