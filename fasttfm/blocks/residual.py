"""The residual connection and the norm beside it (Vaswani et al. 2017, section 5.4), in both orders.

    post-norm   x' = LayerNorm(x + dropout(Sublayer(x)))      the paper
    pre-norm    x' = x + dropout(Sublayer(LayerNorm(x)))      tensor2tensor

A stream takes both as

    y, x = x.branch(norm)              what the sub-layer reads
    x = x.join(sublayer(y), norm, dropout)

for one sub-layer after the other, and each addition is one pass with the LayerNorm that reads it: its own, or with
pre-norm that of the next sub-layer, for which the addition waits. Where a kernel takes that pass it also adds the bias
of the product before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.blocks.forward_pass import ALONE, Pass
from fasttfm.blocks.inspect import LINEAR, NORM, untouched
from fasttfm.cpu.linear import linear
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.merging import norm_adds_bias
from fasttfm.functional.subclasses import ordinary


class Output(NamedTuple):
    """Result of a sub-layer."""

    value: Tensor
    """(..., N)."""
    bias: Tensor | None = None
    """(N,): of the last product, where the norm that follows is to add it."""

    def whole(self) -> Tensor:
        """The output with its bias."""
        return self.value if self.bias is None else self.value + self.bias


class Residual(NamedTuple):
    """The stream that sub-layers read from and add to."""

    stream: Tensor
    """(..., N): what the next output is added to."""
    norm_first: bool
    """Pre-norm."""
    normed: Tensor | None = None
    """Post-norm: what the next sub-layer reads, (..., N). It equals stream, and has a gradient of its own."""
    waiting: tuple[Output, Any] | None = None
    """Pre-norm: an output that is still to be added, and its dropout."""
    ends_bare: bool = False
    """Pre-norm: no norm follows the layer's last output, which therefore keeps its bias."""
    now: Pass = ALONE
    """What its stack tells the layer."""

    @classmethod
    def of(cls, x: Tensor | Residual, norm_first: bool) -> Residual:
        """The stream that begins with x (..., N); a stream stays what it is."""
        return x if isinstance(x, Residual) else cls(x, norm_first, None if norm_first else x, None, norm_first)

    def branch(self, norm: Any) -> tuple[Tensor, Residual]:
        """Return the input of norm's sub-layer (..., N), and the stream that its output is joined to."""
        if self.normed is not None:
            return self.normed, self
        if self.waiting is None:
            y, stream = _begin(self.stream, norm, self.now)
        else:
            output, dropout = self.waiting
            y, stream = _add_and_normalise(output, self.stream, norm, dropout, self.now, post_norm=False)
        return y, Residual(stream, True, None, None, self.ends_bare, self.now)

    def join(self, output: Output, norm: Any, dropout: Dropout | nn.Module) -> Residual:
        """The stream with a sub-layer's output added; norm is the sub-layer's own."""
        if self.norm_first:
            return Residual(self.stream, True, None, (output, dropout), self.ends_bare, self.now)
        y, stream = _add_and_normalise(output, self.stream, norm, dropout, self.now, post_norm=True)
        return Residual(stream, False, y, None, False, self.now)

    def through(self, *sublayers: tuple[Callable[[Tensor], Output], Any, Dropout | nn.Module]) -> Residual:
        """The stream after a layer's sub-layers, in order: what computes one's output from what it reads, its norm, and
        the dropout of its output."""
        stream = self
        for sublayer, norm, dropout in sublayers:
            y, stream = stream.branch(norm)  # (..., N)
            stream = stream.join(sublayer(y), norm, dropout)
        return stream

    def value(self, norm: Any = None) -> Tensor:
        """Return the end of the stream, (..., N); with the final norm of a pre-norm stack, its output."""
        if norm is not None:
            return self.branch(norm)[0]
        if self.normed is not None:
            return self.normed
        return self.stream if self.waiting is None else _add(self.waiting[0].whole(), self.stream, self.waiting[1])

    def like(self, x: Tensor | Residual) -> Any:
        """The stream where one was given, its value where a tensor was given."""
        return self if isinstance(x, Residual) else self.value()


def last_product(x: Tensor, module: Any, *, leave_bias: bool = True, now: Pass = ALONE) -> Output:
    """module(x), the linear layer that a sub-layer ends in; its bias is left to the norm where that can add it."""
    if not (now.plain or (untouched(module, LINEAR) and ordinary(x, module.weight, module.bias))):
        return Output(module(x))
    return linear_output(x, *now.read(module.weight, module.bias), leave_bias=leave_bias and now.choice != "torch")


def linear_output(x: Tensor, weight: Tensor, bias: Tensor | None, *, leave_bias: bool = True) -> Output:
    """last_product() of the parameters themselves, for callers that read them without calling their module."""
    if bias is not None and leave_bias and norm_adds_bias(x):
        return Output(linear(x, weight), bias)
    return Output(linear(x, weight, bias))


def _fuses(norm: Any, stream: Tensor) -> bool:
    """Return whether the operators may read the norm's parameters instead of calling it."""
    return untouched(norm, NORM) and len(norm.normalized_shape) == 1 and ordinary(stream, norm.weight, norm.bias)


def _begin(x: Tensor, norm: Any, now: Pass) -> tuple[Tensor, Tensor]:
    """(norm(x), x), both gradients in one pass."""
    if (now.plain or _fuses(norm, x)) and norm.normalized_shape == tuple(x.shape[-1:]) and x.is_floating_point():
        weight, bias = now.read(norm.weight, norm.bias)
        return F.branch_layer_norm(x, weight, bias, norm.eps)
    return norm(x), x


def _add_and_normalise(
    output: Output, stream: Tensor, norm: Any, dropout: Any, now: Pass, *, post_norm: bool
) -> tuple[Tensor, Tensor]:
    """s = stream + dropout(output) and y = norm(s). Returns y and the next stream: s, or with post_norm y once more, so
    that the gradients of its two uses meet in one pass. Under autocast y has output's dtype, the stream keeps its own.
    """
    if now.plain or (isinstance(dropout, Dropout) and _fuses(norm, stream) and ordinary(output.value)):
        weight, bias = (norm.weight, norm.bias) if now.weights is None else now.read(norm.weight, norm.bias)
        return F.residual_layer_norm(
            output.value, stream, weight, bias, norm.eps, x_bias=output.bias, post_norm=post_norm, **dropout.options()
        )
    s = _add(output.whole(), stream, dropout)
    y = norm(s)
    return y, y if post_norm else s


def _add(output: Tensor, stream: Tensor, dropout: Any) -> Tensor:
    """stream + dropout(output)."""
    if isinstance(dropout, Dropout):
        if ordinary(output, stream):
            return F.residual_add(output, stream, **dropout.options())
        return stream + nn.functional.dropout(output, dropout.dropout_p)
    return stream + dropout(output)
