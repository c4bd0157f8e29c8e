"""Tolerance of kernel errors, the rule of flash-attention.

The error against the exact result may be twice that of plain PyTorch in the same precision, plus a floor of a few units
in the last place of the largest magnitude.
"""

import torch

from fasttfm.functional.backends import backend

FLOOR = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative to the largest magnitude, by dtype of the result: about 16, 1 and 1 units in the last place."""


def assert_as_accurate(results, plain, exact, what="", *, largest=None, slack=0.0):
    """Checks results against exact (float64); plain: of PyTorch, in the dtype of results.

    largest: the magnitude for the floor, by default that of exact; slack: additional tolerance, also by element.
    """
    assert results.shape == exact.shape, f"{what}: shape {tuple(results.shape)} instead of {tuple(exact.shape)}"
    assert results.dtype == plain.dtype, f"{what}: {results.dtype} instead of {plain.dtype}"
    if not exact.numel():
        return
    assert torch.isfinite(results).all(), f"{what} is not finite"
    largest = exact.abs().max().item() if largest is None else largest
    allowed = 2 * (plain.double() - exact).abs().max().item() + FLOOR[results.dtype] * largest
    error = ((results.double() - exact).abs() - slack).max().item()
    assert error <= allowed, f"{what}: error {error:.2e}, allowed {allowed:.2e}, largest {largest:.2e}"


def solve(way, inputs, precision=None, weigh=None):
    """Outputs of way(**inputs), then the gradients of all inputs, by name.

    precision: convert the inputs to it first. weigh(outputs): the scalar to differentiate, by default weigh_all().
    """
    leaves = {name: (value if precision is None else value.to(precision)).detach() for name, value in inputs.items()}
    outputs = way(**{name: leaf.requires_grad_() for name, leaf in leaves.items()})
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    total = (weigh or weigh_all)(outputs)
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    results = {f"output {i}": output for i, output in enumerate(outputs)}
    return results | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def weigh_all(outputs):
    """Sum of all elements of all outputs, each with a different weight."""
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
    """Compares a function on the kernels with its specification in the precision of the inputs and in float64."""
    with backend("triton"):
        actual = solve(ours, inputs, weigh=weigh)
    compare(actual, solve(specified, inputs, weigh=weigh), solve(specified, inputs, torch.float64, weigh=weigh))
