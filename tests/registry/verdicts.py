"""Compares a transformers model on fasttfm with itself on eager attention: outputs and all gradients."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fasttfm.convert import huggingface
from tests.registry.small import NotBuilt, batches, brief, make

Batches = dict[str, tuple[dict[str, Any], dict[int, Tensor]]]
"""Name -> (inputs, length -> positions to compare)."""
GOOD = ("equal", "equal, forward", "equal to sdpa", "refused")
"""Verdicts that count as correct."""


def tensors(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of a model's output, except caches and attention weights."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = [value for name, value in output.items() if "past" not in name and "attentions" not in name]
    if isinstance(output, tuple | list):
        return [t for value in output for t in tensors(value)]
    return []


class Solved(NamedTuple):
    """Results of a model for a batch."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    """By parameter; empty if the model is not differentiable."""


def solve(model: Any, inputs: dict[str, Any], rows: dict[int, Tensor]) -> Solved:
    """Return the outputs at the compared positions, and the gradients of a weighted sum of them."""
    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        found = tensors(model(**copy.deepcopy(inputs)))
        found = [t[rows[t.shape[1]]] if t.dim() > 1 and t.shape[1] in rows and t.shape[0] == 3 else t for t in found]
        generator = torch.Generator().manual_seed(3)
        parts = [t for t in found if t.requires_grad and t.numel()]
        weights = [torch.randn(t.shape, generator=generator) / t.numel() ** 0.5 for t in parts]
        total = [(t.float() * w).nan_to_num().sum() for t, w in zip(parts, weights, strict=True)]
        if total:
            try:
                torch.stack(total).sum().backward()
            except (RuntimeError, NotImplementedError):
                model.zero_grad(set_to_none=True)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Solved([t.detach() for t in found], gradients)


def same(got: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether outputs agree to 0.001 of the largest, or of one."""
    return len(got) == len(expected) and all(_near(a, b) for a, b in zip(got, expected, strict=True) if b.numel())


def _near(got: Tensor, expected: Tensor) -> bool:
    size = max(1.0, float(expected.nan_to_num().abs().max()))
    return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * size, equal_nan=True)


def unlike(got: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Return the first parameter whose gradient differs by more than 0.002 of its maximum; '' if none.

    The tolerance includes 2e-5 of the model's largest gradient. A missing gradient counts as zero.
    """
    largest = max((float(g.nan_to_num().abs().max()) for g in expected.values() if g.numel()), default=0.0)
    for name in {**expected, **got}:
        a, b = got.get(name), expected.get(name)
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        if a is None or b is None or not a.numel():
            continue
        a, b = a.nan_to_num(), b.nan_to_num()
        error, size = float((a - b).abs().max()), float(b.abs().max())
        if error > 2e-3 * size + 2e-5 * largest:
            return f"gradient of {name} differs by {error:.2g} of {size:.2g}"
    return ""


def by_name(model: Any) -> Any:
    """Build the model again with attn_implementation="fasttfm"."""
    ours = type(model)._from_config(copy.deepcopy(model.source_config), attn_implementation="fasttfm").eval()
    ours.load_state_dict(model.state_dict())
    return ours


def accelerated(model: Any) -> Any:
    """Build the model again and accelerate it; some models cache results and cannot be copied."""
    ours = type(model)._from_config(copy.deepcopy(model.source_config), attn_implementation="eager").eval()
    ours.load_state_dict(model.state_dict())
    huggingface.accelerate(ours)
    return ours


WAYS: dict[str, Callable[[Any], Any]] = {"by name": by_name, "accelerate": accelerated}


def verdicts(name: str) -> dict[str, str]:
    """Return the verdict of each way and batch for a class: a GOOD one, or the error. Raises NotBuilt."""
    model = make(name)
    return compared(model, batches(model))


def compared(model: Any, given: Batches) -> dict[str, str]:
    """Return the verdict of each way and batch for a model on eager attention.

    'equal, forward' if its gradients are not reproducible, 'equal to sdpa' if eager and transformers' sdpa differ.
    Raises NotBuilt if eager attention gives no reproducible result.
    """
    expected, why = {}, ""
    for batch, (inputs, rows) in given.items():
        try:
            first, repeated = solve(model, inputs, rows), solve(model, inputs, rows)
        except Exception as error:
            why = f"eager cannot run it, {batch}: {brief(error)}"
            continue
        if (
            not first.outputs
            or not same(repeated.outputs, first.outputs)
            or all(t.isnan().all() for t in first.outputs)
        ):
            why = f"eager gives no numbers that stay, {batch}"
            continue
        stays = bool(first.gradients) and not unlike(repeated.gradients, first.gradients)
        expected[batch] = (inputs, rows, first if stays else Solved(first.outputs, {}))
    if not expected:
        raise NotBuilt(why)
    model.zero_grad(set_to_none=True)
    results = {}
    for way, turn in WAYS.items():
        for batch, (inputs, rows, right) in expected.items():
            build = functools.partial(turn, model)
            verdict = _verdict(build, inputs, rows, right)
            if verdict.startswith(("differs", "gradient")) and _as_sdpa(build, model, inputs, rows):
                verdict = "equal to sdpa"
            results[f"{way}, {batch}"] = verdict
    return results


def _as_sdpa(turn: Callable[[], Any], model: Any, inputs: Any, rows: Any) -> bool:
    """Return whether our result equals transformers' sdpa, which differs from eager on fully masked rows."""
    sdpa = copy.deepcopy(model)
    try:
        sdpa.set_attn_implementation("sdpa")
        theirs, ours = solve(sdpa, inputs, rows), solve(turn(), inputs, rows)
    except Exception:
        return False
    return same(ours.outputs, theirs.outputs) and not unlike(ours.gradients, theirs.gradients)


def _verdict(turn: Callable[[], Any], inputs: Any, rows: Any, right: Solved) -> str:
    try:
        got = solve(turn(), inputs, rows)
    except Exception as error:
        line = str(error)
        refused = isinstance(error, ValueError) and line.startswith("attention 'fasttfm'") and "\n" not in line
        return "refused" if refused else brief(error)
    if same(got.outputs, right.outputs):
        if not right.gradients:
            return "equal, forward"
        return unlike(got.gradients, right.gradients) or "equal"
    shapes = [tuple(t.shape) for t in got.outputs], [tuple(t.shape) for t in right.outputs]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} for {shapes[1]}"
    return "differs by " + ", ".join(
        f"{(a - b).abs().max():.2g}" for a, b in zip(got.outputs, right.outputs, strict=True) if b.numel()
    )
