"""Attention on packed projections with the gradients of their biases, which a layer's plan takes from the operator."""

import torch

from fasttfm.functional import backends
from fasttfm.functional.attention.operator import OPERATOR
from fasttfm.functional.operator import Inner


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(ctx, options, query, key, *biases):
        ctx.inner, ctx.count = Inner(OPERATOR), len(biases)
        outputs, ctx.saved = ctx.inner(query, key, None, *options, backends.current)
        return outputs[0]

    @staticmethod
    def backward(ctx, grad):
        key, into = ctx.saved.call.key, None
        if key is not None:  # its gradient is a part of wider memory
            into = key.new_full((*key.shape[:-3], 3, *key.shape[-3:]), float("nan")).select(-4, 1)
        d_query, d_key, _, *d_biases = ctx.inner.backward(grad, False, torch.float32, into, ctx.saved)[:5]
        assert d_key is into
        rows = 1 if ctx.saved.call.packed else 2
        for n, d in enumerate((d_query, d_key)[: ctx.count]):
            if d_biases[n] is None:  # no kernel has summed it
                d_biases[n] = d.flatten(0, rows - 1).sum(0).flatten()
        return None, d_query, d_key, *d_biases[: ctx.count]


def biased_attention(query, key=None, *, biases, lengths=None, starts=None, longest=0, causal=False, p=0.0, seed=None):
    """The joined heads; query and key as the operator takes packed projections, which have added the biases already."""
    options = (
        lengths, starts, starts, None, None, None, None, seed, longest, longest, causal, 0, -1, 0.0, 0, p,
        query.shape[-1] ** -0.5, 0, False, False,
    )  # fmt: skip
    return _Biased.apply(options, query, key, *biases)
