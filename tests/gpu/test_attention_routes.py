"""Every route of attention on the device, independent of the table."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional import backend
from fasttfm.kernels import launch
from fasttfm.kernels.attention import backward as attention_backward
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.tiles.attention import LAUNCHES

from .problems import ATTENTION
from .test_kernels import DTYPES, check


class TruncatedProducts(TorchDispatchMode):
    """Mode in which matrix products use 19 bits of float32: sign, exponent and ten bits of mantissa."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "bmm", "addmm", "baddbmm"):
            args = [_truncated(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in args]
        return function(*args, **(kwargs or {}))


def _truncated(x):
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("route", ["short", "flash", "softmax"])
@pytest.mark.parametrize("problem", ATTENTION, ids=str)
def test_a_route_errs_at_most_twice_as_much_as_torch(problem, route, dtype, device, ieee, monkeypatch):
    device_chip = launch.chip(device)
    size = (launch.product_kind(dtype, device_chip), attention_launch.width_class(problem.width), problem.keys)
    takes = {
        "short": attention_launch.fits_short(device_chip, *size),
        "flash": attention_launch.takes_long(device_chip, *size[:2]),
    }
    if not takes.get(route, True):
        pytest.skip("the rows do not fit the registers")
    monkeypatch.setattr(attention_launch, "route", lambda *size_class: route)
    check(problem, device, dtype)


@pytest.mark.parametrize("route", ["short", "flash"])
@pytest.mark.parametrize("problem", ATTENTION, ids=str)
def test_a_route_in_tf32(problem, route, device, monkeypatch):
    """Compares with the reference by TruncatedProducts: Triton passes float32 to matrix units, which read 19 bits."""
    device_chip = launch.chip(device)
    if device_chip.capability < 80:
        pytest.skip("no TF32 before sm_80")
    size = ("tf32", attention_launch.width_class(problem.width), problem.keys)
    if route == "short" and not attention_launch.fits_short(device_chip, *size):
        pytest.skip("the rows do not fit the registers")
    monkeypatch.setattr(attention_launch, "route", lambda *size_class: route)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        check(problem, device, torch.float32, products=TruncatedProducts())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("problem", ATTENTION, ids=str)
def test_a_backward_pass_of_one_launch(problem, dtype, device, monkeypatch):
    """In every size class that has it on this chip."""
    launches = []

    def fewest(*size):
        launches.append(min(LAUNCHES.alternatives(*size)))
        return launches[-1]

    monkeypatch.setattr(attention_launch, "route", lambda *size_class: "flash")
    monkeypatch.setattr(attention_backward, "LAUNCHES", fewest)
    check(problem, device, dtype)
    if 1 not in launches:
        pytest.skip("two launches on this chip, or for these scores")


@pytest.mark.parametrize("width", [64, 128])
def test_gradients_of_cudnns_output_by_cudnn_and_by_our_kernels(width, device):
    """As accurate as both passes by our kernels, and deterministic with our backward kernels."""
    if launch.chip(device).name != "sm_90":
        pytest.skip("cuDNN is not used on this chip")
    leaves = [
        torch.randn(2, 1024, 4, width, device=device, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference.attention(*exact, causal=True)[0]
    grad = torch.randn_like(leaves[0])
    exact_results = expected, *torch.autograd.grad(expected, exact, grad.double())

    def results(choice, *, deterministic=False):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with backend(choice):
                output = F.attention(*leaves, causal=True)
                return output, *torch.autograd.grad(output, leaves, grad)
        finally:
            torch.use_deterministic_algorithms(False)

    ours, cudnn = results("triton"), results("auto")
    assert not torch.equal(ours[0], cudnn[0])  # another kernel
    mixed, again = (results("auto", deterministic=True) for _ in range(2))
    assert all(map(torch.equal, mixed, again))
    for right, least, *others in zip(exact_results, ours, cudnn, mixed):
        allowed = 2.0 * (least - right).abs().max()
        assert all((x - right).abs().max() <= allowed for x in others)
