"""The ledger reads machine code, finds its loops, and counts what they ask of each unit. No device is needed."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from benchmarks.measure import check, records
from benchmarks.measure.records import load
from fasttfm.errors import UserError
from fasttfm.kernels.compile_case import CHIPS, CompileCase
from fasttfm.kernels.proof import budgets, matrix
from fasttfm.kernels.proof.ledger import bandwidth, count, gcn, latency, published, record, sass, search, units, work
from fasttfm.kernels.proof.ledger import report as ledger_report
from fasttfm.kernels.proof.ledger.__main__ import main
from fasttfm.kernels.proof.ledger.code import Instruction
from fasttfm.kernels.proof.ledger.count import Count, Usage
from fasttfm.kernels.proof.ledger.counted import Counted
from fasttfm.kernels.proof.ledger.products import PRODUCTS
from fasttfm.kernels.proof.resources import Resources

SM_80, SM_90, GFX942 = CHIPS["sm_80"], CHIPS["sm_90"], CHIPS["gfx942"]


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
    counted = count.count(function, SM_80, warps=4)
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
    loop = count.count(function, SM_90, warps=4).main
    assert (loop.fp32, loop.imad, loop.tensor, loop.mufu) == (8, 4, 16, 24)


def nested(inner: int) -> str:
    """A loop in a loop; `inner` additions in the inner one, which reads memory."""
    return listing(
        ".L_x_1:",
        *["FADD R1, R1, R2"] * 30,
        ".L_x_2:",
        "LDG.E R4, [R2.64]",
        *["FADD R1, R1, R2"] * inner,
        "@P0 BRA `(.L_x_2)",
        "BRA.U !UP0, `(.L_x_1)",
        "EXIT",
    )


def test_the_innermost_loop_is_the_one_over_tiles_and_one_that_waits_for_a_barrier_is_none():
    (function,) = sass.parse(nested(30))
    assert [(len(loop.own), loop.inner, loop.depth) for loop in function.loops] == [(31, 32, 0), (32, 0, 1)]
    loops, products = count.main_loops(function, SM_80)
    assert [len(loop.own) for loop in loops] == [32]
    assert not products
    # The inner one is shorter than any loop over tiles; the outer one reads no memory itself, so that nothing is left.
    (function,) = sass.parse(nested(3))
    assert count.main_loops(function, SM_80)[0] == []


def test_two_ways_back_to_one_instruction_are_one_loop_and_a_branch_with_a_condition_among_its_operands_goes_on():
    text = listing(
        ".L_x_1:",
        "LDG.E R4, [R2.64]",
        "@P0 BRA `(.L_x_1)",
        *["FADD R1, R1, R2"] * 30,
        "BRA.U !UP0, `(.L_x_1)",
        "EXIT",
    )
    (function,) = sass.parse(text)
    (loop,) = function.loops
    assert len(loop.own) == 33
    assert [each.opcode for each in function.outside] == ["EXIT"]


def test_a_group_product_is_shared_by_four_warps():
    product = Instruction(0, "HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR4], R24")
    assert units.multiply_adds(product, 4) == 64 * 128 * 16 / 4
    assert units.tensor_cycles(product, units.RATES[90], 4) == 64
    single = dataclasses.replace(product, opcode="HGMMA.64x128x8.F32.TF32")
    assert units.tensor_cycles(single, units.RATES[90], 4) == 64  # half the depth at half the rate


def test_a_product_of_sm_100_takes_its_shape_from_its_descriptor():
    descriptor = (128 // 8 << 17) | (128 // 16 << 24)
    code = [
        Instruction(0, "UMOV", f"UR6, {descriptor:#x}"),
        Instruction(16, "UTCHMMA", "gdesc[UR4], gdesc[UR8], tmem[UR10], tmem[UR12], idesc[UR6]"),
    ]
    assert units.multiply_adds(code[1], 4, code) == 128 * 128 * 16 / 4
    assert units.multiply_adds(code[1], 4) == 0  # nothing tells


def test_every_rate_gives_the_tensor_rate_that_the_vendor_prints():
    printed = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250, "RTX 3090": 71, "RTX 4090": 165, "RTX 5090": 209}
    printed |= {"MI250X die": 191.5, "MI300X": 1307, "MI355X": 2516}
    for name, teraflops in printed.items():
        product = PRODUCTS.get(name)
        if product is not None:
            chip = CHIPS[product.chip]
            rates = units.RATES[chip.capability] if chip.capability else gcn.RATES[chip.name]
            rate = 2 * rates.fma * product.schedulers * product.clock / 1e3
            assert rate == pytest.approx(teraflops, rel=0.02), name


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
    counted = count.count(function, GFX942, warps=4)
    (loop,) = counted.loops
    assert loop.instructions == 28
    assert loop.tensor == 3 * 32 * 32 * 8 / 256
    assert loop.alu == 20 * 4 + 2 * 16  # every vector instruction: transcendental ones and products of 32 bits 16
    assert (loop.fp32, loop.mufu) == (80, 16)
    assert loop.memory == 2 * 4 * 8  # 16 bytes a lane, twice
    assert (loop.bound, loop.busiest, loop.moved, loop.shared) == (112, "alu", 16, 16)
    assert counted.outside.spilled == 1


def test_work_is_the_elements_of_a_thread():
    assert work.tile_elements("attention.forward/causal/D64/128x64w4s3", 32) == 64
    assert work.tile_elements("feed_forward.forward/plain/64x64x32w4s3", 32) == 16  # half of the depth that counts
    assert work.tile_elements("layer_norm.forward/N512/4x512w4s1", 64) == 8
    with pytest.raises(ValueError, match="does not end in a tile"):
        work.tile_elements("layer_norm.forward", 32)


def test_the_lightest_of_loops_with_products_bounds_a_kernel_and_loops_without_follow_each_other():
    light, heavy = Usage(instructions=30, issue=30.0), Usage(instructions=50, issue=50.0)
    assert Count((light, heavy), Usage(), True).main is light
    assert Count((light, heavy), Usage(), False).main.issue == 80
    assert Count((), heavy, False).main is heavy


def test_resident_warps_share_the_waiting():
    used, needs = Usage(stall=1000), Resources(128, 0, 0, 0)
    assert latency.latency(SM_90, used, needs, 4) == 1000 / (0.25 * 64 / 4)
    assert latency.latency(GFX942, used, needs, 4) == 0


def test_a_count_that_grew_by_more_than_three_percent_is_a_regression():
    before = Resources(40, 0, 1024, 4, bound=20.0, outside=100)
    assert budgets.regressions(dataclasses.replace(before, bound=20.5, outside=103), before) == []
    assert budgets.regressions(dataclasses.replace(before, bound=20.7), before) == [
        "bound 20.0 -> 20.7 cycles an element"
    ]
    (told,) = budgets.regressions(dataclasses.replace(before, outside=120), before)
    assert told == "instructions outside of loops 100 -> 120"
    assert budgets.regressions(before, dataclasses.replace(before, bound=0.0, outside=0)) == []  # not counted then


COMPILED = """
import json, sys
from pathlib import Path
import torch, triton, triton.language as tl
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.proof import budgets, compiling, matrix
from fasttfm.kernels.proof.ledger import counted

def named(chip, kernels, *parts):
    listed = matrix.enumerate_cases([CHIPS[chip]], [kernels])
    return next(c for _, c in listed if c.dtype == "bf16" and all(part in c.name for part in parts))

chip = CHIPS["sm_80"]
plain = counted.of_case(chip, named("sm_80", "embedding", "embedding.forward/plain"))
dropped = counted.of_case(chip, named("sm_80", "embedding", "embedding.forward/positions+dropout"))
amd = counted.of_case(CHIPS["gfx942"], named("gfx942", "partial_sums"))
cubin = compiling.compiled(chip, named("sm_80", "partial_sums"))[0].asm["cubin"]
Path(sys.argv[1]).write_bytes(b"a library" + cubin + b"and more")
print(json.dumps({
    "grown": budgets.regressions(dropped.resources, plain.resources),
    "shrunk": budgets.regressions(plain.resources, dropped.resources),
    "amd": [len(amd.count.loops), amd.resources.bound],
    "again": counted.of_case(chip, named("sm_80", "embedding", "embedding.forward/plain")) == plain,
}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What a process without Triton's interpreter counts, and the file of a library that it wrote."""
    folder = tmp_path_factory.mktemp("ledger")
    library = folder / "lib.so"
    return run("-c", COMPILED, str(library), cache=folder), library


def run(*words: str, cache) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["FASTTFM_CACHE"] = str(cache)
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_planted_heavier_kernel_is_noticed(compiled):
    told = json.loads(compiled[0])
    assert any(line.startswith("bound ") for line in told["grown"]), told
    assert not any(line.startswith("bound ") for line in told["shrunk"]), told
    assert told["again"], "a kept count must be what was counted"
    assert told["amd"][1] > 0


def test_the_cubins_of_a_library_are_found_and_counted(compiled, capsys):
    _, library = compiled
    assert main(["--peer", str(library)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["kernel", "chip", "loop"]
    assert lines
    assert all(line.startswith("_add_parts") and " sm_80 " in line for line in lines)
    assert main(["--peer", str(library), "--match", "nothing"]) == 1
    assert "no kernel of" in capsys.readouterr().err


FOREIGN = """
import torch, triton, triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < n
        total += tl.exp(tl.load(x + at, mask=inside, other=0.0)) * tl.load(y + at, mask=inside, other=0.0)
    tl.store(out + tl.arange(0, BLOCK), total)

x = torch.ones(5000)
add[(5,)](x, x, x, 5000, BLOCK=1024)
"""


def test_the_kernels_that_a_file_launches_are_counted(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FOREIGN)
    told = run("-m", "fasttfm.kernels.proof.ledger", str(file), "--chips", "sm_80,gfx942", cache=tmp_path)
    head, *lines = told.splitlines()
    assert "latency" in head
    loops = [line.split() for line in lines if line.startswith("add BLOCK=1024") and "  1 " in line]
    assert {cells[4] for cells in loops} == {"sm_80", "gfx942"}
    mufu = head.split().index("mufu") + 3  # the name takes four cells
    assert loops[0][mufu] == "8.0"  # an exponential an element


def usual(**changes) -> CompileCase:
    listed = (case for _, case in matrix.enumerate_cases([SM_80], ["attention.forward"]))
    return dataclasses.replace(next(listed), **changes)


def counted_as(bound: float, spill: int = 0, shared: int = 0) -> Counted:
    return Counted(Resources(64, spill, shared, 1, bound=bound), Count((), Usage(), False), 4)


def test_a_search_ranks_spills_before_the_bound_and_what_does_not_fit_last():
    case = usual()
    best, spilling, slow = counted_as(16.0), counted_as(8.0, spill=8), counted_as(24.0)
    large = counted_as(1.0, shared=1 << 20)
    tried = [search.Tried(case, each) for each in (large, slow, spilling, best)] + [search.Tried(case, None, "no")]
    ranked = sorted(tried, key=lambda each: each.rank(SM_80))
    assert [each.counted for each in ranked[:3]] == [best, slow, spilling]
    tiles = search.tiles(SM_80, case)
    assert tiles[0] == case
    assert len({each.name for each in tiles}) == len(tiles) > 10
    assert "-> " not in search.reason(SM_80, [search.Tried(case, best)], case)


def test_a_record_holds_every_loop_and_names_its_columns(tmp_path):
    loop = Usage(instructions=100, issue=100.0, tensor=160.0)
    found = Counted(Resources(64, 0, 1024, 8, bound=2.5), Count((loop,), Usage(), True), 4)
    case = usual()
    record.write(tmp_path / "ledger.jsonl", [(SM_80, case, found)])
    (line,) = records.read(tmp_path / "ledger.jsonl")  # which holds it against its schema
    assert line["counted"] == "not measured"
    (said,), complaints = check.check(tmp_path / "ledger.jsonl")
    assert ("of no machine" in said, complaints) == (True, [])
    with pytest.raises(UserError, match="holds no records"):  # of something measured, which reports are made from
        load(tmp_path)
    (entry,) = line["cases"]
    elements = work.elements(SM_80, case)
    values = dict(zip(line["columns"], entry["loops"][0]))
    assert (entry["case"], values["instructions"], values["by"]) == (case.name, 100, "tensor")
    assert values["bound"] == values["tensor"] == pytest.approx(160 / elements, abs=0.01)


@pytest.mark.parametrize(("factor", "told"), [(1.02, (0, 0)), (1.04, (1, 0)), (0.9, (0, 1))])
def test_what_grew_by_more_than_three_percent_since_a_record_is_named(tmp_path, factor, told):
    def counted(times: float) -> Counted:
        loop = Usage(instructions=100, issue=1000.0 * times)
        return Counted(Resources(64, 0, 1024, 8), Count((loop,), Usage(issue=500.0), True), 4)

    file, case = tmp_path / "ledger.jsonl", usual()
    record.write(file, [(SM_80, case, counted(1.0))])
    other_tile = dataclasses.replace(case, name=case.name.rpartition("/")[0] + "/16x16w1s1")
    new = dataclasses.replace(case, name=f"new/{case.name}")
    grown, shrunk, known = record.against(file, [(SM_80, case, counted(factor)), (SM_80, new, counted(9.0))])
    assert ((len(grown), shrunk), known) == (told, 1)
    assert all(case.name in line for line in grown)
    assert record.against(file, [(SM_80, other_tile, counted(factor))])[2] == 1


def test_a_table_has_a_line_a_loop_and_one_for_the_rest():
    found = Counted(
        Resources(64, 0, 1024, 8), Count((Usage(instructions=40, issue=40.0),), Usage(instructions=9), True), 4
    )
    head, first, rest = ledger_report.table([(SM_80, usual(), found)]).splitlines()
    assert [line.split()[3:5] for line in (first, rest)] == [["1", "40"], ["-", "9"]]
    assert head.split()[-1] == "occupancy"


def test_row_kernels_stand_beside_the_bandwidth():
    (share,) = [
        each
        for each in bandwidth.shares([("sm_90", "layer_norm.forward/residual+dropout/N512/4x512w4s1", "bf16", 38.0)])
        if each.product.name == "H200"
    ]
    # 4 tensors of 2 bytes, a warp of 32: 256 bytes at 4,800 GB/s over 132 * 4 schedulers of 1.83 GHz
    assert share.leaves == pytest.approx(256 / (4800 / 1.83 / 528), rel=1e-3)
    assert share.share == pytest.approx(38 / share.leaves)
    assert bandwidth.bytes_moved("attention.forward/causal/D64/128x64w4s3", "bf16") is None
    for case in {case.name.split("/")[0]: case for _, case in matrix.enumerate_cases([SM_90])}.values():
        moves_rows = bandwidth.bytes_moved(case.name, case.dtype) is not None
        assert case.matrix_product or case.name.startswith("attention") or moves_rows, case.name


def test_published_times_reach_a_share_of_the_bound_below_one():
    for each in published.PUBLISHED:
        assert 0.3 < each.share < 1.0, each
    assert 0.5 < published.reached() < 0.9


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--chips", "sm_1"], "unknown chip sm_1: choose from sm_60"),
        (["--dtypes", "bf17"], "unknown dtype bf17: choose from fp32"),
        (["--kernels", "nothing"], "no kernel file begins with nothing"),
        (["--search", "nothing"], "no kernel file begins with nothing"),
        (["--match", "("], "is not a regular expression"),
        (["--against", "/no/such"], "there is no file /no/such"),
        (["--peer", "/no/such"], "there is no file /no/such"),
        (["no_such.py"], "there is no file no_such.py"),
        (["--workers", "0"], "--workers 0: at least 1"),
        (["--bytes", "--validate"], "exclude each other"),
        (["--record", "/no/such/folder/file"], "a file in a folder that is there"),
        (["--kernels", "rotary", "--match", "nothing", "--chips", "sm_80"], "has a match of 'nothing'"),
    ],
)
def test_wrong_arguments_end_in_a_line(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


def test_files_that_hold_no_kernel_end_in_a_line(tmp_path, capsys):
    file = tmp_path / "a.py"
    for text, told in (("x = (", "cannot be read as Python"), ("import sys; sys.exit(3)", "ended with SystemExit(3)")):
        file.write_text(text)
        assert main([str(file), "--chips", "sm_80"]) == 1
        assert told in capsys.readouterr().err
    assert main(["--peer", str(file)]) == 1
    assert "holds no cubin" in capsys.readouterr().err


def test_what_is_recorded_is_printed(capsys):
    assert main(["--bytes"]) == 0
    assert "bandwidth leaves" in capsys.readouterr().out
    assert main(["--validate"]) == 0
    assert "The median share is" in capsys.readouterr().out
