"""Machine code of whole launches on sm_90: right where the PTX is, and what is spoilt in it is noticed."""

import re

import pytest
import torch
import triton
import triton.language as tl
from spoiling import replaced
from test_language import FEATURES
from test_specialised import MAPS, products_of, stored_of

from ptx_check import FaultyKernel, Unsupported, executed
from ptx_check.ledger import sass
from ptx_check.machine_code.compared import version


@triton.jit
def _product(a, b, out, K, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    total = tl.zeros((N, N), tl.float32)
    for k in range(0, K, N):
        total = tl.dot(tl.load(a + i * K + k + j), tl.load(b + (k + i) * N + j), total)
    tl.store(out + i * N + j, total)


def product(*, rewrite=None, N=64, dtype=torch.float16):
    """A product in steps whose copies and products are asynchronous: wanted, found."""
    a, b = torch.randint(-3, 4, (N, 4 * N)).to(dtype), torch.randint(-3, 4, (4 * N, N)).to(dtype)
    with executed("sm_90", machine_code="compare") as machine:
        if rewrite is not None:
            machine.machine_code.rewrite = rewrite
        out = torch.empty(N, N)
        _product[(1,)](a, b, out, 4 * N, N=N, num_stages=3)
    return a.float() @ b.float(), out


@pytest.mark.sample(2)
@pytest.mark.parametrize(("N", "dtype"), [(16, torch.bfloat16), (16, torch.float32), (64, torch.float16),
                                          (64, torch.bfloat16), (64, torch.float32)])  # fmt: skip
def test_a_product_of_a_warp_and_of_four(N, dtype):
    wanted, found = product(N=N, dtype=dtype)
    assert torch.equal(wanted, found)


SPOILT = {
    "a wrong descriptor": replaced(r"(HGMMA[^;]*gdesc\[UR)(\d+)", r"\g<1>30", 1),
    "a wrong register of a store": replaced(r"(STG\.E\S* [^,]*, R)\d+", r"\g<1>9", 1),
    "a wrong place of a copy": replaced(r"(LDGSTS\.E\S* \[R\d+\+0x\w+)", r"\g<1>0", 1),
    "no wait for copies": replaced(r"DEPBAR\.LE SB0, 0x\w+", "NOP", 1),
    "one group of copies fewer": replaced(r"(DEPBAR\.LE SB0, )0x\w+", r"\g<1>0x3", 1),
    "no barriers": replaced(r"BAR\.SYNC\.DEFER_BLOCKING 0x0", "NOP"),
    "no fence of proxies": replaced(r"FENCE\.VIEW\.ASYNC\.S", "NOP"),
    "no fence of registers": replaced(r"WARPGROUP\.ARRIVE", "NOP"),
    "no wait for products": replaced(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x\w+", "NOP"),
    "a guard turned": replaced(r"@!(P\d)(\s+BRA)", r"@\1\2", 1),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SPOILT)
def test_what_is_spoilt_in_machine_code_is_noticed(name):
    """By a fault, by a refusal, or by numbers that differ from those of the PTX."""
    with pytest.raises((FaultyKernel, Unsupported), match="machine code") as raised:
        product(rewrite=SPOILT[name])
    if name == "a wrong register of a store":
        assert re.search(f"elements of tensor 2 .*ptxas {version(str(sass.tool('ptxas')))}", str(raised.value))


@triton.jit
def _sum(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + 1)


def test_integers_that_differ_only_beyond_float64_are_told():
    x = torch.full((32,), 1 << 60)
    with executed("sm_90", machine_code="compare") as machine:
        machine.machine_code.rewrite = replaced(r"(IADD3 R\d+, P\d+, R\d+, )0x1", r"\g<1>0x2", 1)
        with pytest.raises(FaultyKernel, match="are not what the PTX computes"):
            _sum[(1,)](x, torch.empty_like(x), N=32, num_warps=1)


@triton.jit
def _quotient(x, y, out, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.div_rn(tl.load(x + i), tl.load(y + i)))


def quotient(*, rewrite=None, rows=8, **options):
    """Quotients of which some need a call: wanted, found, machine."""
    x, y = torch.randn(2, 8, 32)
    x[::2, ::3] *= 2.0**-130
    with executed("sm_90", machine_code="compare", **options) as machine:
        if rewrite is not None:
            machine.machine_code.rewrite = rewrite
        out = torch.empty(rows, 32)
        _quotient[(8,)](x, y, out, N=32, num_warps=1)
    return x / y, out, machine


def test_a_call_and_the_way_back_by_two_assemblers_that_agree():
    """Machine code that another assembler has made too runs once."""
    ran, ptxas = [], str(sass.tool("ptxas"))
    wanted, found, machine = quotient(ptxas=[ptxas, ptxas], rewrite=lambda text: ran.append(text) or text)
    assert torch.equal(wanted, found)
    assert (len(machine.machine_code.outcomes), len(ran)) == (2, 1)


def test_machine_code_of_faulty_ptx_does_not_run_and_programs_left_out_write_nothing():
    machine = quotient(rows=4, raising=False)[2]
    assert machine.faults
    assert not machine.machine_code.outcomes
    _, found, machine = quotient(programs=2)
    assert machine.launches[0].left_out == 6
    assert found[1:-1].eq(0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("registers", [True, False])
def test_a_producer_and_two_consumers(registers):
    wanted, found, machine = products_of(registers=registers, machine_code="compare")
    assert not machine.faults
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.whole
@pytest.mark.parametrize(("shape", "box", "dtype"), MAPS[1:], ids=str)
def test_bulk_copies(shape, box, dtype):
    *_, machine = stored_of(shape, box, dtype, machine_code="compare")
    assert not machine.faults


@pytest.mark.whole
@pytest.mark.parametrize("fault", ["one scratch for two", "arrival before the products", "one arrival for two"])
def test_faults_of_pipelines(fault):
    *_, machine = products_of(fault=fault, registers=False, machine_code=True)
    assert machine.faults


@pytest.mark.whole
@pytest.mark.parametrize("feature", [f for f in FEATURES if f.compiles("sm_90")],
                         ids=lambda f: f.name)  # fmt: skip
def test_features_of_the_language_agree_with_their_ptx_or_are_refused(feature):
    try:
        feature.check("sm_90", machine_code="compare")
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("chip", "options", "told"),
    [
        ("sm_80", {"machine_code": True}, "choose sm_90"),
        ("sm_90", {"machine_code": True, "ptxas": ["a", "b"]}, 'needs machine_code="compare"'),
    ],
)
def test_what_cannot_be_executed_is_told_in_one_line(chip, options, told):
    with pytest.raises(ValueError, match=told), executed(chip, **options):
        pass
