"""Hugging Face models with random weights: fasttfm's attention beside eager, no download."""

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm.interop import huggingface  # noqa: E402

SEQUENCE = {
    "vocab_size": 37, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
    "dropout": 0.0, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 1,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "marian": lambda t: t.MarianMTModel(t.MarianConfig(**SEQUENCE)),
    "bart": lambda t: t.BartForConditionalGeneration(t.BartConfig(**SEQUENCE)),
    "t5": lambda t: t.T5ForConditionalGeneration(
        t.T5Config(
            vocab_size=37, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0, pad_token_id=0,
            eos_token_id=1, decoder_start_token_id=0,
        )
    ),
    "bert": lambda t: t.BertForMaskedLM(
        t.BertConfig(
            vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
        )
    ),
    "gpt2": lambda t: t.GPT2LMHeadModel(
        t.GPT2Config(
            vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=2, eos_token_id=1, pad_token_id=0,
        )
    ),
}  # fmt: skip
GENERATIVE = ("marian", "bart", "t5", "gpt2")


def pair(name: str, **config: Any) -> tuple[Any, Any]:
    """A model on eager attention and its copy on ours."""
    torch.manual_seed(0)
    eager = MODELS[name](transformers)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    huggingface.accelerate(ours)
    return eager, ours


def batch(name: str) -> dict[str, torch.Tensor]:
    """Token ids with padding: on the left for gpt2, on the right elsewhere."""
    torch.manual_seed(1)
    ids = torch.randint(3, 37, (3, 7))
    mask = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]
    mask = mask.flip(1) if name == "gpt2" else mask
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_gradients_of_a_padded_batch(name: str) -> None:
    eager, ours = pair(name)
    inputs = batch(name)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    if name == "gpt2":  # the first token after padding is predicted by padding, which sees nothing: zeros here
        labels[torch.arange(3), inputs["attention_mask"].argmax(dim=1)] = -100
    results = []
    for model in (eager, ours):
        model.train()
        output = model(**inputs, labels=labels)
        output.loss.backward()
        keep = slice(None) if name in ("marian", "bart", "t5") else inputs["attention_mask"].bool()
        results.append((output.loss, output.logits[keep], [p.grad for p in model.parameters()]))
    (loss, logits, gradients), (our_loss, our_logits, our_gradients) = results
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)
    for got, expected in zip(our_gradients, gradients, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", GENERATIVE)
def test_generation_is_equal_token_for_token(name: str, beams: int) -> None:
    eager, ours = pair(name)
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False}
    expected, got = (model.eval().generate(**batch(name), **options) for model in (eager, ours))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_report_names_what_was_exchanged(name: str) -> None:
    model = MODELS[name](transformers)
    report = huggingface.accelerate(model, dry_run=True)
    assert model.config._attn_implementation != "fasttfm"
    text = str(huggingface.accelerate(model))
    assert model.config._attn_implementation == "fasttfm"
    assert "attention fasttfm" in text
    assert len(report.lines) == text.count("\n")
    assert ("FusedT5DenseActDense" if name == "t5" else "fasttfm.nn.LayerNorm") in text


def test_attn_implementation_by_name() -> None:
    huggingface.register()
    config = transformers.BertConfig(vocab_size=37, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    model = transformers.AutoModel.from_config(config, attn_implementation="fasttfm")
    assert model.config._attn_implementation == "fasttfm"
    assert torch.isfinite(model(torch.randint(37, (2, 5))).last_hidden_state).all()


def test_what_the_operator_does_not_have_is_refused() -> None:
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="softcap"):
        huggingface.attention_forward(torch.nn.Module(), x, x, x, None, softcap=30.0)
