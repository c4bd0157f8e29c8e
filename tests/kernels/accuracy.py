"""The rule for a kernel's error, flash-attention's.

Against the exact result, a kernel may err twice as much as plain PyTorch does in its own precision, plus a floor
of a few units in the last place of the largest magnitude.
"""

import torch

from fasttfm.functional.backends import backend

FLOOR = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the largest magnitude, by the dtype of the result: about 16, 1 and 1 units in the last place."""


def assert_as_accurate(results, plain, exact, what=""):
    """found may differ from exact (float64) as the rule says; plain is what torch has in found's precision."""
    assert results.shape == exact.shape, f"{what}: shape {tuple(results.shape)} instead of {tuple(exact.shape)}"
    assert results.dtype == plain.dtype, f"{what}: {results.dtype} instead of {plain.dtype}"
    if not exact.numel():
        return
    assert torch.isfinite(results).all(), f"{what} is not finite"
    largest = exact.abs().max().item()
    allowed = 2 * (plain.double() - exact).abs().max().item() + FLOOR[results.dtype] * largest
    error = (results.double() - exact).abs().max().item()
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}, largest {largest:.2e}"


def solve(way, inputs, precision=None, weigh=None):
    """Outputs of way(**inputs), then the gradients of all its floating-point inputs, by name.

    precision: what the inputs are converted to first. weigh(outputs) -> scalar that is differentiated; by default every
    element of every output, weighted each its own way.
    """
    leaf_tensors = {
        name: (value if precision is None else value.to(precision)).detach().requires_grad_()
        for name, value in inputs.items()
    }
    outputs = way(**leaf_tensors)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    total = (weigh or weigh_all)(outputs)
    gradients = torch.autograd.grad(total, list(leaf_tensors.values()), allow_unused=True)
    results = {f"output {i}": output for i, output in enumerate(outputs)}
    return results | {
        f"gradient of {name}": g for name, g in zip(leaf_tensors, gradients, strict=True) if g is not None
    }


def weigh_all(outputs):
    """Every element of every output, each with a weight of its own."""
    total = 0
    for i, output in enumerate(outputs):
        angle = torch.arange(output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
        total = total + (output.double() * torch.cos(angle * (1.7 + i))).sum()
    return total


def compare(results, plain, exact):
    assert results.keys() == plain.keys() == exact.keys()
    for what in results:
        assert_as_accurate(results[what], plain[what], exact[what], what)


def compare_with_reference(ours, specified, inputs, weigh=None):
    """A function on the kernels against its specification in the inputs' own precision and in float64."""
    with backend("triton"):
        actual = solve(ours, inputs, weigh=weigh)
    compare(actual, solve(specified, inputs, weigh=weigh), solve(specified, inputs, torch.float64, weigh=weigh))
