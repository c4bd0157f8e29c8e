"""The choice of attention's backend: made once per call, from its tensors and the settings at that time."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import fasttfm
from fasttfm import functional as F
from fasttfm.functional.attention import backend
from fasttfm.functional.attention.backend import backend_of
from fasttfm.kernels import launch
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS

from .agreement import Seen


def heads(*shape, **options):
    return torch.randn(*shape, **options)


@pytest.fixture
def on_sm_80(monkeypatch):
    """Routes of that chip, with the interpreter's tiles."""
    monkeypatch.setattr(launch, "chip", lambda device: CHIPS["sm_80"])
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def switch_tf32(monkeypatch, precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def switch_table(monkeypatch, route):
    monkeypatch.setattr(attention_launch, "route", lambda *size: route)


@pytest.mark.parametrize("seen", [nullcontext, Seen], ids=["direct", "dispatcher"])
@pytest.mark.parametrize(
    ("switch", "first", "second"),
    [
        (switch_tf32, "none", "tf32"),
        (switch_tf32, "tf32", "none"),
        (switch_table, "softmax", "flash"),
        (switch_table, "flash", "softmax"),
        (switch_table, "short", "softmax"),
    ],
)
def test_the_backward_pass_takes_the_backend_of_its_forward_pass(seen, switch, first, second, on_sm_80, monkeypatch):
    """Even if TF32 or the table changes in between."""
    x = heads(1, 2, 20, 8, requires_grad=True)
    with F.backend("torch"):
        (wanted,) = torch.autograd.grad(F.attention(x, x, x).square().sum(), x)
    chosen = []
    for setting in (second, first):
        switch(monkeypatch, setting)
        chosen.append(backend_of("triton", x, x, 100))
    assert chosen[0] != chosen[1]
    with F.backend("triton"), seen():
        total = F.attention(x, x, x).square().sum()
        switch(monkeypatch, second)
        (output,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def test_a_planned_query_passes_at_most_six_files_to_its_launch():
    """Files whose frames hold the query between F.attention and the launch."""
    query = heads(1, 2, 3, 8)
    files, folder = [], Path(fasttfm.__file__).parent
    rooms = tuple(f"{each}{os.sep}" for each in {folder, folder.resolve(), (folder / "kernels").resolve()})

    def watch(frame, event, argument):
        file = frame.f_code.co_filename
        ours = event in ("call", "return") and file.startswith(rooms)
        if ours and file not in files and any(value is query for value in frame.f_locals.values()):
            files.append(file)

    with F.backend("triton"):
        F.attention(query, heads(1, 2, 3, 8), heads(1, 2, 3, 8))
        sys.setprofile(watch)
        try:
            F.attention(query, heads(1, 2, 3, 8), heads(1, 2, 3, 8))
        finally:
            sys.setprofile(None)
    assert files
    assert files[0].endswith("attention/api.py")
    assert len(files) <= 6, "\n".join(files)


@pytest.mark.parametrize("window", [None, (9, 0)])
def test_long_rows_of_bfloat16_take_torchs_kernel_where_tiles_multiply_and_nothing_needs_a_gradient(
    monkeypatch, window
):
    causal = window is not None
    for has_tiles, keys, grad, expected in (
        (True, 200, False, True), (True, 200, True, False), (True, 40, False, False), (False, 200, False, False)
    ):  # fmt: skip
        monkeypatch.setattr(backend, "_HAS_TILES", has_tiles)
        x = torch.randn(1, 2, keys + has_tiles, 8, dtype=torch.bfloat16, requires_grad=grad)
        with torch.profiler.profile() as profile:
            y = F.attention(x, x, x, causal=causal, window=window)
        names = {event.name for event in profile.events()}
        assert ("aten::_scaled_dot_product_flash_attention_for_cpu" in names) == expected
        exact = F.attention(*3 * [x.detach().double()], causal=causal, window=window)
        torch.testing.assert_close(y.double(), exact, atol=0.02, rtol=0.02)
