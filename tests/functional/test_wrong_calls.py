"""Wrong calls of public functions and modules: each raises our error, in one line that names the argument."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from public_surface import NO_FUNCTIONS, NO_MODULES, compat_names
from shared_fixtures import examples
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


def test_two_wrong_arguments_at_once() -> None:
    """Drawn."""
    draw, faults = random.Random(0), {}
    by_name = {name: [call for call in CALLS if call[1].name == name] for name in {wrong.name for _, wrong in CALLS}}
    for _ in range(examples(900)):
        (target, one), (_, two) = draw.sample(by_name[draw.choice(sorted(by_name))], 2)
        if one.argument != two.argument:
            both = target._replace(arguments={**target.arguments, one.argument: one.value})
            names = one._replace(argument=two.argument, value=two.value, always=one.always or two.always)
            types = one.always and two.always  # a shape that fits no more may be told of either
            found = fault(both, names, {one.argument, two.argument} if types else set(target.arguments))
            if found:
                faults[f"{one.name}: {one.argument}, {one.change}; {two.argument}, {two.change}"] = found
    assert not faults


def test_missing_and_unknown_arguments_raise_pythons_errors() -> None:
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'value'"):
        F.attention(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'"):
        F.layer_norm(torch.ones(2, 8), None, None, nonsense=1)  # type: ignore[call-arg]


def test_numpy_scalars_are_accepted() -> None:
    x, target = torch.randn(2, 8), torch.tensor([0, 1])
    for call, number in (
        (lambda eps: F.rms_norm(x, None, eps), np.float32(1e-6)),
        (lambda eps: F.layer_norm(x, None, None, eps), np.float64(1e-5)),
        (lambda index: F.cross_entropy(x, target, ignore_index=index)[0], np.int64(1)),
    ):
        assert torch.equal(call(number), call(number.item()))


@pytest.mark.parametrize("parameter", ["linear1.weight", "linear2.weight", "self_attn.out_proj.weight"])
def test_a_layer_with_a_weight_on_meta_is_refused(parameter: str) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module, _, name = parameter.rpartition(".")
    setattr(layer.get_submodule(module), name, torch.nn.Parameter(layer.get_parameter(parameter).to("meta")))
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        layer(torch.randn(2, 5, 16))
