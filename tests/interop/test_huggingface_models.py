"""Architectures of today by name alone, attn_implementation="fasttfm": as eager, or refused with the reason."""

import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm.interop import huggingface  # noqa: E402

TEXT = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
BERT = {name: TEXT[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")} | {
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}


def whisper() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=37, num_mel_bins=4, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=6,
        max_target_positions=16, pad_token_id=0, bos_token_id=2, eos_token_id=1, decoder_start_token_id=2,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def clip() -> Any:
    text = BERT | {"bos_token_id": 2, "eos_token_id": 1}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))


DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**TEXT, **SLIDING, use_sliding_window=True)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**TEXT, **SLIDING)),
    "gemma2 without caps": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**TEXT, **SLIDING, attn_logit_softcapping=None)
    ),
}
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "modernbert": (
        lambda: transformers.ModernBertForMaskedLM(
            transformers.ModernBertConfig(
                **BERT, local_attention=4, global_attn_every_n_layers=2, bos_token_id=2, eos_token_id=1, cls_token_id=2,
                sep_token_id=1, reference_compile=False,
            )
        ),
        lambda: padded(left=False),
    ),
    "whisper": (
        whisper,
        lambda: {"input_features": torch.randn(2, 4, 12), "decoder_input_ids": torch.randint(3, 37, (2, 5))},
    ),
    "vit": (
        lambda: transformers.ViTModel(transformers.ViTConfig(**VISION)),
        lambda: {"pixel_values": torch.randn(2, 3, 8, 8)},
    ),
    "clip": (clip, lambda: padded(left=False) | {"pixel_values": torch.randn(3, 3, 8, 8)}),
}  # fmt: skip


def padded(left: bool) -> dict[str, torch.Tensor]:
    mask = torch.arange(9) < torch.tensor([9, 5, 7])[:, None]
    mask = mask.flip(1) if left else mask
    return {"input_ids": torch.randint(3, 37, (3, 9)).where(mask, 0), "attention_mask": mask.long()}


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    eager = make().eval()
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    huggingface.register()
    ours.set_attn_implementation("fasttfm")
    return eager, ours


def result_of(model: Any, **inputs: Any) -> torch.Tensor:
    output = model(**inputs)
    for name in ("logits", "last_hidden_state", "logits_per_image"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    raise AssertionError(output.keys())


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_with_shared_key_heads_and_sliding_windows(name: str, padding: bool) -> None:
    eager, ours = pair(DECODERS[name])
    inputs = padded(left=True) if padding else {"input_ids": torch.randint(3, 37, (2, 9))}
    rows = inputs["attention_mask"].bool() if padding else ...
    expected, got = result_of(eager, **inputs)[rows], result_of(ours, **inputs)[rows]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    gradients = [
        torch.autograd.grad(x.square().mean(), list(m.parameters())) for m, x in ((eager, expected), (ours, got))
    ]
    for theirs, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    for options in ({"num_beams": 1}, {"num_beams": 2}, {"num_beams": 1, "cache_implementation": "static"}):
        tokens = [m.generate(**inputs, max_new_tokens=6, do_sample=False, **options).tolist() for m in (eager, ours)]
        assert tokens[1] == tokens[0]


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_encoders_of_text_pictures_and_sound(name: str) -> None:
    make, draw = OTHERS[name]
    eager, ours = pair(make)
    inputs = draw()
    rows = inputs["attention_mask"].bool() if name == "modernbert" else ...
    expected, got = result_of(eager, **inputs)[rows], result_of(ours, **inputs)[rows]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "softcap": (lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**TEXT, **SLIDING)), "no softcap"),
    "sinks": (
        lambda: transformers.GptOssForCausalLM(
            transformers.GptOssConfig(**TEXT, **SLIDING, num_local_experts=2, num_experts_per_tok=1)
        ),
        "no s_aux, which GptOssAttention needs: use 'eager'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_what_attention_here_does_not_have_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    _, ours = pair(make)
    with pytest.raises(ValueError, match=message):
        ours(torch.randint(3, 37, (2, 9)))


@pytest.mark.parametrize(("name", "option"), [("softcap", "softcap"), ("sinks", "s_aux")])
@torch.no_grad()
def test_accelerate_leaves_a_model_that_needs_more_its_attention_and_says_so(name: str, option: str) -> None:
    model = REFUSED[name][0]().eval()
    ids = torch.randint(3, 37, (2, 9))
    expected, before = model(ids).logits, model.config._attn_implementation
    told = huggingface.accelerate(model, dry_run=True).lines[0]
    assert huggingface.accelerate(model).lines[0] == told
    assert (told.action, told.reason.split()[1:3]) == ("left", ["needs", f"{option},"])
    assert model.config._attn_implementation == before
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_an_option_that_is_not_given_is_no_reason_to_leave_an_attention() -> None:
    config = transformers.Gemma2Config(**TEXT, **SLIDING, attn_logit_softcapping=None)
    assert huggingface.accelerate(transformers.Gemma2ForCausalLM(config)).lines[0].action == "attention fasttfm"


@torch.no_grad()
def test_of_a_model_in_parts_only_the_part_that_needs_more_keeps_its_attention() -> None:
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


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks", "cache", "indices", "block_indices", "bias_of_tomorrow"])
def test_an_argument_that_may_change_the_result_is_never_ignored(name: str) -> None:
    x, value = torch.randn(1, 2, 3, 8), 30.0 if name == "softcap" else torch.randn(2)
    with pytest.raises(ValueError, match=name):
        huggingface.attention_forward(torch.nn.Module(), x, x, x, None, is_causal=True, **{name: value})


def test_what_a_model_file_s_own_eager_attention_reads_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, stride=None, **kwargs):
        """What a file that is not part of transformers may bring."""

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


def test_dropout_is_drawn_in_training_alone() -> None:
    x, module = torch.randn(1, 2, 5, 8), torch.nn.Module().eval()
    plain, _ = huggingface.attention_forward(module, x, x, x, None, is_causal=False)
    got, _ = huggingface.attention_forward(module, x, x, x, None, dropout=0.5, is_causal=False)
    assert torch.equal(got, plain)
    got, _ = huggingface.attention_forward(module.train(), x, x, x, None, dropout=0.5, is_causal=False)
    assert not torch.equal(got, plain)


def test_a_model_that_does_not_ask_for_its_attention_by_name_is_said_to_be_left() -> None:
    config = transformers.FalconConfig(
        vocab_size=37, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True, bos_token_id=2,
        eos_token_id=1,
    )  # fmt: skip
    model = transformers.FalconForCausalLM(config)
    line = huggingface.accelerate(model).lines[0]
    assert (line.action, line.reason) == (
        "left",
        "FalconForCausalLM does not ask transformers for its attention by name",
    )
    assert model.config._attn_implementation != "fasttfm"
