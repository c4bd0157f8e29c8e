"""Muon: polynomials against singular value decompositions, steps against a float64 reference."""

import math

import pytest
import torch

from fasttfm.training.muon import BETA, BLOCK, LEAST, RMS, Muon, is_muons, polar
from fasttfm.training.workers import ALONE, Workers

from .test_updates import make

ONE, INF = torch.zeros(()), torch.ones(())
RATE = torch.tensor(0.01, dtype=torch.float64)


def reference_step(weight, momentum, gradient, lr, by_columns):
    """The formula of muon.py in float64, with U V^T by singular value decomposition."""
    momentum = BETA * momentum + (1 - BETA) * gradient
    direction = BETA * momentum + (1 - BETA) * gradient
    lines, changed = (direction.T, weight.T.clone()) if by_columns else (direction, weight.clone())
    for first in range(0, len(lines), BLOCK):
        block = lines[first : first + BLOCK]
        left, _, right = torch.linalg.svd(block, full_matrices=False)
        changed[first : first + BLOCK] -= lr * RMS * math.sqrt(max(block.shape)) * left @ right
    return (changed.T if by_columns else changed), momentum


def with_singular_values(values, columns, generator):
    rows = len(values)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, rows, generator=generator, dtype=torch.float64))[0]
    return left @ torch.diag(values) @ right.T, left @ right.T


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (64, 64), (17, 33), (1, 5)])
def test_polar_makes_singular_values_one(rows, columns):
    generator = torch.Generator().manual_seed(1)
    values = torch.logspace(0, math.log10(0.2), rows, dtype=torch.float64)
    assert values.min() / values.norm() > LEAST
    block, expected = with_singular_values(values, columns, generator)
    exact = polar(block[None])[0]
    torch.testing.assert_close(torch.linalg.svdvals(exact), torch.ones(rows, dtype=torch.float64), rtol=0, atol=0.02)
    torch.testing.assert_close(exact, expected, rtol=0, atol=0.02)
    # the first polynomial's slope multiplies rounding errors by up to 24
    torch.testing.assert_close(polar(1e3 * block[None].float())[0].double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("size", [1e-10, 1e-18, 1e-20, 1e-23, 1e-25, 1e-38, 1e-44, 0.0])
def test_a_block_that_has_faded_changes_no_weight_by_much_and_neighbours_do_not_matter(size):
    """The momentum of a unit that is dead for a thousand updates; squares of its elements underflow."""
    blocks = torch.randn(3, 8, 16)
    blocks[1] *= size
    result = polar(blocks)
    first, faded, last = torch.linalg.matrix_norm(result, ord=2).tolist()
    assert 0.9 < min(first, last) <= max(first, last) < 1.05
    assert (0.9 if size >= 1e-18 else 0.0) <= faded < 1.05


@pytest.mark.parametrize(
    ("shape", "by_columns"), [((192, 256), False), ((256, 100), True), ((70, 40), False), ((8, 3), True)]
)
def test_a_step_is_the_formulas(shape, by_columns):
    torch.manual_seed(2)
    name = "encoder.layers.0.linear2.weight" if by_columns else "encoder.layers.0.linear1.weight"
    weight = torch.randn(shape)
    muon = Muon({name: weight}, {name: 0.5}, {name: 0.0}, ALONE)
    expected, momentum = weight.double(), torch.zeros(shape, dtype=torch.float64)
    for _ in range(3):
        weight.grad = torch.randn(shape)
        before = expected
        expected, momentum = reference_step(expected, momentum, weight.grad.double(), 0.5 * 0.01, by_columns)
        muon.step(RATE, ONE)
        torch.testing.assert_close(muon.matrices[name].momentum.double(), momentum, rtol=1e-5, atol=1e-7)
        # small singular values are approximated: a few percent of a change
        assert (weight - expected).norm() < 0.1 * (expected - before).norm()
        expected = weight.double()


def test_a_gradient_that_is_not_finite_changes_nothing():
    name = "decoder.layers.0.linear1.weight"
    weight = torch.randn(64, 128)
    muon = Muon({name: weight}, {name: 1.0}, {name: 0.1}, ALONE)
    weight.grad = torch.randn(64, 128)
    muon.step(RATE, ONE)
    before, momentum = weight.clone(), muon.matrices[name].momentum.clone()
    weight.grad[3, 4] = math.nan
    muon.step(RATE, INF)
    assert torch.equal(weight, before)
    assert torch.equal(muon.matrices[name].momentum, momentum)
    weight.grad = None
    muon.step(RATE, ONE)
    assert torch.equal(weight, before)


def test_ranks_compute_all_blocks_between_them_and_each_once():
    class Rank(Workers):
        def add_up(self, tensor):
            parts.append(tensor.clone())

    torch.manual_seed(3)
    blocks, parts = torch.randn(7, 8, 16), []
    for rank in range(3):
        Muon({}, {}, {}, Rank(rank, 3))._orthogonal(blocks)
    assert [int(part.flatten(1).any(1).sum()) for part in parts] == [2, 2, 3]
    torch.testing.assert_close(sum(parts), polar(blocks))


def test_muon_takes_the_matrices_of_the_layers_and_adam_the_rest(tiny_data, tiny_config):
    optimization = make(tiny_data, tiny_config(optimizer="muon")).optimization
    expected = {n for n, p in zip(optimization.names, optimization.sources) if is_muons(n, p)}
    assert set(optimization.muon.matrices) == expected
    assert {n.rsplit(".", 2)[-2] for n in optimization.muon.matrices} >= {"linear1", "linear2", "self_attn", "out_proj"}
    assert not any("embedding" in n or "norm" in n or n.endswith("bias") for n in optimization.muon.matrices)
    adam = sum(p.numel() for group in optimization.adam.param_groups for p in group["params"])
    muon = sum(matrix.weight.numel() for matrix in optimization.muon.matrices.values())
    assert adam + muon == sum(p.numel() for p in optimization.parameters)
    assert not make(tiny_data, tiny_config()).optimization.muon.matrices


_OTHERS = {
    "adam for muon": ({}, {"optimizer": "muon"}, None, r"no muon\.momentum"),
    "muon for adam": ({"optimizer": "muon"}, {}, None, r"no use|no adam"),
    "no average": ({}, {"ema_decay": 0.9}, None, r"no raw\."),
    "an average": ({"ema_decay": 0.9}, {}, None, r"has raw\..*, for which this run has no use"),
    "a moment is lost": ({}, {}, "adam.exp_avg.", r"it has no adam\.exp_avg\."),
}


@pytest.mark.parametrize(("theirs", "ours", "lost", "message"), _OTHERS.values(), ids=_OTHERS)
def test_the_state_of_another_optimization_is_not_taken_for_this_ones(
    tiny_data, tiny_config, theirs, ours, lost, message
):
    given, taken = make(tiny_data, tiny_config(**theirs)), make(tiny_data, tiny_config(**ours))
    given.perform()
    tensors = given.tensors()
    if lost is not None:
        del tensors[next(name for name in tensors if name.startswith(lost))]
    with pytest.raises(ValueError, match=message):
        taken.load(tensors, given.values(0.0))
