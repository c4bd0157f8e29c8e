"""Attention's kernels on calls of one signature: what is decided once, and what is allocated and launched each time."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from fasttfm.functional.attention import bias_sums
from fasttfm.functional.attention.call import Call, gradient_memory, sinks_gradient

Outputs = tuple[Tensor | None, ...]


class _Reader:
    """Operands of a call, and what else its launches are given."""

    def __init__(self, call: Call, *, positive: bool = False) -> None:
        """positive: as Problems takes it."""
        from fasttfm.kernels.attention.launch import Packed, Problems, prepare

        given = (call.query, call.key, call.value)
        self._copied = any(x is not None and x.stride(-1) != 1 for x in given)
        self._negated = positive and call.scale < 0.0
        self._joint = call.key is None
        self._projected = call.value is None
        plain = not (self._copied or self._negated or self._projected)
        self.operands: Any = itemgetter(0, 1, 2) if plain else self._operands
        """Queries, keys and values of a call with unit stride in their last dimension, as views of where they begin."""
        heads = [call.by_head(x) for x in self.operands(call)]
        packed = None if call.sequences is None else Packed(*call.sequences)
        self.call = prepare(*heads, packed=packed, **call.options.arguments())
        masks = {"mask": call.mask, "slopes": call.slopes, "sinks": call.sinks}
        self.problem = Problems(self.call, call[5:8], **masks, positive=positive)

    def _operands(self, call: Call) -> tuple[Tensor, ...]:
        query, key, value = call[:3]
        if self._copied:
            query, key, value = (None if x is None else x.contiguous() for x in (query, key, value))  # type: ignore[assignment]
        if self._joint:
            query, key, value = query.unbind(-3)
        elif self._projected:
            key, value = key.unbind(-3)  # type: ignore[union-attr]
        return -query if self._negated else query, key, value  # type: ignore[return-value]

    def forget(self) -> None:
        """Let go of the tensors that it was made of."""
        del self.call


def forward(call: Call, memory: Callable[[Call], tuple[Tensor, Tensor]]) -> Callable[[Call], Outputs]:
    """memory: makes output and log-sum-exp."""
    from fasttfm.kernels.attention import forward as long_forward
    from fasttfm.kernels.attention import short

    reader = _Reader(call, positive=True)
    prepared, (output, lse) = reader.call, memory(call)
    heads = prepared.inputs[0].shape[1]
    of_rows = lse.expand(call.batch, -1, -1) if call.packed else lse
    plan: Any = short.Forward if call.route == "short" else long_forward.plan
    launch = plan(prepared, call.output_by_head(output, heads), of_rows)
    reader.forget()
    operands, problem = reader.operands, reader.problem

    def compute(call: Any) -> Outputs:
        output, lse = memory(call)
        launch(*operands(call), output, lse, problem(call[5:8], call[8:13], call.site))
        return output, lse, None

    return compute


def backward(grad: Tensor, mask_gradient: bool, saved: Any) -> Callable[[Any], Outputs]:
    """A function of the call of the backward operator."""
    from fasttfm.kernels.attention import backward as long_backward
    from fasttfm.kernels.attention import mask_gradient as kernel_of_masks
    from fasttfm.kernels.attention import short
    from fasttfm.kernels.launch import chip
    from fasttfm.kernels.partial_sums import Sums

    call, output, lse, _ = saved
    reader = _Reader(call)
    prepared = reader.call
    heads = prepared.inputs[0].shape[1]
    copied = grad.stride(-1) != 1
    row = call.output_by_head(grad.contiguous() if copied else grad, heads)
    output = call.output_by_head(output, heads)
    memory = gradient_memory(call)
    gradients = memory(call)
    written = call._replace(query=gradients[0], key=gradients[1], value=gradients[2])
    of_rows = lse.expand(call.batch, -1, -1) if call.packed else lse
    biases = {place: bias for place, bias in enumerate(call[3:5]) if bias is not None}
    count = call.batch if call.route == "short" or not call.packed else 1
    shapes, dtypes = [(count, bias.numel()) for bias in biases.values()], [bias.dtype for bias in biases.values()]
    sums = Sums([*biases], shapes, dtypes, chip(grad.device)) if biases else None
    of_sums = bias_sums.memory(call).of_heads() if biases and call.route == "short" else None
    if call.route == "short":
        launch: Any = short.backward(prepared, row, output, of_rows, written.heads, of_sums, packed=call.packed)
    else:
        launch = long_backward.Backward(prepared, row, output, of_rows, written.heads)
    masks: Any = None if not mask_gradient else kernel_of_masks.Gradient(prepared, row, of_rows, call.mask)
    reader.forget()
    joint, projected, biased, sunk = call.key is None, call.value is None, of_sums is not None, call.sinks is not None

    def compute(backward: Any) -> Outputs:
        grad, _, (call, output, lse, kept) = backward
        if copied:
            grad = grad.contiguous()
        operands, problem = reader.operands(call), reader.problem(call[5:8], call[8:13], call.site)
        gradients = memory(call)
        out: Any = gradients
        if joint:
            out = gradients[0].unbind(-3)
        elif projected:
            out = gradients[0], *gradients[1].unbind(-3)
        of_rows: Any = None
        if biased:
            of_rows = bias_sums.memory(call)
            launch(grad, *operands, output, lse, out, problem, of_rows.of_heads())
        else:
            launch(grad, *operands, output, lse, out, problem)
        d_mask = None
        if masks is not None:
            d_mask = masks(grad, *operands, output, lse, call.mask, problem)
        d_biases = (None, None) if sums is None else sums(of_rows or bias_sums.of_rows(call, gradients))
        return *gradients, *d_biases, d_mask, sinks_gradient(call, grad, output, lse, kept) if sunk else None

    return compute
