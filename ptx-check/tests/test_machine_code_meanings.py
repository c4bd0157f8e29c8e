"""Instructions of sm_90's machine code, one by one: registers before, registers after."""

from types import SimpleNamespace

import numpy as np
import pytest

from ptx_check.faults import Unsupported
from ptx_check.machine_code import products
from ptx_check.machine_code.launch import MEANINGS
from ptx_check.machine_code.operands import Code, operand, split
from ptx_check.machine_code.run import EARLY, Warps

BANK = np.arange(256, dtype=np.uint32).view(np.uint8)
LANES = np.arange(32, dtype=np.uint32)


def warp(threads: int = 32) -> Warps:
    launch = SimpleNamespace(
        threads=threads, grid=(1, 1, 1), shared=4096, stack=64, registers=255, asynchronous=True, memory=None,
        watched=set(), banks={0: BANK}, faults=[], name="kernel",
    )  # fmt: skip
    launch.fault = lambda kind, address, message, location: launch.faults.append(kind)
    return Warps(launch, np.zeros((1, 1), np.int64), EARLY)


def code(text: str) -> Code:
    opcode, _, rest = text.partition(" ")
    return Code("kernel", 0x100, opcode, [operand(part) for part in split(rest)], "", None)


def as_bits(value) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    return np.float32(value).view(np.uint32) if isinstance(value, float) else np.uint32(value & 0xFFFFFFFF)


def after(text: str, before: dict, machine: Warps | None = None) -> Warps:
    """What a warp has after an instruction."""
    machine = machine or warp()
    for name, value in before.items():
        file = {"R": machine.R, "P": machine.P, "U": machine.UR}[name[0]]
        file[int(name.lstrip("URP"))][:] = value if name[0] == "P" else as_bits(value)
    step = code(text)
    with np.errstate(all="ignore"):
        MEANINGS[step.name](step)(machine)
    return machine


HALVES = 0x3C00_4000  # 2.0 below 1.0
CASES = [
    ("MOV R0, 0x12", {}, {"R0": 0x12}),
    ("MOV R0, c[0x0][0x10]", {}, {"R0": 4}),
    ("LDC.64 R0, c[0x0][0x10]", {}, {"R0": 4, "R1": 5}),
    ("ULDC.64 UR0, c[0x0][0x10]", {}, {"U0": 4, "U1": 5}),
    ("IADD3 R0, P0, P1, R1, R2, R3", {"R1": -1, "R2": -1, "R3": -1}, {"R0": -3, "P0": True, "P1": True}),
    ("IADD3 R0, P0, R1, -R2, RZ", {"R1": 5, "R2": 5}, {"R0": 0, "P0": True}),
    ("IADD3 R0, P0, R1, -R2, RZ", {"R1": 4, "R2": 5}, {"R0": -1, "P0": False}),
    ("IADD3.X R0, R1, ~R2, RZ, P1, !PT", {"R1": 9, "R2": 4, "P1": True}, {"R0": 5}),
    ("VIADD R0, R1, 0xffffffff", {"R1": 9}, {"R0": 8}),
    ("UIADD3.64 UR0, UR2, -UR4, URZ", {"U2": 0, "U3": 1, "U4": 1, "U5": 0}, {"U0": -1, "U1": 0}),
    ("IMAD R0, R1, R2, R3", {"R1": 7, "R2": -3, "R3": 1}, {"R0": -20}),
    ("IMAD.WIDE R0, R2, 0x4, R4", {"R2": -1, "R4": 0, "R5": 1}, {"R0": -4, "R1": 0}),
    ("IMAD.WIDE.U32 R0, R2, 0x4, RZ", {"R2": -1}, {"R0": -4, "R1": 3}),
    ("IMAD.HI.U32 R0, R2, R3, R4", {"R2": -1, "R3": 2, "R4": 2, "R5": 0}, {"R0": 2}),
    ("IMAD.HI.U32 R0, P0, R2, R2, R4", {"R2": -1, "R4": -1, "R5": -1}, {"R0": -2, "P0": True}),
    ("IMAD.HI.U32 R0, P0, R2, R2, R4", {"R2": -1, "R4": -1, "R5": 1}, {"R0": 0, "P0": True}),
    ("IMAD.HI.U32 R0, P0, R2, R2, R4", {"R2": -1, "R4": -1, "R5": 0}, {"R0": -1, "P0": False}),
    ("IMAD.HI R0, R2, 0x4, RZ", {"R2": -5}, {"R0": -1}),
    ("IMAD.X R0, RZ, RZ, R1, P0", {"R1": 3, "P0": True}, {"R0": 4}),
    ("LEA R0, P0, R1, R2, 0x2", {"R1": 0x40000001, "R2": -4}, {"R0": 0, "P0": True}),
    ("LEA.HI R0, R1, R2, RZ, 0x7", {"R1": -1, "R2": 1}, {"R0": 128}),
    ("LEA.HI.X R0, R1, R2, R3, 0x2, P0", {"R1": -1, "R2": 5, "R3": 2, "P0": True}, {"R0": 17}),
    ("LEA.HI.SX32 R0, R1, R2, 0x1e", {"R1": -8, "R2": 1}, {"R0": -1}),
    ("SHF.L.U32 R0, R1, 0x4, RZ", {"R1": 0x10000001}, {"R0": 0x10}),
    ("SHF.L.U32 R0, R1, R2, RZ", {"R1": 1, "R2": 40}, {"R0": 0}),
    ("SHF.R.U32.HI R0, RZ, 0x4, R1", {"R1": -1}, {"R0": 0x0FFFFFFF}),
    ("SHF.R.S32.HI R0, RZ, 0x1f, R1", {"R1": -7}, {"R0": -1}),
    ("SHF.L.U64.HI R0, R1, 0x1, R2", {"R1": -1, "R2": 1}, {"R0": 3}),
    ("SHF.R.U64 R0, R1, 0x5, R2", {"R1": 0, "R2": 3}, {"R0": 0x18000000}),
    ("SHF.R.S64 R0, R1, 0x9, R2", {"R1": 0x200, "R2": -1}, {"R0": -0x7FFFFF}),
    ("SGXT R0, R1, 0x1", {"R1": 3}, {"R0": -1}),
    ("SGXT.U32 R0, R1, 0x3", {"R1": -1}, {"R0": 7}),
    ("LOP3.LUT R0, R1, R2, R3, 0xf8, !PT", {"R1": 1, "R2": 6, "R3": 12}, {"R0": 5}),
    ("LOP3.LUT R0, R1, R2, R3, 0xe8, !PT", {"R1": 3, "R2": 5, "R3": 6}, {"R0": 7}),
    ("LOP3.LUT P0, RZ, R1, 0x4, RZ, 0xc0, !PT", {"R1": 6}, {"P0": True}),
    ("PLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x0", {"P1": True, "P2": True}, {"P0": True}),
    ("PLOP3.LUT P0, PT, P1, P2, PT, 0xa8, 0x0", {"P1": False, "P2": True}, {"P0": True}),
    ("PRMT R0, R1, 0x5410, R2", {"R1": 0x11112222, "R2": 0x33334444}, {"R0": 0x44442222}),
    ("PRMT R0, R1, 0x8880, R2", {"R1": 0x80}, {"R0": 0xFFFFFF80}),
    ("SEL R0, R1, R2, !P0", {"R1": 1, "R2": 2, "P0": True}, {"R0": 2}),
    ("IABS R0, R1", {"R1": -4}, {"R0": 4}),
    ("VIMNMX R0, R1, R2, PT", {"R1": -4, "R2": 3}, {"R0": -4}),
    ("VIMNMX.U32 R0, R1, R2, PT", {"R1": -4, "R2": 3}, {"R0": 3}),
    ("VIADDMNMX.RELU R0, R1, 0x1, R2, PT", {"R1": -4, "R2": 3}, {"R0": 0}),
    ("ISETP.GT.U32.AND P0, P1, R1, R2, PT", {"R1": -1, "R2": 1}, {"P0": True, "P1": False}),
    ("ISETP.GE.AND.EX P0, PT, R1, R2, PT, P2", {"R1": 3, "R2": 3, "P2": False}, {"P0": False}),
    ("ISETP.LT.OR P0, PT, R1, R2, P2", {"R1": 3, "R2": 3, "P2": True}, {"P0": True}),
    ("POPC R0, R1", {"R1": 0xF0F}, {"R0": 8}),
    ("FLO.U32 R0, R1", {"R1": 0x800}, {"R0": 11}),
    ("FLO.U32.SH R0, R1", {"R1": 0x800}, {"R0": 20}),
    ("BREV R0, R1", {"R1": 0x80000001}, {"R0": 0x80000001}),
    ("BREV R0, R1", {"R1": 2}, {"R0": 0x40000000}),
    ("BMSK R0, R1, R2", {"R1": 4, "R2": 3}, {"R0": 0x70}),
    ("P2R R0, PR, R1, 0x2", {"P1": True, "R1": 0x80}, {"R0": 0x82}),
    ("R2P PR, R1, 0x2", {"R1": 2, "P0": True}, {"P0": True, "P1": True}),
    ("R2UR UR3, R1", {"R1": 7}, {"U3": 7}),
    ("S2R R0, SR_TID.X", {}, {"R0": LANES}),
    ("FADD R0, R1, -|R2|", {"R1": 1.0, "R2": -3.0}, {"R0": -2.0}),
    ("FADD.RZ R0, R1, R2", {"R1": 1.0, "R2": -1e-12}, {"R0": 0x3F7FFFFF}),
    ("FADD.RM R0, R1, R2", {"R1": -1.0, "R2": -1e-12}, {"R0": 0xBF800001}),
    ("FMUL.FTZ R0, R1, R2", {"R1": 1e-30, "R2": 1e-10}, {"R0": 0}),
    ("FMUL.SAT R0, R1, R2", {"R1": 3.0, "R2": 2.0}, {"R0": 1.0}),
    ("FFMA R0, R1, R1, R2", {"R1": 1.0 + 2.0**-12, "R2": -1.0}, {"R0": float(np.float32(2.0**-11 + 2.0**-24))}),
    ("FMNMX R0, R1, R2, !PT", {"R1": float("nan"), "R2": 2.0}, {"R0": 2.0}),
    ("FMNMX.NAN R0, R1, R2, !PT", {"R1": float("nan"), "R2": 2.0}, {"R0": 0x7FFFFFFF}),
    ("FADD.SAT R0, R1, R2", {"R1": -0.0, "R2": -0.0}, {"R0": 0.0}),
    ("FMNMX R0, R1, R2, PT", {"R1": -0.0, "R2": 0.0}, {"R0": -0.0}),
    ("FMNMX R0, R1, R2, !PT", {"R1": 0.0, "R2": -0.0}, {"R0": 0.0}),
    ("FSETP.GEU.AND P0, PT, R1, 1, PT", {"R1": float("nan")}, {"P0": True}),
    ("FSETP.GE.AND P0, PT, R1, 1, PT", {"R1": float("nan")}, {"P0": False}),
    ("FSET.BF.NEU.AND R0, R1, -INF , PT", {"R1": 3.0}, {"R0": 1.0}),
    ("FSEL R0, -R1, RZ, P0", {"R1": 3.0, "P0": True}, {"R0": -3.0}),
    ("MUFU.EX2 R0, R1", {"R1": 3.0}, {"R0": 8.0}),
    ("MUFU.RCP R0, R1", {"R1": 4.0}, {"R0": 0.25}),
    ("MUFU.RSQ R0, R1", {"R1": 4.0}, {"R0": 0.5}),
    ("I2FP.F32.S32 R0, R1", {"R1": -3}, {"R0": -3.0}),
    ("I2F.U32.RP R0, R1", {"R1": 0x1000001}, {"R0": float(0x1000002)}),
    ("F2I.FTZ.U32.TRUNC.NTZ R0, R1", {"R1": -1.0}, {"R0": 0}),
    ("F2I.TRUNC.NTZ R0, R1", {"R1": -1.75}, {"R0": -1}),
    ("F2I.U64.TRUNC R0, R2", {"R2": 2.0**33}, {"R0": 0, "R1": 2}),
    ("F2I.TRUNC.NTZ R0, R1", {"R1": float("nan")}, {"R0": 0}),
    ("F2I.S64.TRUNC R0, R2", {"R2": float("nan")}, {"R0": 0, "R1": 1 << 31}),
    ("F2I.U64.TRUNC R0, R2", {"R2": float("nan")}, {"R0": 0, "R1": 1 << 31}),
    ("FRND.FLOOR R0, R1", {"R1": -1.5}, {"R0": -2.0}),
    ("F2FP.BF16.F32.PACK_AB R0, R1, R2", {"R1": 1.0, "R2": 2.0}, {"R0": 0x3F804000}),
    ("F2FP.F16.F32.PACK_AB R0, R1, R2", {"R1": 1.0, "R2": 2.0}, {"R0": HALVES}),
    ("HADD2.F32 R0, -RZ, R1.H0_H0", {"R1": HALVES}, {"R0": 2.0}),
    ("HADD2 R0, R1, R1", {"R1": HALVES}, {"R0": 0x40004400}),
    # sums just below the middle of two halves, which float32 rounds to the middle and then to the wrong one
    ("HFMA2 R0, R1, R2, R3", {"R1": 0x3C01, "R2": 0x0FFE, "R3": 0x3C01}, {"R0": 0x3C01}),
    ("HFMA2.BF16_V2 R0, R1, R2, R3", {"R1": 0x3FE0, "R2": 0x3F14, "R3": 0xB080}, {"R0": 0x3F81}),
    ("HMNMX2 R0, R1, R2, PT", {"R1": 0x8000, "R2": 0}, {"R0": 0x8000}),
    ("HFMA2.MMA R0, -RZ, RZ, 1.875, 0", {}, {"R0": 1.0}),
    ("HFMA2.MMA R0, -RZ, RZ, 0, 5.9604644775390625e-08", {}, {"R0": 1}),
    ("HSET2.GE.AND R0, R1, R2, PT", {"R1": HALVES, "R2": 0x4000_3C00}, {"R0": 0x0000FFFF}),
    ("HSETP2.GE.AND P0, P1, R1, R2, PT", {"R1": HALVES, "R2": 0x4000_3C00}, {"P0": True, "P1": False}),
    ("HSETP2.BF16_V2.LT.AND P0, P1, R1, RZ.H0_H0, PT", {"R1": 0xBF800000}, {"P0": False, "P1": True}),
    ("SHFL.BFLY PT, R0, R1, 0x8, 0x1f", {"R1": LANES}, {"R0": LANES ^ 8}),
    ("SHFL.DOWN P0, R0, R1, 0x4, 0x1f", {"R1": LANES},
     {"R0": np.where(LANES < 28, LANES + 4, LANES), "P0": LANES < 28}),
    ("SHFL.IDX PT, R0, R1, R2, 0x1f", {"R1": LANES, "R2": 5}, {"R0": 5}),
    ("VOTEU.ANY UP0, P0", {"P0": LANES == 3}, {}),
    ("VOTE.ANY R0, PT, P0", {"P0": LANES == 3}, {"R0": 8}),
    ("ELECT P0, URZ, PT", {}, {"P0": LANES == 0}),
    ("REDUX.SUM.S32 UR0, R1", {"R1": LANES}, {"U0": 496}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "before", "wanted"), CASES, ids=[text for text, *_ in CASES])
def test_an_instruction_means(text, before, wanted):
    machine = after(text, before)
    for name, value in wanted.items():
        file = {"R": machine.R, "P": machine.P, "U": machine.UR}[name[0]]
        found, value = file[int(name.lstrip("URP"))], value if name[0] == "P" else as_bits(value)
        np.testing.assert_array_equal(found, np.broadcast_to(value, found.shape))
    assert not machine.launch.faults


@pytest.mark.parametrize(
    "text",
    [
        "IADD3.NEW R0, R1, R2, R3", "FADD R0, ~R1, R2", "MUFU.RCP64H R0, R1",
        "HGMMA.64x16x32.F32.E4M3.E4M3 R0, gdesc[UR0], RZ",
        "HGMMA.64x16x16.F16 R0, gdesc[UR0], RZ", "LDG.E.256 R0, desc[UR6][R2.64]",
        "SYNCS.NEW [UR0], R0",
        "S2R R0, SR_NEW", "IMAD.WIDE R0, R1, R2.H0_H0, RZ", "BAR.RED.POPC 0x0", "FENCE.VIEW.ASYNC.G",
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused_by_name(text):
    step = code(text)
    with pytest.raises(Unsupported, match=step.opcode):
        MEANINGS[step.name](step)


def test_a_value_that_differs_within_a_warp_is_no_uniform_one():
    assert after("R2UR UR0, R1", {"R1": LANES}).launch.faults == ["divergence"]


@pytest.mark.parametrize(
    ("text", "address", "kind"),
    [
        ("STS.64 [R1], R2", 1024 + 4096 - 4, "bounds"),
        ("LDS R0, [R1]", 1020, "bounds"),
        ("LDS.64 R0, [R1]", 1028, "alignment"),
        ("LDL R0, [R1]", 64, "bounds"),
        ("LDSM.16.M88 R0, [R1]", 1024 + 8, "alignment"),
    ],
)
def test_memory_has_bounds(text, address, kind):
    assert kind in after(text, {"R1": address}).launch.faults


def test_parts_of_words_go_through_local_memory():
    machine = after("STL [R1+0x4], R2", {"R1": 0, "R2": 0x11223344})
    after("STL.S16 [R1+0x6], R2", {"R2": 0x5555FFFE}, machine)
    after("STL.U8 [R1+0x5], R2", {"R2": 0x77}, machine)
    for text, wanted in {"LDL": 0xFFFE7744, "LDL.U16": 0x7744, "LDL.U8": 0x44}.items():
        after(f"{text} R3, [R1+0x4]", {}, machine)
        np.testing.assert_array_equal(machine.R[3], wanted)
    after("LDL.S16 R3, [R1+0x6]", {}, machine)
    np.testing.assert_array_equal(machine.R[3], 0xFFFFFFFE)
    assert not machine.launch.faults
    assert after("LDL.U16 R3, [R1+0x5]", {}, machine).launch.faults == ["bounds"]


def test_matrices_and_halves_go_through_shared_memory():
    """Rows of an 8x8 matrix are stored, and loaded transposed."""
    values = np.arange(64, dtype=np.uint16).view(np.uint32)
    machine = after("STSM.16.M88 [R1], R2", {"R1": 1024 + 16 * LANES, "R2": values})
    after("LDSM.16.MT88 R3, [R1]", {}, machine)
    turned = np.ascontiguousarray(values.view(np.uint16).reshape(8, 8).T).view(np.uint32).ravel()
    np.testing.assert_array_equal(machine.R[3, 0], turned)
    after("LDS.U16 R4, [R1]", {}, machine)
    np.testing.assert_array_equal(machine.R[4, 0, :8], 8 * np.arange(8))


def test_a_wait_for_a_product_leaves_registers_of_wider_products_of_other_warps_alone(monkeypatch):
    """Both products accumulate from register 24 on, in 32 registers of warp 0 and 64 of warp 1."""
    monkeypatch.setattr(products, "_total", lambda s, product, form, before: before + np.float32(1.0))
    own, other = (
        (products.Product(None, np.array([w]), *[np.zeros(1)] * 5), SimpleNamespace(target=24, columns=n))
        for w, n in ((0, 64), (1, 128))
    )
    s = SimpleNamespace(
        rows=np.array([0]), products=np.array([1, 1]), pending=[other, own], sums=np.zeros((256, 2, 32), np.float32),
        flying=np.zeros((256, 2), bool), R=np.full((256, 2, 32), 7, np.uint32),
    )  # fmt: skip
    s.flying[24] = True
    products._finish(s, 0)
    assert (s.R[24:56, 0].view(np.float32) == 1.0).all()
    assert (s.R[56:, 0] == 7).all()
    assert (s.R[:, 1] == 7).all()
    assert [product.rows.tolist() for product, _ in s.pending] == [[1]]
