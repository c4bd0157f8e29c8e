"""Wrong calls of public functions and modules: each raises our error, in one line that names the argument."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from public_surface import NO_FUNCTIONS, NO_MODULES, compat_names
from wrong_calls import fault, functions, modules, parameters_of, signatures, wrong_calls

import fasttfm.nn
from fasttfm import functional as F

CALLS = list(wrong_calls())
LEFT_OUT = {"device", "cache", "packing", "key_packing", "memory_packing", "biases"}
LEFT_OUT |= {"return_aux", "num_splits", "options", "size_average", "reduce"}
"""Arguments that the wrong calls leave alone."""


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)  # fills torch.empty() with NaN
    yield
    torch.use_deterministic_algorithms(False)


def test_every_function_module_and_argument_is_covered() -> None:
    targets = functions() | signatures() | modules()
    public = (set(F.__all__) - NO_FUNCTIONS) | {"rotary_tables"} | compat_names()
    assert set(targets) == public | {f"nn.{name}" for name in set(fasttfm.nn.__all__) - NO_MODULES}
    for name, target in targets.items():
        left = parameters_of(target) - set(target.arguments) - LEFT_OUT
        assert not {argument for argument in left if not argument.endswith("_is_causal")}, name


@pytest.mark.parametrize("name", sorted({wrong.name for _, wrong in CALLS}))
def test_a_wrong_argument_is_named_in_one_line(name: str) -> None:
    faults = {f"{w.argument}, {w.change}": fault(target, w) for target, w in CALLS if w.name == name}
    assert not {what: found for what, found in faults.items() if found}


def test_numpy_scalars_are_accepted() -> None:
    x = torch.randn(2, 8)
    assert torch.equal(F.layer_norm(x, None, None, np.float64(1e-5)), F.layer_norm(x, None, None, 1e-5))
