"""The kernels for sm_90 in Gluon, which has no interpreter: their PTX executed on a CPU and compared with the reference
and with the kernels of every chip, whose dropout mask is identical."""

import contextlib
import dataclasses
import itertools
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
from fasttfm.kernels.tiles.attention import HOPPER_BACKWARD_KEYS, HOPPER_BACKWARD_QUERIES, HOPPER_FORWARD
from fasttfm.kernels.tiles.table import Tile

SEED, SITE = torch.tensor([987654321]), 3
LAST, FIRST, JOINT = "heads last", "heads first", "one of three projections"
PROCESSORS = 2
"""So few that a program has several work items."""
FORWARD, BACKWARD = (HOPPER_FORWARD,), (HOPPER_BACKWARD_QUERIES, HOPPER_BACKWARD_KEYS)


@pytest.fixture
def taking(monkeypatch):
    """taking(choices, tiles, or triton): a context in which a chip computes with these; yields the machine."""
    chips = {name: dataclasses.replace(CHIPS[name], processors=PROCESSORS) for name in ("sm_90", "sm_100")}
    for name, chip in chips.items():
        monkeypatch.setitem(CHIPS, name, chip)

    @contextlib.contextmanager
    def take(made, *tiles, name="sm_90", **options):
        for choice, tile in zip(made, tiles, strict=True):
            answer = tile if tile == "triton" else Tile.parse(tile)
            monkeypatch.setattr(choice, "shipped", lambda *size, answer=answer: answer)
        choices.keep(chips[name], {})
        with executed(name, **options) as machine, backend("triton"):
            yield machine

    yield take
    for chip in chips.values():
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
    # tile forward, tiles backward of queries and of keys (triton where rule.keys_fit() says no); dtype; batch, heads,
    # key heads, rows, keys, width
    "several works": (
        "128x128w4s2", "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 3, 3, 256, 256, 64), LAST, {"causal": True},
    ),
    "everything at once": (
        "128x128w4s2", "128x64w4s3", "64x128w4s3", torch.float16, (2, 4, 2, 130, 208, 64), FIRST,
        {"causal": True, "causal_offset": 60, "dropout_p": 0.3, "lengths": [171, 0]},
    ),
    "tails and nothing hidden": (
        "128x128w4s2", "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 2, 1, 70, 333, 128), JOINT, {},
    ),
    "invisible rows and keys": (
        "128x128w4s2", "128x64w4s3", "triton", torch.bfloat16, (1, 2, 2, 200, 192, 128), LAST,
        {"causal": True, "causal_offset": -100, "dropout_p": 0.1},
    ),
    "lengths and narrow tiles": (
        "128x64w4s3", "128x64w4s3", "64x128w4s2", torch.float16, (2, 1, 1, 140, 210, 128), JOINT,
        {"lengths": [77, 128]},
    ),
    "one query, negative scale": (
        "128x128w4s3", "128x64w4s4", "64x128w4s2", torch.bfloat16, (2, 2, 2, 1, 300, 64), LAST, {"scale": -0.3},
    ),
    "only the diagonal, invisible rows and keys": (
        "128x128w4s2", "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 1, 1, 200, 200, 64), LAST,
        {"causal": True, "causal_offset": -70, "window": 0},
    ),
    "a window narrower than a tile": (
        "128x128w4s2", "128x64w4s3", "64x128w4s3", torch.float16, (2, 4, 2, 170, 320, 64), FIRST,
        {"causal": True, "causal_offset": 45, "window": 37, "dropout_p": 0.3, "lengths": [171, 0]},
    ),
    "a window of whole tiles": (
        "128x64w4s3", "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 1, 1, 350, 464, 64), JOINT,
        {"causal": True, "causal_offset": 100, "window": 275, "dropout_p": 0.1},
    ),
    "a window without a diagonal": (
        "128x64w4s3", "128x64w4s3", "64x128w4s2", torch.bfloat16, (2, 1, 1, 300, 340, 128), LAST,
        {"causal_offset": 60, "window": 30, "lengths": [340, 123]},
    ),
    "wide heads, shared keys": (
        "128x64w4s2", "128x32w4s3", "triton", torch.bfloat16, (2, 2, 1, 130, 80, 256), LAST,
        {"causal": True, "causal_offset": 4, "lengths": [80, 45]},
    ),
    "wide heads, dropout, not dQ": (
        "128x64w4s2", "128x32w4s3", "triton", torch.float16, (1, 1, 1, 70, 80, 256), JOINT, {"dropout_p": 0.1},
    ),
    "all weights dropped": (
        "128x128w4s2", "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 1, 1, 64, 64, 64), LAST, {"dropout_p": 1.0},
    ),
}  # fmt: skip


class Given:
    """Tensors and options of a case, and what the reference makes of them in float64."""

    def __init__(self, case):
        *self.tiles, self.dtype, (batch, count, key_count, self.rows, keys, width), layout, options = CASES[case]
        self.heads = batch * count
        self.query, self.grad = (heads(layout, batch, count, self.rows, width, self.dtype) for _ in range(2))
        key, value = (heads(layout, batch, key_count, keys, width, self.dtype) for _ in range(2))
        options = {"scale": width**-0.5, "dropout_p": 0.0, "lengths": None, **options}
        lengths = options.pop("lengths")
        lengths = None if lengths is None else torch.tensor(lengths)
        self.options = {**options, "key_lengths": lengths, "seed": SEED if options["dropout_p"] else None, "site": SITE}
        self.operands = self.query, *(hidden(x, lengths, math.nan) for x in (key, value))
        finite = self.query, *(hidden(x, lengths, 0.0) for x in (key, value))
        exact = [x.double().requires_grad_() for x in finite]
        specified = dict(self.options)
        if "window" in specified:
            specified["window"] = specified["window"], None
        output = reference.attention(*exact, **specified)[0]
        self.gradients = torch.autograd.grad(output, exact, self.grad.double())
        self.output = output.detach()
        places = {name: value for name, value in specified.items() if name not in ("dropout_p", "seed", "site")}
        scores = reference.attention_scores(*exact[:2], **places).detach()
        self.lse = torch.logsumexp(scores, -1).masked_fill((scores == -math.inf).all(-1), 0.0) / math.log(2)
        """In base 2, 0 for rows without a visible key."""


def assert_as_accurate(ours, plain, exact):
    error, allowed = (ours - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 1.5 * allowed, (error, allowed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_the_output_is_as_accurate_as_that_of_the_kernel_of_every_chip(case, taking):
    given = Given(case)
    assert_output_as_accurate(given, taking, FORWARD, given.tiles[0])


def assert_output_as_accurate(given, taking, choice, tile, **chip):
    results = []
    for each in (tile, "triton"):
        with taking(choice, each, **chip) as machine:
            results.append(once.forward("flash", *given.operands, **given.options))
        if each != "triton":
            works = -(-given.rows // Tile.parse(tile).rows) * given.heads
            assert (machine.launches[0].grid[0], machine.launches[0].threads) == (min(works, PROCESSORS), 384)
    (output, sums), (plain, _) = results
    assert torch.isfinite(output).all()
    assert_as_accurate(output, plain, given.output)
    torch.testing.assert_close(sums, given.lse.float(), rtol=1e-5, atol=1e-5)


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
        ("128x64w4s3", "128x64w4s3", "64x128w4s2"), [129, 70, 0, 3], [64, 200, 9, 0], (4, 2, 64), {},
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

    def attend():
        padded = [torch.cat([x, torch.full_like(x[:3], math.nan)]).requires_grad_() for x in operands]
        output = F.varlen_attention(*padded, *starts, max(queries), max(keys), **options)[: len(grad)]
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


QUERIES_ALONE, KEYS_ALONE = ["128x64w4s3", "triton"], ["triton", "64x128w4s2"]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("made", "tiles", "packed", "dropout_p"),
    [
        (FORWARD, ["128x128w4s2"], True, 0.0),
        *((BACKWARD, tiles, True, 0.0) for tiles in (QUERIES_ALONE, KEYS_ALONE)),
        *((BACKWARD, tiles, False, p) for tiles in (QUERIES_ALONE, KEYS_ALONE) for p in (0.0, 0.2)),
    ],
)
def test_each_kernel_alone_writes_through_the_strides_of_a_joint_projection(made, tiles, packed, dropout_p, taking):
    starts = torch.tensor([0, 140, 140, 150])
    joint = torch.randn(160, 3, 2, 64).bfloat16()

    def attend():
        x = joint.clone().requires_grad_()
        if packed:
            y = F.varlen_attention(*x.unbind(1), starts, starts, 140, 140, causal=True)
        else:
            operands = (part.transpose(0, 1)[None] for part in x.unbind(1))
            y = F.attention(*operands, causal=True, dropout_p=dropout_p, seed=SEED)
        return y, torch.autograd.grad(y.float().square().sum(), x)[0]

    results = []
    for names in (tiles, ["triton"] * len(made)):
        with taking(made, *names):
            results.append(attend())
    for ours, plain in zip(*results):
        torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.02)
