"""Trains small Transformers with a stand-in for a chip, and prints what Triton would compile, without compiling.

    python tests/kernels/what_compiles.py sm_90 bf16

Triton's launch path runs up to the compilation: it binds the arguments, specializes on those that are 1 or multiples of
16, and calls its cache hook (stand_in.py has the driver). Tensors are on the CPU and hold no valid numbers.
"""

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is imported

import torch
from stand_in import stand_in
from triton import knobs

from fasttfm.functional import backends
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import matrix as compile_matrix
from fasttfm.kernels.proof.executed import replace_everywhere
from fasttfm.models import Transformer, TransformerConfig

FIRST = [(61, 64, 67), (8, 7, 9), (9, 100, 103), (9, 40, 44), (6, 19, 20), (2, 128, 1), (3, 16, 16)]
FIRST += [(2, 112, 96), (5, 48, 48)]
LATER = [(7, 112, 99), (3, 17, 31), (24, 48, 64), (5, 5, 16), (17, 80, 80), (1, 1, 1), (32, 16, 2)]
"""(B, S, L) of batches. Both have every size class, with other numbers that are 1 or multiples of 16."""

Launch = tuple[str, tuple[tuple[str, str], ...]]
"""A kernel and the specialization of every parameter: a constant, or a type and whether it is a multiple of 16."""


def record(chip: str) -> list[Launch]:
    """Launches as if on the chip from now on. Returns the list that collects the launches."""
    seen: list[Launch] = []

    def hook(*, fn, compile, **_) -> bool:
        specialised = described(compile["signature"], compile["constants"], compile["configs"][0])
        options = f"{compile['num_warps']} warps {compile['num_stages']} stages"
        seen.append(
            (f"{fn.module.removeprefix('fasttfm.kernels.')}.{fn.jit_function.__name__}", (*specialised, ("", options)))
        )
        return True  # do not compile, do not run

    knobs.runtime.jit_cache_hook = hook
    stand_in(chip, [])

    def route(choice, *tensors):
        kinds = [each.dtype for each in tensors]
        return "triton" if choice != "torch" and backends.kernels_take(choice, tensors[0].device, *kinds) else "torch"

    on_chip = {
        "use_triton": lambda device, choice=None: True,
        "kernel_route": route,
        "values_are_checked": lambda values: False,
    }
    for name, answer in on_chip.items():
        replace_everywhere(name, getattr(backends, name), answer)
    return seen


def described(signature: dict, constants: dict, attributes: dict) -> list[tuple[str, str]]:
    """(parameter, "= 64", "*bf16:16" or "i32") in the notation of compile_case.py, with tuples flattened by index."""

    def of(name: str, kind: Any, path: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        if isinstance(kind, tuple):
            for i, each in enumerate(kind):
                yield from of(f"{name}[{i}]", each, (*path, i))
        elif kind == "constexpr":
            yield name, f"= {constants[path]}"
        else:
            yield name, f"{kind}:16" if attributes.get(path) else str(kind)

    return [pair for position, (name, kind) in enumerate(signature.items()) for pair in of(name, kind, (position,))]


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flattens an argument of a compile case, with the same names."""
    if isinstance(value, tuple):
        for i, each in enumerate(value):
            yield from flat(f"{name}[{i}]", each)
    else:
        yield name, value


def divisible_in_the_matrix(chip: str) -> dict[str, set[str]]:
    """Kernel -> the integers that are multiples of 16 in every case of the compile matrix."""
    results: dict[str, set[str]] = {}
    for task, case in compile_matrix.enumerate_cases([CHIPS[chip]]):
        leaves = [leaf for argument in case.arguments.items() for leaf in flat(*argument)]
        divisible = {name for name, value in leaves if value in ("i32:16", "i64:16")}
        kernel = f"{task.family}.{case.kernel.__name__}"
        results[kernel] = results.get(kernel, divisible) & divisible
    return results


def train(dtype: torch.dtype, shapes: list[tuple[int, int, int]]) -> None:
    """Forward and backward passes of small Transformers on batches of each shape, padded and packed."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    size = {"vocab_size": 128, "d_model": 128, "heads": 2, "d_ff": 256, "encoder_layers": 1, "decoder_layers": 1}
    dropouts = {"attention_dropout": 0.1, "relu_dropout": 0.1}
    for config in (TransformerConfig(**size), TransformerConfig(**size, **dropouts, norm_first=True, final_norm=True)):
        model = Transformer(config).to(dtype)
        for B, S, L in shapes:
            source, target = torch.randint(1, 128, (B, S)), torch.randint(1, 128, (B, L))
            lengths = torch.randint(1, S + 1, (B,)), torch.randint(1, L + 1, (B,))
            for packed in (None, (int(lengths[0].sum()), int(lengths[1].sum()))):
                loss, _, _ = model.loss(source, target, target, *lengths, packed_tokens=packed)
                loss.backward()


def main() -> int:
    chip, kind = sys.argv[1:]
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]
    divisible = divisible_in_the_matrix(chip)  # first: it imports every kernel file
    seen = record(chip)
    train(dtype, FIRST)
    first = set(seen)
    train(dtype, LATER)
    faults = [f"recompiled for a batch of another shape: {kernel} {dict(of)}" for kernel, of in set(seen) - first]
    for kernel, parameters in sorted(first):
        less = [name for name, value in parameters if name in divisible[kernel] and not value.endswith(":16")]
        faults += [f"{kernel}: the matrix has {name} as a multiple of 16" for name in less]
    print("\n".join([*faults, f"{len(seen)} launches of {len(first)} compiled kernels"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
