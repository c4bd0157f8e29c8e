"""Attention's kernels for sm_90 in Gluon, which no interpreter runs: their PTX executed on a CPU and held against the
reference and against the kernel of every chip, whose mask of dropout is the same to the bit."""

import contextlib
import dataclasses
import math

import pytest
import torch

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional import backend
from fasttfm.kernels import choices
from fasttfm.kernels.attention import once
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof.executed import executed
from fasttfm.kernels.tiles.attention import HOPPER_FORWARD
from fasttfm.kernels.tiles.table import Tile

SEED, SITE = torch.tensor([987654321]), 3
LAST, FIRST, JOINT = "heads last", "heads first", "one of three projections"
PROCESSORS = 2
"""So few that a program has several works."""


@pytest.fixture
def taking(monkeypatch):
    """A function of a tile, or triton: a context in which sm_90 computes by it. Gives the machine."""
    chip = dataclasses.replace(CHIPS["sm_90"], processors=PROCESSORS)
    monkeypatch.setitem(CHIPS, "sm_90", chip)

    @contextlib.contextmanager
    def take(tile):
        monkeypatch.setattr(HOPPER_FORWARD, "shipped", lambda *size: tile)
        choices.keep(chip, {})
        with executed("sm_90") as machine, backend("triton"):
            yield machine

    yield take
    choices.keep(chip, {})


def heads(layout, batch, count, rows, width, dtype):
    if layout == LAST:
        return torch.randn(batch, rows, count, width).to(dtype).transpose(1, 2)
    if layout == JOINT:
        return torch.randn(batch, rows, 3, count, width).to(dtype)[:, :, 1].transpose(1, 2)
    return torch.randn(batch, count, rows, width).to(dtype)


def hidden(x, lengths, filler):
    """x with rows that no query sees replaced."""
    if lengths is None:
        return x
    past = torch.arange(x.shape[2]) >= lengths[:, None]
    return x.masked_fill(past[:, None, :, None], filler)


CASES = {
    "several works": ("128x128w4s2", torch.bfloat16, (1, 3, 3, 256, 256, 64), LAST, {"causal": True}),
    "everything at once": (
        "128x128w4s2", torch.float16, (2, 4, 2, 130, 208, 64), FIRST,
        {"causal": True, "causal_offset": 60, "dropout_p": 0.3, "lengths": [171, 0]},
    ),
    "a tail and nothing hidden": ("128x128w4s2", torch.bfloat16, (1, 2, 1, 70, 333, 128), JOINT, {}),
    "rows without keys": (
        "128x128w4s2", torch.bfloat16, (1, 2, 2, 200, 192, 128), LAST,
        {"causal": True, "causal_offset": -100, "dropout_p": 0.1},
    ),
    "lengths and narrow tiles": ("128x64w4s3", torch.float16, (2, 1, 1, 140, 210, 128), JOINT, {"lengths": [77, 128]}),
    "one query": ("128x128w4s3", torch.bfloat16, (2, 2, 2, 1, 300, 64), LAST, {"scale": 0.3}),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_output_and_log_sum_exp_are_as_accurate_as_those_of_the_kernel_of_every_chip(case, taking):
    tile, dtype, (batch, count, key_count, rows, keys, width), layout, options = CASES[case]
    options = dict(options)
    lengths = options.pop("lengths", None)
    lengths = None if lengths is None else torch.tensor(lengths)
    query = heads(layout, batch, count, rows, width, dtype)
    key, value = (heads(layout, batch, key_count, keys, width, dtype) for _ in range(2))
    options = {"scale": width**-0.5, "dropout_p": 0.0, **options, "key_lengths": lengths}
    given = {**options, "seed": SEED if options["dropout_p"] else None, "site": SITE}
    places = {name: value for name, value in options.items() if name != "dropout_p"}
    scores = reference.attention_scores(query.double(), key.double(), **places)
    exact = reference.attention(query.double(), *(hidden(x, lengths, 0.0).double() for x in (key, value)), **given)[0]
    lse = torch.logsumexp(scores, -1).masked_fill((scores == -math.inf).all(-1), 0.0) / math.log(2)
    found = {}
    for name in (Tile.parse(tile), "triton"):
        with taking(name) as machine:
            found[name] = once.forward("flash", query, *(hidden(x, lengths, math.nan) for x in (key, value)), **given)
        works = -(-rows // 128) * batch * count
        assert machine.launches[0].grid[0] == (
            min(works, PROCESSORS) if name != "triton" else machine.launches[0].grid[0]
        )
    (output, sums), (plain, _) = found.values()
    assert torch.isfinite(output).all()
    error, allowed = (output - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 1.5 * allowed, (error, allowed)
    torch.testing.assert_close(sums, lse.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.whole
def test_packed_sequences_and_gradients_go_the_same_way(taking):
    starts = torch.tensor([0, 140, 140, 150])
    tokens = torch.randn(160, 3, 2, 64).bfloat16()

    def attend():
        joint = tokens.clone().requires_grad_()
        y = F.varlen_attention(*joint.unbind(1), starts, starts, 140, 140, causal=True)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), joint)
        return y, gradient

    results = []
    for name in (Tile.parse("128x128w4s2"), "triton"):
        with taking(name):
            results.append(attend())
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
