"""Encoder pass of a search on a CPU, fused into products and compiled passes.

Sentences join a running search a few at a time, and for a few rows of a small model the modules take longer than the
products. Here the rows of all sentences are computed together without padding; attention runs within each sentence.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.cpu import step_passes
from fasttfm.cpu.linear import frozen, linear
from fasttfm.cpu.step_passes import array
from fasttfm.functional.attention.api import packed_qkv_attention
from fasttfm.models.plain import EMBEDDING, NORM, STACK, plain_width, untouched

ENCODER_LOOP = 96
"""Longest sentence that attends in our own loop. One sentence, 8 heads of 64, two AMD EPYC cores with AVX2: 146 -> 18
us for 16 rows, 247 -> 176 for 64, but 434 -> 714 for 128. The last bits of a search depend on it."""

Norm = tuple[Any, Any, float]


def norm_arrays(norm: nn.LayerNorm) -> Norm:
    """Weight and bias (d,) as arrays, and eps."""
    return array(norm.weight), array(norm.bias), norm.eps


def norms_of(stack: Any) -> list[nn.LayerNorm]:
    """All norms of a stack, in parameter order."""
    names = ("norm1", "norm2", "norm3")
    norms = [getattr(layer, name) for layer in stack.layers for name in names if hasattr(layer, name)]
    return norms if stack.norm is None else [*norms, stack.norm]


def plain_stack(stack: Any, embedding: nn.Embedding, rows: Tensor) -> bool:
    """Return whether a fused pass is equivalent to these layers: frozen plain classes without hooks or wrappers.

    rows: a tensor with the device and dtype of the computation.
    """
    if not (frozen(rows) and untouched(stack, STACK) and len(stack.layers)):
        return False
    layers, norm = list(stack.layers), stack.norm
    return (
        all(plain_width(each) and each.activation is nn.functional.relu for each in layers)
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
    loops, team = step_passes.loops(), step_passes.team()
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
    norms = iter(map(norm_arrays, norms_of(model.encoder)))
    pre_norm = layers[0].norm_first
    x, stream = table.new_empty(count, width), table.new_empty(count, width)
    end = count, array(x), array(stream), None, None
    residual = array(stream if pre_norm else x)  # with post-norm x is the stream
    places = model.source_positions.rows(int(sizes.max()), table.device).detach().float().numpy()  # not for padding
    loops.embed(tokens.numpy(), array(table), places, positions.numpy(), width**0.5, model.config.pad_id, residual)
    if pre_norm:
        loops.add_layer_norm(team, array(torch.zeros_like(x)), None, None, residual, *next(norms), *end)
    sentences = _Sentences(sizes, heads, table.new_empty(count, width))
    for layer in layers:
        attention = layer.self_attn
        joined = sentences.attend(linear(x, attention.in_proj_weight, attention.in_proj_bias))
        y = linear(joined, attention.out_proj.weight, attention.out_proj.bias)
        loops.add_layer_norm(team, array(y), None, None, residual, *next(norms), *end)
        hidden = linear(x, layer.linear1.weight, layer.linear1.bias, relu=True)
        y = linear(hidden, layer.linear2.weight, layer.linear2.bias)
        loops.add_layer_norm(team, array(y), None, None, residual, *next(norms), *end)
    memory = table.new_zeros(batch, longest, width)
    memory[real] = x
    return memory


class _Sentences:
    """Packed sentences: short ones attend in one compiled loop, long ones each in a PyTorch kernel."""

    def __init__(self, sizes: Tensor, heads: int, out: Tensor) -> None:
        """sizes (B,) int64: sentence lengths. out (T, d): output buffer of attend()."""
        self.heads, self.out = heads, out
        firsts, short = sizes.cumsum(0) - sizes, sizes <= ENCODER_LOOP
        self._short = firsts[short].numpy(), sizes[short].numpy(), heads, array(out)
        self._long = list(zip(firsts[~short].tolist(), sizes[~short].tolist()))

    def attend(self, joint: Tensor) -> Tensor:
        """Attention output (T, d) of joint (T, 3 * d): queries, keys and values."""
        step_passes.loops().attend_within(step_passes.team(), array(joint), *self._short)
        for first, size in self._long:
            rows = slice(first, first + size)
            alone = joint[rows].view(1, size, 3, self.heads, -1)
            self.out[rows] = packed_qkv_attention(alone)[0]
        return self.out
