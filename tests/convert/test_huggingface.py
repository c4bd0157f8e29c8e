"""Hugging Face models with random weights: accelerate() against eager attention; downloads nothing."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm.convert import huggingface, huggingface_layers  # noqa: E402
from tests.registry import small  # noqa: E402

MODELS = {
    "marian": ("MarianMTModel", {"FusedMarianEncoderLayer": 2, "FusedMarianDecoderLayer": 2}),
    "bart": ("BartForConditionalGeneration", {"FusedBartEncoderLayer": 2, "FusedBartDecoderLayer": 2}),
    "t5": ("T5ForConditionalGeneration", {"FusedT5DenseActDense": 4, "FusedT5LayerNorm": 12}),
    "bert": ("BertForMaskedLM", {"FusedBertLayer": 2, "FusedBertSelfOutput": 2, "FusedBertOutput": 2}),
    "gpt2": ("GPT2LMHeadModel", {"fasttfm.nn.LayerNorm": 5, "FusedGPT2MLP": 2}),
}
"""Name -> (class, number of modules of each class that accelerate() puts in)."""
NETWORKS = {"marian": 4, "bart": 4, "t5": 4, "bert": 2, "gpt2": 2}
"""Feed-forward networks."""
SETTINGS = {
    "t5": {"decoder_start_token_id": 0}, "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}  # fmt: skip
OTHERS = [("marian", "relu"), ("bart", "gelu_pytorch_tanh"), ("bert", "relu"), ("bert", "gelu_new"), ("bert", "silu"),
          ("gpt2", "gelu"), ("gpt2", "silu")]  # fmt: skip
"""Activations other than the defaults (gelu, relu in T5, and gelu_new in GPT-2)."""


@torch.no_grad()
def randomized(model: Any) -> Any:
    """Add noise to all parameters, norms and biases included, and select eager attention."""
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    model.set_attn_implementation("eager")
    return model


def small_model(name: str, **changes: Any) -> Any:
    """A small random model without dropout. changes: of its configuration."""
    kind = getattr(transformers, MODELS[name][0])
    config = small.small_configuration(kind.config_class)
    vars(config).update(SETTINGS.get(name, {}), **changes)
    return kind(config)


def pair(name: str, activation: str | None = None) -> tuple[Any, Any]:
    """A model on eager attention and its accelerated copy. activation: of the feed-forward networks."""
    torch.manual_seed(0)
    field = "hidden_act" if name == "bert" else "activation_function"
    eager = randomized(small_model(name, **({} if activation is None else {field: activation})))
    ours = copy.deepcopy(eager)
    huggingface.accelerate(ours)
    return eager, ours


def batch(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, Any]:
    """Inputs padded on the left for gpt2, on the right elsewhere; labels; and the index of the outputs to compare."""
    torch.manual_seed(1)
    ids = torch.randint(3, 37, (3, 7))
    mask = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]
    mask = mask.flip(1) if name == "gpt2" else mask
    inputs = {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}
    labels = inputs["input_ids"].masked_fill(~mask, -100)
    if name == "gpt2":  # the first token after padding is predicted by padding, which sees nothing: zeros here
        labels[torch.arange(3), mask.int().argmax(dim=1)] = -100
    return inputs, labels, slice(None) if name in ("marian", "bart", "t5") else mask


def solved(model: Any, name: str) -> Iterator[torch.Tensor | None]:
    """Yield the loss, the logits, and the gradients of the loss."""
    inputs, labels, kept = batch(name)
    model.zero_grad()
    output = model(**inputs, labels=labels)
    output.loss.backward()
    yield from (output.loss.detach(), output.logits[kept].detach(), *(p.grad for p in model.parameters()))


@pytest.mark.parametrize(("name", "activation"), [*((name, None) for name in MODELS), *OTHERS])
def test_logits_loss_and_gradients_of_a_padded_batch(
    name: str, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ReLU or GELU each network is one operator."""
    calls: list[Any] = []
    fused = huggingface_layers.F.feed_forward
    monkeypatch.setattr(huggingface_layers.F, "feed_forward", lambda *a, **k: calls.append(a) or fused(*a, **k))
    expected, got = (solved(model.train(), name) for model in pair(name, activation))
    (loss, logits, *gradients), (our_loss, our_logits, *ours) = expected, got
    assert len(calls) == (0 if activation == "silu" else NETWORKS[name])
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours, gradients, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bart", "bert"])
def test_dropout_is_drawn_in_training_and_not_in_eval(name: str) -> None:
    _, ours = pair(name, "relu")
    for module in ours.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.3
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    inputs, *_ = batch(name)
    ours.train()
    torch.manual_seed(2)
    first, second = ours(**inputs).logits, ours(**inputs).logits
    torch.manual_seed(2)
    assert torch.equal(ours(**inputs).logits, first)
    assert not torch.equal(first, second)
    ours.eval()
    assert torch.equal(ours(**inputs).logits, ours(**inputs).logits)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_output_attentions_returns_the_weights(name: str) -> None:
    inputs, labels, _ = batch(name)
    eager, ours = (model.eval() for model in pair(name))
    expected, got = (model(**inputs, labels=labels, output_attentions=True) for model in (eager, ours))
    keys = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
    theirs, mine = ([layer for key in keys for layer in getattr(output, key, None) or ()] for output in (expected, got))
    assert len(theirs) == (6 if name in ("marian", "bart", "t5") else 2)
    if name == "gpt2":  # rows of padding see nothing
        rows = inputs["attention_mask"].bool()
        theirs, mine = ([layer.transpose(1, 2)[rows] for layer in layers] for layers in (theirs, mine))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not getattr(ours(**inputs, labels=labels), "attentions", None)


@pytest.mark.parametrize(("beams", "cache"), [(1, "dynamic"), (3, "dynamic"), (1, "static"), (3, "static")])
@pytest.mark.parametrize("name", ["marian", "bart", "t5", "gpt2"])
def test_generation_is_equal_token_for_token(name: str, beams: int, cache: str) -> None:
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "cache_implementation": cache}
    expected, got = (model.eval().generate(**batch(name)[0], **options) for model in pair(name))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_report_lists_replaced_modules(name: str) -> None:
    model = small_model(name)
    planned = str(huggingface.accelerate(model, dry_run=True))
    assert model.config._attn_implementation != "fasttfm"
    report = huggingface.accelerate(model)
    assert str(report).splitlines()[1:] == planned.splitlines()[1:]
    assert model.config._attn_implementation == "fasttfm"
    for kind, count in MODELS[name][1].items():
        assert sum(line.action == kind for line in report.lines) == count
        assert sum(type(m).__name__ == kind.split(".")[-1] for m in model.modules()) == count


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bart", {"activation_function": "mish"}), ("bert", {"hidden_act": "mish"}),
        ("gpt2", {"activation_function": "mish"}), ("t5", {"dense_act_fn": "mish"}), ("t5", {"is_gated_act": True}),
    ],
)  # fmt: skip
def test_gated_networks_and_other_activations_are_left_and_named(name: str, changes: Any) -> None:
    report = huggingface.accelerate(small_model(name, **changes))
    reason = "gated" if "is_gated_act" in changes else "not ReLU, GELU or SiLU"
    assert sum(reason in line.reason for line in report.lines) == NETWORKS[name]


@pytest.mark.parametrize("name", ["bart", "bert"])
def test_a_replaced_submodule_is_called(name: str) -> None:
    class Twice(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    inputs, _, kept = batch(name)
    models = pair(name, "relu")
    for model in models:
        layer = model.model.encoder.layers[0] if name == "bart" else model.bert.encoder.layer[0].intermediate
        (layer.fc1 if name == "bart" else layer.dense).__class__ = Twice
        norm = layer.final_layer_norm if name == "bart" else model.bert.encoder.layer[1].output.LayerNorm
        norm.register_forward_hook(lambda module, inputs, output: output * 3)
    expected, got = (model.eval()(**inputs).logits[kept] for model in models)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
