"""The choice of attention's backend: made once per call, from its tensors and the settings at that time."""

import itertools
import os
import sys
from pathlib import Path

import pytest
import torch

import fasttfm
from fasttfm import functional as F
from fasttfm import reference
from fasttfm.functional import backends
from fasttfm.functional.attention.backend import backend_of
from fasttfm.functional.attention.scoring import options_of
from fasttfm.kernels import launch
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.chip import CHIPS


def heads(*shape, **options):
    return torch.randn(*shape, **options)


@pytest.fixture
def on_sm_80(monkeypatch):
    """Routes of that chip, with the interpreter's tiles."""
    monkeypatch.setattr(launch, "chip", lambda device: CHIPS["sm_80"])
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def packed_qkv(x):
    return F.packed_qkv_attention(x.transpose(1, 2).unsqueeze(2).expand(-1, -1, 3, -1, -1)).unflatten(2, (2, 8))


CALLS = {
    "attention": lambda x: F.attention(x, x, x),
    "packed_qkv_attention": packed_qkv,
    "varlen_attention": lambda x: F.varlen_attention(
        *3 * [x[0].transpose(0, 1)], *2 * [torch.tensor([0, 9, 20])], 11, 11
    ),
    "varlen_packed_qkv_attention": lambda x: F.varlen_packed_qkv_attention(
        torch.stack(3 * [x[0].transpose(0, 1)], 1), None, *2 * [torch.tensor([0, 9, 20])], 11, 11
    ),
}


def switch_tf32(monkeypatch, precision):
    torch.backends.cuda.matmul.fp32_precision = precision


def switch_table(monkeypatch, route):
    monkeypatch.setattr(attention_launch, "route", lambda *size: route)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("switch", "first", "second"),
    [(switch_tf32, "none", "tf32"), (switch_tf32, "tf32", "none")]
    + [(switch_table, *each) for each in (("softmax", "flash"), ("flash", "softmax"), ("short", "softmax"))],
)
def test_the_backward_pass_takes_the_backend_of_its_forward_pass(name, switch, first, second, on_sm_80, monkeypatch):
    """Even if TF32 or the table changes in between."""
    x = heads(1, 2, 20, 8, requires_grad=True)
    with F.backend("torch"):
        (wanted,) = torch.autograd.grad(CALLS[name](x).square().sum(), x)
    chosen = []
    for setting in (first, second):
        switch(monkeypatch, setting)
        chosen.append(backend_of("triton", x, x, 100))
    assert chosen[0] != chosen[1]
    switch(monkeypatch, first)
    with F.backend("triton"):
        total = CALLS[name](x).square().sum()
        switch(monkeypatch, second)
        (output,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("site", [1 << 31, -1, 1 << 40])
def test_a_site_out_of_range_is_refused_by_every_public_function(site):
    x, rows, seed = heads(1, 2, 3, 8), heads(4, 8), torch.tensor([1])
    dropped = {"dropout_p": 0.5, "seed": seed, "site": site}
    starts, square = torch.tensor([0, 4]), heads(8, 8)
    for call in (
        lambda: F.attention(x, x, x, **dropped),
        lambda: F.attention_weights(x, x, **dropped),
        lambda: F.varlen_attention(*3 * [heads(4, 2, 8)], starts, starts, 4, 4, **dropped),
        lambda: F.packed_qkv_attention(heads(1, 4, 3, 2, 8), **dropped),
        lambda: F.varlen_packed_qkv_attention(heads(4, 3, 2, 8), None, starts, starts, 4, 4, **dropped),
        lambda: F.residual_layer_norm(rows, rows, None, None, **dropped),
        lambda: F.residual_add(rows, rows, **dropped),
        lambda: F.feed_forward(rows, square, None, square, None, **dropped),
        lambda: F.embed(torch.tensor([[1, 2]]), square, **dropped),
    ):
        with pytest.raises(ValueError, match=rf"site is {site}: it must be at least 0 and below 2\^31"):
            call()


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("offset", [1 << 31, -(1 << 31)])
def test_offsets_beyond_32_bits(offset, backend):
    x, packed, starts = heads(1, 2, 3, 8), heads(4, 2, 8), torch.tensor([0, 4])
    everything = offset > 0
    with F.backend(backend):
        output = F.attention(x, x, x, causal=True, causal_offset=offset)
        torch.testing.assert_close(output, F.attention(x, x, x) * everything)
        output = F.varlen_attention(packed, packed, packed, starts, starts, 4, 4, causal=True, causal_offset=offset)
        torch.testing.assert_close(
            output, F.varlen_attention(packed, packed, packed, starts, starts, 4, 4) * everything
        )


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("offset", [-2, 0, 3])
def test_packed_sequences_with_offsets(backend, offset):
    starts = torch.tensor([0, 4, 4, 11]), torch.tensor([0, 6, 8, 15])
    leaf_tensors = [heads(n, 2, 8, requires_grad=True) for n in (12, 15, 15)]
    options = {"causal": True, "causal_offset": offset, "dropout_p": 0.2, "seed": torch.tensor([5])}
    expected = reference.varlen_attention(*leaf_tensors, *starts, **options)
    wanted = torch.autograd.grad(expected.square().sum(), leaf_tensors)
    with F.backend(backend):
        alone = F.varlen_attention(*leaf_tensors, *starts, 7, 7, **options)
        both = F.varlen_packed_qkv_attention(
            torch.stack(leaf_tensors[1:], 1), leaf_tensors[0], *starts, 7, 7, **options
        )
        for output in (alone, both.unflatten(1, (2, 8))):
            torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
            gradients = torch.autograd.grad(output.square().sum(), leaf_tensors)
            torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["sm_60", "sm_70", "sm_75"])
def test_chips_without_fast_matrix_units_take_cublas_except_for_narrow_windows(name, dtype, monkeypatch):
    """At a quarter of the keys the flash kernel, which computes only the window, is no slower than cuBLAS."""
    monkeypatch.setattr(launch, "chip", lambda device: CHIPS[name])
    taken = []
    for width, keys in itertools.product((64, 128, 256, 300), (20, 300, 1000, 3000)):
        x = heads(1, 1, 2, width, dtype=dtype)
        options = options_of(x, (1, 1, 2, keys), causal=True)
        plain, wide, narrow = (
            backend_of("triton", x, x, keys, options._replace(window=window, softcap=2.0, sinks=torch.ones(1)))
            for window in (-1, keys // 4, keys // 4 - 1)
        )
        taken.append(plain)
        assert wide == plain
        if width < 256:
            assert narrow == ("flash" if plain == "softmax" else plain)
        else:  # wide heads of float32, which no kernel for long rows takes
            assert narrow == plain or (narrow, dtype) == ("flash", torch.float16)
    assert set(taken) == {"short", "flash", "softmax"}


def test_contexts_that_end_in_another_order_leave_no_choice_behind():
    """As those of two threads may."""
    before, first, second = backends.current, backends.backend("torch"), backends.backend("triton")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert backends.current == "triton"
    second.__exit__(None, None, None)
    assert backends.current == before
