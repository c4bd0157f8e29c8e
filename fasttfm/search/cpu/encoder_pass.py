"""Encoder pass of a search on a CPU, fused into products and compiled passes.

Sentences join a running search a few at a time, and for a few rows of a small model the modules take longer than the
products. Here the rows of all sentences are computed together without padding; attention runs within each sentence.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fasttfm.cpu import step_passes
from fasttfm.cpu.linear import FrozenLinear, first_of, frozen, frozen_in_int8
from fasttfm.cpu.step_passes import array
from fasttfm.functional.attention.api import packed_qkv_attention
from fasttfm.models.plain import EMBEDDING, NORM, STACK, fused_activation, plain_width, untouched
from fasttfm.search.cpu.buffers import AtOnce, Buffer, Norm, hidden_of, kept_of, norms_of

ENCODER_LOOP = 96
"""Longest sentence that attends in our own loop. One sentence, 8 heads of 64, two AMD EPYC cores with AVX2: 146 -> 18
us for 16 rows, 247 -> 176 for 64, but 434 -> 714 for 128. The last bits of a search depend on it."""


def plain_stack(stack: Any, embedding: nn.Embedding, rows: Tensor) -> bool:
    """Return whether a fused pass is equivalent to these layers: frozen plain classes without hooks or wrappers.

    rows: a tensor with the device and dtype of the computation.
    """
    if not (frozen(rows) and untouched(stack, STACK) and len(stack.layers)):
        return False
    layers, norm = list(stack.layers), stack.norm
    return (
        all(plain_width(each) and fused_activation(each.activation) for each in layers)
        and len({(each.norm_first, each.self_attn.num_heads, each.linear1.weight.shape) for each in layers}) == 1
        and layers[0].norm_first == (norm is not None)
        and all(each.weight is not None and each.bias is not None for each in norms_of(stack))
        and (norm is None or untouched(norm, NORM))
        and untouched(embedding, EMBEDDING)
        and not embedding.max_norm
        and {each.dtype for each in (*stack.parameters(), embedding.weight)} == {rows.dtype}
        and not torch.is_autocast_enabled("cpu")
    )


def fuses_encoder(model: Any, rows: Tensor) -> bool:
    """Return whether encode() is equivalent to the model's modules."""
    plain = plain_stack(model.encoder, model.source_embedding, rows)
    return plain and not any(each.causal for each in model.encoder.layers)


def encode(model: Any, source: Tensor, lengths: Tensor | None) -> Tensor:
    """Encoder output (B, S, d) of source (B, S) with lengths (B,), if fuses_encoder().

    A sentence's rows depend on that sentence alone. Padding rows are zero and not computed. Raises ValueError for a
    token that the model does not have.
    """
    loops = step_passes.loops()
    batch, longest = source.shape
    sizes = torch.full((batch,), longest, device="cpu") if lengths is None else lengths.long()
    positions = torch.arange(longest, device="cpu")
    real = positions < sizes[:, None]  # (B, S)
    tokens, positions = source[real], positions.expand(batch, -1)[real]  # (T,)
    table, layers = model.source_embedding.weight, model.encoder.layers
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < len(table):  # the loop reads them unchecked
        raise ValueError(
            f"source tokens reach from {int(tokens.min())} to {int(tokens.max())}: the model has 0 to {len(table) - 1}"
        )

    count, width, heads = len(tokens), table.shape[1], layers[0].self_attn.num_heads
    products, first, norms = kept_of(model, model.encoder, _layers)
    pre_norm, int8, hidden_width = layers[0].norm_first, frozen_in_int8(), len(layers[0].linear1.weight)
    now = AtOnce()
    x, joined = (Buffer.new(count, width, table.dtype, int8) for _ in range(2))
    hidden = Buffer.new(count, hidden_width if int8 else 1, table.dtype, int8)
    stream = table.new_empty(count, width)
    sums, more_sums = (table.new_empty(count * each) for each in (max(3 * width, hidden_width), width))
    end = count, x.arrays[0], array(stream), *x.arrays[1:]
    residual = array(stream) if pre_norm else x.arrays[0]  # with post-norm x is the stream
    places = model.source_positions.rows(int(sizes.max()), table.device).detach().float().numpy()  # not for padding
    now.add(
        loops.embed, tokens.numpy(), array(table), places, positions.numpy(), width**0.5, model.config.pad_id, residual
    )
    if first is not None:
        now.add(loops.add_layer_norm, np.zeros_like(residual), None, None, residual, *first, *end)
    elif int8:
        now.add(loops.quantize_rows, *x.arrays)
    attend = _Sentences(sizes, heads, joined.values)
    for (joint, output, expand, activation, contract), (norm1, norm2) in zip(products, norms):
        joint_rows = first_of(sums, count, 3 * width)
        joint.add_to(now, x.operand, joint_rows, x.scales)
        attend(joint_rows)
        if int8:
            now.add(loops.quantize_rows, *joined.arrays)
        y = output.add_to(now, joined.operand, first_of(more_sums, count, width))
        now.add(loops.add_layer_norm, y, joined.scales, output.bias, residual, *norm1, *end)
        between = first_of(sums, count, hidden_width)
        y = expand.add_to(now, x.operand, between, x.scales)
        if activation is not None:
            now.add(loops.activate, y, activation)
        if int8:
            now.add(loops.quantize_rows, y, *hidden.arrays[1:])
        y = contract.add_to(now, hidden.operand if int8 else between, first_of(more_sums, count, width))
        now.add(loops.add_layer_norm, y, hidden.scales, contract.bias, residual, *norm2, *end)
    memory = table.new_zeros(batch, longest, width)
    memory[real] = x.values
    return memory


def _layers(stack: Any, norms: list[Norm]) -> tuple[list[tuple[Any, ...]], Norm | None, list[list[Norm]]]:
    """Products of each layer and its activation, the norm before the first one if any, and two norms of each layer, in
    order of use."""
    products = [
        (
            FrozenLinear(each.self_attn.in_proj_weight, each.self_attn.in_proj_bias),
            FrozenLinear(each.self_attn.out_proj.weight, each.self_attn.out_proj.bias),
            *hidden_of(each),
            FrozenLinear(each.linear2.weight, each.linear2.bias),
        )
        for each in stack.layers
    ]
    first = norms.pop(0) if stack.layers[0].norm_first else None
    return products, first, [norms[n : n + 2] for n in range(0, len(norms), 2)]


class _Sentences:
    """Attention within packed sentences: of short ones in one compiled loop, of long ones each in a PyTorch kernel."""

    def __init__(self, sizes: Tensor, heads: int, out: Tensor) -> None:
        """sizes (B,) int64: sentence lengths. out (T, d): where results go."""
        self._heads, self._out = heads, out
        firsts, short = sizes.cumsum(0) - sizes, sizes <= ENCODER_LOOP
        self._short = firsts[short].numpy(), sizes[short].numpy(), heads, array(out)
        self._long = list(zip(firsts[~short].tolist(), sizes[~short].tolist()))

    def __call__(self, joint: Tensor) -> None:
        """Write the output for joint (T, 3 * d): queries, keys and values."""
        step_passes.loops().attend_within(step_passes.team(), array(joint), *self._short)
        for first, size in self._long:
            rows = slice(first, first + size)
            alone = joint[rows].view(1, size, 3, self._heads, -1)
            self._out[rows] = packed_qkv_attention(alone)[0]
