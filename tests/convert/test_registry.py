"""Models of transformers' registry: results equal eager attention's, or a refusal in our words."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm import functional as F  # noqa: E402
from fasttfm.convert import huggingface  # noqa: E402
from fasttfm.convert.replace import replace_modules  # noqa: E402
from fasttfm.kernels.proof.launch_log import LaunchLog  # noqa: E402
from tests.registry import small, verdicts  # noqa: E402


@pytest.mark.parametrize("kind", ["big_bird", "bloom", "falcon", "git", "sam_vision_model"])
def test_hard_coded_attention_is_left_by_accelerate_which_registers_its_refusal_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = transformers.PreTrainedModel.get_correct_attn_implementation
    plain = getattr(theirs, "__wrapped__", theirs)
    monkeypatch.setattr(transformers.PreTrainedModel, "get_correct_attn_implementation", plain)
    eager = small.make(small.classes()[kind])
    classes = {type(module) for module in eager.modules() if "Attention" in type(module).__name__}
    line = huggingface.accelerate(eager).lines[0]
    assert (line.kind, line.action) == ("attention eager", "left")
    assert line.reason.endswith(" hard-codes its attention")
    assert eager.config._attn_implementation == "eager"
    assert classes == {type(module) for module in eager.modules() if "Attention" in type(module).__name__}
    with pytest.raises(ValueError, match=r"^attention 'fasttfm': \w+ hard-codes its attention; use 'eager' or acc"):
        verdicts.by_name(eager)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["bert", "bart", "gpt2", "gemma2", "gpt_oss", "splinter"])
def test_a_model_on_the_kernels_gives_eager_s_outputs_and_gradients(kind: str) -> None:
    eager = small.make(small.classes()[kind])
    ours = verdicts.accelerated(eager)
    inputs, rows = small.batches(eager)["right" if kind in ("bert", "bart", "splinter") else "left"]
    results = []
    for model, route in ((eager, "torch"), (ours, "triton")):
        with F.backend(route), LaunchLog() as log:
            output = model(**inputs).last_hidden_state
            output = output[rows[9]] if output.shape[1] == 9 else output
            weights = torch.linspace(-1, 1, output.numel()).view_as(output)  # a norm makes a plain mean constant
            (output * weights).sum().backward()
        assert bool(log.triton) == (route == "triton")
        results.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert max(gradient.abs().max() for gradient in results[0][1:]) > 1
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("turn", [replace_modules, huggingface.accelerate], ids=["replace_modules", "accelerate"])
@pytest.mark.parametrize("name", ["XLMModel", "FlaubertModel", "XLMWithLMHeadModel"])
def test_a_model_that_scales_a_norm_s_output_in_place_trains_as_before(name: str, turn: Any) -> None:
    model = small.make(name).train()
    batch = small.batches(model)["right"]
    ours = copy.deepcopy(model)
    turn(ours)
    assert any(type(module).__module__.startswith("fasttfm") for module in ours.modules())
    expected, actual = verdicts.solve(model, *batch), verdicts.solve(ours, *batch)
    torch.testing.assert_close(actual.outputs, expected.outputs, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(actual.gradients, expected.gradients, rtol=1e-3, atol=1e-5)
