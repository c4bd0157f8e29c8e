"""torch.vmap of operators: samples folded into the rows that a call takes anyway, or one call a sample.

An operator names its tensors of rows. Where these alone are mapped over, and no seed ties what is dropped to the place
of a row, all samples are one call. Otherwise, for gradients of parameters by sample above all, each has a call of its
own, as in torch's attention.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.record import Layout, Mask, Overwritten


def batching_rule(name: str, operator: Any, layout: Layout, rows: Sequence[str]) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator with arguments laid out so, as torch.library.register_vmap() takes it.

    rows: names of tensors whose first dimension counts rows that are computed one by one, the leading tensor first; of
    one dimension, that tensor is a row.
    """
    places = {field.name: place for place, field in enumerate(layout.fields)}
    of_rows = [places[name] for name in rows]
    together = [places[name] for name in ("seed", "cu_seqlens_q") if name in places]  # of all rows at once
    masks = [place for place, field in enumerate(layout.fields) if field.type == Mask | None]
    written = [place for place, field in enumerate(layout.fields) if field.type == Overwritten]

    def foldable(dims: Sequence[int | None], args: Sequence[Any]) -> bool:
        return (
            len(of_rows) > 0 and all(args[n] is None for n in together)
            and all(dim is None or n in of_rows for n, dim in enumerate(dims))
            and all(args[n] is None or args[n].dim() < 4 or args[n].shape[0] == 1 for n in masks)
        )  # fmt: skip

    def call_once(size: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
        lead = args[of_rows[0]]
        sample = lead.shape[0 if dims[of_rows[0]] is None else 1 :]
        row, count = len(sample) == 1, 1 if len(sample) == 1 else sample[0]

        def folded(x: Tensor, dim: int | None) -> Tensor:
            x = x[None] if dim is None else x
            x = x[:, None] if row else x
            return x.expand(size, count, *x.shape[2:]).flatten(0, 1)

        def apart(x: Tensor) -> Tensor:
            x = x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:])
            return x[:, 0] if row and x.dim() > 2 else x

        outputs = operator(*(folded(a, dims[n]) if n in of_rows and a is not None else a for n, a in enumerate(args)))
        if isinstance(outputs, Tensor):
            return apart(outputs), 0
        return tuple(map(apart, outputs)), (0,) * len(outputs)

    def rule(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        if any(dims[place] is None for place in written):
            raise RuntimeError(
                f"{name} writes to {layout.fields[written[0]].name}, which torch.vmap does not map over: map over "
                "it too, or give a clone for each sample"
            )
        size, led = info.batch_size, [a if dim is None else a.movedim(dim, 0) for a, dim in zip(args, dims)]
        if size and foldable(dims, args):
            return call_once(size, dims, led)
        # Without a sample one of zeros, whose outputs have the shapes.
        parts = [[a if dim is None else a[n] for a, dim in zip(led, dims)] for n in range(size)]
        parts = parts or [[a if dim is None else a.new_zeros(a.shape[1:]) for a, dim in zip(led, dims)]]
        calls = [operator(*part) for part in parts]
        if calls[0] is None:
            return None, None
        if isinstance(calls[0], Tensor):
            return torch.stack(calls)[:size], 0
        return tuple(torch.stack(outputs)[:size] for outputs in zip(*calls)), (0,) * len(calls[0])

    return rule
