"""Every launch is in the compile matrix: operators launch with the tiles of a chip, and compute nothing."""

import collections
import functools
import itertools

import pytest
import torch
from gpu.problems import (
    PROBLEMS,
    _attention,
    _cross_entropy,
    _embed,
    _feed_forward,
    _norms,
    _rms_norm,
    _rotary,
    _weights,
    solve,
)
from search_step import a_step
from torch.utils._pytree import tree_leaves

from fasttfm import functional as F
from fasttfm.functional import backend
from fasttfm.kernels import jit, launch, search
from fasttfm.kernels.attention.ancestors import Ancestors
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.launch import power_of_two
from fasttfm.kernels.parameter import kinds_of
from fasttfm.kernels.proof import matrix as compile_matrix
from fasttfm.kernels.proof.executed import replace_everywhere
from fasttfm.models import Transformer, TransformerConfig
from fasttfm.search.device.launches import memory_of, sizes_of
from fasttfm.search.device.state import Sizes, State

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="through the interpreter")
CPU = torch.device("cpu")
kinds_of_function = functools.cache(jit._kinds)
OTHERS = [
    *(_attention(1, 2, 3, S, 64, 64, key_heads=1, p=0.1) for S in (20, 150)),
    _attention(1, 1, 3, 140, 256, 256),
    *(_attention(1, 1, 3, 300, *D, p=p) for D in ((40, 48), (72, 80), (200, 208)) for p in (0.0, 0.1)),
    *(problem for N in (64, 100, 200, 300, 900, 2000, 4000, 8000) for problem in _norms(3, N, 0.1)),
    *(_rms_norm(3, N, 0.1) for N in (64, 1024)),
    *(_weights(1, 1, 3, S, 16) for S in (16, 30, 60, 100, 200, 400, 900, 2000, 4000, 8000)),
    *(problem for V in (100, 900, 2000, 5000) for problem in _cross_entropy(3, 16, V)),
    *(_embed(1, 5, N, 50, 0.1) for N in (50, 100, 200, 512)),
    *(_rotary(1, 1, 7, 2 * pairs, 2 * pairs, interleaved=i) for pairs in (5, 32, 64, 128) for i in (False, True)),
    *(_feed_forward(3, 64, 128, 0.1, activation) for activation in ("relu", "gelu")),
]
"""Beside PROBLEMS: keys that heads share, wide heads, strides of which only some are multiples of 16, and rows of every
width with a tile of its own."""


DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "u8"}


def full_name(function) -> str:
    function = getattr(function, "fn", function)  # the module of an interpreted function is the interpreter
    return f"{function.__module__.removeprefix('fasttfm.kernels.')}.{function.__name__}"


def constexprs(kernel) -> list[str]:
    function = getattr(kernel, "fn", kernel)
    return [name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)]


def tile_of(kernel, arguments: dict, options: dict) -> tuple:
    """The integer constants of a kernel, warps and stages. Heads narrower than 64 take the tiles of 64."""
    sizes = {name: arguments[name] for name in constexprs(kernel) if type(arguments[name]) is int and name != "GROUP"}
    sizes |= {name: max(64, power_of_two(sizes[name])) for name in ("D", "DV") if name in sizes}
    return full_name(kernel), tuple(sorted(sizes.items())), options["num_warps"], options["num_stages"]


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


def entries_of(kernel, arguments: dict, options: dict) -> set[tuple]:
    """What a launch or a case has: its tile, its dtypes, and whether heads share keys."""
    shared = full_name(kernel), arguments.get("GROUP", 1) > 1
    return {tile_of(kernel, arguments, options), variant_of(kernel, arguments), shared}


@pytest.fixture
def launching(monkeypatch, request):
    """launching(chip, note): from now on operators launch with the tiles of a chip, and instead of computing call
    note(function, arguments and constants by name, options)."""
    from triton.runtime import interpreter

    def on(chip, note):
        triton_own = {"num_warps": 4, "num_stages": 3 if chip.startswith("sm_") else 2}

        def noted(self, *args, **kwargs):
            note(self.fn, dict(zip(self.arg_names, args)) | kwargs, triton_own | kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
        request.addfinalizer(replace_everywhere("chip", launch.chip, lambda device: CHIPS[chip]))

    return on


def every_cache(dtype):
    """Few and many rows per key head, with and without pages, one share and several, strides that are multiples of 16
    or not; and attention over ancestors."""
    for width, heads, queries in itertools.product((32, 40, 72, 128, 200, 256), (1, 4), (1, 6)):
        query = torch.randn(1, heads, queries, width).to(dtype)
        values = torch.randn(1, 1, queries, (width + 15) // 16 * 16).to(dtype)
        for page, slopes in ((16, torch.ones(heads)), (600, None)):
            caches = [torch.randn(600 // page, 1, page, x.shape[-1]).to(dtype) for x in (query, values)]
            table = None if slopes is None else torch.arange(600 // page)[None]
            options = {"cache_lengths": 9, "block_table": table, "alibi_slopes": slopes}
            F.attention_with_cache(query, *caches, query[:, :1], values, **options)
    for width in (32, 128, 256):
        step = a_step([5], 1, 1, width, dtype)
        Ancestors(*step, heads=1, scale=1.0)(*step, step[0][:, :width].clone())


def every_search(dtype):
    """Few and many slots, beams and vocabularies of all size classes."""
    shapes = (1, 5, 40), (1, 5, 40_000), (200, 5, 4097), (1, 8, 40_000), (1, 16, 5000)
    for slots, beam, vocabulary in shapes:
        state = State(Sizes(slots, beam, 1, 1, 1, 1, vocabulary), CPU)
        sizes, memory = sizes_of(state), memory_of(state)
        logits, refused = torch.empty(slots * beam, vocabulary, dtype=dtype), torch.ones(vocabulary, dtype=torch.bool)
        shares = search.new_shares(sizes, CPU)
        search.Admit(sizes, 2, CPU)(memory)
        table = torch.ones(vocabulary, 4, dtype=dtype)
        search.Embed(table, table[:1].float(), sizes, 1.0, 0)(
            memory, table, table[:1].float(), table.new_empty(slots * beam, 4)
        )
        search.Likeliest(logits, refused, sizes, 3)(memory, logits, refused, None, shares)
        search.Choose(sizes, shares, 3)(memory, shares)


@pytest.mark.parametrize(
    "kind", ["bf16", *(pytest.param(kind, marks=pytest.mark.whole) for kind in ("fp16", "fp32", "tf32"))]
)
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.sample(len(CHIPS))
def test_every_launched_tile_dtype_and_mask_is_listed(chip, kind, launching, request):
    seen, expected = set(), set()
    for _, case in compile_matrix.enumerate_cases([CHIPS[chip]]):  # first: it imports every kernel file
        options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
        expected |= entries_of(case.kernel, case.arguments, options)
    launching(chip, lambda *given: seen.update(entries_of(*given)))
    products = torch.backends.cuda.matmul
    request.addfinalizer(functools.partial(setattr, products, "fp32_precision", products.fp32_precision))
    products.fp32_precision = "tf32" if kind == "tf32" else "ieee"
    with backend("triton"):
        for problem in (*PROBLEMS, *OTHERS):
            solve(problem.ours, problem.inputs(CPU, DTYPES[kind]))
        every_cache(DTYPES[kind])
        every_search(DTYPES[kind])
    assert len({entry[0] for entry in seen}) > 20, "launches are seen"
    missing = sorted(map(str, seen - expected))
    assert not missing, "\n".join(missing)


FIRST = [(61, 64, 67), (8, 7, 9), (9, 100, 103), (9, 40, 44), (6, 19, 20), (2, 128, 1), (3, 16, 16)]
FIRST += [(2, 112, 96), (5, 48, 48)]
LATER = [(7, 112, 99), (3, 17, 31), (24, 48, 64), (5, 5, 16), (17, 80, 80), (1, 1, 1), (32, 16, 2)]
"""(B, S, L) of batches. Both have every size class, with other numbers that are 1 or multiples of 16."""


def train(dtype, shapes):
    """Forward and backward passes of small Transformers on batches of each shape, padded and packed."""
    size = {"vocab_size": 128, "d_model": 128, "heads": 2, "d_ff": 256, "encoder_layers": 1, "decoder_layers": 1}
    dropouts = {"attention_dropout": 0.1, "relu_dropout": 0.1, "norm_first": True, "final_norm": True}
    for changes in ({}, dropouts):
        model = Transformer(TransformerConfig(**size, **changes)).to(dtype)
        for B, S, L in shapes:
            source, target = torch.randint(1, 128, (B, S)), torch.randint(1, 128, (B, L))
            lengths = torch.randint(1, S + 1, (B,)), torch.randint(1, L + 1, (B,))
            for packed in (None, (int(lengths[0].sum()), int(lengths[1].sum()))):
                loss, _, _ = model.loss(source, target, target, *lengths, packed_tokens=packed)
                loss.backward()


def specialized(function, arguments):
    """What Triton compiles a kernel anew for: dtypes, absent arguments, and sizes and strides that are 1 or multiples
    of 16; but not the value of a Varying."""
    kinds = kinds_of_function(getattr(function, "fn", function))
    for _, kind, value in jit._leaves(kinds.items(), (arguments[name] for name in kinds)):
        for x in tree_leaves(value):
            if isinstance(x, torch.Tensor):
                yield x.dtype
            elif x is None or kind in ("Size", "Stride", "Strides"):
                yield None if x is None else (x == 1, x % 16 == 0)


def multiples(function, arguments):
    """The places of integers that are multiples of 16, in the notation of compile_case.py or as they are."""
    kinds = kinds_of_function(getattr(function, "fn", function))
    flat = [((name, i), x) for name in kinds for i, x in enumerate(tree_leaves(arguments[name]))]
    return {place for place, x in flat if (type(x) is int and x % 16 == 0) or (type(x) is str and x.endswith(":16"))}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("chip", "kind"), [("sm_90", "bf16"), ("sm_60", "fp32"), ("gfx942", "fp16")])
def test_a_batch_of_another_shape_recompiles_nothing_and_sizes_are_multiples_where_the_matrix_has_them(
    chip, kind, launching
):
    listed, seen, less = {}, collections.Counter(), set()
    for _, case in compile_matrix.enumerate_cases([CHIPS[chip]]):
        name, places = full_name(case.kernel), multiples(case.kernel, case.arguments)
        listed[name] = listed.get(name, places) & places

    def note(function, arguments, options):
        constants = tuple(sorted((name, str(arguments[name])) for name in constexprs(function)))
        seen[full_name(function), tuple(specialized(function, arguments)), constants] += 1
        less.update(
            (full_name(function), place) for place in listed[full_name(function)] - multiples(function, arguments)
        )

    launching(chip, note)
    with backend("triton"):
        train(DTYPES[kind], FIRST)
        first = set(seen)
        train(DTYPES[kind], LATER)
    assert seen.total() > 1500
    assert len(first) < 100
    assert not set(seen) - first
    assert not less
