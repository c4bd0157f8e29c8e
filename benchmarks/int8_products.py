"""Products of few rows in int8 beside bf16 and float32: which operator is fastest, and what quantising costs.

    python -m benchmarks.int8_products

For M = 1, 4, 16, 32 and 128 rows and every layer shape of paper-base (V = 8,000), one thread unless OMP_NUM_THREADS
says otherwise. Candidates take turns, each for --rounds rounds, and the least time of a call counts. Weights take
turns among as many copies as exceed a core's cache, because a step of a search reads all of a model's. Appends one
line to benchmarks/results/int8-products.jsonl.
"""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import command
from fasttfm.cpu import int8
from fasttfm.cpu.linear import frozen_weights, linear

ROWS = (1, 4, 16, 32, 128)
SHAPES = ((1536, 512), (512, 512), (2048, 512), (512, 2048), (8000, 512))
"""(outputs, inputs) of paper-base: queries, keys and values; other projections; feed-forward; output."""
_BYTES = 8 << 20
"""Of the weights that take turns."""

Product = Callable[[Tensor], Any]


def candidates(weight: Tensor) -> dict[str, Callable[[Tensor], Any]]:
    """Name -> a product of float32 rows with a weight (N, K), everything laid out beforehand.

    "operator alone" has its rows quantized already and leaves its sums as they are.
    """
    quantized, scales = int8.quantize(weight)
    made: dict[str, Product] = {"int8": int8.Int8Product(weight, None, False)}
    for name in int8.exact_routes():
        made[f"int8, {name} alone"] = int8.ROUTES[name](quantized, scales)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.to(dtype)
        made[name] = partial(_laid_out, layer)
    return made


def _laid_out(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    with frozen_weights(layer):
        return linear(x, layer.weight)


def inputs_of(name: str, x: Tensor) -> Tensor:
    """Rows as a candidate takes them."""
    if name.endswith("alone"):
        return int8.quantize(x)[0]
    return x.bfloat16() if name == "bfloat16" else x


def measure(rows: int, shape: tuple[int, int], rounds: int, calls: int) -> dict[str, Any]:
    """Microseconds of a call of every candidate."""
    torch.manual_seed(0)
    copies = max(1, min(8, _BYTES // (shape[0] * shape[1])))
    products = [candidates(torch.randn(shape)) for _ in range(copies)]
    x = torch.randn(rows, shape[1])
    least: dict[str, float] = {}
    with torch.inference_mode():
        for _ in range(rounds):
            for name in products[0]:
                given = inputs_of(name, x)
                turns = [products[call % copies][name] for call in range(calls)]
                turns[0](given)
                begin = time.perf_counter()
                for product in turns:
                    product(given)
                each = (time.perf_counter() - begin) / calls * 1e6
                least[name] = min(least.get(name, each), each)
    microseconds = {name: round(value, 1) for name, value in least.items()}
    return {"rows": rows, "outputs": shape[0], "inputs": shape[1], "microseconds": microseconds}


@command.program(
    command.rounds(10, "all candidates"),
    command.flag("--calls", type=int, default=40, help="of a candidate in a turn (default: %(default)s)"),
)
def main(args: Any) -> dict[str, Any]:
    measured = []
    for shape in SHAPES:
        for rows in ROWS:
            measured.append(measure(rows, shape, args.rounds, args.calls))
            print(json.dumps(measured[-1]), flush=True)
    return {"threads": torch.get_num_threads(), "measured": measured}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
