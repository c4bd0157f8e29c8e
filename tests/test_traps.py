"""Traps that other kernels and their tests fell into, and the test that would notice each of them here.

Where a trap has no test in its own room, the test is below the table.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nn.twins import compare, twins
from planted_faults import FAULTS
from torch import nn

import fasttfm.nn
from fasttfm.models import Transformer, TransformerConfig

TESTS = Path(__file__).parent
ATTENTION, NORM = "kernels/test_attention_kernels.py", "kernels/test_layer_norm.py"

TRAPS = {
    "bool mask inverted against torch's meaning": [
        (ATTENTION, "test_true_in_a_bool_mask_means_attend_as_torch_has_it"),
    ],
    "-1e6 in place of -inf overflows fp16": [
        (ATTENTION, "test_hidden_keys_have_no_weight_even_where_float16_overflows"),
        ("functional/test_attention.py", "test_hidden_keys_whose_float16_scores_overflow_stay_hidden"),
    ],
    "additive mask not scaled by log2(e) on one path": [
        (ATTENTION, "test_an_additive_mask_is_in_the_same_units_as_the_scores")
    ],
    "backward ignoring causal": [(ATTENTION, "test_backward_is_causal_too")],
    "mean and rstd stored in the input's dtype": [
        (NORM, "test_statistics_are_float32_whatever_the_dtype"),
        (NORM, "test_a_large_mean_does_not_swallow_the_variance"),
    ],
    "LayerNorm bias initialised with randn": [
        ("test_traps.py", "test_every_norm_starts_with_ones_and_zeros"),
        ("nn/test_state.py", "test_initial_values_and_keys_are_those_of_torch"),
    ],
    "a test comparing a parameter with itself": [
        ("test_traps.py", "test_twins_share_no_memory_and_their_comparison_can_fail")
    ],
    "device properties read at import": [("test_traps.py", "test_importing_asks_for_no_device_and_no_triton")],
    "partial sums sized for one number of rows a program": [
        (NORM, "test_programs_that_take_several_tiles_of_several_rows_sum_every_row_once"),
        (ATTENTION, "test_gradient_of_a_broadcast_mask_is_summed_in_parts"),
    ],
    "masked positions not zeroed after exp": [
        (ATTENTION, "test_a_row_with_no_key_to_attend_gives_zeros_and_no_gradient"),
        (ATTENTION, "test_hidden_keys_have_no_weight_even_where_float16_overflows"),
    ],
    "fusion and a float64 eps making compiled and eager bits differ": [
        ("test_traps.py", "test_compiled_and_eager_have_the_same_bits"),
        (NORM, "test_eps_is_added_to_the_variance"),
    ],
    "compiled LayerNorm silently all zeros": [
        ("functional/test_layer_norm.py", "test_torch_compile_finds_one_graph_and_the_same_result"),
        ("test_traps.py", "test_compiled_and_eager_have_the_same_bits"),
    ],
    "odd sizes (1, 17, 1023, 1500)": [
        (ATTENTION, "test_long_and_odd_lengths"),
        (NORM, "test_rows_that_are_no_power_of_two_are_not_mixed_with_what_lies_behind_them"),
        (NORM, "test_residual_layer_norm_equals_the_reference_for_any_shape"),
        ("kernels/test_cross_entropy_kernel.py", "test_loss_and_gradient_equal_the_reference_for_any_shape"),
        ("kernels/test_feed_forward.py", "test_feed_forward_equals_the_reference_for_any_shape"),
        ("kernels/test_embedding_kernel.py", "test_output_and_gradients_equal_the_reference_for_any_shape"),
    ],
    "non-contiguous and expanded inputs": [
        (ATTENTION, "test_inputs_of_any_strides"),
        (NORM, "test_expanded_and_transposed_inputs_and_gradients"),
        ("kernels/test_feed_forward.py", "test_expanded_and_transposed_inputs_and_gradients"),
        ("kernels/test_cross_entropy_kernel.py", "test_logits_need_not_be_contiguous"),
        ("kernels/test_embedding_kernel.py", "test_inputs_need_not_be_contiguous"),
    ],
    "head sizes that are not powers of two, Lq != Lk, p = 0": [(ATTENTION, "test_kernel_equals_reference")],
    "rows per program above 1": [(NORM, "test_programs_that_take_several_tiles_of_several_rows_sum_every_row_once")],
}
"""Trap -> (file under tests, test)."""


NOT_PLANTED = {
    "partial sums sized for one number of rows a program": "the fault would lie inside a kernel",
    "rows per program above 1": "the fault would lie inside a kernel",
}
"""Trap -> why no fault shows that its test can fail."""


def run_pytest(*arguments: str) -> subprocess.CompletedProcess:
    """pytest in a process of its own, in this folder's tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    every = {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "FASTTFM_TESTS": "all"}
    environment = {**os.environ, **every}
    return subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False)


def test_every_trap_has_its_tests_and_they_are_collected():
    files = sorted({file for tests in TRAPS.values() for file, _ in tests})
    done = run_pytest("--collect-only", *(str(TESTS / file) for file in files))
    collected = {line.split("[")[0].removeprefix("tests/") for line in done.stdout.splitlines() if "::" in line}
    named = {f"{file}::{name}" for tests in TRAPS.values() for file, name in tests}
    assert named <= collected, f"{sorted(named - collected)} is not collected\n{done.stderr}"


@pytest.mark.whole
@pytest.mark.slow
def test_every_trap_is_noticed_when_it_is_planted():
    """planted_faults runs a test of each with the fault in place, and turns its failure into a success."""
    planted = {(file, name.split("[")[0]) for file, name in FAULTS}
    without = {trap for trap, tests in TRAPS.items() if not planted.intersection(tests)}
    assert without == set(NOT_PLANTED)
    assert planted <= {test for tests in TRAPS.values() for test in tests}
    done = run_pytest("-p", "planted_faults", *(f"{TESTS / file}::{name}" for file, name in FAULTS))
    assert done.returncode == 0, done.stdout
    assert f"{len(FAULTS)} passed" in done.stdout


def test_every_norm_starts_with_ones_and_zeros():
    config = TransformerConfig(
        vocab_size=11, d_model=8, heads=2, d_ff=8, encoder_layers=1, decoder_layers=1, norm_first=True
    )
    for module in (fasttfm.nn.LayerNorm(8), fasttfm.nn.Transformer(8, 2, 1, 1, 8), Transformer(config)):
        norms = [m for m in module.modules() if isinstance(m, nn.LayerNorm)]
        assert norms
        for norm in norms:
            assert torch.equal(norm.weight, torch.ones(8))
            assert torch.equal(norm.bias, torch.zeros(8))


def test_twins_share_no_memory_and_their_comparison_can_fail():
    theirs, ours = twins("LayerNorm", 6)
    for a, b in zip(theirs.parameters(), ours.parameters()):
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
SUBCLASSES = ("fasttfm.interop.huggingface", "fasttfm.interop.auto_model")  # of the classes of transformers
import fasttfm
for module in pkgutil.walk_packages(fasttfm.__path__, "fasttfm."):
    if not module.name.startswith(("fasttfm.kernels", "fasttfm.__main__", *SUBCLASSES)):
        importlib.import_module(module.name)
assert "triton" not in sys.modules
from fasttfm import functional
x = torch.randn(1, 1, 3, 8, requires_grad=True)
functional.attention(x, x, x, dropout_p=0.1).sum().backward()
functional.layer_norm(x, torch.ones(8), torch.zeros(8))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("eps", [1e-5, 1e-12])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_compiled_and_eager_have_the_same_bits(backend, eps):
    torch.manual_seed(0)
    norm = fasttfm.nn.LayerNorm(24, eps=eps)
    x = (torch.randn(5, 24) * 1e-3).requires_grad_()
    grad = torch.randn(5, 24)
    with fasttfm.backend(backend):
        torch._dynamo.reset()
        results = []
        for run in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
            output = run(x)
            results.append((output, *torch.autograd.grad(output, (x, norm.weight, norm.bias), grad)))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert all(a.any() for a in results[1])
