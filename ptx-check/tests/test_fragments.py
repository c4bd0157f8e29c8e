"""Matrix instructions against the tables of the PTX reference, written out element by element."""

import numpy as np
import pytest
from ptx_text import run
from test_products import a_place, bits, registers

RANDOM = np.random.default_rng(3)


def whole(*shape):
    return RANDOM.integers(-8, 9, shape).astype("f4")


def pairs_of(tiles, turned):
    """What each thread has of tiles (count, 8, 8): elements 2 (l % 4) and the next of row l / 4, turned: of column
    l / 4; (32, count, 2)."""
    return (tiles.swapaxes(1, 2) if turned else tiles).reshape(-1, 32, 2).swapaxes(0, 1)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_stmatrix_stores_the_pairs_of_threads_and_ldmatrix_gives_them_back(count, turned):
    pairs = np.arange(32 * count * 2, dtype="u2").reshape(32, count, 2)
    form = f"m8n8.x{count}{'.trans' if turned else ''}.shared.b16"
    given, back = ("{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}" for first in (10, 30))
    loads = "\n".join(f"ld.global.b32 %r{10 + i}, [%rd10+{4 * i}];" for i in range(count))
    stores = "\n".join(f"st.global.b32 [%rd12+{4 * i}], %r{30 + i};" for i in range(count))
    body = f"""
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %rd10, %r1, {4 * count}, %rd1;
    mad.wide.u32 %rd11, %r1, 16, %rd2;
    mad.wide.u32 %rd12, %r1, {4 * count}, %rd3;
    shl.b32 %r2, %r1, 4;
    {loads}
    stmatrix.sync.aligned.{form} [%r2], {given};
    bar.sync 0;
    ldmatrix.sync.aligned.{form} {back}, [%r2];
    {stores}
    setp.lt.u32 %p1, %r1, {8 * count};
    @%p1 ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r2];
    @%p1 st.global.v4.b32 [%rd11], {{%r20, %r21, %r22, %r23}};
    """
    memory = {"x": pairs.reshape(-1), "tiles": np.zeros(64 * count, "u2"), "back": np.zeros(64 * count, "u2")}
    ran = run(body, shared=128 * count, target="sm_90a", **memory)
    assert not ran.faults
    assert np.array_equal(pairs, pairs_of(ran["tiles"].reshape(count, 8, 8), turned))
    assert np.array_equal(pairs.reshape(-1), ran["back"])


# --------------------------------------------------------------------------------------------------------------- wgmma


def swizzled(address, pattern):
    """The canonical layouts' exchange of 16-byte pieces: pattern 128 has rows 0 .. 7, each with 8 pieces."""
    piece, row = address // 16 % (pattern // 16), address // 128 % (pattern // 16)
    return address - piece * 16 + (piece ^ row) * 16


def laid_out(matrix, pattern, turned, kind):
    """The bytes of an operand (rows, depth) in shared memory, its leading and its stride offset."""
    rows, depth = matrix.shape
    size = 4 if kind == "tf32" else 2
    data = np.zeros(1 << 15, "u1")
    across = pattern // size
    if turned:  # 8 steps of k by `across` rows; then further k, then further rows
        stride = 8 * pattern
        leading = stride * -(-depth // 8)
    else:
        stride, leading = 8 * pattern, 0
    for row in range(rows):
        for k in range(depth):
            if turned:
                byte = row % across * size + row // across * leading + k % 8 * pattern + k // 8 * stride
            else:
                byte = row % 8 * pattern + row // 8 * stride + k * size
            byte = swizzled(byte, pattern)
            data[byte : byte + size] = list(bits(matrix[row, k], kind).to_bytes(size, "little"))
    return data, leading, stride


def descriptor(start, leading, stride, pattern):
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | {128: 1, 64: 2, 32: 3}[pattern] << 62


PROXY, FENCE = "fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def wgmma(a, b, kind, pattern, turned, from_registers, columns, scale=1, wait=WAIT, proxy=PROXY, fence=FENCE):
    depth = a.shape[1]
    data_b, *layout_b = laid_out(b.T, pattern, turned[1], kind)
    shared_b = descriptor(32768, *layout_b, pattern)
    data = np.concatenate([laid_out(a, pattern, turned[0], kind)[0], data_b])
    shared_a = descriptor(0, *laid_out(a, pattern, turned[0], kind)[1:], pattern)
    count = columns // 2
    sums = ", ".join(f"%r{100 + i}" for i in range(count))
    setup = "\n".join(f"mov.b32 %r{100 + i}, 0f3F800000;" for i in range(count))
    stores = "\n".join(f"st.global.b32 [%rd13+{4 * i}], %r{100 + i};" for i in range(count))
    flags = "" if kind == "tf32" else f", {turned[0]:d}, {turned[1]:d}"  # 32-bit elements cannot be transposed
    left, fragments = f"%rd20, %rd21, {scale}, 1, 1", np.zeros(512, "u4")
    if from_registers:
        left = f"{{%r20, %r21, %r22, %r23}}, %rd21, {scale}, 1, 1"
        flags = "" if kind == "tf32" else f", {turned[1]:d}"
        count = 4 if kind == "tf32" else 8
        places = [[a_place(lane, i, kind, 16) for i in range(count)] for lane in range(32)]
        fragments = np.concatenate([registers(rows, places, kind) for rows in a.reshape(4, 16, depth)]).reshape(-1)
    count = columns // 2
    return run(
        f"""
        mov.u32 %r1, %tid.x;
        mov.b32 %r2, 0;
        $L__BB0_1:
        mad.lo.s32 %r3, %r2, 2048, 0;
        mad.lo.s32 %r3, %r1, 16, %r3;
        cvt.u64.u32 %rd10, %r3;
        add.s64 %rd10, %rd10, %rd1;
        ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd10];
        st.shared.v4.b32 [%r3], {{%r10, %r11, %r12, %r13}};
        add.s32 %r2, %r2, 1;
        setp.lt.u32 %p1, %r2, 32;
        @%p1 bra $L__BB0_1;
        mad.wide.u32 %rd12, %r1, 16, %rd2;
        ld.global.v4.b32 {{%r20, %r21, %r22, %r23}}, [%rd12];
        {setup}
        mov.b64 %rd20, {shared_a};
        mov.b64 %rd21, {shared_b};
        {proxy}
        bar.sync 0;
        {fence}
        wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} {{{sums}}}, {left}{flags};
        wgmma.commit_group.sync.aligned;
        {wait}
        mad.wide.u32 %rd13, %r1, {4 * count}, %rd3;
        {stores}
        """,
        threads=128,
        shared=65536,
        target="sm_90a",
        x=data,
        f=fragments,
        y=np.zeros(128 * count, "u4"),
    )


@pytest.mark.parametrize("columns", [8, 64])
@pytest.mark.parametrize("pattern", [128, 64, 32])
@pytest.mark.parametrize(
    ("kind", "turned", "from_registers"),
    [
        ("bf16", (False, False), False),
        ("bf16", (False, True), False),
        ("f16", (True, True), False),
        ("f16", (False, True), True),
        ("bf16", (False, False), True),
        ("tf32", (False, False), False),
        ("tf32", (False, False), True),
    ],
)
def test_wgmma_multiplies_swizzled_tiles(kind, turned, from_registers, pattern, columns):
    depth = 8 if kind == "tf32" else 16
    a, b = whole(64, depth), whole(depth, columns)
    ran = wgmma(a, b, kind, pattern, turned, from_registers, columns)
    assert not ran.faults
    actual = ran["y"].view("f4").reshape(128, columns // 2)
    product = a @ b + 1
    for thread in range(128):
        for i in range(columns // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (i // 2 % 2)
            column = i // 4 * 8 + thread % 4 * 2 + i % 2
            assert actual[thread, i] == product[row, column], (thread, i)


def test_wgmma_may_begin_a_sum():
    a, b = whole(64, 16), whole(16, 8)
    actual = wgmma(a, b, "bf16", 128, (False, False), False, 8, scale=0)["y"].view("f4").reshape(128, 4)
    assert actual[0, 0] == (a @ b)[0, 0]


def small(kind="bf16", turned=False, from_registers=False, **changes):
    return wgmma(whole(64, 16), whole(16, 8), kind, 128, (False, turned), from_registers, 8, **changes)


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, set()),
        ({"wait": ""}, {"unwritten"}),  # sums are used too early
        ({"wait": f"bar.sync 0;\nshl.b32 %r3, %r1, 2;\nst.shared.b32 [%r3], %r1;\n{WAIT}"}, {"race"}),  # of an operand
        ({"proxy": ""}, {"fence"}),
        ({"fence": ""}, {"fence"}),
        ({"proxy": "", "fence": f"{PROXY}\n{FENCE}"}, set()),
        ({"fence": f"{FENCE}\nadd.s32 %r100, %r100, 0;"}, {"fence"}),
        ({"fence": f"{FENCE}\nadd.s32 %r99, %r100, 0;"}, {"fence"}),
        ({"fence": f"{FENCE}\nadd.s32 %r99, %r1, 0;"}, set()),
        ({"fence": f"{FENCE}\nmov.b32 %r99, %r100;\nmov.b32 %r100, %r99;"}, set()),  # where the assembler moves them
        ({"fence": f"{FENCE}\nadd.s32 %r99, %r1, 0;\nmov.b32 %r100, %r99;"}, {"fence"}),
        ({"fence": f"{FENCE}\n@%p1 mov.b32 %r100, 0;"}, {"fence"}),
        ({"fence": "mov.b32 %r100, 0;"}, {"fence"}),
        ({"fence": f"mov.b32 %r99, 0;\nst.shared.b32 [%r99], %r99;\nbar.sync 0;\n{FENCE}"}, {"fence"}),
    ],
)
def test_products_need_their_fences(changes, kinds):
    """fence.proxy.async for what threads wrote into shared memory, wgmma.fence for registers that others touched."""
    assert small(**changes).kinds == kinds


TWICE = "wgmma.commit_group.sync.aligned;"


@pytest.mark.parametrize(
    ("fence", "kinds"),
    [
        (FENCE, set()),
        (f"add.s32 %r20, %r21, 0;\n{FENCE}", set()),
        (f"{FENCE}\nadd.s32 %r20, %r21, 0;", {"fenced"}),  # a note: the assembler injects another
        ("add.s32 %r20, %r21, 0;", {"fence"}),
        (f"{FENCE}\n{TWICE}\nadd.s32 %r20, %r21, 0;", {"fence"}),  # behind the products that it was for
        (f"{FENCE}\nadd.s32 %r100, %r20, 0;", {"fence"}),  # the sums
    ],
)
def test_fragments_in_registers_need_the_fence_too(fence, kinds):
    assert small(turned=True, from_registers=True, fence=fence).kinds == kinds
