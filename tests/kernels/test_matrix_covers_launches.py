"""What really runs is in the compile matrix: the launch functions run through the interpreter as if on a chip."""

import sys

import pytest
import torch
from fasttfm.kernels import compile_matrix, launch
from fasttfm.kernels.compile_case import CHIPS

from fasttfm import functional as F
from fasttfm.functional import backend

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")


def tile_of(kernel: str, constants: dict, options: dict) -> tuple:
    """What a tile fixes: the kernel's whole-number constants, warps and stages."""
    sizes = {name: value for name, value in constants.items() if type(value) is int}
    return kernel, tuple(sorted(sizes.items())), options["num_warps"], options["num_stages"]


def listed(chip: str) -> set[tuple]:
    found = set()
    for _, case in compile_matrix.enumerate_cases([CHIPS[chip]]):
        constants = {p: case.arguments[p] for p in constexprs(case.kernel)}
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        found.add(tile_of(full_name(case.kernel), constants, options))
    return found


def full_name(function) -> str:
    function = getattr(function, "fn", function)  # an interpreted function's own module is the interpreter
    return f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__}"


def constexprs(kernel) -> list[str]:
    function = getattr(kernel, "fn", kernel)
    return [name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)]


@pytest.fixture
def launched(monkeypatch):
    """Collects what is launched; call with a chip's name to run as if on it."""
    from triton.runtime import interpreter

    seen: set[tuple] = set()
    here: list[str] = []
    run = interpreter.GridExecutor.__call__

    def logged(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args)) | kwargs
        defaults = {"num_warps": 4, "num_stages": 3 if here[-1].startswith("sm_") else 2}  # Triton's own
        seen.add(tile_of(full_name(self.fn), {name: named[name] for name in constexprs(self.fn)}, defaults | kwargs))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", logged)

    def on(chip: str) -> set[tuple]:
        here.append(chip)
        original = launch.chip  # launch is one of the modules that are changed
        for name, module in list(sys.modules.items()):
            if name.startswith("fasttfm.") and getattr(module, "chip", None) is original:
                monkeypatch.setattr(module, "chip", lambda device: CHIPS[chip])
        return seen

    return on


def with_gradients(function, *inputs):
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o.requires_grad]
    torch.autograd.grad([o.sum() for o in outputs], [x for x in inputs if x.requires_grad])


def everything(dtype):
    def tensor(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_()

    for length, head in ((20, 64), (100, 64), (150, 64), (40, 32), (140, 128)):
        q, k, v = (tensor(1, 1, length, head) for _ in range(3))
        with_gradients(lambda q, k, v: F.attention(q, k, v, causal=True, dropout_p=0.1), q, k, v)
    for width in (64, 512, 1024):
        x, residual, weight, bias = tensor(5, width), tensor(5, width), tensor(width), tensor(width)
        with_gradients(F.layer_norm, x, weight, bias)
        with_gradients(lambda *t: F.residual_layer_norm(*t, dropout_p=0.1), x, residual, weight, bias)
        with_gradients(lambda *t: F.residual_add(*t, dropout_p=0.1), x, residual)
    for rows in (3, 200):
        inputs = [tensor(*shape) for shape in ((rows, 64), (128, 64), (128,), (64, 128), (64,))]
        with_gradients(lambda *t: F.feed_forward(*t, dropout_p=0.1), *inputs)
    for vocabulary in (100, 5000):
        target = torch.arange(3)
        with_gradients(lambda x, t=target: F.cross_entropy(x, t), tensor(3, vocabulary))
        with_gradients(lambda x, w, t=target: F.linear_cross_entropy(x, w, t)[0], tensor(3, 16), tensor(vocabulary, 16))
    with_gradients(lambda w: F.embed(torch.ones(2, 3, dtype=torch.int64), w, dropout_p=0.1), tensor(10, 512))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "dtype"),
    [("sm_60", torch.float32), ("sm_80", torch.float16), ("sm_90", torch.float32), ("gfx942", torch.float16)],
)
def test_every_tile_that_runs_is_listed(chip, dtype, launched):
    wanted = listed(chip)  # first of all: it imports every kernel file before launch.chip is changed
    seen = launched(chip)
    with backend("triton"):
        everything(dtype)
    missing = seen - wanted
    assert seen
    assert not missing, "\n".join(map(str, sorted(missing)))
