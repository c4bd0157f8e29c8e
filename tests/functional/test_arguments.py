"""Arguments that an operator does not take end in one line that names them; nothing is computed from them."""

import pytest
import torch
from public_surface import functions
from torch import Tensor

import fasttfm.nn

# By what they are called in the operator, which other signatures call q, k, v or qkv.
USES = functions()
DIRECT = sorted(name for name in USES if name not in {"residual_add"})


def replaced(inputs: list[Tensor], number: int, value: object) -> list[object]:
    return [value if i == number else x for i, x in enumerate(inputs)]


@pytest.mark.parametrize("name", DIRECT)
def test_a_meta_tensor_among_others_is_refused_in_one_line(name: str) -> None:
    """It has no numbers, and what is computed of it is uninitialised memory."""
    call, inputs = USES[name]
    for number in range(len(inputs)):
        if len(inputs) == 1 and name != "embed":
            continue
        with pytest.raises(ValueError, match="meta") as caught:
            call(*replaced(inputs, number, inputs[number].to("meta")))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8, torch.bool])
@pytest.mark.parametrize("name", DIRECT)
def test_a_dtype_without_real_numbers_is_refused_in_one_line(name: str, dtype: torch.dtype) -> None:
    call, inputs = USES[name]
    for number in range(len(inputs)):
        with pytest.raises((ValueError, TypeError)) as caught:
            call(*replaced(inputs, number, inputs[number].detach().to(dtype)))
        assert ("\n" not in str(caught.value) and "dtype" in str(caught.value)) or str(dtype) in str(caught.value)


@pytest.mark.parametrize("parameter", ["linear1.weight", "linear2.weight", "self_attn.out_proj.weight"])
def test_a_layer_with_a_weight_on_meta_is_refused(parameter: str) -> None:
    layer = fasttfm.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module, _, name = parameter.rpartition(".")
    setattr(layer.get_submodule(module), name, torch.nn.Parameter(layer.get_parameter(parameter).to("meta")))
    with pytest.raises((ValueError, RuntimeError), match="meta"):
        layer(torch.randn(2, 5, 16))
