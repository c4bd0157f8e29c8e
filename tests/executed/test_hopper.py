"""The forward kernel for sm_90 in Gluon, which has no interpreter: its PTX executed on a CPU and compared with the
reference and with the kernel of every chip, whose dropout mask is identical."""

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
"""So few that a program has several work items."""


@pytest.fixture
def taking(monkeypatch):
    """taking({choice: tile, or triton}): a context in which sm_90 computes with these; yields the machine."""
    chip = dataclasses.replace(CHIPS["sm_90"], processors=PROCESSORS)
    monkeypatch.setitem(CHIPS, "sm_90", chip)

    @contextlib.contextmanager
    def take(tiles):
        for choice, tile in tiles.items():
            answer = tile if tile == "triton" else Tile.parse(tile)
            monkeypatch.setattr(choice, "shipped", lambda *size, answer=answer: answer)
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
    """x with invisible rows replaced."""
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


def completed(options, width):
    """Arguments of attention from the options of a case."""
    options = {"scale": width**-0.5, "dropout_p": 0.0, "lengths": None, **options}
    lengths = options.pop("lengths")
    lengths = None if lengths is None else torch.tensor(lengths)
    return {**options, "key_lengths": lengths, "seed": SEED if options["dropout_p"] else None, "site": SITE}


def log_sum_exp(query, key, options):
    """In base 2, 0 for rows without a visible key."""
    places = {name: value for name, value in options.items() if name not in ("dropout_p", "seed", "site")}
    scores = reference.attention_scores(query, key, **places).detach()
    return torch.logsumexp(scores, -1).masked_fill((scores == -math.inf).all(-1), 0.0) / math.log(2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_as_accurate_as_that_of_the_kernel_of_every_chip(case, taking):
    tile, dtype, (batch, count, key_count, rows, keys, width), layout, options = CASES[case]
    query = heads(layout, batch, count, rows, width, dtype)
    key, value = (heads(layout, batch, key_count, keys, width, dtype) for _ in range(2))
    options = completed(options, width)
    lengths = options["key_lengths"]
    finite = (x.double() for x in (query, *(hidden(x, lengths, 0.0) for x in (key, value))))
    lse = log_sum_exp(query.double(), key.double(), options)
    exact = reference.attention(*finite, **options)[0]
    results = []
    for name in (tile, "triton"):
        with taking({HOPPER_FORWARD: name}) as machine:
            operands = query, *(hidden(x, lengths, math.nan) for x in (key, value))
            results.append(once.forward("flash", *operands, **options))
        if name != "triton":
            assert machine.launches[0].grid[0] == min(-(-rows // 128) * batch * count, PROCESSORS)
    (output, sums), (plain, _) = results
    assert torch.isfinite(output).all()
    error, allowed = (output - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 1.5 * allowed, (error, allowed)
    torch.testing.assert_close(sums, lse.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.whole
def test_packed_sequences_and_their_gradients(taking):
    starts = torch.tensor([0, 140, 140, 150])
    tokens = torch.randn(160, 3, 2, 64).bfloat16()

    def attend():
        joint = tokens.clone().requires_grad_()
        y = F.varlen_attention(*joint.unbind(1), starts, starts, 140, 140, causal=True)
        (gradient,) = torch.autograd.grad(y.float().square().sum(), joint)
        return y, gradient

    results = []
    for tile in ("128x128w4s2", "triton"):
        with taking({HOPPER_FORWARD: tile}):
            results.append(attend())
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
