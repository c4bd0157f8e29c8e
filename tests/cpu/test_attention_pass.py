"""Attention by the compiled loop of a CPU against the reference in float64, gradients too."""

import math

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.cpu import attention_pass

pytest.importorskip("numba")

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
    "dropout": (37, 45, {"dropout_p": 0.3, "seed": SEED, "site": 3, "causal": True}),
    "everything": (70, 90, {
        "dropout_p": 0.3, "seed": SEED, "causal": "bottom_right", "softcap": 2.0, "sinks": torch.tensor(SINKS),
        "window": (30, None), "alibi_slopes": torch.linspace(0.1, 1, H), "mask": torch.rand(70, 90) < 0.7,
    }),
}  # fmt: skip


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """How often the loop computed; it takes everything, whatever the processor."""
    calls: list[int] = []
    forward = attention_pass.forward
    monkeypatch.setattr(attention_pass, "forward", lambda *given: calls.append(1) or forward(*given))
    monkeypatch.setattr(attention_pass, "_PROCESSORS", (torch.backends.cpu.get_cpu_capability(),))
    monkeypatch.setattr(attention_pass, "_LEAST", 0)
    return calls


def rows(heads: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(B, length, heads, width).transpose(1, 2)


@pytest.mark.parametrize("key_heads", [H, 2])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_are_the_references(case, key_heads, taken):
    queries, keys, given = CASES[case]
    torch.manual_seed(0)
    tensors = rows(H, queries, D), rows(key_heads, keys, D), rows(key_heads, keys, DV)
    weights = torch.randn(B, H, queries, DV)

    def solve(function, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in tensors]
        options = dict(given)
        if "sinks" in given:
            options["sinks"] = given["sinks"].to(dtype).requires_grad_()
            inputs.append(options["sinks"])
        output = function(*inputs[:3], **options)
        return output, *torch.autograd.grad((output * weights.to(dtype)).sum(), inputs)

    expected = solve(lambda *x, **options: reference.attention(*x, **options)[0], torch.float64)
    actual = solve(F.attention, torch.float32)
    assert taken
    for x, wanted in zip(actual, expected):
        torch.testing.assert_close(x, wanted.float(), rtol=2e-5, atol=2e-5)
    assert actual[0].transpose(1, 2).is_contiguous()


def test_a_row_that_is_no_number_stays_none(taken):
    q, k, v = (rows(H, 40, D) for _ in range(3))
    q[0, 1, 3], k[1, 2, 7, 5] = math.inf, math.nan
    q.requires_grad_()
    output = F.attention(q, k, v, causal=True)
    assert taken
    wrong = output.isnan().all(-1)
    assert wrong[0, 1, 3]
    assert wrong[1, 2, 7:].all()
    assert not output[wrong.logical_not()].isnan().any()
    (gradient,) = torch.autograd.grad(output.sum(), q)
    assert gradient[0, 1, 3].isnan().all()
    assert not gradient[0, 0].isnan().any()


def test_bits_depend_on_neither_threads_nor_the_batch(taken):
    q, k, v = (rows(H, 250, D).requires_grad_() for _ in range(3))

    def solve(n):
        inputs = [x[:n] for x in (q, k, v)]
        output = F.attention(*inputs, causal=True)
        return output, *torch.autograd.grad(output.square().sum(), inputs)

    threads = torch.get_num_threads()
    expected = solve(B)
    try:
        torch.set_num_threads(3)
        assert all(torch.equal(x, y) for x, y in zip(solve(B), expected))
        assert all(torch.equal(x, y[:1]) for x, y in zip(solve(1), expected))
    finally:
        torch.set_num_threads(threads)
    assert len(taken) == 3


def test_what_the_loop_lacks_goes_another_way(taken):
    q, k, v = (rows(H, 40, D) for _ in range(3))
    F.attention(q, k, v, mask=torch.zeros(40, 40, requires_grad=True))
    F.attention(q[..., :24], k[..., :24], v)
    F.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    F.attention(q[:, :, :0], k, v, key_lengths=torch.tensor([3, 4]))
    F.attention(q, k[:, :, :0], v[:, :, :0])
    F.attention(q.double(), k.double(), v.double())
    torch.func.grad(lambda x: F.attention(x, k, v).sum())(q)
    torch.compile(lambda x: F.attention(x, k, v), backend="eager", fullgraph=True)(q)
    assert len(taken) <= 1  # queries of no rows


@pytest.mark.parametrize("given", [
    {}, {"causal": True}, {"causal": "bottom_right", "window": (9, None)}, {"dropout_p": 0.3, "seed": SEED},
    {"sinks": torch.tensor(SINKS), "softcap": 2.0},
], ids=str)  # fmt: skip
def test_packed_sequences_are_those_of_padded_rows(given, taken):
    torch.manual_seed(0)
    starts, key_starts = torch.tensor([0, 37, 37, 60]), torch.tensor([0, 45, 46, 46])
    q, k, v = torch.randn(64, H, D), torch.randn(50, 2, D), torch.randn(50, 2, DV)

    def solve(passes):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        attention_pass._LEAST = 0 if passes else 1 << 40
        output = F.varlen_attention(*inputs, starts, key_starts, 40, 50, **given)
        weights = torch.linspace(-1, 1, output.numel()).view(output.shape)
        return output, *torch.autograd.grad((output * weights).sum(), inputs)

    expected = solve(False)
    assert not taken
    for x, wanted in zip(solve(True), expected):
        torch.testing.assert_close(x, wanted, rtol=2e-5, atol=2e-5)
    assert taken
