"""Traps that other kernels and their tests fell into, and that no room's own tests are about. Those of the kernels are
among the faults that tests/planted/faults.yaml plants.
"""

import subprocess
import sys

import pytest
import torch
from nn.twins import compare, twins

import fasttfm.nn


def test_twins_share_no_memory_and_their_comparison_can_fail():
    theirs, ours = twins("LayerNorm", 6)
    for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
        assert a.data_ptr() != b.data_ptr()
    x = torch.randn(3, 6, dtype=torch.float64)
    compare(theirs, ours, x)
    with torch.no_grad():
        ours.bias[2] += 1e-6
    with pytest.raises(AssertionError):
        compare(theirs, ours, x)


def test_importing_asks_for_no_device_and_no_triton():
    program = """
import importlib, pkgutil, sys
import torch

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "transformers", "ctranslate2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
def asked(*args, **options):
    raise AssertionError("a device was asked for")
for name in ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability"):
    setattr(torch.cuda, name, asked)
LAUNCHES = ("fasttfm.search.device.launches", "fasttfm.models.step_launches")  # where kernels are what computes
SUBCLASSES = ("fasttfm.convert.huggingface", "fasttfm.convert.auto_model")  # of the classes of transformers
import fasttfm
for module in pkgutil.walk_packages(fasttfm.__path__, "fasttfm."):
    if not module.name.startswith(("fasttfm.kernels", "fasttfm.__main__", *LAUNCHES, *SUBCLASSES)):
        importlib.import_module(module.name)
assert not {"triton", "torch.utils.flop_counter"} & set(sys.modules)
from fasttfm import functional
x = torch.randn(1, 1, 3, 8, requires_grad=True)
functional.attention(x, x, x, dropout_p=0.1).sum().backward()
functional.layer_norm(x, torch.ones(8), torch.zeros(8))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiled_and_eager_have_the_same_bits(backend):
    torch.manual_seed(0)
    norm = fasttfm.nn.LayerNorm(24, eps=1e-12)
    x = (torch.randn(5, 24) * 1e-3).requires_grad_()
    grad = torch.randn(5, 24)
    with fasttfm.backend(backend):
        torch._dynamo.reset()
        results = []
        for run in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
            output = run(x)
            results.append((output, *torch.autograd.grad(output, (x, norm.weight, norm.bias), grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert all(a.any() for a in results[1])
