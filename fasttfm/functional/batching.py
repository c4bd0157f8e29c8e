"""torch.vmap rules: fold the samples into the rows of one call, or make one call per sample.

An operator names the tensors whose rows are independent. If vmap maps over these alone, and no seed ties dropout to a
row's place, all samples are one call. Otherwise, above all for per-sample gradients of parameters, each sample is a
call of its own, as in torch's attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.record import Layout, Mask, Overwritten


def batching_rule(
    name: str, operator: Any, layout: Layout, rows: Sequence[str], visible: int
) -> Callable[..., tuple[Any, Any]]:
    """Return an operator's rule for torch.library.register_vmap().

    rows: names of the tensors whose first dimension counts independent rows, the leading tensor first; if that has one
    dimension, it is a row itself, and so are the visible outputs; internal ones have a first dimension of 1.
    """
    places = {field.name: place for place, field in enumerate(layout.fields)}
    row_places = [places[name] for name in rows]
    unfoldable = [places[name] for name in ("seed", "cu_seqlens_q") if name in places]  # they refer to all rows at once
    masks = [place for place, field in enumerate(layout.fields) if field.type == Mask | None]
    written = [place for place, field in enumerate(layout.fields) if field.type == Overwritten]

    def foldable(dims: Sequence[int | None], args: Sequence[Any]) -> bool:
        return (
            len(row_places) > 0 and all(args[n] is None for n in unfoldable)
            and all(dim is None or n in row_places for n, dim in enumerate(dims))
            and all(args[n] is None or args[n].dim() < 4 or args[n].shape[0] == 1 for n in masks)
        )  # fmt: skip

    def call_once(size: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
        lead = args[row_places[0]]
        sample = lead.shape[0 if dims[row_places[0]] is None else 1 :]
        row, count = len(sample) == 1, 1 if len(sample) == 1 else sample[0]

        def fold(x: Tensor, dim: int | None) -> Tensor:
            x = x[None] if dim is None else x
            x = x[:, None] if row else x
            return x.expand(size, count, *x.shape[2:]).flatten(0, 1)

        def unfold(x: Tensor, place: int = 0) -> Tensor:
            x = x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:])
            return x[:, 0] if row and place < visible and x.dim() > 2 else x

        outputs = operator(*(fold(a, dims[n]) if n in row_places and a is not None else a for n, a in enumerate(args)))
        if isinstance(outputs, Tensor):
            return unfold(outputs), 0
        return tuple(map(unfold, outputs, range(len(outputs)))), (0,) * len(outputs)

    def rule(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        if any(dims[place] is None for place in written):
            raise RuntimeError(
                f"{name} writes to {layout.fields[written[0]].name}, which torch.vmap does not map over: map over "
                "it too, or give a clone for each sample"
            )
        size, led = info.batch_size, [a if dim is None else a.movedim(dim, 0) for a, dim in zip(args, dims)]
        if size and foldable(dims, args):
            return call_once(size, dims, led)
        samples = [[a if dim is None else a[n] for a, dim in zip(led, dims)] for n in range(size)]
        # An empty batch calls on one sample of zeros, for the shapes of the outputs.
        samples = samples or [[a if dim is None else a.new_zeros(a.shape[1:]) for a, dim in zip(led, dims)]]
        results = [operator(*sample) for sample in samples]
        if results[0] is None:
            return None, None
        if isinstance(results[0], Tensor):
            return torch.stack(results)[:size], 0
        return tuple(torch.stack(outputs)[:size] for outputs in zip(*results)), (0,) * len(results[0])

    return rule
