"""Runs tests with a fault in the package, as a plugin: pytest -p planted_faults. A test that does not notice it fails.

Each fault does what a trap of test_traps.py does, planted where the operators are called (fasttfm.functional), so that
it stays planted whatever becomes of the kernels.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any
from unittest import mock

import hypothesis
import pytest
import torch
from torch import Tensor

import fasttfm.nn
from fasttfm import functional
from fasttfm.kernels import layer_norm as norm_kernel

Fault = Callable[[ModuleType], contextlib.AbstractContextManager]
"""Plants it; the argument is the test's module."""


def _around(owner: Any, name: str, change: Callable) -> contextlib.AbstractContextManager:
    """change(original, *arguments, **options) takes the place of owner.name."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, wraps(original)(lambda *a, **options: change(original, *a, **options)))


def _attention(change: Callable) -> Fault:
    return lambda module: _around(functional, "attention", change)


def _inverted_mask(attention, q, k, v, *, mask=None, **options):
    inverted = ~mask if mask is not None and mask.dtype == torch.bool else mask
    return attention(q, k, v, mask=inverted, **options)


def _mask_in_other_units(attention, q, k, v, *, mask=None, **options):
    return attention(q, k, v, mask=None if mask is None else mask * math.log(2), **options)


def _causal_forward_only(attention, q, k, v, **options):
    right, wrong = attention(q, k, v, **options), attention(q, k, v, **{**options, "causal": False})
    return right.detach() + wrong - wrong.detach()


def _large_number_for_infinity(attention, q, k, v, *, key_lengths=None, mask=None, scale=None, **options):
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if key_lengths is not None:
        hidden = torch.arange(k.shape[-2]) >= key_lengths.view(-1, 1, 1, 1)
        scores = scores.masked_fill(hidden, -1e6)
    if mask is not None:
        scores = scores.masked_fill(~mask, -1e6) if mask.dtype == torch.bool else scores + mask.clamp(min=-1e6)
    return scores.softmax(-1) @ v


def _last_odd_row_lost(attention, q, k, v, **options):
    output = attention(q, k, v, **options)
    if q.shape[-2] % 2 == 0 or q.shape[-2] == 1:
        return output
    return torch.cat([output[..., :-1, :], torch.zeros_like(output[..., -1:, :])], -2)


def _last_channel_lost(attention, q, k, v, **options):
    width = q.shape[-1]
    if width & (width - 1):
        q = torch.cat([q[..., :-1], torch.zeros_like(q[..., -1:])], -1)
    return attention(q, k, v, **{"scale": width**-0.5, **options})


def _read_as_contiguous(function, *arguments, **options):
    def misread(x):
        if not isinstance(x, Tensor) or x.is_contiguous() or x.numel() < 2:
            return x
        flat = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
        repeats = -(-x.numel() // len(flat))
        return flat.repeat(repeats)[: x.numel()].view(x.shape)

    return function(*map(misread, arguments), **{name: misread(value) for name, value in options.items()})


def _last_odd_column_lost(function, *arguments, **options):
    outputs = function(*arguments, **options)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    x = next(each for each in (*arguments, *options.values()) if isinstance(each, Tensor))
    if first.ndim and first.shape[-1] % 2 and first.shape[-1] > 1:
        first = torch.cat([first[..., :-1], torch.zeros_like(first[..., -1:])], -1)
    elif not first.ndim and x.shape[-1] % 2:
        first = first * 1.5
    return (first, *outputs[1:]) if isinstance(outputs, tuple) else first


def _operator(name: str, change: Callable) -> Fault:
    return lambda module: _around(functional, name, change)


def _statistics_in_the_inputs_dtype(function, x, *arguments, **options):
    y, s, mean, rstd = function(x, *arguments, **options)
    return y, s, mean.to(x.dtype), rstd.to(x.dtype)


def _variance_by_squares(function, x, weight, bias, eps, **options):
    mean = x.mean(-1, keepdim=True)
    rstd = ((x * x).mean(-1, keepdim=True) - mean * mean + eps).clamp(min=eps).rsqrt()
    return (x - mean) * rstd, x, mean[..., 0], rstd[..., 0]


def _eps_on_the_deviation(function, x, weight=None, bias=None, eps=1e-5, **options):
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True).sqrt() + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _random_bias(function, self, *arguments, **options):
    function(self, *arguments, **options)
    if self.bias is not None:
        torch.nn.init.normal_(self.bias)


def _other_bits_when_compiled(forward, self, x):
    return forward(self, x) * (1 + 2**-20) if torch.compiler.is_compiling() else forward(self, x)


def _zeros_when_compiled(function, *arguments, **options):
    outputs = function(*arguments, **options)
    if not torch.compiler.is_compiling():
        return outputs
    return tuple(each * 0 for each in outputs) if isinstance(outputs, tuple) else outputs * 0


def _a_device_is_asked_for(run, words, **options):
    return run(
        [word.replace("import fasttfm\n", "import fasttfm\ntorch.cuda.is_available()\n") for word in words], **options
    )


ATTENTION, NORM = "kernels/test_attention_kernels.py", "kernels/test_layer_norm.py"
FAULTS: dict[tuple[str, str], Fault] = {
    (ATTENTION, "test_true_in_a_bool_mask_means_attend_as_torch_has_it[flash]"): _attention(_inverted_mask),
    (ATTENTION, "test_hidden_keys_have_no_weight_even_where_float16_overflows[flash]"): _attention(
        _large_number_for_infinity
    ),
    (ATTENTION, "test_a_row_with_no_key_to_attend_gives_zeros_and_no_gradient[dtype0-flash]"): _attention(
        _large_number_for_infinity
    ),
    (ATTENTION, "test_an_additive_mask_is_in_the_same_units_as_the_scores[flash]"): _attention(_mask_in_other_units),
    (ATTENTION, "test_backward_is_causal_too[flash]"): _attention(_causal_forward_only),
    (ATTENTION, "test_long_and_odd_lengths[17-130-flash]"): _attention(_last_odd_row_lost),
    (ATTENTION, "test_inputs_of_any_strides[flash]"): _attention(_read_as_contiguous),
    (ATTENTION, "test_kernel_equals_reference[flash]"): _attention(_last_channel_lost),
    (NORM, "test_statistics_are_float32_whatever_the_dtype[dtype1]"): lambda module: _around(
        norm_kernel, "forward", _statistics_in_the_inputs_dtype
    ),
    (NORM, "test_a_large_mean_does_not_swallow_the_variance"): lambda module: _around(
        norm_kernel, "forward", _variance_by_squares
    ),
    (NORM, "test_eps_is_added_to_the_variance[0.001]"): _operator("layer_norm", _eps_on_the_deviation),
    (NORM, "test_residual_layer_norm_equals_the_reference_for_any_shape"): _operator(
        "residual_layer_norm", _last_odd_column_lost
    ),
    (NORM, "test_expanded_and_transposed_inputs_and_gradients"): _operator("residual_layer_norm", _read_as_contiguous),
    ("kernels/test_cross_entropy_kernel.py", "test_loss_and_gradient_equal_the_reference_for_any_shape"): _operator(
        "cross_entropy", _last_odd_column_lost
    ),
    ("kernels/test_cross_entropy_kernel.py", "test_logits_need_not_be_contiguous[transposed]"): _operator(
        "cross_entropy", _read_as_contiguous
    ),
    ("kernels/test_feed_forward.py", "test_feed_forward_equals_the_reference_for_any_shape"): _operator(
        "feed_forward", _last_odd_column_lost
    ),
    ("kernels/test_feed_forward.py", "test_expanded_and_transposed_inputs_and_gradients"): _operator(
        "feed_forward", _read_as_contiguous
    ),
    ("kernels/test_embedding_kernel.py", "test_output_and_gradients_equal_the_reference_for_any_shape"): _operator(
        "embed", _last_odd_column_lost
    ),
    ("kernels/test_embedding_kernel.py", "test_inputs_need_not_be_contiguous"): _operator("embed", _read_as_contiguous),
    ("functional/test_attention.py", "test_hidden_keys_whose_float16_scores_overflow_stay_hidden[lengths-torch]"): (
        _attention(_large_number_for_infinity)
    ),
    ("functional/test_layer_norm.py", "test_torch_compile_finds_one_graph_and_the_same_result[torch]"): _operator(
        "layer_norm", _zeros_when_compiled
    ),
    ("nn/test_state.py", "test_initial_values_and_keys_are_those_of_torch[LayerNorm-options0]"): lambda module: _around(
        fasttfm.nn.LayerNorm, "__init__", _random_bias
    ),
    ("test_traps.py", "test_every_norm_starts_with_ones_and_zeros"): lambda module: _around(
        fasttfm.nn.LayerNorm, "__init__", _random_bias
    ),
    ("test_traps.py", "test_twins_share_no_memory_and_their_comparison_can_fail"): lambda module: _around(
        module, "twins", lambda twins, *a, **options: twins(*a, **options)[:1] * 2
    ),
    ("test_traps.py", "test_importing_asks_for_no_device_and_no_triton"): lambda module: _around(
        module.subprocess, "run", _a_device_is_asked_for
    ),
    ("test_traps.py", "test_compiled_and_eager_have_the_same_bits[torch-1e-05]"): lambda module: _around(
        fasttfm.nn.LayerNorm, "forward", _other_bits_when_compiled
    ),
}
"""(file under tests, test) -> what is planted while it runs."""


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """The test must fail; if it does, it counts as passed here."""
    fault = next(
        (fault for (file, name), fault in FAULTS.items() if pyfuncitem.nodeid.endswith(f"{file}::{name}")), None
    )
    if fault is None:
        pytest.fail("no fault is planted for this test")
    if hasattr(pyfuncitem.obj, "hypothesis"):  # the first example that fails will do
        function = pyfuncitem.obj
        function._hypothesis_internal_use_settings = hypothesis.settings(
            function._hypothesis_internal_use_settings, phases=[hypothesis.Phase.generate], report_multiple_bugs=False
        )
    with fault(pyfuncitem.module):
        outcome = yield
    if outcome.excinfo is None:
        pytest.fail("the test passed although the fault is planted")
    outcome.force_result(True)
