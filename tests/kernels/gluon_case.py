"""Compiles a warp-specialized Gluon kernel as a compile case, launches it with a stand-in for sm_90, prints JSON."""

import json
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is imported
sys.path.insert(0, str(Path(__file__).parents[2] / "ptx-check" / "tests" / "kernels"))

import torch
from gluon_kernels import descriptor, product
from stand_in import stand_in

from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.proof import budgets, compiling
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import counted, report

SM_90 = CHIPS["sm_90"]
CONSTANTS = {"REGISTERS": True, "CONSUMERS": 160, "PRODUCER": 24, "FAULT": ""}
CASE = CompileCase(
    kernel=product,
    name="product/128x64x64w8s2",
    dtype="bf16",
    arguments={"a": "map bf16 64x64", "b": "map bf16 64x64", "out": "*fp32", "N": "i32:16", "K": "i32:16", **CONSTANTS},
    num_warps=4,
    num_stages=2,
    matrix_product=True,
)

result = counted.of_case(SM_90, CASE)
stand_in("sm_90", started := [])
a, b, c = torch.empty(128, 320, dtype=torch.bfloat16), torch.empty(320, 64, dtype=torch.bfloat16), torch.empty(128, 64)
product[1, 1](descriptor(a, [64, 64]), descriptor(b, [64, 64]), c, 64, 320, **CONSTANTS, num_warps=4, num_stages=2)
print(json.dumps({
    "registers": result.resources.registers,
    "matrix": result.resources.matrix,
    "broken": budgets.broken_rules(SM_90, CASE, result.resources, result.count.loops),
    "loops": [loop.tensor for loop in result.count.loops],
    "orders": result.count.orders,
    "counted again": counted.of_case(SM_90, CASE) == result,
    "as launched": all(
        getattr(started[0].metadata, name) == value
        for name, value in compiling.compiled(SM_90, CASE).metadata._asdict().items()
        if name != "hash"
    ),
    "last cells": [line.rpartition("%")[2].strip() for line in report.table([(SM_90, CASE, result)]).splitlines()[1:]],
}))  # fmt: skip
