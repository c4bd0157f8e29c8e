"""Runs the inputs that PyTorch tests its own modules with (torch.testing's module_db) on torch.nn and on fasttfm.nn.

python upstream_cases.py torch|triton [--modes train eval] [--every N]

Each case builds both modules from the same constructor arguments and seed, loads one's state dict into the other, and
compares outputs, input gradients and parameter gradients: in float64 on the plain PyTorch route, in float32 on the
kernels. Prints a line per module and one for all; ends with status 1 if a case differs. --every N takes each Nth case.
A process of its own, because importing torch.testing's case list fixes PyTorch's global flags for good.
"""

import argparse
import copy
import os
import sys
import types
import unittest
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
if "expecttest" not in sys.modules:  # a base class of PyTorch's own test cases, of which only the inputs are used here
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as tree

import fasttfm.nn
from fasttfm.functional import backend
from fasttfm.interop import replace_modules

sys.path.insert(0, str(Path(__file__).parents[1]))
from quick_interpreter import make_quick

MODULES = (
    "LayerNorm", "MultiheadAttention", "TransformerEncoderLayer", "TransformerDecoderLayer", "TransformerEncoder",
    "Transformer",
)  # fmt: skip


def pair(name: str, arguments: Any, dtype: torch.dtype, training: bool) -> tuple[nn.Module, nn.Module]:
    """torch.nn's module and ours, with the same weights from the same seed and through the state dict."""
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


def solve(module: nn.Module, given: Any) -> list[Tensor | None]:
    """Outputs, gradients of every floating input and of every parameter."""
    leaf_tensors: list[Tensor] = []

    def leaf(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().clone()
        if x.is_floating_point():
            leaf_tensors.append(x.requires_grad_())
        return x

    positional, named = tree.tree_map(leaf, (given.args, given.kwargs))
    outputs = [x for x in tree.tree_leaves(module(*positional, **named)) if isinstance(x, Tensor)]
    torch.manual_seed(1)
    torch.autograd.backward([(x * torch.randn(x.shape, dtype=x.dtype)).sum() for x in outputs])
    return [*outputs, *(x.grad for x in leaf_tensors), *(p.grad for p in module.parameters())]


def compare(name: str, case: Any, dtype: torch.dtype, training: bool, route: str) -> None:
    theirs, ours = pair(name, case.constructor_input, dtype, training)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    expected = solve(theirs, case.forward_input)
    with backend(route):
        got = solve(ours, case.forward_input)
    for a, b in zip(expected, got, strict=True):
        assert (a is None) == (b is None), "a gradient of one alone"
        if a is not None:
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("route", choices=("torch", "triton"))
    parser.add_argument("--modes", nargs="+", choices=("train", "eval"), default=["train", "eval"])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    route = options.route
    if route == "triton":
        make_quick()
    warnings.simplefilter("ignore")
    dtype = torch.float64 if route == "torch" else torch.float32
    passed, failed = 0, 0
    for module in module_db:
        name = module.module_cls.__name__
        if module.module_cls is not getattr(torch.nn, name, None) or name not in MODULES:
            continue
        before = passed
        for mode in options.modes:
            training = mode == "train"
            torch.manual_seed(0)
            inputs = module.module_inputs_func
            cases = inputs(module, device="cpu", dtype=dtype, requires_grad=True, training=training)
            for number, case in list(enumerate(cases))[options.first :: options.every]:
                try:
                    compare(name, case, dtype, training, route)
                    passed += 1
                except Exception as error:  # every case is told, whatever it raises
                    failed += 1
                    print(f"{name} {mode} case {number} ({case.desc}): {type(error).__name__}: {error}")
        print(f"{name}: {passed - before} cases agree")
    print(f"{passed} cases agree, {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
