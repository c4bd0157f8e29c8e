"""Behaviours that PyTorch's own tests check, beyond the other files here: see behaviours.md."""

import logging
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm.nn
from tests.peer_tests.__main__ import of_pytorch
from tests.peer_tests.suites import differences, judge

from .twins import as_floats, causal, compare, hides_some, padding, twins

HERE = Path(__file__).parent


@pytest.mark.slow
def test_the_inputs_that_torch_tests_itself_with() -> None:
    verdict = judge(of_pytorch("torch"), differences("pytorch"))
    assert verdict.good, verdict
    assert verdict.passed >= 900


@pytest.mark.whole
@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 4, 8, 12])
def test_the_inputs_that_torch_tests_itself_with_on_the_kernels(first: int) -> None:
    words = ("triton", "--modes", "train", "--every", "16", "--first", str(first))
    verdict = judge(of_pytorch(*words), differences("pytorch"))
    assert not verdict.unexplained, verdict
    assert verdict.passed >= 40


def test_every_behaviour_names_tests_that_exist() -> None:
    lines = (HERE / "behaviours.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line.startswith("| test_")]
    assert len(rows) >= 60
    for upstream, behaviour, covered in rows:
        assert behaviour.strip(), upstream
        named = re.findall(r"(\w+)\.py::(\w+)", covered)
        assert named or covered.strip().startswith("not of the modules"), f"{upstream.strip()} is not covered"
        for file, test in named:
            actual = [p for p in HERE.parent.rglob(f"{file}.py") if f"def {test}(" in p.read_text(encoding="utf-8")]
            assert actual, f"{upstream.strip()}: there is no {file}.py::{test}"


# ------------------------------------------------------------------------------------------------- MultiheadAttention


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mask", [None, "2-D", "3-D"])
@pytest.mark.parametrize("form", ["bool", "float"])
@torch.no_grad()
def test_attention_at_inference_is_what_the_fast_path_gives(form: str, mask: str | None, padded: bool) -> None:
    theirs, ours = twins("MultiheadAttention", 8, 4, batch_first=True)
    theirs.eval()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    shape = {"2-D": (4, 4), "3-D": (8, 4, 4)}
    attn = None if mask is None else hides_some(*shape[mask])
    keys = hides_some(2, 4) if padded else None
    if form == "float":
        attn, keys = (None if m is None else as_floats(m) for m in (attn, keys))
    expected, _ = theirs(x, x, x, keys, need_weights=False, attn_mask=attn)
    for mode in (True, False):
        got, weights = ours.train(mode)(x, x, x, keys, need_weights=False, attn_mask=attn)
        torch.testing.assert_close(got, expected)
        assert weights is None


@torch.no_grad()
def test_rows_that_see_something_agree_with_the_fast_path_when_others_see_nothing() -> None:
    theirs, ours = twins("MultiheadAttention", 14, 7, batch_first=True)
    x = torch.randn(8, 5, 14, dtype=torch.float64)
    mask, keys = torch.rand(5, 5) < 0.5, torch.rand(8, 5) < 0.5
    sees = ~(mask[None] | keys[:, None]).all(-1)
    assert not sees.all()
    expected, _ = theirs.eval()(x, x, x, keys, attn_mask=mask)
    got, _ = ours.eval()(x, x, x, keys, attn_mask=mask)
    torch.testing.assert_close(got[sees], expected[sees])
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention_keeps_shape_and_dtype(dtype: Any, batch_first: bool, training: bool, need_weights: bool) -> None:
    ours = fasttfm.nn.MultiheadAttention(16, 8, batch_first=batch_first).to(dtype).train(training)
    x = torch.randn(8, 10, 16, dtype=dtype)
    with torch.set_grad_enabled(training):
        output, weights = ours(x, x, x, need_weights=need_weights)
    assert output.shape == x.shape
    assert output.dtype == dtype
    assert weights is None or weights.dtype == dtype


@torch.no_grad()
def test_a_bias_of_another_dtype_is_taken_as_torch_takes_it() -> None:
    theirs, ours = twins("MultiheadAttention", 4, 4, batch_first=True)
    for module in (theirs, ours):
        module.eval().in_proj_bias = nn.Parameter(module.in_proj_bias.half())
    x = torch.randn(4, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_nested_tensors_attend_through_torch() -> None:
    theirs, ours = twins("MultiheadAttention", 8, 2, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(length, 8, dtype=torch.float64) for length in (4, 6)])
    expected, got = (m.eval()(nested, nested, nested, need_weights=False)[0] for m in (theirs, ours))
    assert got.is_nested
    for a, b in zip(got.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
@torch.no_grad()
def test_nested_tensors_that_torch_refuses_are_refused(options: dict[str, bool]) -> None:
    nested = torch.nested.nested_tensor([torch.randn(length, 8) for length in (4, 6)])
    for library in (nn, fasttfm.nn):
        with pytest.raises(AssertionError, match=r"(?i)nested ?tensor"):
            library.MultiheadAttention(8, 2, batch_first=True, **options).eval()(nested, nested, nested)


# ------------------------------------------------------------------------------------------------------------- layers


def test_a_transformer_takes_empty_batches() -> None:
    model = fasttfm.nn.Transformer(16, 2, 1, 1, 24)
    output = model(torch.randn(5, 0, 16), torch.randn(4, 0, 16))
    assert output.shape == (4, 0, 16)
    output.sum().backward()


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_as_many_sequences_as_positions_are_not_confused(training: bool, grad: bool) -> None:
    theirs, ours = (
        library.TransformerEncoder(
            library.TransformerEncoderLayer(4, 2, 16, 0.0, batch_first=True), 2, enable_nested_tensor=library is nn
        ).double()
        for library in (nn, fasttfm.nn)
    )
    ours.load_state_dict(theirs.state_dict())
    x, mask = torch.randn(2, 2, 4, dtype=torch.float64), torch.tensor([[False, True], [False, False]])
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(ours.train(training)(x, mask=mask), theirs.train(training)(x, mask=mask))


@pytest.mark.sample(1)
@pytest.mark.parametrize("lengths", [(1020, 1024), (1024, 1025, 1031, 1040)])
@torch.no_grad()
def test_sequences_of_a_thousand_positions(lengths: tuple[int, ...]) -> None:
    theirs, ours = (
        library.TransformerEncoder(library.TransformerEncoderLayer(12, 4, 12, batch_first=True), 2).eval()
        for library in (nn, fasttfm.nn)
    )
    ours.load_state_dict(theirs.state_dict())
    mask = padding(*lengths)
    x = torch.randn(len(lengths), max(lengths), 12)
    expected = theirs(x, src_key_padding_mask=mask)
    torch.testing.assert_close(ours(x, src_key_padding_mask=mask)[~mask], expected[~mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 6])
@pytest.mark.parametrize("name", ["Encoder", "Decoder"])
def test_stacks_of_one_and_of_six_layers(name: str, layers: int) -> None:
    pair = []
    for library in (nn, fasttfm.nn):
        torch.manual_seed(0)
        layer = getattr(library, f"Transformer{name}Layer")(4, 2, 16, 0.0, batch_first=True)
        pair.append(getattr(library, f"Transformer{name}")(layer, layers, library.LayerNorm(4)).double())
    inputs = [torch.randn(2, length, 4, dtype=torch.float64) for length in (3, 5)][: 1 if name == "Encoder" else 2]
    compare(*pair, *inputs)


def test_bool_masks_together_give_no_warning_and_no_log(caplog: pytest.LogCaptureFixture) -> None:
    square, hidden = torch.ones(3, 3, dtype=torch.bool).triu_(1), padding(3, 2)
    x = torch.randn(2, 3, 16)
    with warnings.catch_warnings(), caplog.at_level(logging.DEBUG):
        warnings.simplefilter("error")
        encoder_layer = fasttfm.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        encoder = fasttfm.nn.TransformerEncoder(encoder_layer, 2, fasttfm.nn.LayerNorm(16))
        decoder_layer = fasttfm.nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)
        decoder = fasttfm.nn.TransformerDecoder(decoder_layer, 2, fasttfm.nn.LayerNorm(16))
        memory = encoder(x, mask=square, src_key_padding_mask=hidden)
        decoder(x, memory, tgt_mask=square, tgt_key_padding_mask=hidden, memory_key_padding_mask=hidden)
    assert not caplog.records


@pytest.mark.parametrize(
    ("options", "at_the_end", "left_out"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"mask_check": False}, False, True),
        ({"enable_nested_tensor": False}, True, False),
    ],
)
@torch.no_grad()
def test_padding_is_left_out_where_torch_would_nest(options: Any, at_the_end: bool, left_out: bool) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    encoder = fasttfm.nn.TransformerEncoder(layer, 2, **options).eval()
    mask = torch.tensor([[False, at_the_end is False, at_the_end], [False, False, False]])
    output = encoder(torch.randn(2, 3, 8), src_key_padding_mask=mask)
    assert bool(output[mask].any()) != left_out


def test_a_causal_mask_sets_the_hint_of_the_layers() -> None:
    class Layer(nn.Module):
        def forward(self, x: Tensor, *positional: Any, **named: Any) -> Tensor:
            given.append((positional, named))
            return x

    x, square = torch.randn(1, 4, 2), torch.ones(4, 4, dtype=torch.bool).triu(1)
    for mask, is_causal in ((square, True), (as_floats(square, torch.float32), True), (square.t(), False)):
        for library in (nn, fasttfm.nn):
            given: list[Any] = []
            layer = library.TransformerEncoderLayer(2, 1, 4, batch_first=True)
            encoder = library.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            encoder.layers[1] = Layer()
            encoder(x, mask=mask)
            assert [(positional, sorted(named), named["is_causal"]) for positional, named in given] == [
                ((), ["is_causal", "src_key_padding_mask", "src_mask"], is_causal)
            ]


@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_layers_without_biases_at_inference(bias: bool) -> None:
    theirs, ours = twins("TransformerEncoderLayer", 8, 2, 12, batch_first=True, bias=bias)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_a_transformer_with_every_mask_and_dropout_trains() -> None:
    for batch_first in (True, False):
        model = fasttfm.nn.Transformer(32, 4, 2, 2, 24, 0.3, batch_first=batch_first, dtype=torch.float64)
        src, tgt = (torch.randn(4, length, 32, dtype=torch.float64) for length in (9, 5))
        src, tgt = (src, tgt) if batch_first else (src.transpose(0, 1), tgt.transpose(0, 1))
        masks = {f"{name}_key_padding_mask": torch.rand(4, n) >= 0.5 for name, n in (("src", 9), ("tgt", 5))}
        masks |= {f"{name}_mask": causal(n) for name, n in (("src", 9), ("tgt", 5))}
        masks |= {"memory_mask": torch.randn(5, 9).double(), "memory_key_padding_mask": torch.rand(4, 9) >= 0.5}
        output = model(src, tgt, **masks)
        (output * torch.randn_like(output)).sum().backward()  # a sum over all is constant after a norm
        assert torch.isfinite(output).all()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        assert all(p.grad.abs().max() > 1e-6 for name, p in model.named_parameters() if name.endswith("weight"))


# ------------------------------------------------------------------------------------------------------- TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused_until_the_modules_are_restored() -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True).eval()
    x = torch.randn(2, 4, 8)
    expected = layer(x)
    with pytest.raises(Exception, match=r"call fasttfm\.restore_modules\(model\) first"):
        torch.jit.script(layer)
    for module in (layer.norm1, layer.self_attn, nn.Sequential(layer.norm1), nn.Sequential(layer.self_attn)):
        with pytest.raises(RuntimeError, match=r"call fasttfm\.restore_modules\(model\) first"):
            torch.jit.script(module)
    fasttfm.restore_modules(layer)
    torch.testing.assert_close(torch.jit.script(layer)(x), expected)


# --------------------------------------------------------------------------------------------------------- LayerNorm


def test_layer_norm_takes_float32_weights_with_half_precision_input_as_torch_does() -> None:
    theirs, ours = twins("LayerNorm", 5, dtype=torch.float32)
    x = torch.randn(3, 5).bfloat16()
    expected, got = theirs(x), ours(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
