"""Fused attention on a CPU and its gradients against the float64 reference."""

import math

import numpy as np
import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.config.model import TransformerConfig
from fasttfm.cpu import attention_pass
from fasttfm.functional.operator import forget_plans
from fasttfm.models.transformer import Transformer

pytest.importorskip("numba")

import numba

from fasttfm.cpu import tiles

ACROSS = numba.njit(lambda *args: tiles.panels_across(*args))
B, H, D, DV = 2, 4, 32, 16
SEED = torch.tensor([-(2**62) - 12345])
SINKS = [-math.inf, 0.5, 2.0, -1.0]

CASES = {
    "one query, one key": (1, 1, {}),
    "all keys": (37, 45, {}),
    "several chunks": (250, 250, {"causal": True}),
    "lengths": (37, 45, {"key_lengths": torch.tensor([0, 31])}),
    "offset": (37, 45, {"causal": True, "causal_offset": -3, "key_lengths": torch.tensor([45, 7])}),
    "offsets": (37, 45, {"causal": True, "causal_offset": torch.tensor([-60, 8])}),
    "window": (90, 90, {"window": (20, None), "causal": True}),
    "window on both sides": (90, 80, {"window": (3, 5), "key_lengths": torch.tensor([80, 50])}),
    "bool": (37, 45, {"mask": torch.rand(B, 1, 37, 45, generator=torch.Generator().manual_seed(1)) < 0.1}),
    "bool, no rows": (37, 45, {"mask": torch.tensor([True, False]).view(B, 1, 1, 1)}),
    "floats": (37, 45, {"mask": torch.randn(H, 37, 45, generator=torch.Generator().manual_seed(1))}),
    "floats and -inf": (37, 45, {"mask": torch.randn(37, 45).masked_fill(torch.eye(37, 45) == 0, -math.inf)}),
    "soft cap": (37, 45, {"softcap": 0.7, "causal": True}),
    "slopes": (37, 45, {"alibi_slopes": torch.linspace(0.1, 1, H), "window": (9, 4)}),
    "sinks": (37, 45, {"sinks": torch.tensor(SINKS), "key_lengths": torch.tensor([0, 45])}),
    "infinite sinks": (37, 45, {"sinks": torch.tensor([math.inf, 0.5, -math.inf, math.inf])}),
    "dropout": (37, 45, {"dropout_p": 0.3, "seed": SEED, "site": 3, "causal": True}),
    "everything": (70, 90, {
        "dropout_p": 0.3, "seed": SEED, "causal": "bottom_right", "softcap": 2.0, "sinks": torch.tensor(SINKS),
        "window": (30, None), "alibi_slopes": torch.linspace(0.1, 1, H), "mask": torch.rand(70, 90) < 0.7,
    }),
}  # fmt: skip


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """One element per call of the fused loop, which takes any size on any processor."""
    calls: list[int] = []
    forward = attention_pass.forward
    monkeypatch.setattr(attention_pass, "forward", lambda *args: calls.append(1) or forward(*args))
    monkeypatch.setattr(attention_pass, "PANELS", (torch.backends.cpu.get_cpu_capability(),))
    monkeypatch.setattr(attention_pass, "ATTENTION_LOOP", 0)
    return calls


def rows(heads: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(B, length, heads, width).transpose(1, 2)


@pytest.mark.parametrize("most_keys", [0, 256], ids=["recomputed", "saved"])
@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_match_the_reference(case, key_heads, most_keys, calls, monkeypatch):
    monkeypatch.setattr(attention_pass, "SAVED_KEYS", most_keys)
    queries, keys, options = CASES[case]
    tensors = rows(H, queries, D), rows(key_heads, keys, D), rows(key_heads, keys, DV)
    weights = torch.randn(B, H, queries, DV)

    def solve(function, dtype):
        inputs, sinks = [x.to(dtype).requires_grad_() for x in tensors], {}
        if "sinks" in options:
            sinks["sinks"] = options["sinks"].to(dtype).requires_grad_()
        inputs += sinks.values()
        output = function(*inputs[:3], **{**options, **sinks})
        return output, *torch.autograd.grad((output * weights.to(dtype)).sum(), inputs)

    expected = solve(lambda *x, **options: reference.attention(*x, **options)[0], torch.float64)
    actual = solve(F.attention, torch.float32)
    assert calls
    for x, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, wanted.float(), rtol=2e-5, atol=2e-5)
    assert actual[0].transpose(1, 2).is_contiguous()


def test_rows_with_nan_give_nan_and_only_they(calls):
    q, k, v = (rows(H, 40, D) for _ in range(3))
    q[0, 1, 3], k[1, 2, 7, 5] = math.inf, math.nan
    q.requires_grad_()
    output = F.attention(q, k, v, causal=True)
    assert calls
    wrong = output.isnan().all(-1)
    assert wrong[0, 1, 3]
    assert wrong[1, 2, 7:].all()
    assert not output[wrong.logical_not()].isnan().any()
    (gradient,) = torch.autograd.grad(output.sum(), q)
    assert gradient[0, 1, 3].isnan().all()
    assert not gradient[0, 0].isnan().any()


def test_bits_depend_on_neither_threads_nor_the_batch(calls, threads):
    q, k, v = (rows(H, 250, D).requires_grad_() for _ in range(3))

    def solve(n):
        inputs = [x[:n] for x in (q, k, v)]
        output = F.attention(*inputs, causal=True)
        return output, *torch.autograd.grad(output.square().sum(), inputs)

    expected = solve(B)
    threads(3)
    assert all(torch.equal(x, y) for x, y in zip(solve(B), expected, strict=True))
    assert all(torch.equal(x, y[:1]) for x, y in zip(solve(1), expected, strict=True))
    assert len(calls) == 3


def test_unsupported_calls_take_another_backend(calls):
    q, k, v = (rows(H, 40, D) for _ in range(3))
    F.attention(q, k, v, mask=torch.zeros(40, 40, requires_grad=True))
    F.attention(q[..., :24], k[..., :24], v)
    F.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    F.attention(q[:, :, :0], k, v, key_lengths=torch.tensor([3, 4]))
    F.attention(q, k[:, :, :0], v[:, :, :0])
    F.attention(q.double(), k.double(), v.double())
    torch.func.grad(lambda x: F.attention(x, k, v).sum())(q)
    torch.compile(lambda x: F.attention(x, k, v), backend="eager", fullgraph=True)(q)
    assert len(calls) <= 1  # the call without queries


LAYOUTS = {
    "batch first": lambda x: x,
    "positions first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other number": lambda x: torch.stack((x, x), -1)[..., 0],
    "numbers first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "at an odd address": lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}
JOINT = {
    "plain": {},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": SEED, "site": 3},
    "lengths": {"key_lengths": torch.tensor([0, 31]), "dropout_p": 0.3, "seed": SEED},
    "a mask": {"mask": torch.rand(B, 1, 1, 37, generator=torch.Generator().manual_seed(1)) < 0.4},
}
STARTS = torch.tensor([0, 37, 37, 60])


def compare_joint(computed, layout: str, cross: bool, lead: tuple[int, ...], expected) -> None:
    """Assert that computed() and its gradients match expected() in float64, on packed projections of a layout.

    (*lead, 3, H, D), or with cross (*lead, 2, 2, D) and a query (*lead, H, D); expected() takes query, key and value.
    """
    shapes = [(*lead, 2, 2, D), (*lead, H, D)] if cross else [(*lead, 3, H, D)]
    inputs, probe = (
        [LAYOUTS[layout](torch.randn(shape)).requires_grad_() for shape in shapes],
        torch.randn(*lead, H * D),
    )
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted, output = expected(*wide[1:], *wide[0].unbind(-3)), computed(*inputs)
    gradients = torch.autograd.grad(output, inputs, probe)
    theirs = torch.autograd.grad(wanted, wide, probe.double())
    for x, y in zip((output, *gradients), (wanted, *theirs), strict=True):
        torch.testing.assert_close(x, y.float(), rtol=2e-5, atol=2e-5)
    if layout in ("batch first", "positions first"):
        assert all(d.stride() == x.stride() for d, x in zip(gradients, inputs, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("case", JOINT)
def test_gradients_of_packed_projections_have_their_layout(case, cross, layout, calls):
    def expected(*heads):
        heads = (x.transpose(1, 2) for x in heads)
        return reference.attention(*heads, **JOINT[case])[0].transpose(1, 2).flatten(2)

    compare_joint(lambda *x: F.packed_qkv_attention(*x, **JOINT[case]), layout, cross, (B, 37), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("covered", [False, True], ids=["filler", "covered"])
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "positions first"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("case", ["plain", "dropout"])
def test_packed_projections_of_packed_sequences_match_each_sequence(case, cross, layout, covered, calls):
    options, rows = {key: value for key, value in JOINT[case].items() if key != "site"}, 60 if covered else 64

    def expected(*heads):
        length, sizes = 40, STARTS.diff()
        index = (STARTS[:-1, None] + torch.arange(length)).clamp(max=59)
        heads = (x[index].transpose(1, 2) for x in heads)
        output = reference.attention(*heads, key_lengths=sizes, **options)[0].transpose(1, 2).flatten(2)
        return torch.nn.functional.pad(output[torch.arange(length) < sizes[:, None]], (0, 0, 0, rows - 60))

    def computed(joint, query=None):
        return F.varlen_packed_qkv_attention(joint, query, STARTS, STARTS, 40, 40, covered=covered, **options)

    compare_joint(computed, layout, cross, (rows,), expected)
    assert len(calls) == 1


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "bottom_right", "window": (9, None)}, {"dropout_p": 0.3, "seed": SEED},
    {"sinks": torch.tensor(SINKS), "softcap": 2.0},
], ids=str)  # fmt: skip
def test_packed_sequences_match_padded_rows(options, calls):
    cu_seqlens_k = torch.tensor([0, 45, 46, 46])
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((64, H, D), (50, 2, D), (50, 2, DV))]
    weights, results = torch.linspace(-1, 1, 64 * H * DV).view(64, H, DV), []
    for least in (1 << 40, 0):  # without the loop and with it
        assert not calls
        attention_pass.ATTENTION_LOOP = least
        forget_plans()
        output = F.varlen_attention(*inputs, STARTS, cu_seqlens_k, 40, 50, **options)
        results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    assert calls
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_uses_the_loop_and_saves_weights_only_for_gradients(packed, monkeypatch):
    config = TransformerConfig(
        vocab_size=20, d_model=64, heads=4, d_ff=64, encoder_layers=1, decoder_layers=2, dropout=0.0
    )
    model, saved, forward = Transformer(config).train(), [], attention_pass.forward
    tokens, lengths = torch.randint(1, 20, (B, 37)), torch.tensor([30, 37])
    monkeypatch.setattr(attention_pass, "forward", lambda *call: saved.append(call[3] is not None) or forward(*call))
    for enabled in (False, True, False):
        with torch.set_grad_enabled(enabled):
            model.loss(tokens, tokens, tokens, lengths, lengths, packed_tokens=(67, 67) if packed else None)
    assert saved == [False] * 5 + [True] * 5 + [False] * 5


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 17, 30, 32])
@pytest.mark.parametrize("size", [16, 32])
def test_packing_reads_and_writes_within_bounds(rows, size):
    stride, first, panels = 3 * size, 5, (rows + tiles.PANEL - 1) // tiles.PANEL
    x = np.full(first + 33 * stride, np.nan, np.float32)
    numbers = np.random.default_rng(0).random((rows, size), np.float32)
    for m in range(rows):
        x[first + m * stride : first + m * stride + size] = numbers[m]
    out = np.full(panels * tiles.PANEL * size + 8, 7.0, np.float32)
    ACROSS(x, first, stride, rows, size, out)
    filled = np.pad(numbers, ((0, panels * tiles.PANEL - rows), (0, 0))).reshape(panels, tiles.PANEL, size)
    assert (out[:-8].reshape(panels, size, tiles.PANEL) == filled.transpose(0, 2, 1)).all()
    assert (out[-8:] == 7).all()
