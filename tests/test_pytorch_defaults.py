"""PyTorch's default device and dtype do not change any result."""

import ast
from pathlib import Path

import pytest
import torch
from public_surface import SEED, Use, functions, new

from fasttfm import functional as F

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
    for call, lacking in (("zeros(2, dtype=t)", True), ("arange(n)", True), ("ones(3, dtype=t, device=d)", False)):
        assert lacks(ast.parse(f"torch.{call}", mode="eval").body) == lacking


def test_passes_and_their_gradients_are_the_same(request):
    """Of every public function, at sizes of the compiled CPU loops."""
    target, allowed = torch.arange(256), torch.rand(40, 40) > 0.5
    dropped = {"dropout_p": 0.1, "seed": SEED}
    uses = [
        *functions(40, 512, dropout_p=0.1).values(),
        Use(lambda x: F.cross_entropy(x, target)[0], new((256, 512))),
        Use(lambda w: F.embed(target.view(4, 64), w, **dropped), new((300, 512))),
        Use(lambda q: F.attention(q, q, q, mask=allowed), new((2, 4, 40, 32))),
        Use(lambda q: F.attention(q, q, q, causal=True, **dropped), new((2, 4, 40, 32))),
    ]

    def results():
        torch.manual_seed(0)
        for call, leaves in uses:
            outputs = call(*leaves)
            outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
            yield [*outputs, *torch.autograd.grad([x.sum() for x in outputs], leaves)]

    expected = list(results())
    request.getfixturevalue("other_defaults")
    torch.testing.assert_close(list(results()), expected, rtol=0, atol=0)
