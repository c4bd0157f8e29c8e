"""Predictions from machine code for kernels that no GPU at hand has run; nothing here is measured.

    python -m benchmarks static-evidence                 every kernel on every device
    python -m benchmarks static-evidence --device P100   one device, with registers, spills, shared memory, occupancy

From kernels/proof/budgets.csv comes what the compiler made of a kernel on a chip: registers, spills, shared memory,
matrix instructions, and the cycles of the busiest unit for an element, as the ledger counts them (docs/ledger.md). From
the suite's cases, what each must move and multiply at its shape on a GPU. A prediction is the longest of

    memory        bytes over the bandwidth that the resident warps can ask for: few warps make the memory wait
    products      FLOPs over the rate of matrix units where the code has their instructions, else of multiply-adds
    instructions  elements times the counted cycles, over the share of such a bound that well-made kernels reach

plus a launch. Of several recorded tiles it takes the best. Rates are the vendors' and neither tile waste nor spill
traffic is counted, so that it is a hopeful prediction: a measurement far above it shows something that the model does
not know. Measured rows stand beside it where records have them.
"""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import kernels
from benchmarks.measure.case import Setting
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import RESULTS, Entry, Loaded, load
from benchmarks.measure.text_table import aligned, shape_text
from fasttfm.cli.parser import Parser
from fasttfm.errors import UserError
from fasttfm.kernels.compile_case import CHIPS
from fasttfm.kernels.proof import budgets
from fasttfm.kernels.proof.costs import Cost, Machine
from fasttfm.kernels.proof.ledger import published
from fasttfm.kernels.proof.ledger.latency import resident_threads
from fasttfm.kernels.proof.ledger.products import PRODUCTS
from fasttfm.kernels.proof.resources import Resources, occupancy
from fasttfm.parsing import parse_yaml

LABEL = "predicted, not measured"

# What a prediction assumes beside the vendors' rates; leads until a device answers.
GRAPH_LAUNCH_US = 1.5
"""From one kernel to the next in a replayed CUDA graph: published figures lie between 1 and 2; measure before use."""
MEMORY_LATENCY_S = 600e-9
WAITING_SHARE = 0.25
"""Of a thread's registers, those that wait for a load at a time: what its bytes in flight are counted from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Limits of a kernel on one GPU, as its vendor prints it; rates are dense, without structured sparsity."""

    name: str
    chip: str
    """As in the compile matrix: sm_90, gfx942."""
    fp32: float
    """TFLOP/s of float32 multiply-adds outside matrix units."""
    half: float
    """TFLOP/s of float16 products with float32 sums where the chip has matrix units for it, else of packed float16."""
    bandwidth: float
    """GB/s between the chip and its memory."""
    processors: int
    """Streaming multiprocessors or compute units."""
    source: str
    """Where the rates are printed, or what measured them."""

    @property
    def machine(self) -> Machine:
        """The device as kernels.costs counts half-precision products with it."""
        return Machine(flops=self.half * 1e12, bandwidth=self.bandwidth * 1e9)


_TABLE = parse_yaml((Path(__file__).parent / "devices.yaml").read_bytes())
DEVICES = {name: Device(name=name, **rates) for name, rates in _TABLE.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A case of the suite as it is on a GPU, and the kernels that it runs there."""

    case: str
    passes: str
    shape: Mapping[str, Any]
    dtype: str
    cost: Cost
    elements: int = 0
    """That every kernel goes through: scores, or elements of rows."""
    launches: tuple[tuple[str, float], ...]
    """Kernel, as its budgets are filed, and its share of the cost."""

    @property
    def title(self) -> str:
        return f"{self.case} {shape_text(dict(self.shape))}, {self.passes}"


_SHORT = 128
"""Rows of keys up to here are held whole by one program (attention_short.py)."""


def _launches(case: str, shape: Mapping[str, Any], passes: str) -> tuple[tuple[str, float], ...]:
    """The kernels of a case; none for one that is mostly library products or that nobody has mapped."""
    if "+" in passes:  # its two halves stand apart
        return ()
    forward = passes.endswith("forward")
    if case == "attention" and (shape["dropout"] or shape["mask"] == "causal"):
        if shape["S"] <= _SHORT:
            return (("attention.short.forward" if forward else "attention.short.backward", 1.0),)
        # of the 14 parts of its products dQ needs 6, dK and dV 8; the bytes go about the same way
        backward = (("attention.backward.queries", 6 / 14), ("attention.backward.keys", 8 / 14))
        return (("attention.forward", 1.0),) if forward else backward
    if case == "LayerNorm" or (case == "residual + dropout + LayerNorm" and shape["dropout"]):
        backward = (("layer_norm.backward", 1.0), ("layer_norm.column_sums", 0.0))
        return (("layer_norm.forward", 1.0),) if forward else backward
    if case == "cross entropy":
        return (("cross_entropy.forward" if forward else "cross_entropy.backward", 1.0),)
    if case == "embedding":
        return (("embedding.forward" if forward else "embedding.sum_rows", 1.0),)
    return ()


def _elements(shape: Mapping[str, Any]) -> int:
    """Scores of an attention, else elements of its rows."""
    if "S" not in shape:
        rows = shape["M"] if "M" in shape else shape["B"] * shape["L"]
        return rows * shape.get("N", shape.get("V", 0))
    length, keys = shape["L"], shape["S"]
    pairs = sum(min(i + 1, keys) for i in range(length)) if shape["mask"] == "causal" else length * keys
    return shape["B"] * shape["H"] * pairs


class _LargeGpu(Setting):
    """A GPU with memory for every case, which need not be here."""

    @property
    def small_memory(self) -> bool:
        return False


@functools.cache
def works() -> tuple[Work, ...]:
    """The suite's half-precision kernel cases on a GPU, as far as they are our kernels alone."""
    setting = _LargeGpu(device=torch.device("cuda"), dtype=torch.bfloat16)
    return tuple(
        Work(
            case=c.name,
            passes=c.passes,
            shape=c.shape,
            dtype=c.dtype,
            cost=c.cost,
            elements=_elements(c.shape),
            launches=launches,
        )
        for c in kernels.cases(setting)
        if c.cost is not None and (launches := _launches(c.name, c.shape, c.passes))
    )


@dataclass(frozen=True, slots=True)
class Compiled:
    """One recorded case of a kernel on a chip."""

    name: str
    dtype: str
    resources: Resources
    occupancy: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """A work on a device: predicted, not measured."""

    work: Work
    device: Device
    compiled: tuple[Compiled, ...]
    """The tile of every launch."""
    us: float
    bound: str
    """memory, products, instructions, or launch."""
    floor_us: float
    """What the device's rates alone would allow."""


def compiled_cases() -> dict[tuple[str, str], list[Compiled]]:
    """The recorded cases by kernel and chip."""
    result: dict[tuple[str, str], list[Compiled]] = {}
    for (chip, name, dtype), resources in budgets.read()[1].items():
        warps = re.search(r"w(\d+)s\d+$", name)
        if warps is None or chip not in CHIPS:
            raise UserError(f"budgets.csv: the case {name} on {chip} tells no number of warps or is of no known chip")
        share = occupancy(CHIPS[chip], resources, int(warps[1]))
        result.setdefault((name.split("/")[0], chip), []).append(Compiled(name, dtype, resources, share))
    return result


def _times_us(cost: Cost, elements: float, compiled: Compiled, device: Device) -> dict[str, float]:
    """Return each resource's time for a launch, by name; no instructions where none were counted."""
    threads = resident_threads(CHIPS[device.chip]) * compiled.occupancy * device.processors
    asked = threads * compiled.resources.registers * 4 * WAITING_SHARE / MEMORY_LATENCY_S
    units = device.half if compiled.resources.matrix else device.fp32
    counted = PRODUCTS[device.name].seconds(compiled.resources.bound, elements / CHIPS[device.chip].warp)
    return {
        "memory": 1e6 * cost.bytes / min(device.bandwidth * 1e9, asked),
        "products": cost.flops / units / 1e6,
        "instructions": 1e6 * counted / published.reached(),
    }


def _fitting(cases: Iterable[Compiled], dropout: bool) -> list[Compiled]:
    """Return the resident ones; if there are any, the counted ones alone, and those with or without dropout."""
    result = [case for case in cases if case.occupancy]
    result = [case for case in result if case.resources.bound] or result
    return [case for case in result if ("dropout" in case.name) == dropout] or result


def predict(work: Work, device: Device, cases: Mapping[tuple[str, str], Sequence[Compiled]]) -> Prediction | None:
    """Predict a launch; None where a kernel of the work has no recorded case on the device's chip that can be resident.

    A kernel without products may stand for its half-precision self with its float32 case; one with products may not.
    """
    us, longest, bound, tiles = 0.0, 0.0, "launch", []
    for kernel, share in work.launches:
        whole = work.cost
        cost = Cost(round(share * whole.flops), round(share * whole.bytes), 1, round(share * whole.philox))
        elements = work.elements if share else 0
        recorded = _fitting(cases.get((kernel, device.chip), ()), bool(work.shape.get("dropout")))
        half = [c for c in recorded if c.dtype in ("bf16", "fp16")] or ([] if cost.flops else recorded)
        if not half:
            return None
        tile = min(half, key=lambda c: (max(_times_us(cost, elements, c, device).values()), c.resources.spill, c.name))
        times = _times_us(cost, elements, tile, device)
        name = max(times, key=lambda key: times[key])
        us += times[name] + GRAPH_LAUNCH_US
        if times[name] > longest:
            longest, bound = times[name], name
        tiles.append(tile)
    if longest < GRAPH_LAUNCH_US * len(tiles):
        bound = "launch"
    floor_us = 1e6 * work.cost.seconds(device.machine)
    return Prediction(work, device, tuple(tiles), us, bound, floor_us)


def predictions(devices: Iterable[Device] = tuple(DEVICES.values())) -> list[Prediction]:
    """Every work on every device for which there are compiled cases."""
    cases = compiled_cases()
    result = (predict(work, device, cases) for work in works() for device in devices)
    return [prediction for prediction in result if prediction is not None]


def measurement(prediction: Prediction, files: Loaded) -> Entry | None:
    """Our timed half-precision row of the same case, shape and pass on a device of that name, the last of them."""
    work, result = prediction.work, None
    for entry in files.suite:
        record = entry.record
        if (
            entry.timed
            and entry.provider == OURS
            and record["dtype"] != "float32"
            and (record["case"], record["pass"], record["shape"]) == (work.case, work.passes, work.shape)
            and prediction.device.name.lower() in str(entry.machine.get("device", "")).lower()
        ):
            result = entry
    return result


def measured_us(prediction: Prediction, files: Loaded | None) -> str:
    """For a table: the median, or a dash for a device that did not run it."""
    entry = measurement(prediction, files) if files else None
    return f"{entry.p50:,.1f}" if entry else "-"


HEAD = (
    *("work", "device", "registers", "spill B", "shared B", "occupancy", "matrix instr."),
    *("floor us", "predicted us", "bound by", "measured us"),
)


def row(prediction: Prediction, files: Loaded | None) -> tuple[str, ...]:
    """The worst of a work's launches in every column of resources."""
    tiles = prediction.compiled
    return (
        prediction.work.title,
        prediction.device.name,
        str(max(c.resources.registers for c in tiles)),
        str(max(c.resources.spill for c in tiles)),
        f"{max(c.resources.shared for c in tiles):,}",
        f"{min(c.occupancy for c in tiles):.0%}",
        str(min(c.resources.matrix for c in tiles)),
        f"{prediction.floor_us:,.1f}",
        f"{prediction.us:,.1f}",
        prediction.bound,
        measured_us(prediction, files),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m benchmarks static-evidence",
        description="Times from machine code and shapes: predicted, not measured.",
    )
    parser.add_argument("--device", help=f"one of {', '.join(DEVICES)} (default: all)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of records (default: %(default)s)")
    args = parser.parse_args(argv)
    known = {name.lower(): device for name, device in DEVICES.items()}
    if args.device is not None and args.device.lower() not in known:
        raise UserError(f"--device {args.device} is unknown: one of {', '.join(DEVICES)}")
    devices = DEVICES.values() if args.device is None else [known[args.device.lower()]]
    version, _ = budgets.read()
    files = load(args.results)
    print(f"Compiled by Triton {version}, half precision. Times are {LABEL}; a dash: not run on that device.\n")
    print(aligned([HEAD, *(row(prediction, files) for prediction in predictions(devices))], names=2))
    return 0
