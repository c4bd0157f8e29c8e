"""Dropout: kernels and reference draw the same mask, and it is random."""

import math

import keep_mask
import pytest
import torch
import triton.language as tl

from fasttfm import reference
from fasttfm.kernels import philox

SEED = torch.tensor([0x0123456789ABCDEF])


def assert_same_mask(shape, p, seed=SEED, site=0, **how):
    """how: the way of keep_mask.write(), and its tile."""
    out = torch.empty(shape, dtype=torch.int8)
    mask = keep_mask.write(out, seed, site, reference.dropout_threshold(p), **how).bool()
    assert torch.equal(mask, reference.keep_mask(shape, p, seed, site))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 17, 7), (3, 5, 1023), (2, 70, 65)], ids=str)
@pytest.mark.parametrize("tile", [(8, 16), (4, 32), (16, 64), (64, 128)], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_kernel_draws_the_mask_of_the_reference_by_any_tile(shape, p, tile):
    assert_same_mask(shape, p, site=3, rows=tile[0], columns=tile[1])


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("how", [tl.float32, tl.float16, tl.bfloat16, "transposed"], ids=str)
def test_attention_draws_the_mask_of_the_reference_in_its_own_order(columns, how):
    assert_same_mask((2, 18, 150), 77 / 256, site=3, how=how, columns=columns)


@pytest.mark.parametrize("threshold", [1, 2, 26, 127, 128, 129, 200, 254, 255, 256])
@pytest.mark.parametrize("how", [tl.float16, "transposed"], ids=str)
def test_every_threshold(threshold, how):
    """4,096 lanes contain all 256 values; the transposed way compares four at a time."""
    assert_same_mask((1, 32, 128), threshold / 256, how=how)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**32])
@pytest.mark.parametrize("site", [0, 1, 2**31 - 1])
def test_all_64_bits_of_the_seed_and_every_site(seed, site):
    assert_same_mask((2, 3, 40), 0.5, torch.tensor([seed]), site)


def test_the_mask_does_not_depend_on_the_size_of_the_matrix():
    large = reference.keep_mask((3, 50, 90), 0.3, SEED)
    assert torch.equal(reference.keep_mask((2, 7, 33), 0.3, SEED), large[:2, :7, :33])
    assert torch.equal(reference.keep_mask((1, 50, 90), 0.3, SEED, first_plane=2), large[2:])


@pytest.mark.parametrize(("p", "kept"), [(0.0, True), (1.0, False), (1e-6, True), (1 - 1e-6, False)])
def test_probabilities_near_0_and_1_drop_nothing_or_everything(p, kept):
    assert_same_mask((1, 40, 100), p)
    assert (reference.keep_mask((1, 40, 100), p, SEED) == kept).all()


def test_the_scale_undoes_the_rate_that_is_really_drawn():
    for p in (0.1, 0.3, 0.7):
        assert reference.dropout_scale(p) * (1 - reference.dropout_threshold(p) / 256) == pytest.approx(1.0, abs=1e-15)
    assert reference.dropout_scale(1.0) == 0.0
    assert philox.dropout_arguments(0.1, SEED, 3) == (SEED, 3, 26, reference.dropout_scale(0.1))
    assert philox.dropout_arguments(0.1, None, 3) == philox.dropout_arguments(0.0, SEED, 3) == (None, 3, 0, 1.0)


# ------------------------------------------------------------------------------------------------------- randomness
#
# Chi-square statistics of fixed masks must be within six standard deviations above the mean.


def chi_square_limit(freedom):
    return freedom + 6 * math.sqrt(2 * freedom)


def chi_square(counts, expected):
    return ((counts.double() - expected) ** 2 / expected).sum().item()


def pairs():
    mask = reference.keep_mask((16, 64, 256), 0.3, SEED)
    yield "neighbouring lanes", mask[..., ::2], mask[..., 1::2]
    yield "neighbouring pairs of lanes", mask[..., 1:-1:2], mask[..., 2::2]
    yield "neighbouring words", mask.unflatten(2, (-1, 4))[:, :, :-1], mask.unflatten(2, (-1, 4))[:, :, 1:]
    yield "neighbouring blocks", mask[..., :-16], mask[..., 16:]
    yield "neighbouring rows", mask[:, ::2], mask[:, 1::2]
    yield "neighbouring planes", mask[::2], mask[1::2]
    yield "rows and columns swapped", mask[:, :64, :64], mask[:, :64, :64].transpose(1, 2).roll(1, 1)
    yield "neighbouring streams", mask, reference.keep_mask((16, 64, 256), 0.3, SEED, 1)
    yield "neighbouring seeds", mask, reference.keep_mask((16, 64, 256), 0.3, SEED + 1)
    yield "seeds that differ in the upper word", mask, reference.keep_mask((16, 64, 256), 0.3, SEED + 2**32)
    yield "a plane and a stream exchanged", mask[1:2], reference.keep_mask((1, 64, 256), 0.3, SEED, 1)


def test_neighbours_are_independent():
    """The contingency table of two masks against the product of their rates."""
    rate = 1 - reference.dropout_threshold(0.3) / 256
    one = torch.tensor([1 - rate, rate], dtype=torch.float64)
    for name, first, second in pairs():
        count = torch.bincount((first.reshape(-1).int() * 2 + second.reshape(-1).int()), minlength=4)
        expected = (one[:, None] * one).reshape(-1) * count.sum()
        assert chi_square(count, expected) < chi_square_limit(3), name
