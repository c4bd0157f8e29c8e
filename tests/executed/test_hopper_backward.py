"""The backward kernels for sm_90 in Gluon: their PTX executed on a CPU and compared with the reference and with the
kernels of every chip."""

import math

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.attention import once
from fasttfm.kernels.tiles.attention import HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES
from tests.executed.test_hopper import FIRST, JOINT, LAST, SEED, completed, heads, hidden, log_sum_exp
from tests.executed.test_hopper import taking as taking  # a fixture

TRITON = ("triton", "triton")


def backward_tiles(queries, keys):
    return {HOPPER_BACKWARD_QUERIES: queries, HOPPER_BACKWARD_KEYS: keys}


def exact_gradients(grad, operands, options):
    """Output, log-sum-exp in base 2 and gradients in float64."""
    operands = [x.double().requires_grad_() for x in operands]
    output = reference.attention(*operands, **options)[0]
    lse = log_sum_exp(*operands[:2], options)
    return output.detach(), lse, torch.autograd.grad(output, operands, grad.double())


CASES = {
    "several works": ("128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 3, 3, 256, 256, 64), LAST, {"causal": True}),
    "everything at once": (
        "128x64w4s3", "64x128w4s3", torch.float16, (2, 4, 2, 130, 208, 64), FIRST,
        {"causal": True, "causal_offset": 60, "dropout_p": 0.3, "lengths": [171, 0]},
    ),
    "tails and nothing hidden": ("128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 2, 1, 70, 333, 128), JOINT, {}),
    "invisible rows and keys": (
        "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 2, 2, 200, 192, 128), LAST,
        {"causal": True, "causal_offset": -100, "dropout_p": 0.1},
    ),
    "lengths": ("128x64w4s4", "64x128w4s2", torch.float16, (2, 1, 1, 140, 210, 64), JOINT, {"lengths": [77, 128]}),
    "one query, negative scale": (
        "128x64w4s3", "64x128w4s2", torch.bfloat16, (2, 2, 2, 1, 300, 64), LAST, {"scale": -0.3},
    ),
    "all weights dropped": (
        "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 1, 1, 64, 64, 64), LAST, {"dropout_p": 1.0},
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_accurate_as_those_of_the_kernels_of_every_chip(case, taking):
    *tiles, dtype, (batch, count, key_count, rows, keys, width), layout, options = CASES[case]
    query, grad = (heads(layout, batch, count, rows, width, dtype) for _ in range(2))
    key, value = (heads(layout, batch, key_count, keys, width, dtype) for _ in range(2))
    options = completed(options, width)
    lengths = options["key_lengths"]
    finite = query, *(hidden(x, lengths, 0.0) for x in (key, value))
    output, lse, exact = exact_gradients(grad, finite, options)
    operands = query, *(hidden(x, lengths, math.nan) for x in (key, value))
    results = []
    for names in (tuple(tiles), TRITON):
        with taking(backward_tiles(*names)) as machine:
            results.append(once.backward("flash", grad, *operands, output.to(dtype), lse.float(), **options))
        threads = [launch.threads for launch in machine.launches]
        assert (threads == [384, 384]) == (names != TRITON)
    for ours, plain, right in zip(*results, exact):
        error, allowed = (ours - right).abs().max(), (plain - right).abs().max()
        assert error <= 1.5 * allowed, (error, allowed)


@pytest.mark.whole
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_each_kernel_alone_writes_through_the_strides_of_a_joint_projection(dropout_p, taking):
    joint = torch.randn(1, 160, 3, 2, 64).bfloat16()

    def gradient():
        x = joint.clone().requires_grad_()
        y = F.attention(*(part.transpose(1, 2) for part in x.unbind(2)), causal=True, dropout_p=dropout_p, seed=SEED)
        return torch.autograd.grad(y.float().square().sum(), x)[0]

    results = []
    for names in (TRITON, ("128x64w4s3", "triton"), ("triton", "64x128w4s2")):
        with taking(backward_tiles(*names)):
            results.append(gradient())
    for ours in results[1:]:
        torch.testing.assert_close(ours, results[0], rtol=0.02, atol=0.02)
