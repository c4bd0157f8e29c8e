"""Current architectures with attn_implementation="fasttfm": results equal eager's, or a refusal names the reason."""

import copy
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from replayable import Watched

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

import fasttfm  # noqa: E402
from fasttfm import functional as F  # noqa: E402
from fasttfm.convert import huggingface  # noqa: E402
from fasttfm.kernels.jit import Launch  # noqa: E402
from ptx_check.chips import CHIPS  # noqa: E402
from ptx_check.cuda import Answers  # noqa: E402

from .test_huggingface import randomized  # noqa: E402

TEXT = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
CAP = {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 0.5}
"""A cap that the scores of random weights reach."""
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**SLIDING, "use_sliding_window": True}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", SLIDING),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**SLIDING, "use_sliding_window": True}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", SLIDING | CAP),
    "gemma2 without caps": ("Gemma2ForCausalLM", "Gemma2Config", SLIDING | CAP | {"attn_logit_softcapping": None}),
    "gpt-oss": ("GptOssForCausalLM", "GptOssConfig", {**SLIDING, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


def by_name(model: Any) -> None:
    huggingface.register()
    model.set_attn_implementation("fasttfm")


def pair(name: str, turn: Callable[[Any], Any] = by_name) -> tuple[Any, Any]:
    """A decoder on eager attention and its copy on ours."""
    torch.manual_seed(0)
    kind, config, settings = DECODERS[name]
    eager = randomized(getattr(transformers, kind)(getattr(transformers, config)(**TEXT, **settings)).eval())
    ours = copy.deepcopy(eager)
    turn(ours)
    assert ours.config._attn_implementation == "fasttfm"
    return eager, ours


@pytest.mark.sample(8)
@pytest.mark.parametrize("turn", [by_name, huggingface.accelerate])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_windows_caps_sinks_and_shared_key_heads(name: str, padding: bool, turn: Any) -> None:
    """Dynamic and static caches keep no more than the window."""
    models = pair(name, turn)
    inputs, rows = {"input_ids": torch.randint(3, 37, (3, 9))}, ...
    if padding:
        rows = (torch.arange(9) < torch.tensor([9, 5, 7])[:, None]).flip(1)
        inputs = {"input_ids": inputs["input_ids"].where(rows, 0), "attention_mask": rows.long()}
    expected, got = (model(**inputs).logits[rows] for model in models)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    theirs, mine = (
        torch.autograd.grad(x.square().sum(), list(m.parameters())) for m, x in zip(models, (expected, got))
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    if turn is huggingface.accelerate:
        theirs, mine = (m(**inputs, output_attentions=True).attentions for m in models)
        for expected, got in zip(theirs, mine, strict=True):
            torch.testing.assert_close(got.transpose(1, 2)[rows], expected.transpose(1, 2)[rows], rtol=1e-4, atol=1e-5)
        return
    for options in ({"num_beams": 1}, {"num_beams": 2}, {"num_beams": 1, "cache_implementation": "static"}):
        tokens = [m.generate(**inputs, max_new_tokens=6, do_sample=False, **options).tolist() for m in models]
        assert tokens[1] == tokens[0]


def test_an_rms_norm_with_mixed_dtypes_equals_transformers() -> None:
    theirs, ours = (model.model.norm for model in pair("llama", huggingface.accelerate))
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))
    assert ours(x).dtype == torch.float32


@torch.no_grad()
def test_a_graph_can_hold_a_step_with_a_static_cache() -> None:
    """Token and position differ between steps; calls, launches and addresses do not."""
    _, model = pair("llama", huggingface.accelerate)
    logits, cache = torch.zeros(2, 1, 37), transformers.StaticCache(config=model.config, max_cache_len=32)

    def forward(tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        places = {"cache_position": position, "position_ids": position[None]}
        return model(tokens, past_key_values=cache, use_cache=True, **places).logits

    watched = Watched(torch.device("cpu"))
    unlaunched = mock.patch.object(Launch, "__call__", return_value=None)
    with Answers(CHIPS["sm_90"]), fasttfm.backend("triton"), unlaunched:
        forward(torch.randint(3, 37, (2, 5)), torch.arange(5))
        for number in range(5, 9):
            given = torch.full((2, 1), number), torch.tensor([number])
            watched(lambda *inputs: logits.copy_(forward(*inputs)), None, given)
    launches = [name for name, *_ in watched.runs[None][-1].made if "." not in name]
    assert len(watched.runs[None]) == 4
    assert len(launches) == 7, "attention of two layers, and five norms"


@pytest.mark.parametrize("size", [None, 3], ids=["causal", "window"])
@torch.no_grad()
def test_a_causal_mask_is_marked_without_padding_until_it_is_modified(
    size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' mask equals causal=True and window=(sliding_window - 1, 0), and is not read if it is marked."""
    huggingface.register()
    config = transformers.MistralConfig(**TEXT, sliding_window=size)
    config._attn_implementation = "fasttfm"
    made = "create_causal_mask" if size is None else "create_sliding_window_causal_mask"
    window = None if size is None else (size - 1, 0)
    q, k, v = (torch.randn(2, 4, 9, 8) for _ in range(3))
    given: list[tuple[bool, Any]] = []
    attend = F.attention

    def mask_of(padding: torch.Tensor | None) -> torch.Tensor:
        inputs = {"inputs_embeds": q[:, 0], "attention_mask": padding, "past_key_values": None}
        return getattr(transformers.masking_utils, made)(config=config, **inputs)

    def result(mask: torch.Tensor) -> torch.Tensor:
        module = torch.nn.Module().eval()
        got, _ = huggingface.attention_forward(module, q, k, v, mask, is_causal=True, sliding_window=size)
        return got.transpose(1, 2)

    def recorded(*x: torch.Tensor, **options: Any) -> torch.Tensor:
        given.append((options["mask"] is None, options.get("window")))
        return attend(*x, **options)

    monkeypatch.setattr(F, "attention", recorded)
    for lengths in (None, torch.tensor([9, 9]), torch.tensor([9, 6])):
        got = result(mask_of(None if lengths is None else torch.arange(9) < lengths[:, None]))
        expected = attend(q, k, v, causal=True, window=window, key_lengths=lengths)
        torch.testing.assert_close(got, expected)
    assert given == [(True, window and (window[0], None))] * 2 + [(False, None)]
    mask = mask_of(None)
    mask[0, ..., 5] = False  # modified in place; the rows share their memory
    expected = attend(q, k, v, causal=True, window=window, mask=torch.arange(9) != 5)
    torch.testing.assert_close(result(mask), expected)


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


@torch.no_grad()
def test_only_the_submodel_with_unsupported_attention_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "NEEDS", {"gemma2": "softcap"})  # as if our attention had none
    text = transformers.Gemma2Config(**TEXT, **SLIDING)
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    sizes = {"image_token_index": 36, "projection_dim": 32}
    config = transformers.PaliGemmaConfig(vision_config=vision, text_config=text, **sizes)
    model = transformers.PaliGemmaModel(config).eval()
    inputs = {"input_ids": torch.cat([torch.full((2, 4), 36), torch.randint(3, 30, (2, 5))], 1)}
    inputs |= {"attention_mask": torch.ones(2, 9, dtype=torch.long), "pixel_values": torch.randn(2, 3, 16, 16)}
    expected, own = model(**inputs).last_hidden_state, model.language_model.config._attn_implementation
    lines = huggingface.accelerate(model).lines
    assert lines[0].action == "attention fasttfm"
    assert [line.name for line in lines if "softcap" in line.reason] == ["language_model"]
    assert model.language_model.config._attn_implementation == own != "fasttfm"
    assert model.config.vision_config._attn_implementation == "fasttfm"
    torch.testing.assert_close(model(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-4)


def test_an_argument_that_may_change_the_result_is_never_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A paged cache, a tensor of any name, and parameters of eager attention in the modeling file."""
    given = {"cache": object(), "block_indices": object(), "bias": torch.randn(2), "bias_of_tomorrow": 0.5, "stride": 2}
    assert {*huggingface.NEEDS} <= {*transformers.CONFIG_MAPPING.keys()}
    assert {*huggingface.NEEDS.values()} <= given.keys()

    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, stride=None, **kwargs):
        """Attention of a modeling file outside transformers."""

    file = types.ModuleType("modeling_of_tomorrow")
    file.eager_attention_forward = eager_attention_forward
    monkeypatch.setitem(sys.modules, file.__name__, file)
    module = type("Attention", (torch.nn.Module,), {"__module__": file.__name__})()
    x = torch.randn(1, 2, 3, 8)
    for name, value in given.items():
        with pytest.raises(ValueError, match=f"has no {name}, which Attention needs"):
            huggingface.attention_forward(module, x, x, x, None, is_causal=True, **{name: value})
    huggingface.attention_forward(module, x, x, x, None, stride=None, use_cache=True)


def test_causal_attention_needs_a_mask_as_eager_does() -> None:
    x, module = torch.randn(1, 2, 5, 8), torch.nn.Module().eval()
    with pytest.raises(ValueError, match="causal attention without a mask"):
        huggingface.attention_forward(module, x, x, x, None, is_causal=True)
    one, _ = huggingface.attention_forward(module, x[:, :, 4:], x, x, None, is_causal=True)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    every, _ = huggingface.attention_forward(module, x, x, x, mask, is_causal=True)
    torch.testing.assert_close(one, every[:, 4:])
