"""Hugging Face models that modify a norm's output in place, or whose convolutions read fully masked rows."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm.convert import huggingface  # noqa: E402
from fasttfm.convert.replace import replace_modules  # noqa: E402
from tests.registry import small as registry  # noqa: E402


def step(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the output and all existing gradients."""
    output = model(**inputs)[0]
    model.zero_grad()
    output.sin().mean().backward()
    return [output.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("turn", [replace_modules, huggingface.accelerate], ids=["replace_modules", "accelerate"])
@pytest.mark.parametrize("name", ["XLMModel", "FlaubertModel", "XLMWithLMHeadModel"])
def test_a_model_that_scales_a_norm_s_output_in_place_trains_as_before(name: str, turn: Any) -> None:
    model = registry.make(name).train()
    ids, lengths = torch.randint(5, 60, (3, 9)), torch.tensor([9, 4, 6])
    padded = torch.arange(9) < lengths[:, None]
    inputs = {"input_ids": ids.where(padded, 2), "attention_mask": padded.long()}
    ours = copy.deepcopy(model)
    turn(ours)
    assert any(type(module).__module__.startswith("fasttfm") for module in ours.modules())
    expected, actual = step(model, inputs), step(ours, inputs)
    assert len(actual) == len(expected)
    expected[0], actual[0] = (outputs[0][padded] for outputs in (expected, actual))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_sam3_s_text_model_under_left_padding_is_that_of_eager_or_of_sdpa(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution of its last layer reads padding, whose fully masked rows are zeros here and in sdpa, but the mean
    of all values in eager."""
    monkeypatch.setitem(registry.SMALL, "num_hidden_layers", 4)  # the first and the last have no attention
    huggingface.register()
    model = registry.make("Sam3LiteTextTextModel")
    ids = torch.randint(5, 60, (3, 9))
    rows = (torch.arange(9) < torch.tensor([9, 4, 6])[:, None]).flip(1)
    mask = rows[:, None, None, :] & torch.ones(9, 9).tril().bool() if causal else rows.long()

    def output(attention: str) -> Tensor:
        twin = type(model)._from_config(copy.deepcopy(model.source_config), attn_implementation=attention).eval()
        twin.load_state_dict(model.state_dict())
        with torch.no_grad():
            return twin(input_ids=ids, attention_mask=mask).last_hidden_state[rows]

    torch.testing.assert_close(output("fasttfm"), output("sdpa"), rtol=1e-4, atol=1e-5)
    if not causal:
        torch.testing.assert_close(output("fasttfm"), output("eager"), rtol=1e-4, atol=1e-5)
