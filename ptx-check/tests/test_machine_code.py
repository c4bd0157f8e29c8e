"""The ledger reads machine code, finds its loops, and counts what they ask of each unit. No device is needed."""

import dataclasses
import re

import pytest

from ptx_check.__main__ import main
from ptx_check.ledger import count, counted, gcn, latency, published, sass, units
from ptx_check.ledger.code import Instruction
from ptx_check.ledger.count import Count, Usage
from ptx_check.ledger.products import PRODUCTS
from ptx_check.ledger.resources import Resources


def listing(*lines: str, stall: int = 1) -> str:
    """A function as nvdisasm prints it: lines that end with a colon are labels, others instructions."""
    upper = stall << 41
    text, address = ['\t.section\t.text.kernel,"ax",@progbits', ".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/   {line} ;   /* 0x0000000000000001 */")
        text.append(f"                            /* 0x{upper:016x} */")
        address += 16
    return "\n".join(text)


LOOP = (
    "S2R R0, SR_TID.X",
    "@P1 BRA `(.L_x_9)",
    ".L_x_1:",
    *["LDG.E.128 R4, [R2.64]"] * 2,
    *["HMMA.16816.F32.BF16 R8, R4, R6, R8"] * 4,
    *["FFMA R8, R8, R9, R10"] * 6,
    *["MUFU.EX2 R8, R8"] * 3,
    *["LOP3.LUT R2, R0, 0x1f, RZ, 0xc0, !PT"] * 5,
    *["IMAD.WIDE R4, R0, R2, R4"] * 2,
    *["LDS.128 R4, [R2]"] * 2,
    *["STL [R1], R4"] * 1,
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "@!P0 BRA `(.L_x_1)",
    ".L_x_9:",
    "STG.E [R2.64], R8",
    "EXIT",
    ".L_x_2:",
    "BRA `(.L_x_2)",
    "NOP",
)


def test_a_loop_is_counted_by_unit_as_by_hand():
    (function,) = sass.parse(listing(*LOOP, stall=3))
    counted = count.count(function, "sm_80", warps=4)
    (loop,) = counted.loops
    assert loop.instructions == 27
    assert loop.columns == {
        "issue": 27,
        "fp32": (6 + 2) * 2,  # IMAD goes through the lanes of FFMA
        "imad": 2 * 2,
        "alu": 5 * 2,
        "mufu": 3 * 8,
        "memory": 5 * 4,
        "tensor": 4 * 8,  # 16 * 8 * 16 multiply-adds, 256 a cycle
    }
    assert (loop.bound, loop.busiest) == (32, "tensor")
    assert (loop.shared, loop.moved, loop.spilled, loop.stall) == (32, 32, 1, 3 * 27)
    # What no loop holds; the code's end, which branches to itself for ever, is neither a loop nor padding that counts.
    assert counted.outside.instructions == 2 + 2 + 1
    assert counted.main is loop


def test_the_same_loop_on_a_newer_chip_takes_fewer_cycles_of_the_units_that_grew():
    (function,) = sass.parse(listing(*LOOP))
    loop = count.count(function, "sm_90", warps=4).main
    assert (loop.fp32, loop.imad, loop.tensor, loop.mufu) == (8, 4, 16, 24)


ASYNCHRONOUS = (
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "WARPGROUP.ARRIVE",
    *["HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4].tnspA, R8"] * 3,
    "HGMMA.64x64x16.F32.BF16 R8, gdesc[UR4].tnspA, R8, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1",
    *["MUFU.EX2 R8, R8"] * 2,
    "FFMA R8, R8, R9, R10",
    "MUFU.EX2 R8, R8",
    *["FFMA R8, R8, R9, R10"] * 16,
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",
)


def test_loops_in_several_partitions_are_found_with_the_order_of_their_products():
    """A table of branches leads to the consumers, of which one has more to do, and to a producer."""
    partitions = [
        part
        for label, more in (("2", ()), ("4", ("MUFU.EX2 R9, R9",)))
        for part in (f".L_x_{label}:", *ASYNCHRONOUS, *more, f"@!P0 BRA `(.L_x_{label})", "BRA `(.L_x_1)")
    ]
    producer = (".L_x_6:", *["LDS.128 R4, [R2]"] * 30, "@!P0 BRA `(.L_x_6)", "BRA `(.L_x_1)")
    targets = '(*"BRANCH_TARGETS .L_x_2,.L_x_4,.L_x_6,.L_x_9"*)'
    lines = (".L_x_1:", "LDS.U8 R2, [R0]", f"BRX R2 -0x1b0 {targets}", *partitions, *producer, ".L_x_9:", "EXIT")
    (function,) = sass.parse(listing(*lines))
    counted = count.count(function, "sm_90", warps=12)
    assert counted.products
    order = "B A H4 | W1 E3 W0"
    assert counted.orders == (order, f"{order} E1")
    assert [loop.instructions for loop in counted.loops] == [29, 30]
    (function,) = sass.parse(listing(*LOOP))
    assert count.count(function, "sm_80", warps=4).orders == ("",)


def nested(inner: int) -> str:
    """A loop in a loop; `inner` additions in the inner one, which reads memory and has two ways back."""
    return listing(
        ".L_x_1:",
        *["FADD R1, R1, R2"] * 30,
        ".L_x_2:",
        "LDG.E R4, [R2.64]",
        "@P1 BRA `(.L_x_2)",
        *["FADD R1, R1, R2"] * inner,
        "@P0 BRA `(.L_x_2)",
        "BRA.U !UP0, `(.L_x_1)",
        "EXIT",
    )


def test_the_innermost_loop_is_the_one_over_tiles_and_one_that_waits_for_a_barrier_is_none():
    (function,) = sass.parse(nested(30))
    assert [(len(loop.own), loop.inner, loop.depth) for loop in function.loops] == [(31, 33, 0), (33, 0, 1)]
    assert [each.opcode for each in function.outside] == ["EXIT"]
    loops, products = count.main_loops(function, "sm_80")
    assert [len(loop.own) for loop in loops] == [33]
    assert not products
    # The inner one is shorter than any loop over tiles; the outer one reads no memory itself, so that nothing is left.
    (function,) = sass.parse(nested(3))
    assert count.main_loops(function, "sm_80")[0] == []


def test_a_group_product_is_shared_by_four_warps():
    product = Instruction(0, "HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR4], R24")
    assert units.multiply_adds(product, 4) == 64 * 128 * 16 / 4
    assert units.tensor_cycles(product, units.RATES["sm_90"], 4) == 64
    single = dataclasses.replace(product, opcode="HGMMA.64x128x8.F32.TF32")
    assert units.tensor_cycles(single, units.RATES["sm_90"], 4) == 64  # half the depth at half the rate
    integers = dataclasses.replace(product, opcode="IGMMA.64x128x32.S8.S8")
    assert units.tensor_cycles(integers, units.RATES["sm_90"], 4) == 64  # twice the depth at twice the rate


def test_a_product_of_sm_100_takes_its_shape_from_its_descriptor():
    descriptor = (128 // 8 << 17) | (128 // 16 << 24)
    code = [
        Instruction(0, "UMOV", f"UR6, {descriptor:#x}"),
        Instruction(16, "UTCHMMA", "gdesc[UR4], gdesc[UR8], tmem[UR10], tmem[UR12], idesc[UR6]"),
    ]
    assert units.multiply_adds(code[1], 4, code) == 128 * 128 * 16 / 4
    assert units.multiply_adds(code[1], 4) == 0  # nothing tells


PRINTED = {
    "A100": {"": 312, "IMMA.16832.S8.S8": 624},
    "RTX 3090": {"": 71, "IMMA.16832.S8.S8": 284},
    "RTX 4090": {"": 165, "IMMA.16832.S8.S8": 660, "QMMA.16832.F32.E4M3.E4M3": 330},
    "RTX 5090": {"": 209},
    "H100": {"": 989, "IGMMA.64x128x32.S8.S8": 1979},
    "H200": {"": 989},
    "B200": {"": 2250},
    "MI250X die": {"": 191.5, "v_mfma_f32_32x32x2f32": 47.9, "v_mfma_i32_32x32x8i8": 191.5},
    "MI300X": {"": 1307, "v_mfma_f32_32x32x2_f32": 163.4, "v_mfma_f32_32x32x4_xf32": 653.7,
               "v_mfma_i32_32x32x16_i8": 2615, "v_mfma_f32_32x32x16_fp8_fp8": 2615},
    "MI355X": {"": 2516, "v_mfma_f32_16x16x4_f32": 157.3},
}  # fmt: skip
"""Teraflops by product and instruction; of float16 where none is named."""


@pytest.mark.parametrize("name", PRINTED)
def test_products_have_the_rate_that_the_vendor_prints(name):
    product = PRODUCTS[name]
    amd = product.chip in gcn.RATES
    rates = gcn.RATES[product.chip] if amd else units.RATES[product.chip]
    for opcode, printed in PRINTED[name].items():
        instruction = Instruction(0, opcode, "")
        if not opcode:
            work = rates.fma
        elif amd:
            work = gcn.multiply_adds(instruction) / gcn.tensor_cycles(instruction, rates)
        else:
            work = units.multiply_adds(instruction, 4) / units.tensor_cycles(instruction, rates, 4)
        assert 2 * work * product.schedulers * product.clock / 1e3 == pytest.approx(printed, rel=0.02), opcode


def test_widths_of_atomic_and_transposed_accesses_are_read():
    atomics = ("REDG.E.ADD.F32.STRONG.GPU", "ATOM.E.ADD.64")
    assert [units.global_bytes(Instruction(0, opcode, "")) for opcode in atomics] == [4, 8]
    reads = ("ds_read_b64_tr_b16", "ds_read_u16_d16_hi")
    assert [gcn.width(Instruction(0, opcode, "")) for opcode in reads] == [8, 2]


GCN = """
	.type	kernel,@function
kernel:                                 ; @kernel
	s_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
	global_load_dwordx4 v[0:3], v[4:5], off
{products}
	v_exp_f32_e32 v1, v1
	v_mul_lo_u32 v2, v2, v3
{sums}
	ds_read_b128 v[0:3], v9
	s_cbranch_scc1 .LBB0_1
; %bb.2:
	scratch_store_dword off, v0, s0
	s_endpgm
"""


def test_amds_assembly_is_counted_as_by_hand():
    text = GCN.format(
        products="\n".join(["\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]"] * 3),
        sums="\n".join(["\tv_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[0:1]"] * 20),
    )
    (function,) = gcn.parse(text)
    counted = count.count(function, "gfx942", warps=4)
    (loop,) = counted.loops
    assert loop.instructions == 28
    assert loop.tensor == 3 * 32 * 32 * 8 / 256
    assert loop.alu == 20 * 4 + 2 * 16  # every vector instruction: transcendental ones and products of 32 bits 16
    assert (loop.fp32, loop.mufu) == (80, 16)
    assert loop.memory == 2 * 4 * 8  # 16 bytes a lane, twice
    assert (loop.bound, loop.busiest, loop.moved, loop.shared) == (112, "alu", 16, 16)
    assert counted.outside.spilled == 1


def test_the_lightest_of_loops_with_products_bounds_a_kernel_and_loops_without_follow_each_other():
    light, heavy = Usage(instructions=30, issue=30.0), Usage(instructions=50, issue=50.0)
    assert Count((light, heavy), Usage(), True).main is light
    assert Count((light, heavy), Usage(), False).main.issue == 80
    assert Count((), heavy, False).main is heavy


def test_resident_warps_share_the_waiting():
    used, needs = Usage(stall=1000), Resources(128, 0, 0, 0)
    assert latency.latency("sm_90", used, needs, 4) == 1000 / (0.25 * 64 / 4)
    assert latency.latency("sm_103", used, needs, 4) == 1000 / (0.25 * 64 / 4)
    assert latency.latency("gfx942", used, needs, 4) == 0


def test_published_times_reach_a_share_of_the_bound_below_one(capsys):
    for each in published.PUBLISHED:
        assert 0.3 < each.share < 1.0, each
    assert 0.5 < published.reached() < 0.9
    assert main(["ledger", "--validate"]) == 0
    assert re.search(r"The median share is \d+%", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mine.py", "--chips", "sm_1"], "unknown chip sm_1: choose from sm_60"),
        (["--match", "("], "is not a regular expression"),
        (["--peer", "/no/such"], "there is no file /no/such"),
        (["--peer", "a", "--validate"], "give one of"),
        ([], "give one of"),
    ],
)
def test_wrong_arguments_end_in_a_line(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["ledger", *words])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_images_that_the_disassembler_does_not_know_are_passed_over(tmp_path, capsys):
    ptx = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry mine() { ret; }\n"
    images = {chip: counted.assemble(ptx, chip) for chip in ("sm_70", "sm_80")}
    file = tmp_path / "lib.so"
    file.write_bytes(b"".join(images.values()))
    assert main(["ledger", "--peer", str(file)]) == 0
    assert re.search(r"mine +sm_80 ", capsys.readouterr().out)
    assert main(["ledger", "--peer", str(file), "--match", "nothing"]) == 1
    assert "no kernel of" in capsys.readouterr().err
    for content, told in ((images["sm_70"], "holds no cubin of sm_75 or newer"), (b"nothing", "holds no cubin")):
        file.write_bytes(content)
        assert main(["ledger", "--peer", str(file)]) == 1
        assert told in capsys.readouterr().err
