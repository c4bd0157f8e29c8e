"""Cost model of each kernel as a function of shapes: FLOPs, bytes, launches, Philox blocks.

Bytes count every input read once and every output written once; rereads from a cache are free. With the peak rates of a
machine they give the lower bound on time that benchmarks compare with. Letters: B batch, H heads, L/S target/source
length, D head size, M rows, N columns, F hidden width, V vocabulary; size: bytes per element.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass

_SINGLE = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one or more launches."""

    flops: int = 0
    """FLOPs of matrix products, two per multiply-add; pointwise work is not counted."""
    bytes: int = 0
    launches: int = 0
    philox: int = 0
    """Philox blocks drawn, of 16 bytes each."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, astuple(self), astuple(other)))

    def __mul__(self, times: int) -> Cost:
        return Cost(*(times * value for value in astuple(self)))

    def seconds(self, machine: Machine) -> float:
        """Lower bound on the time on a machine, set by its busier resource."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth)


@dataclass(frozen=True, slots=True)
class Machine:
    """Sustained rates of a device, not those of its data sheet."""

    flops: float
    """FLOP/s of matrix products, by default in half precision."""
    bandwidth: float
    """Bytes per second."""


H200 = Machine(flops=790e12, bandwidth=4.3e12)
"""Published rates of large cuBLAS products and copies."""


def _blocks(rows: int, columns: int, held: int = 8) -> int:
    """Philox blocks drawn if a thread holds `held` consecutive columns of a block's 16: 8 in row-wise kernels, which
    load 16 bytes of half precision; 16 if two threads exchange halves."""
    return rows * -(-columns // held)


def _held(keys: int) -> int:
    """Consecutive keys per thread in attention scores (philox.spread)."""
    return 16 if keys > 32 else 8 if keys > 16 else 4


def linear(M: int, N: int, F: int, size: int) -> Cost:
    """x (M, N) times weight (F, N), with bias in the epilogue."""
    return Cost(2 * M * N * F, size * (M * N + N * F + M * F), 1)


def linear_backward(M: int, N: int, F: int, size: int, *, bias: bool) -> Cost:
    """Gradients of x and weight, and of the bias as a sum over dy."""
    products = Cost(4 * M * N * F, 2 * size * (M * N + N * F + M * F), 2)
    return products + Cost(0, size * M * F, 1) if bias else products


def attention(B: int, H: int, L: int, S: int, D: int, size: int, *, causal: bool, dropout: bool) -> Cost:
    """softmax(Q K^T) V in one launch: reads q, k, v, writes the output and a float32 log-sum-exp per row."""
    scores = _scores(L, S, causal)
    return Cost(
        flops=4 * B * H * scores * D,
        bytes=B * H * (size * D * (2 * L + 2 * S) + _SINGLE * L),
        launches=1,
        philox=B * H * _blocks(L, S, _held(S)) if dropout else 0,
    )


def attention_backward_short(B: int, H: int, L: int, S: int, D: int, size: int, *, causal: bool, dropout: bool) -> Cost:
    """One launch: a program holds its whole row of keys and needs no output (delta comes from P * dP)."""
    return Cost(
        flops=10 * B * H * _scores(L, S, causal) * D,
        bytes=B * H * (size * D * (3 * L + 4 * S) + _SINGLE * L),
        launches=1,
        philox=B * H * _blocks(L, S, 16) if dropout else 0,
    )


def _scores(L: int, S: int, causal: bool) -> int:
    """Number of visible query-key pairs; causal: query i sees keys 0 to i."""
    return sum(min(i + 1, S) for i in range(L)) if causal else L * S


def layer_norm(M: int, N: int, size: int) -> Cost:
    """Reads x, writes y and two float32 statistics per row."""
    return Cost(0, 2 * size * M * N + 2 * _SINGLE * M, 1)


def residual_layer_norm(M: int, N: int, size: int, *, dropout: bool) -> Cost:
    """Reads x and residual, writes y, s and two float32 statistics per row."""
    return Cost(0, 4 * size * M * N + 2 * _SINGLE * M, 1, _blocks(M, N) if dropout else 0)


def residual_layer_norm_backward(M: int, N: int, size: int, *, dropout: bool) -> Cost:
    """Reads dy and s; writes dresidual and, with dropout, dx. Post-norm: a continuing stream would be read, too.

    A second launch adds the partial sums of the parameter gradients, whose bytes are negligible.
    """
    return Cost(0, (3 + dropout) * size * M * N + 2 * _SINGLE * M, 2, _blocks(M, N) if dropout else 0)


def cross_entropy(M: int, V: int, size: int) -> Cost:
    """Reads the logits (a row stays in cache between its two passes) and overwrites them with their gradient."""
    return Cost(0, 2 * size * M * V + 2 * _SINGLE * M, 1)


def embedding(M: int, N: int, size: int, *, dropout: bool) -> Cost:
    """Copies a row of the table for every token; positions stay in cache."""
    return Cost(0, 2 * size * M * N + 8 * M, 1, _blocks(M, N, 16) if dropout else 0)


def embedding_backward(M: int, N: int, V: int, size: int, *, dropout: bool) -> Cost:
    """Reads dy and writes the gradient of the whole table."""
    return Cost(0, size * (M * N + V * N) + 8 * M, 1, _blocks(M, N, 16) if dropout else 0)


def adam(parameters: int) -> Cost:
    """Reads weight, gradient and two moments, writes weight and moments, in float32."""
    return Cost(0, 7 * _SINGLE * parameters, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Transformer that its cost depends on."""

    d_model: int
    heads: int
    d_ff: int
    vocabulary: int
    layers: int = 6
    """Layers of the encoder, and as many of the decoder."""


def training_step(shape: Shape, *, tokens: int, length: int, size: int) -> dict[str, list[Cost]]:
    """Costs by part of one training step of a post-norm model, without padding.

    tokens: number of source tokens, and as many target tokens; length: tokens per sentence. Dropout as in the paper, on
    sub-layers and embeddings. size: bytes per element; Adam works on float32.
    """
    d, layers = shape.d_model, shape.layers
    sentences = (tokens // length, shape.heads, length, length, d // shape.heads, size)

    def product(inputs: int, outputs: int, *, bias: bool = True) -> list[Cost]:
        return [linear(tokens, inputs, outputs, size), linear_backward(tokens, inputs, outputs, size, bias=bias)]

    attend = [
        attention(*sentences, causal=False, dropout=False),  # a causal tile of this length is computed whole
        attention_backward_short(*sentences, causal=False, dropout=False),
    ]
    join = [
        residual_layer_norm(tokens, d, size, dropout=True),
        residual_layer_norm_backward(tokens, d, size, dropout=True),
    ]
    embed = [
        embedding(tokens, d, size, dropout=True),
        embedding_backward(tokens, d, shape.vocabulary, size, dropout=True),
    ]
    self_attention, cross_attention = product(d, 3 * d) + product(d, d), product(d, d) + product(d, 2 * d)
    return {
        "logits and cross entropy": [
            *product(d, shape.vocabulary, bias=False),
            cross_entropy(tokens, shape.vocabulary, size),
        ],
        "attention": 3 * layers * attend,
        "residual, dropout, LayerNorm": 5 * layers * join,
        "FFN": 2 * layers * (product(d, shape.d_ff) + product(shape.d_ff, d)),
        "projections": layers * (2 * self_attention + cross_attention + product(d, d)),
        "Adam and embedding": [adam(parameters(shape)), *embed, *embed],
    }


def parameters(shape: Shape) -> int:
    """Weights of a model with one shared embedding table; biases and norms are negligible."""
    d = shape.d_model
    return shape.vocabulary * d + shape.layers * (12 * d * d + 4 * d * shape.d_ff)
