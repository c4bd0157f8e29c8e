"""Every launch is in the compile matrix: operators run in the interpreter with the tiles of a chip."""

import collections
import itertools
from functools import partial

import pytest
import torch
from search_step import a_step

from fasttfm import functional as F
from fasttfm.functional import backend
from fasttfm.kernels import launch, search
from fasttfm.kernels.attention import launch as attention_launch
from fasttfm.kernels.attention.ancestors import Ancestors
from fasttfm.kernels.chip import CHIPS, INTERPRETER
from fasttfm.kernels.launch import power_of_two
from fasttfm.kernels.parameter import kinds_of
from fasttfm.kernels.proof import matrix as compile_matrix
from fasttfm.kernels.proof.attention_case import WIDTHS
from fasttfm.kernels.proof.executed import replace_everywhere
from fasttfm.kernels.tiles import attention as tables
from fasttfm.kernels.tiles.table import Tile
from fasttfm.search.device.launches import memory_of, sizes_of
from fasttfm.search.device.state import Sizes, State

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")


def tile_of(kernel: str, constants: dict, options: dict) -> tuple:
    """The integer constants of a kernel, warps and stages. Heads narrower than 64 take the tiles of 64."""
    sizes = {name: value for name, value in constants.items() if type(value) is int}
    sizes |= {name: max(64, power_of_two(sizes[name])) for name in ("D", "DV") if name in sizes}
    return kernel, tuple(sorted(sizes.items())), options["num_warps"], options["num_stages"]


NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}


def variant_of(kernel, arguments: dict) -> tuple:
    """Dtypes of elements, residual stream, parameters, sums and mask, and whether sequences are packed. arguments:
    tensors, or the notation of compile_case.py."""
    dtypes: dict[str, str] = {}
    for name, kind in kinds_of(kernel).items():
        if kind in ("Pointer", "Pointers", "ResidualPointer", "ParameterPointer", "MaskPointer"):
            pointer = arguments[name][-1] if isinstance(arguments[name], tuple) else arguments[name]
            if pointer is not None:
                dtypes[kind] = pointer.removeprefix("*") if isinstance(pointer, str) else NAMES[pointer.dtype]
    if "spans" in arguments:
        dtypes["spans"] = "lengths" if arguments["spans"][1] is None else "packed"
    return full_name(kernel), tuple(sorted(dtypes.items()))


def listed(chip: str) -> set[tuple]:
    """Tiles and variants of the matrix."""
    result = set()
    for _, case in compile_matrix.enumerate_cases([CHIPS[chip]]):
        constants = {p: case.arguments[p] for p in constexprs(case.kernel)}
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        result.add(tile_of(full_name(case.kernel), constants, options))
        result.add(variant_of(case.kernel, case.arguments))
    return result


def full_name(function) -> str:
    function = getattr(function, "fn", function)  # the module of an interpreted function is the interpreter
    return f"{function.__module__.removeprefix('fasttfm.kernels.')}.{function.__name__}"


def constexprs(kernel) -> list[str]:
    function = getattr(kernel, "fn", kernel)
    return [name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)]


@pytest.fixture
def launched(monkeypatch, request):
    """launched(chip) runs operators with the tiles of a chip and returns the set that collects their launches."""
    from triton.runtime import interpreter

    seen: set[tuple] = set()
    here: list[str] = []
    run = interpreter.GridExecutor.__call__

    def logged(self, *args, **kwargs):
        named = dict(zip(self.arg_names, args)) | kwargs
        defaults = {"num_warps": 4, "num_stages": 3 if here[-1].startswith("sm_") else 2}  # Triton's own
        seen.add(tile_of(full_name(self.fn), {name: named[name] for name in constexprs(self.fn)}, defaults | kwargs))
        seen.add(variant_of(self.fn, named))
        self.grid = (1,) * len(self.grid)  # one program is enough
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", logged)

    def on(chip: str) -> set[tuple]:
        here.append(chip)
        request.addfinalizer(replace_everywhere("chip", launch.chip, lambda device: CHIPS[chip]))
        return seen

    return on


def with_gradients(function, *inputs):
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else [o for o in outputs if o.requires_grad]
    torch.autograd.grad([o.sum() for o in outputs], [x for x in inputs if x.requires_grad])


def every_attention(tensor):
    """Every route on every chip: short rows, long rows, and rows too long for the softmax route; padded, packed,
    masked, and returning weights."""

    def inputs(L, S, D):
        return tensor(1, 1, L, D), tensor(1, 1, S, D), tensor(1, 1, S, D)

    for L, S, D in ((20, 20, 64), (3, 60, 64), (100, 100, 64), (150, 150, 64), (40, 40, 32), (3, 1100, 64)):
        with_gradients(lambda q, k, v: F.attention(q, k, v, causal=True, dropout_p=0.1), *inputs(L, S, D))
    for S, D in ((5, 64), (20, 128), (60, 128), (140, 128), (16, 256), (30, 256), (140, 256), (1100, 256)):
        with_gradients(F.attention, *inputs(3, S, D))
    for S, D in ((20, 64), (60, 64), (150, 64), (1100, 64), (20, 128), (140, 128), (30, 256)):
        added, allowed = tensor(3, S), torch.rand(3, S) > 0.2
        with_gradients(lambda q, k, v, m: F.attention(q, k, v, mask=m, dropout_p=0.1), *inputs(3, S, D), added)
        with_gradients(lambda q, k, v, m=allowed: F.attention(q, k, v, mask=m), *inputs(3, S, D))
    for S in (20, 150):
        shared = tensor(1, 4, 3, 64), tensor(1, 1, S, 64), tensor(1, 1, S, 64)
        with_gradients(lambda q, k, v: F.attention(q, k, v, dropout_p=0.1), *shared)
    for length in (20, 60, 150):
        starts = torch.tensor([0, length, length + 5])
        packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
        with_gradients(
            lambda *t, p=packed: F.varlen_attention(*t, **p, causal=True, dropout_p=0.1),
            *(tensor(length + 5, 1, 64) for _ in range(3)),
        )
    for joint in (tensor(1, 20, 3, 1, 64), tensor(1, 20, 3, 2, 32), tensor(1, 60, 3, 1, 64), tensor(1, 150, 3, 1, 64)):
        with_gradients(lambda x: F.packed_qkv_attention(x, causal=True, dropout_p=0.1), joint)
    with_gradients(lambda x, q: F.packed_qkv_attention(x, q), tensor(1, 30, 2, 1, 64), tensor(1, 20, 1, 64))
    for keys in (20, 150, 9000):
        with_gradients(
            lambda q, k, m: F.attention_weights(q, k, mask=m, dropout_p=0.1),
            tensor(1, 1, 3, 16), tensor(1, 1, keys, 16), tensor(3, keys),
        )  # fmt: skip


def every_cache(dtype):
    """Few and many rows per key head, with and without pages, one share and several; and attention over ancestors."""
    for width, heads, queries in itertools.product((32, 128, 256), (1, 4), (1, 6)):
        query = torch.randn(1, heads, queries, width).to(dtype)
        for page, slopes in ((16, torch.ones(heads)), (600, None)):
            cache = torch.randn(600 // page, 1, page, width).to(dtype)
            table = None if slopes is None else torch.arange(600 // page)[None]
            options = {"cache_lengths": 9, "block_table": table, "alibi_slopes": slopes}
            F.attention_with_cache(query, cache, cache, query[:, :1], query[:, :1], **options)
    for width in (32, 128, 256):
        step = a_step([5], 1, 1, width, dtype)
        Ancestors(*step, heads=1, scale=1.0)(*step, step[0][:, :width].clone())


def every_search(dtype):
    """Few and many slots, beams and vocabularies of all size classes."""
    cpu = torch.device("cpu")
    shapes = (1, 5, 40), (1, 5, 40_000), (200, 5, 4097), (1, 8, 40_000), (1, 16, 5000)
    for slots, beam, vocabulary in shapes:
        state = State(Sizes(slots, beam, 1, 1, 1, 1, vocabulary), cpu)
        sizes, memory = sizes_of(state), memory_of(state)
        logits, refused = torch.empty(slots * beam, vocabulary, dtype=dtype), torch.ones(vocabulary, dtype=torch.bool)
        shares = search.new_shares(sizes, cpu)
        search.Admit(sizes, 2, cpu)(memory)
        table = torch.ones(vocabulary, 4, dtype=dtype)
        search.Embed(table, table[:1].float(), sizes, 1.0, 0)(
            memory, table, table[:1].float(), table.new_empty(slots * beam, 4)
        )
        search.Likeliest(logits, refused, sizes, 3)(memory, logits, refused, None, shares)
        search.Choose(sizes, shares, 3)(memory, shares)


def everything(dtype):
    def tensor(*shape):
        return torch.randn(*shape).to(dtype).requires_grad_()

    every_attention(tensor)
    every_cache(dtype)
    every_search(dtype)
    for pairs in (5, 32, 64, 128):
        tables = F.rotary_tables(7, 2 * pairs)
        for interleaved in (False, True):
            with_gradients(
                lambda x, t=tables, i=interleaved: F.rotary(x, *t, interleaved=i), tensor(1, 1, 7, 2 * pairs)
            )
    for width in (64, 512, 1024):
        x, residual, weight, bias = tensor(5, width), tensor(5, width), tensor(width), tensor(width)
        with_gradients(F.layer_norm, x, weight, bias)
        with_gradients(lambda *t: F.residual_layer_norm(*t, dropout_p=0.1), x, residual, weight, bias)
        with_gradients(F.rms_norm, x, weight)
        with_gradients(lambda *t: F.residual_rms_norm(*t, dropout_p=0.1), x, residual, weight)
        with_gradients(lambda *t: F.residual_add(*t, dropout_p=0.1), x, residual)
    for rows in (3, 200):
        inputs = [tensor(*shape) for shape in ((rows, 64), (128, 64), (128,), (64, 128), (64,))]
        for activation in ("relu", "gelu"):
            with_gradients(lambda *t, a=activation: F.feed_forward(*t, dropout_p=0.1, activation=a), *inputs)
    for vocabulary in (100, 5000):
        target = torch.arange(3)
        with_gradients(lambda x, t=target: F.cross_entropy(x, t), tensor(3, vocabulary))
        with_gradients(lambda x, w, t=target: F.linear_cross_entropy(x, w, t)[0], tensor(3, 16), tensor(vocabulary, 16))
    with_gradients(lambda w: F.embed(torch.ones(2, 3, dtype=torch.int64), w, dropout_p=0.1), tensor(10, 512))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "kind"),
    [("sm_60", "fp32"), ("sm_80", "fp16"), ("sm_90", "fp32"), ("sm_90", "tf32"), ("sm_90", "bf16"), ("gfx942", "bf16")],
)
def test_every_launched_tile_dtype_and_mask_is_listed(chip, kind, launched, request):
    expected = listed(chip)  # first: it imports every kernel file before launch.chip is replaced
    seen = launched(chip)
    products = torch.backends.cuda.matmul
    request.addfinalizer(partial(setattr, products, "fp32_precision", products.fp32_precision))
    products.fp32_precision = "tf32" if kind == "tf32" else "ieee"
    with backend("triton"):
        everything({"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32))
    kernels = {entry[0] for entry in seen}
    assert len(kernels) > 20, "launches are seen"
    missing = sorted(map(str, seen - expected))
    assert not missing, "\n".join(missing)


def questions(chip):
    """(kernel, table, size) of every lookup in the attention tables by the routes of a chip."""
    kinds = ("fp16", "bf16", "fp32", *(["tf32"] if chip.capability >= 80 else []))
    for kind, width, extras in itertools.product(kinds, WIDTHS, (0, 1, 2, 3, 4)):
        size = (chip, kind, width, extras)
        if attention_launch.takes_long(chip, kind, width):
            yield "forward._forward", tables.FORWARD, size
            yield "backward._backward_queries", tables.BACKWARD_QUERIES, size
            yield "backward._backward_keys", tables.BACKWARD_KEYS, size
            yield "mask_gradient._gradient", tables.MASK_GRADIENT, size[:3]
        yield "ancestors._attend", tables.ANCESTORS, size[:3]
        for rows in (16, 32):
            yield "decode._decode", tables.DECODE, (*size[:3], rows)
        for keys in (16, 32, 64, 128):
            if attention_launch.fits_short(chip, kind, width, keys):
                yield "short._forward", tables.SHORT_FORWARD, (*size, keys)
                yield "short._backward", tables.SHORT_BACKWARD, (*size, keys)
                for queries in (16, 32, 64, 128, 256):
                    yield "backward._backward_queries", tables.SHORT_BY_LONG, (*size, queries, keys)
                    yield "backward._backward_keys", tables.SHORT_BY_LONG, (*size, queries, keys)


def shipped(table):
    return getattr(table, "shipped", table)


def test_every_cell_of_the_attention_tables_is_used_by_some_chip():
    """A cell that is shadowed by others, or that no route looks up, is a mistake."""
    asked = collections.defaultdict(set)
    for chip in (*CHIPS.values(), INTERPRETER):
        for _, table, size in questions(chip):
            asked[shipped(table)].add(size)
            asked[tables.LONG_WIDTH].add(size[:2])
            asked[tables.SHORT_KEYS].add(size[:3])
        asked[shipped(tables.MASKED_SOFTMAX)] |= {(chip, 2**power) for power in range(4, 14)}
    for table, sizes in asked.items():
        of_all_compilers = {(row, column) for row, column in table.answers if not table.compilers[row]}
        dead = of_all_compilers - {table.cell(*size) for size in sizes}
        assert not dead, [(table.sizes[row], table.chips[column]) for row, column in sorted(dead)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("chip", CHIPS)
def test_every_answer_of_the_attention_tables_is_listed(chip):
    listed = {
        (full_name(case.kernel), a["D"], Tile(a.get("ROWS", 0), a["COLUMNS"], case.num_warps, case.num_stages))
        for _, case in compile_matrix.enumerate_cases([CHIPS[chip]], ["attention"])
        if "D" in (a := case.arguments)
    }
    asked = {(f"attention.{kernel}", size[2], shipped(table)(*size)) for kernel, table, size in questions(CHIPS[chip])}
    answers = {each for each in asked if isinstance(each[2], Tile)}
    missing = answers - listed
    assert len(answers) > 10
    assert not missing, "\n".join(map(str, sorted(missing, key=str)))
    assert all(max(tile.rows, tile.columns) <= attention_launch.TILE_ROWS for *_, tile in answers)
