"""Table of the instructions that each chip has and the machine executes, as in docs/ptx.md:

    ptx-check --table

Each family is represented by one instruction and the first chip that has it; tests verify both with the assembler.
Source: NVIDIA, "PTX ISA", the target notes of chapter 9.7.
"""

from dataclasses import dataclass

from ptx_check.chips import CHIPS
from ptx_check.forms import executed


@dataclass(frozen=True, slots=True)
class Family:
    name: str
    example: str
    """A statement with registers such as %p1, %rs1 (16 bits), %r1, %rd1."""
    since: int = 60
    """First chip that has it."""
    alone: bool = False
    """Whether `since` is the only chip that has it."""

    def on(self, chip: str) -> str:
        """Text of a table cell."""
        number = int(chip[3:])
        if number < self.since or (self.alone and number != self.since):
            return ""
        return "yes" if executed(self.example.split()[0]) else "refused"


_FOUR, _TWO, _ADDRESS = "{%r1, %r2, %r3, %r4}", "{%r5, %r6}", "[%r1]"
FAMILIES = (
    Family("integers, float32", "fma.rn.f32 %r1, %r2, %r3, %r4"),
    Family("float64", "fma.rn.f64 %rd1, %rd2, %rd3, %rd4"),
    Family("float16", "fma.rn.f16x2 %r1, %r2, %r3, %r4"),
    Family("bfloat16: fma", "fma.rn.bf16x2 %r1, %r2, %r3, %r4", 80),
    Family("bfloat16: add, mul", "mul.rn.bf16x2 %r1, %r2, %r3", 90),
    Family("pairs of int16", "max.s16x2 %r1, %r2, %r3", 90),
    Family("pairs of float32", "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4", 100),
    Family("float8 conversions", "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r1, %r2", 89),
    Family("shuffles, votes", "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1"),
    Family("redux", "redux.sync.add.s32 %r1, %r2, -1", 80),
    Family("redux: float32", "redux.sync.max.f32 %r1, %r2, -1", 100, alone=True),
    Family("a thread's own memory", "ld.local.b32 %r2, [%r1]"),
    Family("hints to caches", "createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0", 80),
    Family("atomics, global, ordered", "atom.global.acq_rel.gpu.cas.b32 %r1, [%rd1], %r2, %r3", 70),
    Family("atomics, shared", "atom.shared.add.u32 %r2, [%r1], %r3"),
    Family("atomics, bfloat16", "atom.global.add.noftz.bf16x2 %r1, [%rd1], %r2", 90),
    Family("cp.async", "cp.async.cg.shared.global [%r1], [%rd1], 16", 80),
    Family("ldmatrix", f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {_FOUR}, {_ADDRESS}", 75),
    Family("stmatrix", f"stmatrix.sync.aligned.m8n8.x4.shared.b16 {_ADDRESS}, {_FOUR}", 90),
    Family(
        "mma: float16", f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {_FOUR}, {_TWO}, {{%r7}}, {_FOUR}", 75
    ),
    Family(
        "mma: bfloat16", f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_FOUR}, {_FOUR}, {_TWO}, {_FOUR}", 80
    ),
    Family("mma: tf32", f"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {_FOUR}, {_FOUR}, {_TWO}, {_FOUR}", 80),
    Family("mma: int8", f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {_FOUR}, {_FOUR}, {_TWO}, {_FOUR}", 80),
    Family(
        "mma: float64",
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%rd1, %rd2}, {%rd3}, {%rd4}, {%rd1, %rd2}", 80,
    ),
    Family("mma: float8", f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {_FOUR}, {_FOUR}, {_TWO}, {_FOUR}", 89),
    Family("wgmma", "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
           f"{_FOUR}, %rd1, %rd2, 1, 1, 1, 0, 0", 90, alone=True),
    Family("tensor memory (tcgen05)", "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1", 100,
           alone=True),
    Family("mbarrier: init, wait", "mbarrier.init.shared::cta.b64 [%r1], 1", 80),
    Family("barriers of some warps", "barrier.sync 1, 64"),
    Family("registers handed over", "setmaxnreg.dec.sync.aligned.u32 24", 90),
    Family("bulk copies (TMA)", "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
           "[%r1], [%rd1, {%r2, %r3}], [%r4]", 90),
)  # fmt: skip


def table() -> str:
    """The table in Markdown."""
    lines = [f"| | {' | '.join(CHIPS)} |", f"|---|{'---|' * len(CHIPS)}"]
    lines += [f"| {family.name} | {' | '.join(family.on(chip) for chip in CHIPS)} |" for family in FAMILIES]
    return "\n".join(line.replace("|  |", "| |").replace("|  |", "| |") for line in lines)
