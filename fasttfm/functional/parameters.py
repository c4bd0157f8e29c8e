"""A model's parameters as one pass reads them, and their gradients put together at the end in three launches.

A training step reads some two hundred parameters. Each of its own, that is a cast to half precision and one back under
autocast, and a launch for every bias and norm whose gradient the kernels leave as partial sums. Here one node of the
autograd graph stands between all of them and the layers: it casts them together, and its backward pass, which autograd
runs when every gradient has arrived, casts these back together and adds up all partial sums together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm.functional.derivative import read_together


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of a parameter, along its first dimension."""

    parameter: Tensor
    first: int = 0
    rows: int | None = None
    """None: all from first on."""

    def of(self, x: Tensor) -> Tensor:
        """The same rows of another tensor of the parameter's shape."""
        count = x.shape[0] - self.first if self.rows is None else self.rows
        return x if count == x.shape[0] else x.narrow(0, self.first, count)


@dataclass(frozen=True, slots=True)
class Sum:
    """A vector whose gradient comes in parts, (programs, N) float32."""

    part: Slice
    programs: int


def read_parameters(
    products: Sequence[Sequence[Slice]], biases: Sequence[Sequence[Slice]], sums: Sequence[Sum], dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return what a pass reads in place of float32 parameters: three lists, in the order of the arguments.

    products: each group of parts becomes one tensor in dtype, its parts one after the other along the first dimension,
    and takes a gradient. biases: the same without a gradient, which sums bring. sums: each becomes (programs, N), the
    vector repeated in one memory, whose gradient is (programs, N) float32 of which the parameter gets the sum.
    The parts of a parameter in products and sums must not overlap; of what none of them reads the gradient is zero.
    """
    parts = [part for group in products for part in group] + [s.part for s in sums]
    parameters = list({id(part.parameter): part.parameter for part in parts}.values())
    plan = _Plan(products, biases, sums, dtype)
    tensors = list(_Read.apply(plan, *parameters))
    counts = (len(products), len(biases), len(sums))
    return tensors[: counts[0]], tensors[counts[0] : sum(counts[:2])], tensors[sum(counts[:2]) :]


@dataclass(frozen=True, slots=True)
class _Plan:
    products: Sequence[Sequence[Slice]]
    biases: Sequence[Sequence[Slice]]
    sums: Sequence[Sum]
    dtype: torch.dtype


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Each source into its target, all in one launch or two, whatever their dtypes."""
    if targets:
        torch._foreach_copy_(targets, sources)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.plan, ctx.parameters = plan, parameters
        ctx.set_materialize_grads(False)
        targets: list[Tensor] = []
        sources: list[Tensor] = []

        def joined(group: Sequence[Slice]) -> Tensor:
            values = [part.of(part.parameter.detach()) for part in group]
            if len(values) == 1 and values[0].dtype == plan.dtype:
                return values[0]
            rows = [v.shape[0] for v in values]
            target = values[0].new_empty(sum(rows), *values[0].shape[1:], dtype=plan.dtype)
            targets.extend(target.split(rows))
            sources.extend(values)
            return target

        products = [joined(group) for group in plan.products]
        biases = [joined(group) for group in plan.biases]
        _copy(targets, sources)
        sums = [s.part.of(s.part.parameter.detach()).expand(s.programs, -1) for s in plan.sums]
        ctx.mark_non_differentiable(*biases)
        return *products, *biases, *sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            results = _Read.sums(ctx, *gradients)
        if torch.is_grad_enabled():
            results = [x if x is None else _Once.apply(x, p) for x, p in zip(results, ctx.parameters)]
        return None, *results

    @staticmethod
    def sums(ctx: Any, *gradients: Tensor | None) -> list[Tensor | None]:
        """The gradient of each parameter."""
        plan: _Plan = ctx.plan
        of_products = gradients[: len(plan.products)]
        of_sums = gradients[len(plan.products) + len(plan.biases) :]
        pieces: dict[int, list[tuple[Slice, Tensor | None]]] = {id(p): [] for p in ctx.parameters}
        for group, gradient in zip(plan.products, of_products):
            rows = [part.of(part.parameter).shape[0] for part in group]
            split = [None] * len(group) if gradient is None else gradient.split(rows)
            for part, piece in zip(group, split):
                pieces[id(part.parameter)].append((part, piece))
        for s, gradient in zip(plan.sums, of_sums):
            pieces[id(s.part.parameter)].append((s.part, gradient))
        results: list[Tensor | None] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        parts: list[tuple[Tensor, Tensor]] = []
        for parameter in ctx.parameters:
            given = [(part, piece) for part, piece in pieces[id(parameter)] if piece is not None]
            if not given:
                results.append(None)
                continue
            part, piece = given[0]
            if piece.shape == parameter.shape and piece.dtype == parameter.dtype and piece.is_contiguous():
                results.append(piece)
                continue
            whole = sum(part.of(parameter).shape[0] for part, _ in given) == parameter.shape[0]
            result = torch.empty_like(parameter) if whole else torch.zeros_like(parameter)
            results.append(result)
            for part, piece in given:
                into = part.of(result)
                if piece.dim() == into.dim():
                    targets.append(into)
                    sources.append(piece)
                else:
                    parts.append((piece, into))
        _copy(targets, sources)
        if parts:
            from fasttfm.kernels.partial_sums import add_parts

            add_parts(parts)
        return results


class _Once(torch.autograd.Function):
    """A gradient from which a way leads to its parameter: a second derivative by that ends in a message, where
    torch.autograd.grad(..., allow_unused=True) would find none."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, parameter: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise read_together()
