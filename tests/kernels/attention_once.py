"""Decoding, appending and the gradient of a mask, planned and launched in one call, like attention/once.py."""

from fasttfm.kernels.attention import mask_gradient
from fasttfm.kernels.attention.decode import Append, Decode
from fasttfm.kernels.attention.launch import unit
from fasttfm.kernels.attention.once import prepared


def gradient_of_mask(grad, query, key, value, output, lse, mask, **options):
    """The gradient of an additive mask, in its shape and dtype; other arguments as for once.backward()."""
    call, problem = prepared(query, key, value, options | {"mask": mask})
    grad = unit(grad)
    return mask_gradient.Gradient(call, grad, lse, mask)(grad, *call.inputs, output, lse, mask, problem)


def decode(query, key_cache, value_cache, lengths, starts, block_table, *, slopes=None, sinks=None, **scoring):
    """Attention over cached keys; arguments of Decode."""
    tensors = query, key_cache, value_cache
    plan = Decode(*tensors, block_table, slopes=slopes, sinks=sinks, **scoring)
    return plan(*tensors, lengths, starts, block_table, slopes, sinks)


def append(cache, x, lengths, block_table):
    """Writes x to the cache; arguments of Append."""
    Append(cache, x, block_table)(cache, x, lengths, block_table)
