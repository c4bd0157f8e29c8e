"""The interpreter as the tests change it gives the numbers of Triton's own, and finds what that one finds."""

import contextlib
import dataclasses

import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl

from fasttfm.kernels.launch import interpreted

pytestmark = pytest.mark.skipif(not interpreted(), reason="kernels are compiled here")


@triton.jit
def _mixed(x, integers, y, whole, shift, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, 2 * N)[None, :]
    value = tl.load(x + rows * 2 * N + columns, mask=columns < 2 * N - 1, other=1.0)
    number = tl.load(integers + columns)
    value = 0.5 * value - 2 * value + value.to(tl.float32) / (1 + rows) + (rows > 1) * 3
    value = value * tl.where(number > shift, value, -value) + number
    tl.store(y + rows * 2 * N + columns, value - tl.max(value, axis=1)[:, None])
    number = (number * shift - columns) // 3 % 7 + (number.to(tl.uint32) >> 1).to(tl.int64)
    tl.store(whole + rows * 2 * N + columns, number + rows)


def mixed(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 8, generator=generator).to(dtype)
    results = [torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int64)]
    _mixed[(1,)](x, torch.arange(8, dtype=torch.int32), *results, 3, N=4)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_numbers_are_those_of_tritons_own(dtype, monkeypatch):
    semantic = triton.runtime.interpreter.interpreter_semantic
    quick = mixed(dtype)
    for name in [name for name, each in vars(semantic).items() if quick_interpreter.__name__ in each.__module__]:
        monkeypatch.delattr(semantic, name)
    monkeypatch.setattr(quick_interpreter, "_types_made_once", contextlib.nullcontext)
    assert all(value.any() for value in quick)
    for ours, theirs in zip(quick, mixed(dtype), strict=True):
        assert torch.equal(ours, theirs)


@triton.jit
def _copy(x, y, N: tl.constexpr):
    columns = tl.arange(0, N)
    tl.store(y + columns, tl.load(x + columns).to(y.dtype.element_ty))


def test_bfloat16_is_rounded_as_pytorch_rounds():
    odd = [0.0, -0.0, 1e-45, 1e-40, 3.4e38, float("inf"), -float("inf"), float("nan"), 1.00390625, 1.01171875]
    x = torch.cat([torch.randn(4086) * 10.0 ** torch.randint(-38, 38, (4086,)), torch.tensor(odd)])
    rounded, back = torch.empty(4096, dtype=torch.bfloat16), torch.empty(4096)
    _copy[(1,)](x, rounded, N=4096)
    _copy[(1,)](rounded, back, N=4096)
    assert torch.equal(rounded.nan_to_num(7.0), x.bfloat16().nan_to_num(7.0))
    assert torch.equal(back.nan_to_num(7.0), rounded.float().nan_to_num(7.0))


def test_an_overflow_is_found_where_triton_debugs(monkeypatch):
    builder = triton.runtime.interpreter.interpreter_builder
    most = torch.full((8,), 2**31 - 1, dtype=torch.int32)
    for debugs in (False, True):
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=debugs))
        with pytest.raises(Exception, match="int32 overflow") if debugs else contextlib.nullcontext():
            _mixed[(1,)](torch.zeros(4, 8), most, torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.int64), 3, N=4)
