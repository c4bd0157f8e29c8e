"""Products of sm_100, which threads find in tensor memory, as the compiler writes them; and with a wait, a fence or a
barrier taken out."""

import pytest
import torch
import triton
import triton.language as tl
from spoiling import replaced, without_lines

from ptx_check import executed


@triton.jit
def multiply(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), KIND)
    for first in range(0, K, BK):
        row, column = first + k[:, None], first + k[None, :]
        left = tl.load(a + m[:, None] * K + column, mask=(m[:, None] < M) & (column < K), other=0.0)
        right = tl.load(b + row * N + n[None, :], mask=(row < K) & (n[None, :] < N), other=0.0)
        sums = tl.dot(left, right, sums, out_dtype=KIND)
    tl.store(c + m[:, None] * N + n[None, :], sums, mask=(m[:, None] < M) & (n[None, :] < N))


TILES = [(64, 64, 32, 4), (128, 64, 32, 4), (128, 128, 32, 8), (64, 32, 64, 4)]


def products(a, b, tile=(64, 64, 32, 4), stages=2, rewrite=None):
    (rows, depth), columns = a.shape, b.shape[1]
    whole = a.dtype == torch.int8
    kind = tl.int32 if whole else tl.float32
    with executed("sm_100", raising=False, rewrite=rewrite) as machine:
        c = torch.empty(rows, columns, dtype=torch.int32 if whole else torch.float32)
        grid = (triton.cdiv(rows, tile[0]), triton.cdiv(columns, tile[1]))
        multiply[grid](a, b, c, rows, columns, depth, *tile[:3], kind, num_warps=tile[3], num_stages=stages)
    return c, machine


def whole(*shape, dtype=torch.float16):
    """Small whole numbers, whose sums are exact in every type."""
    return torch.randint(-4, 5, shape).to(dtype)


@pytest.mark.sample(6)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("stages", [1, 3])
def test_products_of_every_tile(tile, dtype, stages):
    a, b = whole(130, 72, dtype=dtype), whole(72, 96, dtype=dtype)
    c, machine = products(a, b, tile, stages)
    assert not machine.faults
    assert not machine.notes
    assert torch.equal(c, a.float() @ b.float())


MUTATIONS = {
    "no tcgen05.wait::ld": (without_lines(r"tcgen05\.wait::ld"), "unwritten"),
    "no tcgen05.wait::st": (without_lines(r"tcgen05\.wait::st"), "unwritten"),
    "no tcgen05.commit": (without_lines(r"tcgen05\.commit"), "deadlock"),
    "no wait for the mbarrier": (without_lines(r"mbarrier\.try_wait|@!complete"), "unwritten"),
    "no fence.proxy.async": (without_lines(r"fence\.proxy\.async"), "fence"),
    "no mbarrier.init": (without_lines(r"mbarrier\.init"), "unwritten"),
    "too little is allocated": (replaced(r"(tcgen05\.alloc.*\], )64", r"\g<1>32"), "bounds"),
    "all threads multiply": (replaced(r"@%p\d+ (tcgen05\.mma)", r"\1"), "divergence"),
    "no copies are waited for": (without_lines(r"cp\.async\.wait_group"), "unwritten"),
    "no barriers": (without_lines(r"bar\.sync"), "tensor memory that threads touched"),
}


@pytest.mark.parametrize(("rewrite", "told"), MUTATIONS.values(), ids=MUTATIONS)
def test_what_is_taken_out_is_noticed(rewrite, told):
    a, b = whole(64, 128), whole(128, 64)
    _, machine = products(a, b, stages=3, rewrite=rewrite)
    assert any(told in ([fault.kind] if told.isalpha() else fault.message) for fault in machine.faults), machine.faults
