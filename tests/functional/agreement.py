"""Comparison of an operator with what it must equal, forward and backward."""

import torch
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm import functional as F
from fasttfm import reference


def agree(ours, expected, inputs, backend="auto", gradients=None, **close):
    """Assert that ours(*inputs) equals expected, a tensor, with its gradients; return both.

    gradients: tolerances of the gradients, if others.
    """
    probe = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, probe)
    with F.backend(backend):
        actual = ours(*inputs)
        computed = torch.autograd.grad(actual, inputs, probe)
    torch.testing.assert_close(actual, expected, **close)
    torch.testing.assert_close(computed, wanted, **(gradients or close))
    return actual, computed


def solve(function, inputs, **options):
    """The outputs of a function, and the gradients of its inputs that are not None."""
    outputs = function(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    total = sum((o.double() * torch.cos(torch.arange(o.numel()) + 1.0 * i).view(o.shape)).sum()
                for i, o in enumerate(outputs))  # fmt: skip
    return [*outputs, *torch.autograd.grad(total, [x for x in inputs if x is not None])]


def assert_same(actual, expected, tolerance):
    """Assert equal dtypes, and values within the tolerance of the coarsest dtype, relative to the largest value."""
    close = max(tolerance[x.dtype] for x in expected)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.dtype == other.dtype
        largest = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(mine, other, rtol=0, atol=close * max(1.0, largest))


def saved_bytes(function):
    """Bytes that autograd saves for the backward pass of function(): each storage once, without parameters."""
    kept = {}

    def pack(tensor):
        if not isinstance(tensor, Parameter) and not isinstance(getattr(tensor, "_base", None), Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    assert output.requires_grad
    return sum(kept.values())


def attended(function, tensors, options, dtype=None):
    """The output, and the gradients of the tensors, of sinks and of an additive mask, all in this dtype, if given."""

    def leaf(x):
        return x.detach().to(dtype or x.dtype).requires_grad_()

    taking = [name for name in ("sinks", "mask") if name in options and options[name].is_floating_point()]
    options = options | {name: leaf(options[name]) for name in taking}
    tensors = [leaf(x) for x in tensors]
    output = function(*tensors, **options)
    grad = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape).to(output.dtype)
    leaves = [*tensors, *(options[name] for name in taking)]
    return output.detach(), *torch.autograd.grad(output, leaves, grad, allow_unused=True, materialize_grads=True)


def attention_of_the_reference(*tensors, **options):
    return reference.attention(*tensors, **options)[0]


class Seen(TorchDispatchMode):
    """Sends calls through the dispatcher, and records those of our operators."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fasttfm":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Inside(TorchDispatchMode):
    """Records the elements of the largest output of PyTorch's operators that ours are made of; no views."""

    sees_through_operators = True

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if not func.is_view:
            outputs = output if isinstance(output, tuple | list) else [output]
            self.sizes.append(max((x.numel() for x in outputs if torch.is_tensor(x)), default=0))
        return output
