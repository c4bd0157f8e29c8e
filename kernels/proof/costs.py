"""Cost model of each kernel as a function of shapes: FLOPs and bytes.

Bytes count every input read once and every output written once; rereads from a cache are free. With the peak rates of a
machine they give the lower bound on time that benchmarks compare with. Letters: B batch, H heads, L/S target/source
length, D head size, M rows, N columns, F hidden width, V vocabulary; size: bytes per element.
"""

from __future__ import annotations

from dataclasses import dataclass

_SINGLE = 4  # bytes of a float32


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one or more launches."""

    flops: int = 0
    """FLOPs of matrix products, two per multiply-add; pointwise work is not counted."""
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

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


def linear(M: int, N: int, F: int, size: int) -> Cost:
    """x (M, N) times weight (F, N), with bias in the epilogue."""
    return Cost(2 * M * N * F, size * (M * N + N * F + M * F))


def linear_backward(M: int, N: int, F: int, size: int, *, bias: bool) -> Cost:
    """Gradients of x and weight, and of the bias as a sum over dy."""
    return Cost(4 * M * N * F, size * (2 * (M * N + N * F + M * F) + M * F * bias))


def attention(B: int, H: int, L: int, S: int, D: int, size: int, *, causal: bool) -> Cost:
    """softmax(Q K^T) V in one launch: reads q, k, v, writes the output and a float32 log-sum-exp per row."""
    return Cost(4 * B * H * _scores(L, S, causal) * D, B * H * (size * D * (2 * L + 2 * S) + _SINGLE * L))


def attention_backward_short(B: int, H: int, L: int, S: int, D: int, size: int, *, causal: bool) -> Cost:
    """One launch: a program holds its whole row of keys and needs no output (delta comes from P * dP)."""
    return Cost(10 * B * H * _scores(L, S, causal) * D, B * H * (size * D * (3 * L + 4 * S) + _SINGLE * L))


def _scores(L: int, S: int, causal: bool) -> int:
    """Number of visible query-key pairs; causal: query i sees keys 0 to i."""
    return sum(min(i + 1, S) for i in range(L)) if causal else L * S


def layer_norm(M: int, N: int, size: int) -> Cost:
    """Reads x, writes y and two float32 statistics per row."""
    return Cost(0, 2 * size * M * N + 2 * _SINGLE * M)


def residual_layer_norm(M: int, N: int, size: int) -> Cost:
    """Reads x and residual, writes y, s and two float32 statistics per row."""
    return Cost(0, 4 * size * M * N + 2 * _SINGLE * M)


def residual_layer_norm_backward(M: int, N: int, size: int, *, dropout: bool) -> Cost:
    """Reads dy and s; writes dresidual and, with dropout, dx. Post-norm: a continuing stream would be read, too.

    The bytes of the partial sums of the parameter gradients are negligible.
    """
    return Cost(0, (3 + dropout) * size * M * N + 2 * _SINGLE * M)


def cross_entropy(M: int, V: int, size: int) -> Cost:
    """Reads the logits (a row stays in cache between its two passes) and overwrites them with their gradient."""
    return Cost(0, 2 * size * M * V + 2 * _SINGLE * M)


def embedding(M: int, N: int, size: int) -> Cost:
    """Copies a row of the table for every token; positions stay in cache."""
    return Cost(0, 2 * size * M * N + 8 * M)


def embedding_backward(M: int, N: int, V: int, size: int) -> Cost:
    """Reads dy and writes the gradient of the whole table."""
    return Cost(0, size * (M * N + V * N) + 8 * M)


def adam(parameters: int) -> Cost:
    """Reads weight, gradient and two moments, writes weight and moments, in float32."""
    return Cost(0, 7 * _SINGLE * parameters)
