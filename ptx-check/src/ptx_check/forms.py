"""Instruction forms that the machine executes; all others are rejected.

Each word is a family of opcodes: [.a|.b] is an optional modifier, (.a|.b) a required one. ptxas accepts each opcode for
some chip. Source: NVIDIA, "PTX ISA", chapter 9.7.
"""

import functools
import itertools
import re

_INT = "(.u16|.u32|.u64|.s16|.s32|.s64)"
_ANY = "(.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64)"
_SIGNED = "(.s16|.s32|.s64)"
_BITS = "(.b16|.b32|.b64)"
_ALL = "(.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64|.f32|.f64)"
_ROUND = "(.rn|.rz|.rm|.rp)"
_WHOLE = "(.rni|.rzi|.rmi|.rpi)"
_FLOATS = "(.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan)"
_JOIN = "[.and|.or|.xor]"

FORMS = f"""
add{_INT} sub{_INT} min{_INT} max{_INT} div{_INT} rem{_INT} neg{_SIGNED} abs{_SIGNED}
add.sat.s32 sub.sat.s32 min.relu.s32 max.relu.s32 sad{_INT} mul24.lo(.u32|.s32) dp4a(.u32|.s32)(.u32|.s32)
add(.u16x2|.s16x2) min(.u16x2|.s16x2) max(.u16x2|.s16x2) min.relu.s16x2 max.relu.s16x2
mul(.lo|.hi){_INT} mad(.lo|.hi){_INT} mul.wide(.u16|.u32|.s16|.s32) mad.wide(.u16|.u32|.s16|.s32) mad.hi.sat.s32
and(.pred|.b16|.b32|.b64) or(.pred|.b16|.b32|.b64) xor(.pred|.b16|.b32|.b64) not(.pred|.b16|.b32|.b64)
shl{_BITS} shr(.b16|.b32|.b64|.u16|.u32|.u64|.s16|.s32|.s64) shf(.l|.r)(.clamp|.wrap).b32
popc(.b32|.b64) clz(.b32|.b64) brev(.b32|.b64) bfind[.shiftamt](.u32|.u64|.s32|.s64)
bfe(.u32|.u64|.s32|.s64) bfi(.b32|.b64) prmt.b32 lop3.b32 mov.pred mov{_ALL} selp{_ALL}
add[.rn|.rz|.rm|.rp][.ftz][.sat].f32 sub[.rn|.rz|.rm|.rp][.ftz][.sat].f32 mul[.rn|.rz|.rm|.rp][.ftz][.sat].f32
fma{_ROUND}[.ftz][.sat].f32 div(.approx|.full|.rn|.rz|.rm|.rp)[.ftz].f32 neg[.ftz].f32 abs[.ftz].f32
min[.ftz][.NaN][.xorsign.abs].f32 max[.ftz][.NaN][.xorsign.abs].f32 rcp(.approx|.rn|.rz|.rm|.rp)[.ftz].f32
sqrt(.approx|.rn|.rz|.rm|.rp)[.ftz].f32 testp(.finite|.infinite|.number|.notanumber|.normal|.subnormal)(.f32|.f64)
rsqrt.approx[.ftz].f32 sin.approx[.ftz].f32 cos.approx[.ftz].f32 lg2.approx[.ftz].f32 ex2.approx[.ftz].f32
tanh.approx.f32 copysign(.f32|.f64)
add[.rn|.rz|.rm|.rp].f64 sub[.rn|.rz|.rm|.rp].f64 mul[.rn|.rz|.rm|.rp].f64 fma{_ROUND}.f64 div{_ROUND}.f64
rcp{_ROUND}.f64 sqrt{_ROUND}.f64 rcp.approx.ftz.f64 rsqrt.approx[.ftz].f64 neg.f64 abs.f64 min.f64 max.f64
add[.rn][.ftz].f32x2 sub[.rn][.ftz].f32x2 mul[.rn][.ftz].f32x2 fma.rn[.ftz].f32x2
add[.rn][.sat].f32(.f16|.bf16) sub[.rn][.sat].f32(.f16|.bf16) fma.rn[.sat].f32(.f16|.bf16)
add[.rn][.ftz][.sat](.f16|.f16x2) sub[.rn][.ftz][.sat](.f16|.f16x2) mul[.rn][.ftz][.sat](.f16|.f16x2)
add[.rn](.bf16|.bf16x2) sub[.rn](.bf16|.bf16x2) mul[.rn](.bf16|.bf16x2)
fma.rn[.ftz][.sat](.f16|.f16x2) fma.rn[.ftz].relu(.f16|.f16x2) fma.rn[.relu](.bf16|.bf16x2)
neg[.ftz](.f16|.f16x2) abs[.ftz](.f16|.f16x2) neg(.bf16|.bf16x2) abs(.bf16|.bf16x2)
min[.ftz][.NaN][.xorsign.abs](.f16|.f16x2) max[.ftz][.NaN][.xorsign.abs](.f16|.f16x2)
min[.NaN][.xorsign.abs](.bf16|.bf16x2) max[.NaN][.xorsign.abs](.bf16|.bf16x2)
tanh.approx(.f16|.f16x2|.bf16|.bf16x2) ex2.approx(.f16|.f16x2) ex2.approx.ftz(.bf16|.bf16x2)
setp(.eq|.ne|.lt|.le|.gt|.ge){_JOIN}{_INT} setp(.lo|.ls|.hi|.hs){_JOIN}(.u16|.u32|.u64) setp(.eq|.ne){_JOIN}{_BITS}
setp{_FLOATS}{_JOIN}[.ftz](.f32|.f16|.f16x2) setp{_FLOATS}{_JOIN}(.f64|.bf16|.bf16x2)
set(.eq|.ne|.lt|.le|.gt|.ge)(.u32|.s32)(.u16|.u32|.s16|.s32) set(.lo|.ls|.hi|.hs)(.u32|.s32)(.u16|.u32)
set(.eq|.ne)(.u32|.s32)(.b16|.b32) set{_FLOATS}[.ftz](.u32|.s32)(.f32|.f16) set{_FLOATS}(.u32|.s32).bf16
set{_FLOATS}[.ftz].u32.f16x2
cvt{_ANY}{_ANY} cvt.sat.u8(.u16|.u32|.u64|.s8|.s16|.s32|.s64) cvt.sat.u16(.u32|.u64|.s8|.s16|.s32|.s64)
cvt.sat.u32(.u64|.s8|.s16|.s32|.s64) cvt.sat.u64(.s8|.s16|.s32|.s64) cvt.sat.s8(.u8|.u16|.u32|.u64|.s16|.s32|.s64)
cvt.sat.s16(.u16|.u32|.u64|.s32|.s64) cvt.sat.s32(.u32|.u64|.s64) cvt.sat.s64.u64
cvt{_ROUND}(.f32|.f64|.f16){_ANY} cvt{_ROUND}.bf16{_INT}
cvt{_WHOLE}[.ftz][.sat]{_ANY}.f32 cvt{_WHOLE}[.sat]{_ANY}(.f64|.f16) cvt{_WHOLE}{_INT}.bf16
cvt{_WHOLE}[.ftz][.sat].f32.f32 cvt{_WHOLE}[.sat].f64.f64 cvt{_WHOLE}[.sat].f16.f16
cvt.sat.f32.f32 cvt.ftz[.sat].f32.f32
cvt[.ftz][.sat].f32.f16 cvt[.ftz].f32.bf16 cvt[.ftz][.sat].f64.f32 cvt[.sat].f64.f16
cvt{_ROUND}[.ftz][.sat].f32.f64 cvt{_ROUND}[.sat].f16.f64 cvt{_ROUND}[.ftz][.sat].f16.f32
cvt(.rn|.rz).relu.f16.f32 cvt(.rn|.rz)[.relu].bf16.f32 cvt(.rn|.rz)[.relu](.f16x2|.bf16x2).f32
cvt.rna.tf32.f32 cvt(.rn|.rz)[.relu].tf32.f32
cvt.rn.satfinite[.relu](.e4m3x2|.e5m2x2)(.f32|.f16x2) cvt.rn[.relu].f16x2(.e4m3x2|.e5m2x2)
"""

CARRYING = """
add.cc(.u32|.s32|.u64|.s64) addc[.cc](.u32|.s32|.u64|.s64) sub.cc(.u32|.s32|.u64|.s64) subc[.cc](.u32|.s32|.u64|.s64)
mad(.lo|.hi).cc(.u32|.s32|.u64|.s64) madc(.lo|.hi)[.cc](.u32|.s32|.u64|.s64)
"""
"""Forms that read or write the carry flag."""

_STORED = "(.b8|.b16|.b32|.b64|.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64|.f32|.f64)"
_KEPT = "[.L1::evict_normal|.L1::evict_unchanged|.L1::evict_first|.L1::evict_last|.L1::no_allocate]"
_POLICY = "[.L2::cache_hint]"
_SCOPE = "[.cta|.cluster|.gpu|.sys]"
_ORDER = "[.relaxed|.acquire|.release|.acq_rel]"
_SHARED = "(.shared|.shared::cta)"
_MAP = ".shared::cta.b1024.b32"
_EIGHT = "(.e4m3|.e5m2)"
_PLACE = "(.global|.shared|.shared::cta)"
_SIZES = "|".join(f".m64n{8 * n}k{{0}}" for n in range(1, 33))

MEMORY = f"""
ld.param{_STORED}
ld[.weak].global[.ca|.cg|.cs|.lu|.cv][.nc]{_KEPT}{_POLICY}[.L2::64B|.L2::128B|.L2::256B][.v2|.v4]{_STORED}
ld[.weak|.volatile](.shared|.shared::cta|.local)[.v2|.v4]{_STORED}
st[.weak|.volatile](.shared|.shared::cta|.local)[.v2|.v4]{_STORED}
ld[.v2|.v4]{_STORED} st[.v2|.v4]{_STORED} ld.volatile.global[.v2|.v4]{_STORED} st.volatile.global[.v2|.v4]{_STORED}
st[.weak].global[.wb|.cg|.cs|.wt]{_KEPT}{_POLICY}[.v2|.v4]{_STORED}
createpolicy.fractional(.L2::evict_first|.L2::evict_last|.L2::evict_normal|.L2::evict_unchanged).b64
shfl.sync(.up|.down|.bfly|.idx).b32 vote.sync(.any|.all).pred vote.sync.ballot.b32 bar.sync bar.warp.sync
redux.sync(.add|.min|.max)(.u32|.s32) redux.sync(.and|.or|.xor).b32 activemask.b32
barrier.sync[.aligned] setmaxnreg(.inc|.dec).sync.aligned.u32 brx.idx[.uni]
cp.async(.commit_group|.wait_group|.wait_all) cp.async(.ca|.cg){_SHARED}.global{_POLICY}[.L2::64B|.L2::128B|.L2::256B]
ldmatrix.sync.aligned.m8n8(.x1|.x2|.x4)[.trans]{_SHARED}.b16
stmatrix.sync.aligned.m8n8(.x1|.x2|.x4)[.trans]{_SHARED}.b16
mma.sync.aligned(.m16n8k16|.m16n8k8).row.col(.f32.bf16.bf16.f32|.f32.f16.f16.f32|.f16.f16.f16.f16)
mma.sync.aligned(.m8n8k16|.m16n8k16|.m16n8k32).row.col[.satfinite].s32(.s8|.u8)(.s8|.u8).s32
mma.sync.aligned.m16n8k32.row.col(.f32{_EIGHT}{_EIGHT}.f32|.f16{_EIGHT}{_EIGHT}.f16)
mma.sync.aligned(.m8n8k4|.m16n8k4|.m16n8k8|.m16n8k16).row.col.f64.f64.f64.f64
mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
wgmma.fence.sync.aligned wgmma.commit_group.sync.aligned wgmma.wait_group.sync.aligned
wgmma.mma_async.sync.aligned({_SIZES.format(16)})(.f32.bf16.bf16|.f32.f16.f16|.f16.f16.f16)
wgmma.mma_async.sync.aligned({_SIZES.format(32)})(.f32|.f16){_EIGHT}{_EIGHT}
wgmma.mma_async.sync.aligned({_SIZES.format(32)}).s32(.s8|.u8)(.s8|.u8)[.satfinite]
wgmma.mma_async.sync.aligned({_SIZES.format(8)}).f32.tf32.tf32
elect.sync redux.sync(.min|.max)[.abs][.NaN].f32
mbarrier(.init|.inval|.try_wait.parity|.arrive|.arrive.expect_tx){_SHARED}.b64
cvta[.to].global.u64 cvta[.to].local.u64 cvta.param.u64 call(.vprintf|.__assertfail)
tensormap.replace.tile(.global_address|.global_stride).shared::cta.b1024.b64
tensormap.replace.tile(.rank|.box_dim|.global_dim|.element_stride|.elemtype){_MAP}
tensormap.replace.tile(.interleave_layout|.swizzle_mode|.fill_mode){_MAP}
tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
cp.async.bulk(.commit_group|.wait_group|.wait_group.read)
cp.async.bulk.tensor(.1d|.2d|.3d|.4d|.5d).shared::cta.global.mbarrier::complete_tx::bytes
cp.async.bulk.tensor(.1d|.2d|.3d|.4d|.5d).global.shared::cta.bulk_group
cp.reduce.async.bulk.tensor(.1d|.2d|.3d|.4d|.5d).global.shared::cta(.add|.min|.max|.and|.or|.xor)[.tile].bulk_group
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned
tcgen05.dealloc.cta_group::1.sync.aligned.b32 tcgen05(.wait::ld|.wait::st).sync.aligned
tcgen05.ld.sync.aligned(.16x32bx2|.32x32b)(.x1|.x2|.x4|.x8|.x16|.x32|.x64|.x128)[.pack::16b].b32
tcgen05.st.sync.aligned(.16x32bx2|.32x32b)(.x1|.x2|.x4|.x8|.x16|.x32|.x64|.x128)[.unpack::16b].b32
tcgen05.mma.cta_group::1(.kind::f16|.kind::tf32|.kind::f8f6f4|.kind::i8)
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64
tcgen05(.fence::before_thread_sync|.fence::after_thread_sync)
bra[.uni] ret[.uni] exit trap membar(.cta|.gl|.sys) fence[.sc|.acq_rel]{_SCOPE} fence.mbarrier_init.release.cluster
fence.proxy(.alias|.async|.async.global|.async.shared::cta|.async.shared::cluster)
fence.proxy.tensormap::generic.acquire.gpu
prefetch.global(.L1|.L2) prefetchu.L1 griddepcontrol(.wait|.launch_dependents)
""" + "\n".join(
    f"{base}{modes}{what}"
    for base in ("atom", "red")
    for modes in (f"{_ORDER}{_SCOPE}{_PLACE}", f"{_PLACE}{_SCOPE}{_ORDER}", f"{_PLACE}{_ORDER}{_SCOPE}")
    for what in ("(.add.u32|.add.s32|.add.u64|.add.f32|.add.f64|.add.noftz.f16|.add.noftz.f16x2)",
                 "(.add.noftz.bf16|.add.noftz.bf16x2)", "(.min|.max)(.u32|.s32|.u64|.s64)",
                 "(.and|.or|.xor)(.b32|.b64)", "(.inc|.dec).u32", "(.exch)(.b32|.b64)", "(.cas)(.b16|.b32|.b64)")
    if base == "atom" or not what.startswith(("(.exch", "(.cas"))
)  # fmt: skip
"""Forms of memory, warp and control-flow instructions; Triton writes .global first in atomics."""


@functools.cache
def executed(opcode: str) -> bool:
    """Whether the machine executes an opcode."""
    return opcode in accepted() or opcode in carrying() or _memory().fullmatch(opcode) is not None


@functools.cache
def _memory() -> re.Pattern:
    families = "|".join(re.escape(family) for family in MEMORY.split())
    for letter, meant in (("\\[", "(?:"), ("\\]", ")?"), ("\\(", "(?:"), ("\\)", ")"), ("\\|", "|")):
        families = families.replace(letter, meant)
    return re.compile(families)


@functools.cache
def accepted() -> frozenset[str]:
    """All opcodes of FORMS, expanded."""
    return frozenset(opcode for family in FORMS.split() for opcode in _written_out(family))


@functools.cache
def carrying() -> frozenset[str]:
    return frozenset(opcode for family in CARRYING.split() for opcode in _written_out(family))


def _written_out(family: str) -> list[str]:
    base, rest = re.match(r"(\w+)(.*)", family).groups()  # type: ignore[union-attr]
    choices = [[base]]
    for optional, one, plain in re.findall(r"\[([^\]]*)\]|\(([^)]*)\)|(\.\w+)", rest):
        choices.append([*optional.split("|"), ""] if optional else one.split("|") if one else [plain])
    return ["".join(parts) for parts in itertools.product(*choices)]
