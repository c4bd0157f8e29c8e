"""What foreign code asks of torch.cuda and of tensors while kernels are executed."""

import pytest
import torch
import triton
import triton.language as tl
from torch.cuda import current_device, is_available
from torch.utils._triton import has_triton

from ptx_check import CHIPS, executed

BOUND = current_device, is_available


def test_torch_cuda_speaks_of_the_chip():
    for name, chip in CHIPS.items():
        with executed(name):
            assert torch.cuda.is_available()
            assert torch.cuda.device_count() == 1
            assert torch.cuda.get_device_capability("cuda") == chip.capability
            properties = torch.cuda.get_device_properties(torch.device("cuda:0"))
            assert (properties.major, properties.minor) == chip.capability
            assert properties.multi_processor_count == chip.processors
            assert torch.cuda.get_device_name() == chip.product
            assert triton.runtime.driver.active.get_active_torch_device() == torch.device("cuda", 0)
            assert torch.cuda.is_bf16_supported(including_emulation=False) == (chip.number >= 80)
        assert not torch.cuda.is_available() or torch.cuda.get_device_name() != chip.product


def test_tensors_on_a_device_lie_on_the_cpu_and_say_that_they_do_not():
    with executed("sm_80"):
        made = [
            torch.zeros(2, device="cuda"),
            torch.tensor([1.0, 2.0]).cuda(),
            torch.ones(2).to("cuda:0"),
            torch.ones(2).to(torch.device("cuda"), torch.float64),
            torch.ones(2).new_empty((2,), device="cuda").fill_(1),
            torch.nn.Linear(2, 2).cuda().weight,
            torch.arange(2, device=0),
        ]
        for tensor in made:
            assert tensor.is_cuda
            assert tensor.device == torch.device("cuda", 0)
            assert tensor.get_device() == 0
        with torch.cuda.device(made[0].device), torch.cuda.stream(torch.cuda.Stream()):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            end.record()
            assert begin.elapsed_time(end) >= 0
    for tensor in made:
        assert not tensor.is_cuda
        assert tensor.device.type == "cpu"
    with executed("sm_90", cuda=False):
        assert torch.zeros(1).device.type == "cpu"
        assert not torch.zeros(1).is_cuda


class Tripled(torch.autograd.Function):
    """An operator whose gradient is allocated where its input lies."""

    @staticmethod
    def forward(ctx, x):
        ctx.device = x.device
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        made = torch.empty(gradient.shape, device=ctx.device)
        return made.copy_(gradient * 3)


def test_training_goes_on_as_on_a_cpu_and_backward_functions_are_answered_too():
    """PyTorch itself is told the truth: autograd, optimizers and random numbers look for no device."""
    with executed("sm_90"):
        layer = torch.nn.Linear(3, 1, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        with torch.random.fork_rng():
            loss = layer(torch.randn(5, 3, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        x = torch.randn(4, device="cuda", requires_grad=True)
        (gradient,) = torch.autograd.grad(Tripled.apply(x).sum(), x)
        Tripled.apply(x).sum().backward()
    assert gradient.tolist() == x.grad.tolist() == [3.0] * 4


def test_what_was_bound_at_import_answers_too_and_is_itself_again_afterwards():
    with executed("sm_90"):
        assert (current_device(), is_available(), has_triton()) == (0, True, True)
    assert (current_device, is_available) == (torch.cuda.current_device, torch.cuda.is_available) == BOUND


def test_a_generator_autocast_compile_and_the_accelerator_are_the_devices():
    x, w = (torch.randn(3, 3) for _ in range(2))
    with executed("sm_90"):
        assert isinstance(torch.Generator("cuda").manual_seed(3), torch.Generator)
        assert not x.is_cpu
        assert not torch.cuda.is_current_stream_capturing()
        assert torch.accelerator.is_available()
        assert torch.accelerator.current_accelerator().type == "cuda"
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled("cuda")
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            assert (x.cuda() @ w.cuda()).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cuda")
        for made in (torch.autocast("cuda"), torch.amp.autocast("cuda"), torch.cuda.amp.autocast()):
            with made:
                assert (x @ w).dtype == torch.float16
        with torch.autocast("cuda", enabled=False):
            assert (x @ w).dtype == torch.float32

        @torch.compile(fullgraph=True)
        def doubled(x):
            print(end="")  # would break a graph
            return 2 * x

        assert torch.equal(doubled(x), 2 * x)
    assert x.is_cpu


@triton.jit
def _twice(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


@torch.library.custom_op("ptx_check_tests::twice", mutates_args=())
def _twice_by_an_operator(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, device=x.device)
    assert out.is_cuda
    _twice[(1,)](x, out, x.numel(), N=64)
    return out


@pytest.mark.parametrize("programs", [None, 4])
def test_an_operator_of_a_library_is_answered_in_its_body_and_what_it_leaves_unwritten_is_noticed(programs):
    numpy = torch.Tensor.numpy
    with executed("sm_80", programs=programs, raising=False) as machine:
        x = torch.randn(50, device="cuda")
        assert torch.equal(_twice_by_an_operator(x), 2 * x)
        assert len(machine.launches) == 1
        torch.library.wrap_triton(_twice)[(1,)](x, out := torch.empty(60), 50, N=64)
        assert torch.equal(out[:50], 2 * x)
        assert not machine.faults
        _twice_by_an_operator(out)
    assert torch.Tensor.numpy is numpy, "each block inside another leaves it as it was"
    assert [fault.kind for fault in machine.faults] == ["unwritten"]
