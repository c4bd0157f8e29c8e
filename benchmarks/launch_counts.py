"""Launches of a training step of six and six layers, by the route of its attention.

    TRITON_INTERPRET=1 python -m benchmarks.launch_counts

Counted without a device (kernels/proof/launch_log.py says what counts), products and optimizer included; of width
nothing depends but how many launches walk over the lists of parameters, and of the batch only what a sort of its tokens
takes, so both are small, and a sort counts as one of more than 4,096. Prints the table and replaces
benchmarks/results/launch-counts.jsonl.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import command
from benchmarks.measure.text_table import aligned
from fasttfm.errors import UserError
from fasttfm.functional import backend, embed
from fasttfm.functional.merging import merged_launches
from fasttfm.kernels import choices
from fasttfm.kernels.chip import INTERPRETER
from fasttfm.kernels.proof.launch_log import LaunchLog
from fasttfm.models import Transformer, TransformerConfig

ROUTES = {
    "short": "rows of few keys: one kernel",
    "flash": "longer rows, half precision or TF32 from sm_80 on: one kernel",
    "softmax": "longer rows, elsewhere (P100, V100, T4; float32 proper): one kernel between products of cuBLAS",
}
"""Of attention, by the name that kernels/attention/launch.py gives them."""


def training_step(
    route: str,
    *,
    norm_first: bool = False,
    final_norm: bool | None = None,
    precision: torch.dtype = torch.float32,
    merged: bool = True,
) -> LaunchLog:
    """The launches of a step of six encoder and six decoder layers.

    precision: autocast's. final_norm: None is as norm_first.
    """
    config = TransformerConfig(
        vocab_size=40,
        d_model=16,
        heads=2,
        d_ff=32,
        attention_dropout=0.1,
        relu_dropout=0.1,
        norm_first=norm_first,
        final_norm=norm_first if final_norm is None else final_norm,
    )
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the first step also makes Adam's moments
    optimizer.zero_grad()
    table = torch.zeros(config.vocab_size, config.d_model, requires_grad=True)
    with backend("triton"):
        embed(torch.zeros(1, 1, dtype=torch.int64), table).sum().backward()  # makes what a device needs once
    source, target = torch.randint(4, 40, (2, 5)), torch.randint(4, 40, (2, 4))
    lengths = torch.tensor([5, 3]), torch.tensor([4, 4])
    with backend("triton"), merged_launches(merged), _attention_by(route), LaunchLog(long_sorts=True) as log:
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            loss, _, tokens = model.loss(source, target, target, *lengths)
        (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return log


@contextlib.contextmanager
def _attention_by(route: str) -> Iterator[None]:
    """Inside, attention of these heads and rows takes this route, as if it had been tuned so."""
    from fasttfm.kernels.attention.launch import key_class, width_class

    before = choices.kept(INTERPRETER)
    sizes = [(kind, width_class(8), key_class(5)) for kind in ("fp32", "fp16", "bf16")]
    choices.keep(INTERPRETER, {**before, **{("attention.route", size): route for size in sizes}})
    try:
        yield
    finally:
        choices.keep(INTERPRETER, before)


def counts() -> list[dict[str, Any]]:
    """One row a route, precision and order of the norms."""
    rows = []
    for route in ROUTES:
        for precision in (torch.float32, torch.float16):
            for norm_first in (False, True):
                count = functools.partial(training_step, route, norm_first=norm_first, precision=precision)
                logs = {merged: count(merged=merged) for merged in (True, False)}
                rows.append(
                    {
                        "route": route,
                        "precision": str(precision).removeprefix("torch."),
                        "norm": "pre" if norm_first else "post",
                        "launches": logs[True].total,
                        "unmerged": logs[False].total,
                        "triton": logs[True].triton.total(),
                        "products": logs[True].products.total(),
                        "others": logs[True].others.total(),
                    }
                )
    return rows


@command.program()
def main(args: Any) -> dict[str, Any]:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError("launches are counted through Triton's interpreter: set TRITON_INTERPRET=1")
    rows = counts()
    (args.results / "launch-counts.jsonl").unlink(missing_ok=True)
    print(aligned([list(rows[0]), *([str(value) for value in row.values()] for row in rows)], names=3))
    return {"launches": rows}


if __name__ == "__main__":
    raise SystemExit(command.run(main))
