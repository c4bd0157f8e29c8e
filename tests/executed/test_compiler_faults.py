"""Published faults of Triton's compiler are noticed if the installed version has them, and pass if not. The interpreter
shows none of them."""

import pytest
import torch
import triton
import triton.language as tl

from fasttfm.kernels.proof.executed import executed
from ptx_check import FaultyKernel


@triton.jit
def _product_of_masked_numbers(a, mask, b, out, K: tl.constexpr):
    i, j, k = tl.arange(0, 16), tl.arange(0, 16), tl.arange(0, K)
    offsets = i[:, None] * K + k[None, :]
    x = tl.where(tl.load(mask + offsets) != 0, tl.load(a + offsets), 0.0)
    even, odd = tl.split(tl.reshape(tl.join(x, x), (16, K, 2)))
    y = tl.load(b + k[:, None] * 16 + j[None, :])
    tl.store(out + i[:, None] * 16 + j[None, :], tl.dot((even + odd).to(b.dtype.element_ty), y))


@pytest.mark.sample(1)
@pytest.mark.parametrize("chip", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "tf32"])
@pytest.mark.parametrize("depth", [16, 32])
def test_a_shallow_product_behind_a_load_of_bytes_is_noticed(depth, dtype, chip):
    """triton#11691: a depth of 16 is too shallow for the layout that follows from an 8-bit load and a join. The machine
    reports exactly the wrong results."""
    a, b = torch.randint(-3, 4, (16, depth)).to(dtype), torch.randint(-3, 4, (depth, 16)).to(dtype)
    mask, out = torch.randint(0, 2, (16, depth), dtype=torch.int8), torch.empty(16, 16)
    with executed(chip, raising=False) as machine:
        _product_of_masked_numbers[(1,)](a, mask, b, out, K=depth)
    right = torch.equal(out, 2 * (a * mask).float() @ b.float())
    assert right == (depth == 32 or tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 8))
    assert [fault.kind for fault in machine.faults] == ([] if right else ["product"])
    assert right or "test_compiler_faults.py:" in str(machine.faults[0])


@triton.jit
def _two_products_a_step(q, k, v, out, k_stride, v_stride, steps, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    rows = tl.load(q + i * N + j)
    acc = tl.zeros((N, N), tl.float32)
    for step in range(steps):
        scores = tl.dot(rows, tl.trans(tl.load(k + (step * N + i) * k_stride + j)))
        acc += tl.dot(scores.to(q.dtype.element_ty), tl.load(v + (step * N + i) * v_stride + j))
    tl.store(out + i * N + j, acc)


@pytest.mark.sample(1)
@pytest.mark.parametrize("chip", ["sm_90", "sm_100"])
def test_an_asynchronous_copy_that_arrives_behind_the_only_fence_is_noticed(chip):
    """Triton 3.7.1 considers a copy written when it is issued: it relies on the fence.proxy.async of another operand's
    stores, although the copy arrives later. launch.stages_for() avoids this in attention."""
    steps, N = 3, 64
    q = torch.randint(-1, 2, (N, N), dtype=torch.float16)
    k, v = (torch.randint(-1, 2, (steps * N, width), dtype=torch.float16) for width in (72, 80))
    with pytest.raises(FaultyKernel, match="fence"), executed(chip):
        _two_products_a_step[(1,)](q, k, v, torch.empty(N, N), 72, 80, steps, N=N, num_stages=2)
    with executed(chip):
        _two_products_a_step[(1,)](q, k, v, out := torch.empty(N, N), 72, 80, steps, N=N, num_stages=1)
    assert torch.equal(out, (q.float() @ k[:, :N].float().T) @ v[:, :N].float())
