"""Hugging Face models with random weights: accelerate() against eager attention; downloads nothing."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from replayable import Watched

from .their_models import randomized

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

import fasttfm  # noqa: E402
from fasttfm.convert import huggingface, huggingface_layers  # noqa: E402
from fasttfm.kernels.jit import Launch  # noqa: E402
from ptx_check.chips import CHIPS  # noqa: E402
from ptx_check.cuda import Answers  # noqa: E402
from tests.registry import small  # noqa: E402

MODELS = {
    "marian": "MarianMTModel",
    "bart": "BartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "gpt2": "GPT2LMHeadModel",
}
GENERATIVE = ("marian", "bart", "t5", "gpt2")
SETTINGS = {
    "t5": {"decoder_start_token_id": 0}, "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}  # fmt: skip
ACTIVATION = {
    "marian": "activation_function", "bart": "activation_function", "bert": "hidden_act", "gpt2": "activation_function",
}  # fmt: skip
OTHERS = [("marian", "relu"), ("bart", "relu"), ("bert", "relu"), ("bert", "gelu_new"), ("bart", "gelu_pytorch_tanh"),
          ("gpt2", "gelu"), ("gpt2", "silu"), ("bert", "silu")]  # fmt: skip
"""Activations other than the defaults (gelu, and gelu_new in GPT-2)."""


def small_model(name: str, **changes: Any) -> Any:
    """A small random model without dropout. changes: of its configuration."""
    kind = getattr(transformers, MODELS[name])
    config = small.small_configuration(kind.config_class)
    vars(config).update(SETTINGS.get(name, {}), **changes)
    return kind(config)


def pair(name: str, activation: str | None = None) -> tuple[Any, Any]:
    """A model on eager attention and its accelerated copy. activation: of the feed-forward networks."""
    torch.manual_seed(0)
    eager = randomized(small_model(name, **({} if activation is None else {ACTIVATION[name]: activation})))
    ours = copy.deepcopy(eager)
    huggingface.accelerate(ours)
    return eager, ours


def batch(name: str) -> dict[str, torch.Tensor]:
    """Token ids with padding: on the left for gpt2, on the right elsewhere; and labels."""
    torch.manual_seed(1)
    ids = torch.randint(3, 37, (3, 7))
    mask = torch.arange(7) < torch.tensor([7, 4, 5])[:, None]
    mask = mask.flip(1) if name == "gpt2" else mask
    return {"input_ids": ids.where(mask, 0), "attention_mask": mask.long()}


def labels_of(name: str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    if name == "gpt2":  # the first token after padding is predicted by padding, which sees nothing: zeros here
        labels[torch.arange(3), inputs["attention_mask"].argmax(dim=1)] = -100
    return labels


def kept(name: str, inputs: dict[str, torch.Tensor]) -> Any:
    """Index of the output positions to compare."""
    return slice(None) if name in ("marian", "bart", "t5") else inputs["attention_mask"].bool()


@pytest.mark.parametrize(("name", "activation"), [*((name, None) for name in MODELS), *OTHERS])
def test_logits_loss_and_gradients_of_a_padded_batch(name: str, activation: str | None) -> None:
    eager, ours = pair(name, activation)
    inputs = batch(name)
    labels, keep = labels_of(name, inputs), kept(name, inputs)
    results = []
    for model in (eager, ours):
        model.train()
        output = model(**inputs, labels=labels)
        output.loss.backward()
        results.append((output.loss, output.logits[keep], [p.grad for p in model.parameters()]))
    (loss, logits, gradients), (our_loss, our_logits, our_gradients) = results
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(our_logits, logits, rtol=1e-4, atol=1e-4)
    for got, expected in zip(our_gradients, gradients, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_half_precision_is_as_near_to_float32_as_eager(name: str, dtype: torch.dtype) -> None:
    """Logits, loss and gradients: the error is at most twice eager's in that dtype plus one ulp."""
    eager, ours = pair(name)
    inputs = batch(name)
    labels, keep = labels_of(name, inputs), kept(name, inputs)

    def solve(model: Any) -> list[torch.Tensor]:
        model.zero_grad()
        output = model(**inputs, labels=labels)
        output.loss.backward()
        gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]
        return [output.logits[keep].float(), output.loss.float(), *gradients]

    exact, theirs, got = solve(eager), solve(copy.deepcopy(eager).to(dtype)), solve(ours.to(dtype))
    errors = [torch.stack([(a - b).norm() for a, b in zip(found, exact, strict=True)]) for found in (theirs, got)]
    size = torch.stack([x.norm() for x in exact])
    assert (errors[1] <= 2 * errors[0] + torch.finfo(dtype).eps * (size + 0.01 * size.max())).all()


@pytest.mark.parametrize("name", ["bart", "bert"])
def test_dropout_is_drawn_in_training_and_not_in_eval(name: str) -> None:
    _, ours = pair(name, "relu")
    for module in ours.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.3
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    inputs = batch(name)
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
    eager, ours = (model.eval() for model in pair(name))
    inputs = batch(name)
    labels = {"labels": labels_of(name, inputs)}
    expected, got = (model(**inputs, **labels, output_attentions=True) for model in (eager, ours))
    rows = inputs["attention_mask"].bool()
    found = 0
    for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        for theirs, mine in zip(getattr(expected, key, None) or (), getattr(got, key, None) or (), strict=True):
            if name == "gpt2":  # rows of padding see nothing
                theirs, mine = theirs.transpose(1, 2)[rows], mine.transpose(1, 2)[rows]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            found += 1
    assert found == (6 if name in ("marian", "bart", "t5") else 2)
    assert not getattr(ours(**inputs, **labels), "attentions", None)


@pytest.mark.parametrize("name", ["bart", "gpt2", "t5"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    _, ours = pair(name)
    inputs = batch(name)
    results = []
    for checkpointing in (False, True):
        ours.train().zero_grad()
        if checkpointing:
            ours.gradient_checkpointing_enable()
        ours(**inputs, labels=labels_of(name, inputs)).loss.backward()
        results.append([p.grad.clone() for p in ours.parameters() if p.grad is not None])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize(("beams", "cache"), [(1, "dynamic"), (3, "dynamic"), (1, "static"), (3, "static")])
@pytest.mark.parametrize("name", GENERATIVE)
def test_generation_is_equal_token_for_token(name: str, beams: int, cache: str) -> None:
    eager, ours = pair(name)
    options = {"max_new_tokens": 8, "num_beams": beams, "do_sample": False, "cache_implementation": cache}
    expected, got = (model.eval().generate(**batch(name), **options) for model in (eager, ours))
    assert got.tolist() == expected.tolist()


EXCHANGED = {
    "marian": {"FusedMarianEncoderLayer": 2, "FusedMarianDecoderLayer": 2},
    "bart": {"FusedBartEncoderLayer": 2, "FusedBartDecoderLayer": 2},
    "bert": {"FusedBertLayer": 2, "FusedBertSelfOutput": 2, "FusedBertOutput": 2},
    "t5": {"FusedT5DenseActDense": 4, "FusedT5LayerNorm": 12},
    "gpt2": {"fasttfm.nn.LayerNorm": 5, "FusedGPT2MLP": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_the_report_lists_replaced_and_left_modules(name: str) -> None:
    model = small_model(name)
    kinds = [type(m) for m in model.modules()]
    planned = str(huggingface.accelerate(model, dry_run=True))
    assert [type(m) for m in model.modules()] == kinds
    assert model.config._attn_implementation != "fasttfm"
    report = huggingface.accelerate(model)
    text = str(report)
    assert text.splitlines()[1:] == planned.splitlines()[1:]
    assert model.config._attn_implementation == "fasttfm"
    assert "attention fasttfm" in text
    for kind, count in EXCHANGED[name].items():
        assert sum(line.action == kind for line in report.lines) == count
        assert sum(type(m).__name__ == kind.split(".")[-1] for m in model.modules()) == count


def tiny_llama(kind: str) -> Any:
    """A pre-norm decoder with RMSNorm weights different from one."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=37, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        intermediate_size=24, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return randomized(getattr(transformers, f"{kind}ForCausalLM")(config))


@torch.no_grad()
def test_a_graph_can_hold_a_step_with_a_static_cache() -> None:
    """Token and position differ between steps; calls, launches and addresses do not."""
    model, logits = tiny_llama("Llama").eval(), torch.zeros(2, 1, 37)
    huggingface.accelerate(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)

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


@pytest.mark.parametrize(("kind", "norms"), [("Llama", 5), ("Mistral", 5), ("Qwen3", 9), ("Gemma2", 0)])
def test_rms_norms_of_llama_and_its_copies_are_replaced(kind: str, norms: int) -> None:
    """Gemma's norm differs: it multiplies by 1 + weight."""
    eager = tiny_llama(kind)
    ours = copy.deepcopy(eager)
    report = huggingface.accelerate(ours)
    assert sum(type(m) is huggingface_layers.FusedRMSNorm for m in ours.modules()) == norms
    assert sum(line.action == "FusedRMSNorm" for line in report.lines) == norms
    if kind == "Gemma2":
        return
    inputs = batch("t5")
    results = []
    for model in (eager, ours):
        output = model(**inputs, labels=inputs["input_ids"])
        output.loss.backward()
        results.append([output.logits[inputs["attention_mask"].bool()], *(p.grad for p in model.parameters())])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_an_rms_norm_with_mixed_dtypes_equals_transformers() -> None:
    theirs = tiny_llama("Llama").model.norm
    ours = copy.deepcopy(theirs)
    ours.__class__ = huggingface_layers.FusedRMSNorm
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    assert torch.equal(ours(x), theirs(x))
    assert ours(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "networks", "activation"),
    [
        ("marian", 4, None), ("bart", 4, None), ("bert", 2, None), ("t5", 4, None), ("gpt2", 2, None),
        ("marian", 4, "relu"), ("bart", 4, "relu"), ("bert", 2, "relu"),
    ],
)  # fmt: skip
def test_networks_with_relu_or_gelu_are_one_operator(
    name: str, networks: int, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = pair(name, activation)
    calls: list[Any] = []
    fused = huggingface_layers.F.feed_forward
    monkeypatch.setattr(huggingface_layers.F, "feed_forward", lambda *a, **k: calls.append(a) or fused(*a, **k))
    inputs = batch(name)
    ours(**inputs, labels=labels_of(name, inputs))
    assert len(calls) == networks


@pytest.mark.parametrize(
    ("name", "changes", "networks"),
    [
        ("bart", {"activation_function": "silu"}, 4), ("bert", {"hidden_act": "silu"}, 2),
        ("gpt2", {"activation_function": "silu"}, 2), ("t5", {"dense_act_fn": "silu"}, 4),
        ("t5", {"is_gated_act": True}, 4),
    ],
)  # fmt: skip
def test_gated_networks_and_other_activations_are_left_and_named(name: str, changes: Any, networks: int) -> None:
    report = huggingface.accelerate(small_model(name, **changes))
    reason = "gated" if "is_gated_act" in changes else "neither ReLU nor GELU"
    assert sum(reason in line.reason for line in report.lines) == networks


def test_a_replaced_submodule_is_called() -> None:
    class Twice(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    for name in ("bart", "bert"):
        eager, ours = pair(name, "relu")
        for model in (eager, ours):
            layer = model.model.encoder.layers[0] if name == "bart" else model.bert.encoder.layer[0].intermediate
            (layer.fc1 if name == "bart" else layer.dense).__class__ = Twice
            norm = layer.final_layer_norm if name == "bart" else model.bert.encoder.layer[1].output.LayerNorm
            norm.register_forward_hook(lambda module, inputs, output: output * 3)
        inputs = batch(name)
        keep = kept(name, inputs)
        expected, got = (model.eval()(**inputs).logits[keep] for model in (eager, ours))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
