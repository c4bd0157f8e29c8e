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

Rule = Callable[..., tuple[Any, Any]]
"""What torch.library.register_vmap takes: (info, in_dims, *args) to the outputs and the batch dimension of each."""


def batching_rule(operator: Any, layout: Layout, rows: Sequence[str], fake: Callable[..., Any]) -> Rule:
    """The rule of an operator of torch.ops with arguments laid out so.

    rows: names of tensors whose first dimension counts rows that are computed one by one, the leading tensor first; of
    one dimension, that tensor is a row. fake: the outputs of the arguments, without numbers.
    """
    names = [field.name for field in layout.fields]
    of_rows = [names.index(name) for name in rows]
    together = [place for place, name in enumerate(names) if name in ("seed", "cu_seqlens_q")]  # of all rows at once
    masks = [place for place, field in enumerate(layout.fields) if field.type == Mask | None]
    written = [place for place, field in enumerate(layout.fields) if field.type == Overwritten]

    def foldable(dims: Sequence[int | None], args: Sequence[Any]) -> bool:
        if any(args[place] is not None for place in together):
            return False
        return all(dim is None or place in of_rows or place in masks for place, dim in enumerate(dims))

    def call_once(size: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
        lead = args[of_rows[0]]
        sample = lead.shape[0 if dims[of_rows[0]] is None else 1 :]
        count = 1 if len(sample) == 1 else sample[0]

        def folded(x: Tensor, dim: int | None, mask: bool) -> Tensor:
            shape = x.shape if dim is None else x.shape[1:]
            if mask and dim is None and (len(shape) < 4 or shape[0] == 1):  # the same for all rows
                return x
            if mask:
                shape = torch.Size((1,) * (4 - len(shape))) + shape
            shape = shape if len(sample) > 1 else torch.Size((1,)) + shape
            x = x.reshape(1 if dim is None else size, *shape).expand(size, count, *shape[1:])
            return x.reshape(size * count, *shape[1:])

        single = fake(*(a if dim is None else a.new_empty(a.shape[1:]) for a, dim in zip(args, dims)))
        together = [
            folded(a, dims[n], n in masks) if a is not None and (n in of_rows or n in masks) else a
            for n, a in enumerate(args)
        ]
        outputs = operator(*together)
        if isinstance(outputs, Tensor):
            return outputs.reshape(size, *single.shape), 0
        return tuple(x.reshape(size, *one.shape) for x, one in zip(outputs, single)), (0,) * len(outputs)

    def rule(info: Any, dims: Sequence[int | None], *args: Any) -> tuple[Any, Any]:
        if any(dims[place] is None for place in written):
            raise RuntimeError(
                f"{operator._schema.name} writes to {names[written[0]]}, which torch.vmap does not map over: map over "
                "it too, or give a clone for each sample"
            )
        led = [a if dim is None else a.movedim(dim, 0) for a, dim in zip(args, dims)]
        if of_rows and foldable(dims, args):
            return call_once(info.batch_size, dims, led)
        return _call_each(operator, info.batch_size, dims, led)

    return rule


def _call_each(operator: Any, size: int, dims: Sequence[int | None], args: Sequence[Any]) -> tuple[Any, Any]:
    """One call a sample; without a sample one of zeros, whose outputs have the shapes."""
    parts = [
        [a if dim is None else a[n] for a, dim in zip(args, dims)] for n in range(size)
    ] or [[a if dim is None else a.new_zeros(a.shape[1:]) for a, dim in zip(args, dims)]]  # fmt: skip
    calls = [operator(*part) for part in parts]
    if calls[0] is None:
        return None, None
    if isinstance(calls[0], Tensor):
        return torch.stack(calls)[:size], 0
    return tuple(torch.stack(outputs)[:size] for outputs in zip(*calls)), (0,) * len(calls[0])
