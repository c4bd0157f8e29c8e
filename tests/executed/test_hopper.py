"""The kernels for sm_90 in Gluon, which has no interpreter: their PTX executed on a CPU and compared with the reference
and with the kernels of every chip, whose dropout mask is identical."""

import itertools
import math

import pytest
import torch
from long_rows import CASES, Given, assert_as_accurate, assert_output_as_accurate

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.kernels.attention import once
from fasttfm.kernels.tiles.attention import HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES, HOPPER_FORWARD

FORWARD, BACKWARD = (HOPPER_FORWARD,), (HOPPER_BACKWARD_QUERIES, HOPPER_BACKWARD_KEYS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_as_accurate_as_that_of_the_kernel_of_every_chip(case, taking):
    given = Given(case)
    assert_output_as_accurate(given, taking, FORWARD, given.tiles[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_as_accurate_as_those_of_the_kernels_of_every_chip(case, taking):
    given, results = Given(case), []
    saved = given.output.to(given.dtype), given.lse.float()
    for tiles in (given.tiles[1:], ["triton", "triton"]):
        with taking(BACKWARD, *tiles) as machine:
            results.append(once.backward("flash", given.grad, *given.operands, *saved, **given.options))
        threads = [launch.threads for launch in machine.launches]
        assert (threads == [384, 384]) == ("triton" not in tiles)
    for ours, plain, exact in zip(*results, given.gradients):
        assert_as_accurate(ours, plain, exact)


PACKED = {
    # tiles; queries, then keys of each sequence; heads, key heads, width; options
    "queries and keys of a sequence are as many": (
        ("128x128w4s2", "128x64w4s3", "64x128w4s3"), [140, 0, 1, 65], [140, 0, 1, 65], (2, 2, 64), {"causal": True},
    ),
    "none without the others, heads share keys": (
        ("128x64w4s2", "128x64w4s3", "64x128w4s2"), [129, 70, 0, 3], [64, 200, 9, 0], (4, 2, 64), {},
    ),
    "heads of three parts": (
        ("128x128w4s2", "128x64w4s3", "64x128w4s2"), [129, 0, 70], [64, 9, 200], (2, 1, 96), {"causal": True},
    ),
    "wide heads": (("128x64w4s2", "128x32w4s3", "triton"), [129, 3], [70, 40], (2, 1, 256), {"causal": True}),
    "a window on both sides": (
        ("128x64w4s2", "128x64w4s3", "64x128w4s2"), [1, 200, 130], [150, 210, 128], (1, 1, 128), {"window": (50, 20)},
    ),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences_are_as_accurate_as_by_the_kernels_of_every_chip(case, taking):
    tiles, queries, keys, (count, key_count, width), options = PACKED[case]
    starts = [torch.tensor([0, *itertools.accumulate(lengths)]) for lengths in (queries, keys)]
    shapes = [(sum(queries), count, width), *[(sum(keys), key_count, width)] * 2]
    operands, grad = [torch.randn(shape).bfloat16() for shape in shapes], torch.randn(shapes[0]).bfloat16()

    joint = queries == keys  # one projection: gradients are written through its strides

    def attend():
        padded = [torch.cat([x, torch.full_like(x[:3], math.nan)]).requires_grad_() for x in operands]
        given = torch.stack(padded, 1).unbind(1) if joint else padded
        output = F.varlen_attention(*given, *starts, max(queries), max(keys), **options)[: len(grad)]
        gradients = torch.autograd.grad(output, padded, grad)
        return output, *(x[: len(own)] for x, own in zip(gradients, operands))

    results = []
    for names in (tiles, ["triton"] * 3):
        with taking((*FORWARD, *BACKWARD), *names) as machine:
            results.append(attend())
        threads = [launch.threads for launch in machine.launches]
        assert (threads == [384] * 3) == ("triton" not in names)
    exact = [x.double().requires_grad_() for x in operands]
    output = reference.varlen_attention(*exact, *starts, **options)
    expected = output, *torch.autograd.grad(output, exact, grad.double())
    for ours, plain, true in zip(*results, expected):
        assert_as_accurate(ours, plain, true)
