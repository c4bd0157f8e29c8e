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
from fasttfm.nn import MultiheadAttention

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


def without_and_with_the_loop(solve, calls):
    """The results of solve() without the fused loop and with it."""
    results = []
    for least in (1 << 40, 0):
        assert not calls
        attention_pass.ATTENTION_LOOP = least
        forget_plans()
        results.append(solve())
    assert calls
    return results


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


@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"causal": "bottom_right", "window": (9, None)}, {"dropout_p": 0.3, "seed": SEED},
    {"sinks": torch.tensor(SINKS), "softcap": 2.0},
], ids=str)  # fmt: skip
def test_packed_sequences_match_padded_rows(options, calls):
    starts, cu_seqlens_k = torch.tensor([0, 37, 37, 60]), torch.tensor([0, 45, 46, 46])
    q, k, v = torch.randn(64, H, D), torch.randn(50, 2, D), torch.randn(50, 2, DV)

    def solve():
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        output = F.varlen_attention(*inputs, starts, cu_seqlens_k, 40, 50, **options)
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
        return output, *torch.autograd.grad((output * weights).sum(), inputs)

    for wanted, x in zip(*without_and_with_the_loop(solve, calls), strict=True):
        torch.testing.assert_close(x, wanted, rtol=2e-5, atol=2e-5)


JOINT = {
    "plain": {},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": SEED, "site": 3},
    "lengths": {"key_lengths": torch.tensor([0, 31]), "dropout_p": 0.3, "seed": SEED},
    "a mask": {"mask": torch.rand(B, 1, 1, 37, generator=torch.Generator().manual_seed(1)) < 0.4},
}
LAYOUTS = {
    "batch first": lambda x: x,
    "positions first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other number": lambda x: torch.stack((x, x), -1)[..., 0],
    "numbers first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "at an odd address": lambda x: torch.nn.functional.pad(x.flatten(), (1, 0))[1:].view(x.shape),
}


def joint_tensors(cross: bool, *rows: int) -> list[torch.Tensor]:
    """Packed projections: (*rows, 3, H, D), or with cross (*rows, 2, Hk, D) and a query (*rows, H, D)."""
    return [torch.randn(*rows, 2, 2, D), torch.randn(*rows, H, D)] if cross else [torch.randn(*rows, 3, H, D)]


def heads_of(joint: torch.Tensor, query: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    parts = joint.unbind(-3)
    return parts if query is None else (query, *parts)


def compare(computed, inputs, expected, probe) -> tuple[torch.Tensor, ...]:
    """The gradients of computed(*inputs); asserts that they and the output match expected() in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    wanted, output = expected(*wide), computed(*inputs)
    gradients = torch.autograd.grad(output, inputs, probe)
    theirs = torch.autograd.grad(wanted, wide, probe.double())
    for x, y in zip((output, *gradients), (wanted, *theirs), strict=True):
        torch.testing.assert_close(x, y.float(), rtol=2e-5, atol=2e-5)
    return gradients


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("case", JOINT)
def test_gradients_of_packed_projections_have_their_layout(case, cross, layout, calls):
    tensors = joint_tensors(cross, B, 37)
    probe = torch.randn(B, 37, H * D)

    def expected(*inputs):
        heads = (x.transpose(1, 2) for x in heads_of(*inputs))
        return reference.attention(*heads, **JOINT[case])[0].transpose(1, 2).flatten(2)

    inputs = [LAYOUTS[layout](x).requires_grad_() for x in tensors]
    gradients = compare(lambda *x: F.packed_qkv_attention(*x, **JOINT[case]), inputs, expected, probe)
    assert len(calls) == 1
    if layout in ("batch first", "positions first"):
        assert all(d.stride() == x.stride() for d, x in zip(gradients, inputs, strict=True))


@pytest.mark.parametrize("covered", [False, True], ids=["filler", "covered"])
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each != "positions first"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "dropout_p": 0.3, "seed": SEED}], ids=["plain", "dropout"])
def test_packed_projections_of_packed_sequences_match_each_sequence(options, cross, layout, covered, calls):
    starts = torch.tensor([0, 37, 37, 60])
    tensors = joint_tensors(cross, 60 if covered else 64)
    probe = torch.randn(len(tensors[0]), H * D)

    def expected(*inputs):
        length, sizes = 40, starts.diff()
        index = (starts[:-1, None] + torch.arange(length)).clamp(max=59)
        heads = (x[index].transpose(1, 2) for x in heads_of(*inputs))
        output = reference.attention(*heads, key_lengths=sizes, **options)[0].transpose(1, 2).flatten(2)
        rows = output[torch.arange(length) < sizes[:, None]]
        return torch.nn.functional.pad(rows, (0, 0, 0, len(inputs[0]) - 60))

    def computed(joint, query=None):
        return F.varlen_packed_qkv_attention(joint, query, starts, starts, 40, 40, covered=covered, **options)

    compare(computed, [LAYOUTS[layout](x).requires_grad_() for x in tensors], expected, probe)
    assert len(calls) == 1


@pytest.mark.parametrize("memory", [False, True], ids=["self", "memory"])
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_uses_the_loop(memory, causal, calls):
    ours, theirs = MultiheadAttention(64, 4), torch.nn.MultiheadAttention(64, 4)
    theirs.load_state_dict(ours.state_dict())
    x, probe = torch.randn(37, B, 64), torch.randn(37, B, 64)
    y = torch.randn(37, B, 64) if memory else x
    hidden = torch.ones(37, 37).triu(1).bool() if causal else None

    def solve(module):
        leaf = x.clone().requires_grad_()
        keys = y if memory else leaf
        output = module(leaf, keys, keys, need_weights=False, attn_mask=hidden, is_causal=causal)[0]
        return output, *torch.autograd.grad(output, (leaf, *module.parameters()), probe)

    for actual, wanted in zip(solve(ours), solve(theirs), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_training_step_uses_the_loop(packed, calls):
    config = TransformerConfig(
        vocab_size=20, d_model=64, heads=4, d_ff=64, encoder_layers=1, decoder_layers=2, dropout=0.0
    )
    model = Transformer(config).train()
    tokens, lengths = torch.randint(1, 20, (B, 37)), torch.tensor([30, 37])
    sums = {"packed_tokens": (67, 67)} if packed else {}

    def step():
        loss = model.loss(tokens, tokens, tokens, lengths, lengths, **sums)[0]
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    for wanted, actual in zip(*without_and_with_the_loop(step, calls), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)
    assert len(calls) == 5


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


def test_a_stack_saves_weights_only_with_gradients(monkeypatch):
    config = TransformerConfig(vocab_size=31, d_model=128, heads=4, d_ff=64, encoder_layers=1, decoder_layers=1)
    model, saved, forward = Transformer(config), [], attention_pass.forward

    def record(call, output, lse, weights):
        saved.append(weights is not None)
        forward(call, output, lse, weights)

    monkeypatch.setattr(attention_pass, "forward", record)
    tokens = torch.randint(4, 31, (16, 33))
    for expected in (False, True, False):
        with torch.set_grad_enabled(expected):
            model.loss(tokens, tokens[:, :-1], tokens[:, 1:])
        assert saved == [expected] * 3
        saved.clear()
