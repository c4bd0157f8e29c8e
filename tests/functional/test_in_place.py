"""Outputs of the public functions and modules may be changed in place, as those of torch.nn."""

import copy
import re

import pytest
import torch
from public_surface import (
    NO_FUNCTIONS,
    NO_GRADIENT,
    NO_MODULES,
    compat_names,
    first,
    functions,
    input_count,
    modules,
    public_name,
)

import fasttfm.nn
from fasttfm import functional as F
from fasttfm.cpu import training_passes
from fasttfm.functional import backends

SIZES = {"small": {"length": 5, "width": 16}, "passes": {"length": 40, "width": 512}}
"""passes exceeds the thresholds of the compiled CPU loops (2^15 elements) and of torch's fused attention."""
SAVED = "modified by an inplace operation|leaf Variable"
"""torch's errors if the output is needed for the gradient or is the input."""
SAVE_THEIR_OUTPUT = {"residual_layer_norm": {1}, "residual_rms_norm": {1}, "attention_weights": {0}}
"""Outputs that the backward pass reads, by function; torch's own functions refuse the change, too."""
FUSED = {"attention", "scaled_dot_product_attention", "flash_attn_func", "flash_attn_qkvpacked_func"}
FUSED |= {"flash_attn_kvpacked_func"}
"""Functions that use torch's fused kernel for long rows without dropout."""


def test_every_public_name_has_a_use():
    assert {public_name(name) for name in functions()} == (set(F.__all__) | compat_names()) - NO_FUNCTIONS - NO_GRADIENT
    assert {public_name(name) for name in modules()} == set(fasttfm.nn.__all__) - NO_MODULES


@pytest.fixture(params=["small", "passes", "triton"])
def size(request, threads):
    """Sizes of a call; the loops run on one thread."""
    if request.param == "triton":
        with F.backend("triton"):
            yield SIZES["small"]
        return
    if request.param == "passes":
        pytest.importorskip("numba")
        threads(1)
        assert training_passes.takes(torch.empty(2, 40, 512))
    yield SIZES[request.param]


def gradients(output, leaves):
    factor = torch.arange(output.numel(), dtype=output.dtype).view(output.shape)
    return torch.autograd.grad((output * factor).sum(), leaves, allow_unused=True)


def may_refuse(name, number, dropout_p):
    """Whether the backward pass of this call needs this output."""
    if number in SAVE_THEIR_OUTPUT.get(name, ()):
        return True
    if backends.current == "triton":
        return "atten" in name or "attn" in name
    return name in FUSED and not dropout_p


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", functions())
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_an_output_of_a_function_may_be_changed_in_place(name, dropout_p, size):
    call, leaves = functions(**size, dropout_p=dropout_p)[name]

    def outputs():
        torch.manual_seed(1)  # of the dropout of signatures that take no seed
        outputs = call(*leaves)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    for number in range(len(outputs())):
        try:
            got = gradients(outputs()[number].add_(1).mul_(2), leaves)
        except RuntimeError as error:
            if may_refuse(name, number, dropout_p) and re.search(SAVED, str(error)):
                continue
            raise
        torch.testing.assert_close(got, gradients((outputs()[number] + 1) * 2, leaves))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", modules())
def test_an_output_of_a_module_may_be_changed_in_place_as_torch_nn(name, size):
    module = modules(size["width"])[name]
    twin = copy.deepcopy(module)
    inputs = [torch.randn(2, size["length"], size["width"]).requires_grad_() for _ in range(input_count(name))]
    output = first(module(*inputs))
    assert not output._is_view() or output._base.grad_fn is not None
    got = gradients(output.add_(1).mul_(2), [*inputs, *module.parameters()])
    wanted = gradients((first(twin(*inputs)) + 1) * 2, [*inputs, *twin.parameters()])
    torch.testing.assert_close(got, wanted)
