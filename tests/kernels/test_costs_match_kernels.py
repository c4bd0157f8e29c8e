"""The cost model against the memory accesses, products and random numbers of the kernels in the interpreter."""

import contextlib
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from search_step import a_step, attend

from fasttfm import functional as F
from fasttfm.functional import backend
from fasttfm.kernels import search
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.launch_log import LaunchLog

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")


@dataclass
class Traffic:
    """Counts of the kernels launched in a block."""

    loaded: int = 0
    """Bytes of unmasked elements, counted at every load."""
    stored: int = 0
    flops: int = 0
    """Of tl.dot, tile by tile."""
    mixed: int = 0
    """Multiplications of Philox: at most 14 per block, whose first rounds are shared."""

    @property
    def bytes(self) -> int:
        return self.loaded + self.stored

    def drew(self, blocks: int) -> bool:
        """True if this number of Philox blocks agrees with the multiplications."""
        return self.mixed / 14 <= blocks <= self.mixed / 8


@contextlib.contextmanager
def traffic():
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    seen = Traffic()

    def size(pointers, mask):
        return int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8

    def load(self, pointers, mask, *rest, run=Builder.create_masked_load):
        seen.loaded += size(pointers, mask)
        return run(self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest, run=Builder.create_masked_store):
        seen.stored += size(pointers, mask)
        return run(self, pointers, value, mask, *rest)

    def dot(self, a, b, *rest, run=Builder.create_dot):
        seen.flops += 2 * a.data.shape[-2] * a.data.shape[-1] * b.data.shape[-1]
        return run(self, a, b, *rest)

    def high(self, a, b, run=Builder.create_umulhi):
        result = run(self, a, b)
        seen.mixed += result.data.size
        return result

    counting = {"create_masked_load": load, "create_masked_store": store, "create_dot": dot, "create_umulhi": high}
    with mock.patch.multiple(Builder, **counting), backend("triton"):
        yield seen


def tensor(*shape):
    return torch.randn(shape, requires_grad=True)


def backward(function, *inputs):
    """Traffic and launches of the gradients alone."""
    with backend("triton"):
        output = function(*inputs)
        output = output if isinstance(output, torch.Tensor) else output[0]
    with traffic() as seen, LaunchLog() as log:
        torch.autograd.grad(output, inputs, torch.ones_like(output))
    return seen, log


SEED = torch.tensor([3])


@pytest.mark.parametrize("dropout", [False, True])
def test_residual_layer_norm(dropout):
    rows, width = 256, 512
    inputs = (tensor(rows, width), tensor(rows, width), tensor(width), tensor(width))

    def run(*t):
        return F.residual_layer_norm(*t, dropout_p=0.1 if dropout else 0.0, seed=SEED)

    cost = costs.residual_layer_norm(rows, width, 4, dropout=dropout)
    with traffic() as seen:
        run(*inputs)
    # not in the model: weight and bias, once per program
    assert cost.bytes <= seen.bytes <= 1.3 * cost.bytes
    assert seen.drew(cost.philox)

    cost = costs.residual_layer_norm_backward(rows, width, 4, stream=False, dropout=dropout)
    seen, log = backward(run, *inputs)
    # not in the model: weight, and the partial sums of its gradient, which do not depend on the number of rows
    assert cost.bytes <= seen.bytes <= 2 * cost.bytes
    assert seen.drew(cost.philox)
    assert log.triton.total() == cost.launches


def test_layer_norm():
    rows, width = 256, 512
    cost = costs.layer_norm(rows, width, 4)
    with traffic() as seen:
        F.layer_norm(tensor(rows, width), tensor(width), tensor(width))
    assert cost.bytes <= seen.bytes <= 1.6 * cost.bytes
    assert seen.mixed == 0


@pytest.mark.parametrize("dropout", [False, True])
def test_attention_over_short_rows(dropout):
    sizes = (2, 2, 32, 32, 32)
    q, k, v = (tensor(2, 2, 32, 32) for _ in range(3))

    def run(q, k, v):
        return F.attention(q, k, v, dropout_p=0.1 if dropout else 0.0, seed=SEED)

    cost = costs.attention(*sizes, 4, causal=False, dropout=dropout)
    with traffic() as seen, LaunchLog() as log:
        run(q, k, v)
    assert cost.bytes <= seen.bytes <= 1.5 * cost.bytes  # keys and values once per tile of queries
    assert seen.flops == cost.flops
    assert seen.drew(cost.philox)
    assert log.triton.total() == cost.launches

    cost = costs.attention_backward_short(*sizes, 4, causal=False, dropout=dropout)
    seen, log = backward(run, q, k, v)
    assert cost.bytes <= seen.bytes <= 1.1 * cost.bytes
    assert seen.flops == cost.flops
    assert seen.drew(cost.philox)
    assert log.triton.total() == cost.launches


def test_attention_over_long_rows():
    sizes = (1, 1, 256, 256, 32)
    q, k, v = (tensor(1, 1, 256, 32) for _ in range(3))
    once = costs.attention_backward_short(*sizes, 4, causal=False, dropout=False)
    seen, log = backward(F.attention, q, k, v)
    assert seen.flops == 7 * once.flops / 5  # the scores and their gradient twice
    assert seen.bytes >= once.bytes  # each tile of queries rereads all keys, from the cache of a chip
    assert log.triton.total() == 2


def test_attention_of_a_beam_search_step():
    heads, step = 2, a_step([35, 0, 7], width=32)
    with traffic() as seen, LaunchLog() as log:
        attend(*step, heads=heads)
    past = step[3].repeat_interleave(3).tolist()
    cost = costs.attention_over_ancestors(past, heads, 32, 4)
    # not in the model: places for every head, and the position of each program
    assert seen.bytes == cost.bytes + 8 * (heads - 1) * sum(past) + 8 * heads * len(past)
    assert log.triton.total() == cost.launches


def test_cross_entropy_in_place():
    rows, vocabulary = 8, 1024
    cost = costs.cross_entropy(rows, vocabulary, 4)
    logits, target = torch.randn(rows, vocabulary), torch.arange(rows)
    with traffic() as seen, LaunchLog() as log:
        F.cross_entropy(logits.requires_grad_().clone(), target, inplace=True)
    assert cost.bytes <= seen.bytes <= 1.02 * cost.bytes
    assert log.triton.total() == cost.launches


def test_embedding():
    batch, length, width = 2, 16, 256
    cost = costs.embedding(batch * length, width, 4, dropout=True)
    tokens, weight = torch.randint(50, (batch, length)), tensor(50, width)
    with traffic() as seen:
        F.embed(tokens, weight, dropout_p=0.1, seed=SEED)
    assert cost.bytes <= seen.bytes <= 1.1 * cost.bytes
    assert seen.drew(cost.philox)


def test_selection_in_a_beam_search_step():
    sizes = search.Sizes(S=2, K=2, N=2, T=9, Q=2, V=3000)
    shares = search.new_shares(sizes, torch.device("cpu"))
    long, single = {name: torch.zeros(64, dtype=torch.int64) for name in search.Memory._fields}, torch.zeros(64)
    memory = search.Memory(**long | {name: single.clone() for name in long if "score" in name})._replace(
        sentence=torch.tensor([0, 1]), divisors=torch.ones(64), found_log_probabilities=single.clone()
    )
    logits, refused = torch.randn(4, 3000), torch.zeros(3000, dtype=torch.bool)
    cost = costs.search_step(4, 3000, *shares.logits.shape[1:], 4)
    with traffic() as seen, LaunchLog() as log:
        search.Likeliest(logits, refused, sizes, 3)(memory, logits, refused, None, shares)
        search.Choose(sizes, shares, 3)(memory, shares)
    assert cost.bytes <= seen.bytes <= 1.3 * cost.bytes  # refused tokens, once per row
    assert log.triton.total() == cost.launches
