"""PyTorch's default device and dtype do not change any result."""

import ast
from pathlib import Path

import pytest
import torch
from search.small_models import model_of, sources_of

import fasttfm.functional as F
from fasttfm.models import Transformer
from fasttfm.search import DecodingConfig, search_ids
from fasttfm.search.coverage import cross_attention

ROOT = Path(__file__).parents[1]
ROOMS = "fasttfm", "kernels", "pretraining/src"
VALUES = {"empty", "zeros", "ones", "rand", "randn", "linspace", "eye"}
INTEGERS = {"full", "arange", "tensor", "as_tensor", "randint", "randperm"}


@pytest.fixture
def other_defaults():
    """Defaults that would break any tensor that relies on them."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def lacks(call: ast.AST) -> bool:
    """Whether a call creates a tensor with the default device or dtype."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    name, given = call.func.attr, {each.arg for each in call.keywords}
    if ast.unparse(call.func.value) != "torch" or name not in VALUES | INTEGERS or None in given:
        return False
    return "device" not in given or (name in VALUES and "dtype" not in given)


def of_parameters(tree: ast.AST) -> set[ast.AST]:
    """Initial values of nn.Parameters, which follow the defaults as in torch.nn."""
    calls = (each for each in ast.walk(tree) if isinstance(each, ast.Call) and ast.unparse(each.func) == "nn.Parameter")
    return {argument for call in calls for argument in call.args}


@pytest.mark.parametrize("room", ROOMS)
def test_every_new_tensor_names_its_device_and_dtype(room):
    found, files = [], sorted((ROOT / room).rglob("*.py"))
    assert len(files) > 20
    for file in files:
        tree = ast.parse(file.read_text())
        found += [f"{file.name}:{each.lineno}" for each in {*filter(lacks, ast.walk(tree))} - of_parameters(tree)]
    assert not found


@pytest.mark.parametrize("call", ["torch.empty(3, device=d)", "torch.zeros(2, dtype=t)", "torch.arange(n)"])
def test_a_default_device_or_dtype_is_noticed(call):
    assert lacks(ast.parse(call, mode="eval").body)
    assert not lacks(ast.parse("torch.ones(3, dtype=t, device=d)", mode="eval").body)


def searched(model: Transformer, **settings) -> tuple:
    """Hypotheses, and their cross-attention."""
    sources = sources_of(40, 5)
    config = DecodingConfig(max_len_b=5, **settings)
    found = search_ids(model, sources, config, banned=[[5], [6, 7]], prefixes=[[8]] * 5)
    maps = cross_attention(model, sources, [each[0].tokens for each in found], config)
    return found, [each.tolist() for each in maps]


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("settings", [
    {"beam": 1}, {"beam": 4}, {"beam": 1, "sampling": True}, {"beam": 4, "diverse_beam_groups": 2},
])  # fmt: skip
def test_a_search_on_a_cpu_finds_the_same(kind, settings, request):
    model = model_of(kind, 40)
    expected = searched(model, **settings)
    request.getfixturevalue("other_defaults")
    assert searched(model, **settings) == expected


def test_a_search_for_required_words_finds_the_same(request):
    def run():
        required = [[[[9]]]] * 5
        return search_ids(model, sources, DecodingConfig(max_len_b=5), required=required)

    model, sources = model_of("fp32", 40), sources_of(40, 5)
    expected = run()
    request.getfixturevalue("other_defaults")
    assert run() == expected


def passes() -> list[torch.Tensor]:
    """Outputs and gradients of every operator family, at sizes of the compiled CPU loops."""
    draw = torch.Generator("cpu").manual_seed(3)

    def leaf(*shape):
        return (torch.randn(*shape, generator=draw, dtype=torch.float32, device="cpu") * 0.3).requires_grad_()

    rows, stream, weight, bias = leaf(256, 512), leaf(256, 512), leaf(512), leaf(512)
    query = leaf(2, 4, 40, 32)
    seed = {"dropout_p": 0.1, "seed": torch.tensor([5], device="cpu")}
    target = torch.randint(1, 300, (256,), generator=draw, device="cpu")
    table, hidden = leaf(300, 512), [leaf(1024, 512), leaf(1024), leaf(512, 1024), leaf(512)]
    allowed = torch.randint(0, 2, (40, 40), generator=draw, device="cpu").bool()
    results = [
        F.layer_norm(rows, weight, bias), *F.residual_layer_norm(rows, stream, weight, bias, **seed),
        F.feed_forward(rows, *hidden, activation="gelu", **seed), F.embed(target.view(4, 64), table, **seed),
        F.attention(query, query, query, mask=allowed), F.attention(query, query, query, causal=True, **seed),
        *F.linear_cross_entropy(rows, table, target=target), *F.cross_entropy(rows, target),
    ]  # fmt: skip
    torch.autograd.backward([each.sum() for each in results if each.requires_grad])
    leaves = rows, stream, weight, bias, query, table, *hidden
    return [*(each.detach() for each in results), *(each.grad for each in leaves)]


def test_passes_and_their_gradients_are_the_same(request):
    expected = passes()
    request.getfixturevalue("other_defaults")
    torch.testing.assert_close(passes(), expected, rtol=0, atol=0)
