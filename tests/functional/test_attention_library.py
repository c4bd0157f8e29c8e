"""Attention by cuDNN: which calls the table sends there, the arguments of its operators, and who computes gradients.

No GPU is used: operators with the same signature replace cuDNN's, and meta tensors go through PyTorch's own.
"""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.compat.flash_attn import flash_attn_func
from fasttfm.functional import backends
from fasttfm.functional.attention import api, backend, library, operator
from fasttfm.functional.attention.arguments import options_of
from fasttfm.functional.attention.call import Call
from fasttfm.functional.attention.operator import attend
from fasttfm.kernels import choices, launch
from fasttfm.kernels.chip import CHIPS

LENGTH = 640
USABLE = library.usable


def rows(*shape, dtype=torch.bfloat16, **options):
    """(B, H, L, D), heads adjacent in memory."""
    batch, heads, length, width = shape
    return torch.randn(batch, length, heads, width, dtype=torch.float32).to(dtype, **options).transpose(1, 2)


X = rows(1, 2, LENGTH, 64)


def call_of(query=X, key=None, value=None, backend="auto", only_weights=False, starts=None, **options):
    key, value = query if key is None else key, query if value is None else value
    options = options_of(query, (*query.shape[:3], key.shape[2]), **{"causal": True, "scale": 0.1} | options)
    fields = options._asdict()
    places = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), starts)
    return Call(
        query=query, key=key, value=value, **places, max_seqlen_q=LENGTH, max_seqlen_k=LENGTH, covered=False,
        only_weights=only_weights, backend=backend, **fields,
    )  # fmt: skip


@pytest.fixture
def on_sm_90(monkeypatch):
    """Decisions of an H100 whose cuDNN supports every call; yields its chip."""
    monkeypatch.setattr(launch, "chip", lambda device: CHIPS["sm_90"])
    monkeypatch.setattr(backend, "kernels_take", lambda *given: True)
    monkeypatch.setattr(library, "usable", lambda *given, **options: True)
    yield CHIPS["sm_90"]
    choices.keep(CHIPS["sm_90"], {})


TAKEN = [
    call_of(rows(1, 2, 1024, 64)), call_of(rows(1, 2, 4096, 64)), call_of(rows(1, 2, LENGTH, 128)),
    call_of(rows(1, 2, LENGTH, 64, dtype=torch.float16)),
    call_of(*torch.randn(1, LENGTH, 3, 2, 64, dtype=torch.bfloat16).permute(2, 0, 3, 1, 4).unbind(0)),
]  # fmt: skip
LEFT = [
    call_of(backend="triton"), call_of(only_weights=True), call_of(causal=False), call_of(causal_offset=1),
    call_of(dropout_p=0.1, seed=torch.tensor([1])), call_of(key_lengths=torch.tensor([LENGTH])),
    call_of(mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool)), call_of(window=(99, 0)), call_of(softcap=2.0),
    call_of(alibi_slopes=torch.ones(2)), call_of(sinks=torch.zeros(2)), call_of(scale=-0.1), call_of(X.float()),
    call_of(X, *2 * [X[:, :1]]),  # shared keys
    call_of(X, X, X[..., :32]),
    call_of(X[:, :, :512], X, X),
    call_of(X.contiguous()),  # heads one after the other
    call_of(rows(1, 2, LENGTH + 1, 64)),  # a length of a ragged batch
    call_of(rows(1, 2, 384, 64)),  # was not faster
    call_of(X[:0]),
    call_of(torch.randn(1, LENGTH, 3, 2, 64).bfloat16())._replace(key=None, value=None),
    call_of()._replace(
        **dict.fromkeys(("query", "key", "value"), X[0].transpose(0, 1)),
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, LENGTH])),
    ),
]  # fmt: skip


def test_only_long_causal_rows_in_half_precision_go_to_cudnn_on_sm_90(on_sm_90):
    for call in TAKEN:
        assert operator._decide(call) == "cudnn", call
        assert operator._decide(call._replace(backend="cudnn")) == "cudnn"  # idempotent
    for call in LEFT:
        assert operator._decide(call) in ("short", "flash", "softmax"), call


def test_other_chips_keep_their_kernels_and_so_do_calls_that_this_cudnn_does_not_support(on_sm_90, monkeypatch):
    for name in CHIPS.keys() - {"sm_90"}:
        monkeypatch.setattr(launch, "chip", lambda device, name=name: CHIPS[name])
        assert operator._decide(call_of()) != "cudnn", name
    monkeypatch.setattr(launch, "chip", lambda device: CHIPS["sm_90"])
    assert operator._decide(call_of()) == "cudnn"
    monkeypatch.setattr(library, "usable", USABLE)  # PyTorch's own answer: no cuDNN here
    assert operator._decide(call_of()) == "flash"


def test_the_public_function_uses_cudnn_in_both_passes_while_it_is_switched_on(on_sm_90, cudnn, monkeypatch):
    monkeypatch.setattr(operator.OPERATOR, "_prefers", None)  # no CPU backends
    monkeypatch.setattr(library, "usable", lambda *given, **options: torch.backends.cuda.cudnn_sdp_enabled())
    monkeypatch.setattr(operator.kernel_plans, "forward", lambda call, memory: lambda call: (*memory(call), None, None))
    exact, x = X.double().requires_grad_(), X.detach().requires_grad_()
    expected = reference.attention(exact, exact, exact, causal=True)[0]
    (wanted,) = torch.autograd.grad(expected.square().sum(), exact)
    try:
        for on in (True, False, True, False):
            torch.backends.cuda.enable_cudnn_sdp(on)
            for _ in range(2):
                cudnn.calls.clear()
                output = F.attention(x, x, x, causal=True)
                assert cudnn.calls == ["forward"] * on
            if on:
                (gradient,) = torch.autograd.grad(output.float().square().sum(), x)
                assert cudnn.calls == ["forward", "backward"]
                torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
                torch.testing.assert_close(gradient.double(), wanted, rtol=0.05, atol=0.05)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("call", [F.attention, flash_attn_func])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_call_requests_the_kernels_for_itself_alone(call, deterministic, monkeypatch):
    asked = []

    def ask(query, *fields):
        asked.append((fields[-1], backends.current))
        return (query,)

    monkeypatch.setattr(api, "operator", ask)
    with FakeTensorMode():
        for device in ("cuda", "cpu"):
            x = torch.empty(1, 128, 128, 64, dtype=torch.bfloat16, device=device)
            for current in ("auto", "torch"):
                with backends.backend(current):
                    call(x, x, x, causal=True, deterministic=deterministic)
    usual = [("auto", "auto"), ("torch", "torch")]
    assert asked == [("triton", "auto") if deterministic else usual[0], usual[1], *usual]


class CuDNN:
    """Operators with cuDNN's signatures, computed by PyTorch's CPU kernels."""

    def __init__(self):
        self.calls = []

    def attend(self, query, key, value, bias, with_lse, rate, causal, debug, *, scale):
        self.calls.append("forward")
        assert (bias, with_lse, rate, debug) == (None, True, 0.0, False)
        compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, lse = compute(query, key, value, 0.0, causal, scale=scale)
        return output, lse.contiguous().unsqueeze(-1), None

    def differentiate(
        self, grad, query, key, value, output, lse, seed, offset, bias, starts_q, starts_k, longest_q, longest_k, rate,
        causal, *, scale,
    ):  # fmt: skip
        self.calls.append("backward")
        assert bias is starts_q is starts_k is None
        assert (longest_q, longest_k, rate) == (query.shape[2], key.shape[2], 0.0)
        assert lse.shape == (*query.shape[:3], 1)
        assert seed.dtype == offset.dtype == torch.int64
        assert grad.stride() == output.stride()  # else PyTorch warns and copies
        compute = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return compute(grad, query, key, value, output, lse.squeeze(-1), 0.0, causal, scale=scale)


@pytest.fixture
def cudnn(monkeypatch):
    stand_in = CuDNN()
    monkeypatch.setattr(library, "_attend", stand_in.attend)
    monkeypatch.setattr(library, "_differentiate", stand_in.differentiate)
    return stand_in


@pytest.fixture
def deterministic():
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["asked from the first", "asked for between the passes"])
@pytest.mark.parametrize("asked", [True, False], ids=["deterministic", "fastest"])
def test_output_and_gradients_equal_the_reference(causal, first, asked, cudnn, deterministic):
    """Our kernels compute the gradients from cuDNN's output if they must be deterministic."""
    leaves = [rows(2, 2, 128, 16).float().requires_grad_() for _ in range(3)]
    options = options_of(leaves[0], (2, 2, 128, 128), causal=causal, scale=0.25)
    expected = reference.attention(*leaves, causal=causal, scale=0.25)[0]
    grad = torch.randn_like(expected).contiguous()
    wanted = torch.autograd.grad(expected, leaves, grad)
    if first:
        deterministic(asked)
    output = attend(*leaves, options, "cudnn")
    deterministic(asked)
    gradients = torch.autograd.grad(output, leaves, grad)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)
    assert cudnn.calls == (["forward"] if asked else ["forward", "backward"])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("layout", ["own", "joint"])
def test_pytorchs_operators_have_the_outputs_of_the_fake(layout, width):
    """On meta tensors: shapes, strides and dtypes."""
    joint = torch.empty(2, 256, 3, 4, width, dtype=torch.bfloat16, device="meta")
    tensors = joint.permute(2, 0, 3, 1, 4).unbind(0)
    if layout == "own":
        tensors = [x.clone() for x in tensors]
    call = call_of(*tensors, backend="cudnn")
    outputs = library.forward(call)
    announced = operator._fake(call)
    saved = operator.Saved(*operator._save(call, announced))
    given = operator._Backward(torch.empty_like(announced[0]), False, None, None, saved)
    gradients = library.gradients(given)
    for found, wanted in zip((*outputs, *gradients), (*announced, *operator._fake_backward(given)), strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
