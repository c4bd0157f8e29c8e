"""Plans of attention's kernels: one signature's launches, and the allocations and launches of each call."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.attention.call import Call, Options, Saved, gradient_memory, sinks_gradient

Outputs = tuple[Tensor | None, ...]


def _prepared(call: Call, *, positive: bool = False) -> tuple[Any, Callable[[Any], tuple], Any]:
    """Prepare the launches of calls like this one; positive: as in Problems.

    Returns the kernels' call; a reader of a call's queries, keys and values, with unit stride in the last dimension;
    and Problems.
    """
    from fasttfm.kernels.attention.launch import Problems, prepare

    copied, negated = any(x is not None and x.stride(-1) != 1 for x in call[:3]), positive and call.scale < 0.0
    count = sum(x is not None for x in call[:3])

    def operands(call: Any) -> tuple:
        query, key, value = call[:3]
        if copied:
            query, key, value = (None if x is None else x.contiguous() for x in (query, key, value))
        if count == 1:
            query, key, value = query.unbind(-3)
        elif count == 2:
            key, value = key.unbind(-3)
        return -query if negated else query, key, value

    read = itemgetter(0, 1, 2) if count == 3 and not (copied or negated) else operands
    options = {name: getattr(call, name) for name in Options._fields}
    prepared = prepare(*map(call.by_head, read(call)), packed=call.sequences, **options)
    masks = {"mask": call.mask, "slopes": call.slopes, "sinks": call.sinks}
    return prepared, read, Problems(prepared, call[3:6], **masks, positive=positive)


def forward(call: Call, memory: Callable[[Call], tuple[Tensor, Tensor]]) -> Callable[[Call], Outputs]:
    """Plan a forward pass; memory allocates the output and the log-sum-exp."""
    from fasttfm.kernels.attention import forward as long_forward
    from fasttfm.kernels.attention import short

    prepared, operands, problem = _prepared(call, positive=True)
    output, lse = memory(call)
    heads = prepared.inputs[0].shape[1]
    of_rows = lse.expand(call.batch, -1, -1) if call.packed else lse
    plan: Any = short.Forward if call.backend == "short" else long_forward.plan
    launch = plan(prepared, call.output_by_head(output, heads), of_rows)

    def compute(call: Any) -> Outputs:
        output, lse = memory(call)
        launch(*operands(call), output, lse, problem(call[3:6], call[6:11], call.site))
        return output, lse, None, None

    return compute


def bias_rows(call: Call) -> tuple[Tensor, Tensor | None]:
    """Allocate float32 partial sums of the bias gradients of packed projections, one per batch row: query's, key's."""
    query, key = call[:2]
    shape = (call.batch, *query.shape[-3 if key is None else -2 :])
    key_rows = None if key is None else key.new_empty((call.batch, *key.shape[-3:]), dtype=torch.float32)
    return query.new_empty(shape, dtype=torch.float32), key_rows


def backward(
    grad: Tensor, mask_gradient: bool, bias_dtype: torch.dtype | None, d_key: Tensor | None, saved: Saved
) -> Callable[[Any], Outputs]:
    """Plan a backward pass, as a function of a call of the backward operator."""
    from fasttfm.kernels.attention import backward as long_backward
    from fasttfm.kernels.attention import mask_gradient as kernel_of_masks
    from fasttfm.kernels.attention import short
    from fasttfm.kernels.launch import chip
    from fasttfm.kernels.partial_sums import Sums

    call, output, lse, *_ = saved
    prepared, read, problem_of = _prepared(call)
    heads = prepared.inputs[0].shape[1]
    copied = grad.stride(-1) != 1
    row = call.output_by_head(grad.contiguous() if copied else grad, heads)
    output = call.output_by_head(output, heads)  # type: ignore[arg-type]
    memory = gradient_memory(call)
    gradients = memory(call, d_key)
    written = call._replace(query=gradients[0], key=gradients[1], value=gradients[2])
    of_rows = lse.expand(call.batch, -1, -1) if call.packed else lse
    sums: Any = None
    if call.backend == "short":
        of_sums = None
        if bias_dtype is not None:
            rows = bias_rows(call)
            of_sums = call._replace(query=rows[0], key=rows[1]).apart
            shapes = [x.flatten(1).shape for x in rows if x is not None]
            sums = Sums(range(len(shapes)), shapes, [bias_dtype] * len(shapes), chip(grad.device))
        launch: Any = short.backward(prepared, row, output, of_rows, written.heads, of_sums, packed=call.packed)
    else:
        launch = long_backward.Backward(prepared, row, output, of_rows, written.heads)
    mask: Any = call.mask
    masks: Any = None if not mask_gradient else kernel_of_masks.Gradient(prepared, row, of_rows, mask)
    packed_all, projected, sunk = call.key is None, call.value is None, call.sinks is not None

    def apart(query: Tensor, key: Any) -> tuple[Tensor, ...]:
        return query.unbind(-3) if packed_all else (query, *key.unbind(-3))

    def compute(backward: Any) -> Outputs:
        grad, _, _, d_key, saved = backward
        call, output, lse, *_ = saved
        if copied:
            grad = grad.contiguous()
        operands, problem = read(call), problem_of(call[3:6], call[6:11], call.site)
        gradients = memory(call, d_key)
        out = apart(*gradients[:2]) if projected else gradients
        d_biases: Any = None, None
        if sums is None:
            launch(grad, *operands, output, lse, out, problem)
        else:
            rows = bias_rows(call)
            launch(grad, *operands, output, lse, out, problem, apart(*rows))
            d_biases = sums(rows)
        d_mask = None
        if masks is not None:
            d_mask = masks(grad, *operands, output, lse, call.mask, problem)
        return *gradients, *d_biases, d_mask, sinks_gradient(saved, grad) if sunk else None

    return compute
