"""Attention of long rows: cases of the kernels in Gluon, their reference, and how accurate an output must be."""

import math

import torch

from fasttfm import reference
from fasttfm.kernels.attention import once
from fasttfm.kernels.tiles.table import Tile

SEED, SITE = torch.tensor([987654321]), 3
LAST, FIRST, JOINT = "heads last", "heads first", "one of three projections"
PROCESSORS = 2
"""So few that a program has several work items."""


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
        "128x128w4s2", "128x64w4s3", "64x128w4s2", torch.float16, (2, 4, 2, 170, 320, 64), FIRST,
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
    "three parts, everything at once": (
        "128x128w4s2", "128x64w4s3", "64x128w4s2", torch.bfloat16, (1, 2, 1, 70, 144, 96), JOINT,
        {"causal": True, "causal_offset": 60, "dropout_p": 0.2, "lengths": [131]},
    ),
    "three parts, a window": (
        "128x64w4s3", "128x64w4s3", "64x128w4s2", torch.float16, (2, 1, 1, 70, 150, 96), FIRST,
        {"causal_offset": 60, "window": 40, "lengths": [150, 77]},
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
