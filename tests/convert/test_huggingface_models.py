"""Current architectures with attn_implementation="fasttfm": results equal eager's, or a refusal names the reason."""

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm import functional as F  # noqa: E402
from fasttfm.convert import huggingface  # noqa: E402

from .their_models import randomized  # noqa: E402

TEXT = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


def gemma2(attn_logit_softcapping: float | None = 0.5) -> Any:
    """Gemma 2 with a cap that the scores of random weights reach."""
    more = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": attn_logit_softcapping}
    return transformers.Gemma2Config(**TEXT, **SLIDING, **more)


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**TEXT, **SLIDING, use_sliding_window=True)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TEXT, **SLIDING)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**TEXT, sliding_window=3)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TEXT, **SLIDING, use_sliding_window=True)
    ),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(gemma2()),
    "gemma2 without caps": lambda: transformers.Gemma2ForCausalLM(gemma2(attn_logit_softcapping=None)),
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**TEXT, **SLIDING, num_local_experts=2, num_experts_per_tok=1)
    ),
}


def padded(left: bool) -> dict[str, torch.Tensor]:
    mask = torch.arange(9) < torch.tensor([9, 5, 7])[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.randint(3, 37, (3, 9)).where(mask, 0), "attention_mask": mask.long()}


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = randomized(make().eval())
    ours = copy.deepcopy(eager)
    huggingface.register()
    ours.set_attn_implementation("fasttfm")
    return eager, ours


def accelerated(make: Callable[[], Any]) -> tuple[Any, Any]:
    eager, _ = pair(make)
    ours = copy.deepcopy(eager)
    huggingface.accelerate(ours)
    assert ours.config._attn_implementation == "fasttfm"
    return eager, ours


@pytest.mark.sample(4)
@pytest.mark.parametrize("turn", [pair, accelerated])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_windows_caps_sinks_and_shared_key_heads(name: str, padding: bool, turn: Any) -> None:
    """Dynamic and static caches keep no more than the window."""
    eager, ours = turn(DECODERS[name])
    inputs = padded(left=True) if padding else {"input_ids": torch.randint(3, 37, (2, 9))}
    rows = inputs["attention_mask"].bool() if padding else ...
    expected, got = (model(**inputs).logits[rows] for model in (eager, ours))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    gradients = [
        torch.autograd.grad(x.square().sum(), list(m.parameters())) for m, x in ((eager, expected), (ours, got))
    ]
    for theirs, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    if turn is accelerated:
        weights = [m(**inputs, output_attentions=True).attentions for m in (eager, ours)]
        for theirs, mine in zip(*weights, strict=True):
            torch.testing.assert_close(mine.transpose(1, 2)[rows], theirs.transpose(1, 2)[rows], rtol=1e-4, atol=1e-5)
        return
    for options in ({"num_beams": 1}, {"num_beams": 2}, {"num_beams": 1, "cache_implementation": "static"}):
        tokens = [m.generate(**inputs, max_new_tokens=6, do_sample=False, **options).tolist() for m in (eager, ours)]
        assert tokens[1] == tokens[0]


@torch.no_grad()
def test_sinks_take_weight_and_a_cap_bounds_scores() -> None:
    """Both affect the results of the models above, so that equality with eager is meaningful."""
    for name, without in (
        ("gpt-oss", lambda m: [layer.self_attn.sinks.fill_(-1e4) for layer in m.model.layers]),
        ("gemma2", lambda m: [setattr(layer.self_attn, "attn_logit_softcapping", None) for layer in m.model.layers]),
    ):
        _, ours = pair(DECODERS[name])
        ids = torch.randint(3, 37, (2, 9))
        before = ours(ids).logits
        without(ours)
        assert not torch.allclose(ours(ids).logits, before, atol=1e-4)


@torch.no_grad()
def test_the_window_of_a_mask_is_that_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' mask equals window=(sliding_window - 1, 0), and is not read without padding."""
    huggingface.register()
    config = transformers.MistralConfig(**TEXT, sliding_window=3)
    config._attn_implementation = "fasttfm"
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    given: list[dict[str, Any]] = []
    attend = F.attention
    monkeypatch.setattr(F, "attention", lambda *x, **options: given.append(options) or attend(*x, **options))
    for lengths in (None, torch.tensor([9, 9]), torch.tensor([9, 6])):
        padding = None if lengths is None else torch.arange(9) < lengths[:, None]
        mask = transformers.masking_utils.create_sliding_window_causal_mask(
            config=config, inputs_embeds=q[:, 0], attention_mask=padding, past_key_values=None
        )
        module = torch.nn.Module().eval()
        got, _ = huggingface.attention_forward(module, q, k, v, mask, is_causal=True, sliding_window=3)
        expected = attend(q, k, v, causal=True, window=(2, 0), key_lengths=lengths)
        torch.testing.assert_close(got.transpose(1, 2), expected)
    assert [(each["mask"] is None, each.get("window")) for each in given] == [(True, (2, None))] * 2 + [(False, None)]
    mask = transformers.masking_utils.create_sliding_window_causal_mask(
        config=config, inputs_embeds=q[:, 0], attention_mask=None, past_key_values=None
    )
    mask[0, ..., 5] = False  # modified in place; the rows share their memory
    got, _ = huggingface.attention_forward(module, q, k, v, mask, is_causal=True, sliding_window=3)
    expected = attend(q, k, v, causal=True, window=(2, 0), mask=torch.arange(9) != 5)
    torch.testing.assert_close(got.transpose(1, 2), expected)


def test_sinks_of_each_query_and_chosen_keys_are_those_of_the_formula() -> None:
    """Sinks as in Inkling 2, and selected keys as in DeepSeek V3.2."""
    q, k, v, bias = (torch.randn(2, 4, *n, requires_grad=True) for n in ((5, 8), (6, 8), (6, 3), (5, 6)))
    sinks = torch.randn(2, 4, 5, 1, requires_grad=True)
    mask = torch.rand(2, 1, 5, 6) > 0.2
    indices = torch.rand(2, 5, 6).topk(4).indices.int()
    seen = mask & torch.zeros(2, 5, 6, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    scores = (q @ k.mT / 8**0.5 + bias).masked_fill(~seen, -torch.inf)
    expected = (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
    options = {"position_bias": bias, "sinks": sinks, "indices": indices}
    for more in ({}, {"output_attentions": True}):
        got, _ = huggingface.attention_forward(torch.nn.Module().eval(), q, k, v, mask, **options, **more)
        torch.testing.assert_close(got, expected)
        leaves = (q, k, v, bias, sinks)
        found, right = (torch.autograd.grad(x.square().sum(), leaves, retain_graph=True) for x in (got, expected))
        torch.testing.assert_close(found, right)


@pytest.fixture
def no_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that our attention has no soft cap."""
    monkeypatch.setattr(huggingface, "NEEDS", {"gemma2": "softcap"})


@pytest.mark.parametrize("kind", huggingface.NEEDS)
def test_unsupported_attention_arguments_of_a_model_type_are_refused(kind: str) -> None:
    assert kind in transformers.CONFIG_MAPPING
    x, option = torch.randn(1, 2, 3, 8), huggingface.NEEDS[kind]
    with pytest.raises(ValueError, match=option):
        huggingface.attention_forward(torch.nn.Module(), x, x, x, None, **{option: torch.ones(1)})


@pytest.mark.usefixtures("no_soft_cap")
@torch.no_grad()
def test_only_the_submodel_with_unsupported_attention_keeps_its_own() -> None:
    text = transformers.Gemma2Config(**TEXT, **SLIDING)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    sizes = {"image_token_index": 36, "projection_dim": 32}
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, **sizes)
    model = transformers.PaliGemmaModel(config).eval()
    inputs = {"input_ids": torch.cat([torch.full((2, 4), 36), torch.randint(3, 30, (2, 5))], 1)}
    inputs |= {"attention_mask": torch.ones(2, 9, dtype=torch.long), "pixel_values": torch.randn(2, 3, 16, 16)}
    expected = model(**inputs).last_hidden_state
    lines = huggingface.accelerate(model).lines
    assert lines[0].action == "attention fasttfm"
    assert [line.name for line in lines if "softcap" in line.reason] == ["language_model"]
    assert model.config.vision_config._attn_implementation == "fasttfm"
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_accelerate_registers_the_check_for_hard_coded_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = transformers.PreTrainedModel.get_correct_attn_implementation
    plain = getattr(theirs, "__wrapped__", theirs)
    monkeypatch.setattr(transformers.PreTrainedModel, "get_correct_attn_implementation", plain)
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30}
    huggingface.accelerate(transformers.BloomModel(transformers.BloomConfig(**sizes)))
    with pytest.raises(ValueError, match="hard-codes its attention"):
        transformers.BloomModel._from_config(transformers.BloomConfig(**sizes), attn_implementation="fasttfm")


@pytest.mark.parametrize("name", ["cache", "block_indices", "bias_of_tomorrow"])
def test_an_argument_that_may_change_the_result_is_never_ignored(name: str) -> None:
    x, value = torch.randn(1, 2, 3, 8), torch.randn(2)
    with pytest.raises(ValueError, match=name):
        huggingface.attention_forward(torch.nn.Module(), x, x, x, None, is_causal=True, **{name: value})


def test_parameters_of_a_file_s_eager_attention_are_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, stride=None, **kwargs):
        """Attention of a modeling file outside transformers."""

    file = types.ModuleType("modeling_of_tomorrow")
    file.eager_attention_forward = eager_attention_forward
    monkeypatch.setitem(sys.modules, file.__name__, file)
    module = type("Attention", (torch.nn.Module,), {"__module__": file.__name__})()
    x = torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match="stride"):
        huggingface.attention_forward(module, x, x, x, None, is_causal=True, stride=2)
    huggingface.attention_forward(module, x, x, x, None, stride=None, use_cache=True)


def test_causal_attention_needs_a_mask_as_eager_does() -> None:
    x, module = torch.randn(1, 2, 5, 8), torch.nn.Module().eval()
    with pytest.raises(ValueError, match="causal attention without a mask"):
        huggingface.attention_forward(module, x, x, x, None, is_causal=True)
    one, _ = huggingface.attention_forward(module, x[:, :, 4:], x, x, None, is_causal=True)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    every, _ = huggingface.attention_forward(module, x, x, x, mask, is_causal=True)
    torch.testing.assert_close(one, every[:, 4:])


def test_dropout_applies_only_in_training() -> None:
    x, module = torch.randn(1, 2, 5, 8), torch.nn.Module().eval()
    plain, _ = huggingface.attention_forward(module, x, x, x, None, is_causal=False)
    got, _ = huggingface.attention_forward(module, x, x, x, None, dropout=0.5, is_causal=False)
    assert torch.equal(got, plain)
    got, _ = huggingface.attention_forward(module.train(), x, x, x, None, dropout=0.5, is_causal=False)
    assert not torch.equal(got, plain)
