"""Models of transformers that write attention out: their products on the one operator, with eager's numbers."""

import copy
import io
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the package transformers (pip install transformers)")

from fasttfm import functional as F  # noqa: E402
from fasttfm.interop import huggingface  # noqa: E402
from fasttfm.interop.huggingface_products import Step, fused  # noqa: E402
from tests.registry import small, verdicts  # noqa: E402

KINDS = ("bloom", "codegen", "falcon", "gptj", "mpnet", "mpt", "sam_vision_model", "squeezebert", "tapas", "xglm")
OF_ITS_OWN = ("big_bird", "longformer", "nystromformer", "vits")
FALCON = {"vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 1}


def falcon(attention: str = "eager", alibi: bool = True) -> Any:
    """With ALiBi, of which the registry's has none."""
    config = transformers.FalconConfig(**FALCON, alibi=alibi, bos_token_id=2)
    return transformers.FalconModel._from_config(config, attn_implementation=attention).eval()


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What the operator gave."""
    outputs: list[torch.Tensor] = []
    output = Step.output

    def call(self: Step, value: torch.Tensor) -> torch.Tensor | None:
        given = output(self, value)
        outputs.extend([] if given is None else [given])
        return given

    monkeypatch.setattr(Step, "output", call)
    return outputs


@pytest.fixture(autouse=True)
def _registered() -> None:
    huggingface.register()


def calls(products: list[torch.Tensor], model: Any, inputs: dict[str, Any]) -> int:
    products.clear()
    model(**copy.deepcopy(inputs))
    return len(products)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [*KINDS, "falcon with ALiBi"])
def test_outputs_and_gradients_are_eager_s_and_each_layer_is_one_operator(
    kind: str, products: list[torch.Tensor]
) -> None:
    if kind == "falcon with ALiBi":
        eager = falcon()
        eager.source_config = eager.config
    else:
        eager = small.make(small.classes()[kind])
    given = small.batches(eager)
    found = verdicts.compared(eager, given)
    assert set(found.values()) <= {"equal", "equal to sdpa"}
    inputs = next(iter(given.values()))[0]
    assert [calls(products, turn(eager), inputs) for turn in verdicts.WAYS.values()] == [2, 2]
    assert not calls(products, eager, inputs)


@pytest.mark.parametrize("kind", OF_ITS_OWN)
def test_attention_that_is_another_is_refused_by_name_and_left_by_accelerate(kind: str) -> None:
    eager = small.make(small.classes()[kind])
    inputs = next(iter(small.batches(eager).values()))[0]
    with pytest.raises(ValueError, match=r"^attention 'fasttfm': \w+ computes attention in a way of its own; use"):
        verdicts.by_name(eager)(**inputs)
    lines = huggingface.accelerate(eager).lines
    assert (lines[0].action, lines[0].reason.split(" ", 1)[1]) == ("left", "computes attention in a way of its own")
    assert not any("Attention" in type(m).__name__ and "Fused" in type(m).__name__ for m in eager.modules())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
@torch.no_grad()
def test_alibi_models_generate_eager_s_tokens(name: str, cache: str, products: list[torch.Tensor]) -> None:
    if cache == "static" and name == "Mpt":
        pytest.skip("transformers' MPT takes no static cache")
    sizes = {"hidden_size": 32, "n_layer": 2, "n_head": 4} if name == "Bloom" else {
        "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64,
    }  # fmt: skip
    tokens = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
    eager = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes, **tokens))
    for parameter in eager.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    ours = copy.deepcopy(eager.eval())
    huggingface.accelerate(ours)
    ids = torch.randint(3, 37, (2, 9))
    ids[0, :3] = 0
    options = {"attention_mask": (ids > 0).long(), "max_new_tokens": 6, "do_sample": False}
    for beams in (1, 2):
        expected, got = (
            m.generate(ids, **options, num_beams=beams, cache_implementation=cache).tolist() for m in (eager, ours)
        )
        assert got == expected
    assert products


def test_weights_are_given_and_dropout_is_drawn_in_training(products: list[torch.Tensor]) -> None:
    eager = falcon()
    ours = copy.deepcopy(eager)
    huggingface.accelerate(ours)
    ids = torch.randint(3, 37, (2, 9))
    theirs, mine = (m(ids, output_attentions=True) for m in (eager, ours))
    torch.testing.assert_close(mine.last_hidden_state, theirs.last_hidden_state)
    for a, b in zip(theirs.attentions, mine.attentions, strict=True):
        torch.testing.assert_close(b + 0, a)
    for module in ours.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    assert torch.equal(ours(ids).last_hidden_state, ours(ids).last_hidden_state)
    ours.train()
    assert not torch.equal(ours(ids).last_hidden_state, ours(ids).last_hidden_state)


@torch.no_grad()
def test_torch_s_attention_in_a_layer_becomes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, attention = falcon("sdpa", alibi=False), F.attention
    ours = copy.deepcopy(theirs)
    huggingface.accelerate(ours)
    ids = torch.randint(3, 37, (2, 9))
    ids[0, :3] = 0
    for mask in (None, (ids > 0).long()):
        rows = ... if mask is None else mask.bool()
        expected, got = (m(ids, attention_mask=mask).last_hidden_state[rows] for m in (theirs, ours))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    called = []
    monkeypatch.setattr(F, "attention", lambda *a, **k: called.append(k) or attention(*a, **k))
    ours(ids)
    theirs(ids)
    assert len(called) == 2


def test_copies_and_saved_models_compute_the_same(products: list[torch.Tensor]) -> None:
    ours = falcon()
    report = huggingface.accelerate(ours)
    assert [line.action for line in report.lines].count("FusedFalconAttention") == 2
    ids = torch.randint(3, 37, (2, 9))
    expected = ours(ids).last_hidden_state
    stored = io.BytesIO()
    torch.save(ours, stored)
    stored.seek(0)
    for other in (copy.deepcopy(ours), torch.load(stored, weights_only=False)):
        products.clear()
        assert torch.equal(other(ids).last_hidden_state, expected)
        assert len(products) == 2


class Odd(torch.nn.Module):
    """Products that are attention's and are not."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, how: str) -> torch.Tensor:
        scores = q @ k.mT
        if how == "in place":
            alias = scores
            scores.add_(torch.ones(6)).mul_(0.5)
            return alias.softmax(-1) @ v
        if how == "asked":
            assert (scores.shape, scores.dtype, scores.dim()) == ((2, 4, 5, 6), torch.float32, 4)
            assert scores.device == q.device
            return scores.max(-1).values
        if how == "across queries":
            return scores.softmax(2) @ v
        if how == "no softmax":
            return (scores / 3) @ v
        if how == "bool mask":
            seen = torch.ones(5, 6, dtype=torch.bool).tril(1)
            return torch.where(seen, scores, torch.tensor(-1e9)).softmax(dim=-1) @ v
        if how == "replaced":
            return scores.masked_fill(torch.ones(5, 6, dtype=torch.bool).tril(), 2.0).softmax(-1) @ v
        return scores.view(8, 5, 6).add(torch.ones(8, 1, 6)).view(2, 4, 5, 6).softmax(-1) @ v


@pytest.mark.parametrize(
    ("how", "operators"),
    [("in place", 1), ("asked", 0), ("across queries", 0), ("no softmax", 0), ("bool mask", 1), ("replaced", 0),
     ("of rows and heads", 1)],
)  # fmt: skip
def test_whatever_is_done_with_a_product_has_the_numbers_as_written(
    how: str, operators: int, products: list[torch.Tensor]
) -> None:
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 6, 6))
    plain, ours = Odd(), fused(Odd)()
    leaves = (q, k) if how == "asked" else (q, k, v)
    expected, got = plain(q, k, v, how), ours(q, k, v, how)
    torch.testing.assert_close(got + 0, expected)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, expected))):
        torch.testing.assert_close(a, b)
    assert len(products) == operators
