"""Launches of attention: the kernels of a call and what they are given."""

import pytest
import torch
from biased_attention import biased_attention
from test_attention_kernels import seeded

from fasttfm import functional as F
from fasttfm.kernels import launch
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.launch_log import LaunchLog


def heads_of(x):
    """(B, L, n, H, D) as n tensors (B, H, L, D)."""
    return (part.transpose(1, 2) for part in x.unbind(2))


WAYS = {
    "separate": lambda x, **o: F.attention(*heads_of(x), **o),
    "causal": lambda x, **o: F.packed_qkv_attention(x, causal=True, **o),
    "biases": lambda x, dropout_p, seed, **_: biased_attention(x, biases=[x.new_zeros(192)], p=dropout_p, seed=seed),
    "shared": lambda x, **o: F.attention(x[:, :, :2, 0].transpose(1, 2), *2 * [x[:, :, 2].transpose(1, 2)], **o),
    "packed": lambda x, **o: F.varlen_attention(*x.flatten(0, 1).unbind(1), *2 * [STARTS], 100, 100, **o),
}
STARTS = torch.tensor([0, 100, 150])


@pytest.mark.parametrize(
    ("chip", "way", "rows", "width", "p", "launches"),
    [
        ("sm_90", "separate", 100, 64, 0.1, 2),
        ("sm_90", "causal", 128, 40, 0.1, 2),
        ("sm_90", "biases", 100, 64, 0.1, 1),
        ("sm_90", "shared", 100, 64, 0.1, 1),
        ("sm_90", "packed", 100, 64, 0.1, 1),
        ("sm_90", "separate", 64, 64, 0.1, 1),
        ("sm_90", "separate", 100, 64, 0.0, 1),
        ("sm_80", "separate", 100, 64, 0.1, 1),
    ],
)
def test_backward_of_padded_rows_of_65_to_128_keys_with_dropout_uses_the_kernels_for_long_rows_on_sm_90(
    chip, way, rows, width, p, launches, monkeypatch
):
    """Except for bias gradients, whose sums only the kernel for short rows computes."""
    for module in (launch, attention_launch):
        monkeypatch.setattr(module, "chip", lambda device: CHIPS[chip])
    x = torch.randn(2, rows, 3, 1, width, dtype=torch.bfloat16).requires_grad_()
    with F.backend("triton"):
        output = WAYS[way](x, **seeded(p))
        with LaunchLog() as log:
            output.sum().backward()
    two = {"attention.backward._backward_queries": 1, "attention.backward._backward_keys": 1}
    ours = {name: count for name, count in log.triton.items() if name.startswith("attention.")}
    assert ours == (two if launches == 2 else {"attention.short._backward": 1})


def test_chips_without_matrix_units_multiply_rows_of_up_to_1024_keys_by_cublas():
    routes = [attention_launch.route(CHIPS["sm_60"], "fp16", 64, keys) for keys in (32, 512, 4096)]
    assert routes == ["short", "softmax", "flash"]
