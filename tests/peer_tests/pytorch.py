"""Runs fasttfm on the inputs of PyTorch's own module and function tests (torch.testing's module_db and op_db).

    python -m tests.peer_tests.pytorch torch|triton [--modes train eval] [--every N]

Modules: torch.nn's and fasttfm.nn's are built with the same arguments and seed, and one's state dict is loaded into the
other. Outputs and the gradients of inputs and parameters are compared: in float64 with plain PyTorch, in float32 with
the kernels. Inputs that a torch function must reject, ours must reject too.
Prints a JSON line for each case in plugin.py's format. --every N runs every Nth case.
Runs in its own process, because importing torch.testing's case list changes PyTorch's global flags permanently.
"""

import argparse
import copy
import json
import os
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
if "expecttest" not in sys.modules:  # base class of PyTorch's test cases, which are not used
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    vars(sys.modules["expecttest"])["TestCase"] = unittest.TestCase

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as tree

import fasttfm.nn
from fasttfm import functional as F
from fasttfm.compat import losses
from fasttfm.convert import replace_modules
from fasttfm.functional import backend
from tests.quick_interpreter import make_quick

MODULES = (
    "LayerNorm", "RMSNorm", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer",
    "TransformerEncoder", "Transformer",
)  # fmt: skip


def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """torch's function through our module."""
    module = fasttfm.nn.LayerNorm(shape, eps, elementwise_affine=False)
    vars(module).update(weight=weight, bias=bias)
    return module(x)


def rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor:
    """torch's function through our module."""
    module = fasttfm.nn.RMSNorm(shape, eps, elementwise_affine=False)
    vars(module).update(weight=weight)
    return module(x)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "nn.functional.scaled_dot_product_attention": F.scaled_dot_product_attention,
    "nn.functional.layer_norm": layer_norm,
    "nn.functional.rms_norm": rms_norm,
    "nn.functional.cross_entropy": losses.cross_entropy,
    "nn.functional.linear_cross_entropy": losses.linear_cross_entropy,
}


def pair(name: str, arguments: Any, dtype: torch.dtype, training: bool) -> tuple[nn.Module, nn.Module]:
    """Build torch.nn's module and ours with the same seed, randomize, and copy the weights by state dict."""
    made = []
    for library in (torch.nn, fasttfm.nn):
        positional = tuple(copy.deepcopy(x) for x in arguments.args)
        if library is fasttfm.nn:
            for argument in positional:
                if isinstance(argument, nn.Module):
                    replace_modules(argument)  # the layer that a stack is made of
        torch.manual_seed(0)
        made.append(getattr(library, name)(*positional, **arguments.kwargs).to(dtype).train(training))
    theirs, ours = made
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b), "initial values"
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return theirs, ours


def solve(function: Callable[..., Any], *given: Any) -> list[Tensor | None]:
    """Return outputs and the gradients of inputs and parameters. given: positional and keyword arguments."""
    leaf_tensors: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if isinstance(x, Tensor):
            wants = x.is_floating_point() and (x.requires_grad or isinstance(function, nn.Module))
            x = x.detach().clone().requires_grad_(wants)
            leaf_tensors.extend([x] if wants else [])
        return x

    positional, named = tree.tree_map(leaf, given)
    outputs = [x for x in tree.tree_leaves(function(*positional, **named)) if isinstance(x, Tensor)]
    torch.manual_seed(1)
    torch.autograd.backward([(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in outputs])
    parameters = function.parameters() if isinstance(function, nn.Module) else ()
    return [*outputs, *(x.grad for x in leaf_tensors), *(p.grad for p in parameters)]


def agree(ours: Callable[..., Any], theirs: Callable[..., Any], route: str, *given: Any) -> None:
    """Raise AssertionError if outputs or gradients differ."""
    tolerance = 1e-9 if route == "torch" else 2e-4
    expected = solve(theirs, *given)
    with backend(route):
        got = solve(ours, *given)
    for a, b in zip(expected, got, strict=True):
        assert (a is None) == (b is None), "a gradient of one alone"
        if a is not None:
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def refuses(ours: Callable[..., Any], wrong: Any) -> None:
    """Raise AssertionError if ours accepts an input that torch rejects, or raises another error."""
    given = wrong.sample_input
    try:
        ours(given.input, *given.args, **given.kwargs)
    except wrong.error_type:
        return
    except Exception as error:
        raise AssertionError(f"{type(error).__name__} in place of {wrong.error_type.__name__}: {error}") from None
    raise AssertionError(f"taken, where torch says: {wrong.error_regex}")


def cases(route: str, modes: list[str]) -> Iterator[tuple[str, Callable[[], None] | None]]:
    """Yield the name of each case and a function that runs it; None for random results."""
    dtype = torch.float64 if route == "torch" else torch.float32

    def of_module(name: str, case: Any, training: bool) -> None:
        theirs, ours = pair(name, case.constructor_input, dtype, training)
        agree(ours, theirs, route, case.forward_input.args, case.forward_input.kwargs)

    for module in module_db:
        name = module.module_cls.__name__
        for mode in modes if name in MODULES and module.module_cls is getattr(torch.nn, name, None) else ():
            torch.manual_seed(0)
            options = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": mode == "train"}
            for number, case in enumerate(module.module_inputs_func(module, **options)):
                yield f"{name}::{mode}[{number} {case.desc}]", partial(of_module, name, case, mode == "train")
    for op in op_db:
        if (ours := FUNCTIONS.get(op.name)) is None:
            continue
        name = ".".join(filter(None, (op.name, op.variant_test_name)))
        torch.manual_seed(0)
        for number, case in enumerate(op.sample_inputs("cpu", dtype, requires_grad=True)):
            given = ((case.input, *case.args), case.kwargs)
            run = partial(agree, ours, op.op, route, *given)
            yield f"{name}::sample[{number}]", None if case.kwargs.get("dropout_p") else run
        for number, wrong in enumerate(op.error_inputs("cpu") if op.error_inputs_func is not None else ()):
            yield f"{name}::error[{number}]", partial(refuses, ours, wrong)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("route", choices=("torch", "triton"))
    parser.add_argument("--modes", nargs="+", choices=("train", "eval"), default=["train", "eval"])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.route == "triton":
        make_quick()
    warnings.simplefilter("ignore")
    for name, run in islice(cases(options.route, options.modes), options.first, None, options.every):
        outcome, text = "passed" if run else "skipped", "" if run else "dropout: other random bits"
        try:
            if run:
                run()
        except Exception as error:  # every case is told, whatever it raises
            outcome, text = "failed", f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:300]}"
        print(json.dumps({"test": name, "outcome": outcome, "text": text, "cases": 1}), flush=True)


if __name__ == "__main__":
    main()
