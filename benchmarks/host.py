"""Host cost of calls and of their peers: function calls, microseconds, launches.

    python -m benchmarks host [--quick] [--only WORD]

On a GPU, calls on tiny tensors are queued without synchronization, so the host is the bottleneck. Without a GPU, a
separate process runs the Python of the GPU path on CPU tensors and launches no kernel (measure/exchanged.py). Its
counts equal those on a GPU; its CPU times are only good for ratios, and nothing was run on a GPU. A time is the minimum
of many short runs, alternating with the peer's: other load only adds to it.
"""

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import command
from benchmarks.measure.machine import machine_name
from fasttfm.errors import UserError
from fasttfm.system.children import child_environment, run_to_end
from fasttfm.system.machine import pick_device

if TYPE_CHECKING:
    from benchmarks.cases.host import Call, Case

STANDS_IN_FOR = "sm_90"
SECONDS = {"quick": 0.2, "standard": 1.0}
"""Duration of the timed runs per call."""
_SIDES = ("", "peer_")
_RUN = 3e-3
"""Approximate duration of one run of several calls, in seconds."""


def least(calls: Sequence["Call"], device: torch.device, seconds: float) -> list[float]:
    """Host time of each call in microseconds: the minimum over alternating runs, `seconds` per call."""
    clock = time.perf_counter if device.type == "cuda" else time.thread_time
    best, counts = [math.inf] * len(calls), [1] * len(calls)
    for place, call in enumerate(calls):
        call()
        start = clock()
        call()
        counts[place] = max(1, min(50, int(_RUN / max(clock() - start, 1e-6))))
    end = clock() + seconds * len(calls)
    for round in range(1000):
        for place, call in enumerate(calls):
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # a full launch queue would block the host
            start = clock()
            for _ in range(counts[place]):
                call()
            best[place] = min(best[place], (clock() - start) / counts[place] * 1e6)
        if round >= 7 and clock() > end:
            break
    return best


def function_calls(call: "Call") -> int:
    """Number of Python and C function calls that one call makes."""
    count = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with torch.autograd.set_multithreading_enabled(False):  # backward runs on this thread, where the hook sees it
        call()
        call()
        sys.setprofile(hook)
        try:
            call()
        finally:
            sys.setprofile(None)
    return count - 2  # the call itself and sys.setprofile


def launches(call: "Call") -> dict[str, int]:
    """Number of Triton kernel launches and of ATen operators in a call."""
    from fasttfm.kernels.proof.launch_log import LaunchLog

    with LaunchLog():  # fills the plans for calls under a dispatch mode
        call()
    with LaunchLog() as log:
        call()
    return {"triton": log.triton.total(), "aten": log.products.total() + log.others.total()}


def row(case: "Case", device: torch.device, seconds: float | None) -> dict[str, Any]:
    """Cost of one call, or one search step, of ours and of the peer; seconds: see least(), None: counts only."""
    from benchmarks.cases.host import FEW, MANY

    result: dict[str, Any] = {"what": case.what, "peer": case.peer}
    try:
        sides = dict(zip(_SIDES, case.make()))
    except ImportError as error:
        return {**result, "absent": str(error)}

    def each(values: Sequence[float]) -> float:
        return values[0] if len(values) == 1 else (values[1] - values[0]) / (MANY - FEW)

    for side, calls in sides.items():
        if calls:
            result[f"{side}calls"] = round(each(list(map(function_calls, calls))))
            counts = list(map(launches, calls))
            result |= {f"{side}{kind}": round(each([count[kind] for count in counts])) for kind in counts[0]}
    if seconds is not None:
        mine, theirs = sides.values()
        times = least((*mine, *theirs), device, seconds)
        result["us"] = round(each(times[: len(mine)]), 1)
        if theirs:
            result["peer_us"] = round(each(times[len(mine) :]), 1)
            result["ratio"] = round(each(times[: len(mine)]) / each(times[len(mine) :]), 3)
    return result


HEAD = ("", "calls", "us", "launches", "peer", "its calls", "its us", "its launches", "ratio")


def cells(row: dict[str, Any]) -> list[str]:
    """Cells of a row in the report's table; launches are Triton + ATen."""
    has_peer = any(name.startswith("peer_") for name in row)
    peer = f"{row['peer']}, absent" if "absent" in row else row["peer"] if has_peer else ""
    ours, theirs = (
        [
            f"{row[f'{side}calls']:,}" if f"{side}calls" in row else "",
            f"{row[f'{side}us']:,}" if f"{side}us" in row else "",
            f"{row[f'{side}triton']} + {row[f'{side}aten']}" if f"{side}calls" in row else "",
        ]
        for side in _SIDES
    )
    return [row["what"], *ours, peer, *theirs, f"{row['ratio']:.2f}" if "ratio" in row else ""]


def note(record: dict[str, Any]) -> str:
    """Sentence above the report's table."""
    text = "Python and C function calls, host time and launches (Triton + ATen) per call, or per search step."
    if chip := record.get("stands_in_for"):
        text += (
            f" **Not run on a GPU**: a CPU stands in for the host of an {chip}, runs the Python of its calls on tiny "
            "tensors and launches no kernel. Counts equal the GPU's; times are CPU times, and only ratios are reliable."
        )
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks host", __doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name contains WORD; keeps no record")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer runs")
    level.add_argument("--counts", action="store_true", help="function calls and launches, without times")
    parser.add_argument("--json", action="store_true", help="one JSON line per case")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if available)")
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(arguments)
    device = pick_device(args.device)
    command.writable(args.results, "--results")
    stands_in = device.type == "cpu"
    if stands_in and os.environ.pop("FASTTFM_EXCHANGED", None) is None:
        environment = child_environment() | {"FASTTFM_EXCHANGED": "1", "FASTTFM_TUNING": "0", "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        return run_to_end([sys.executable, "-m", "benchmarks.host", *arguments], env=environment).returncode
    if stands_in:
        from benchmarks.measure.exchanged import exchange

        exchange(STANDS_IN_FOR)
    from benchmarks.cases.host import cases

    torch.set_num_threads(1)
    torch.manual_seed(0)
    chosen = [case for case in cases(device) if args.only in case.what]
    if not chosen:
        raise UserError(f"no case contains {args.only!r}: {'; '.join(case.what for case in cases(device))}")
    if not args.json:
        print(" | ".join(HEAD))
    measured = []
    for case in chosen:
        measured.append(row(case, device, None if args.counts else SECONDS["quick" if args.quick else "standard"]))
        print(json.dumps(measured[-1]) if args.json else " | ".join(cells(measured[-1])), flush=True)
    if not args.only and not args.counts:
        more = {"stands_in_for": STANDS_IN_FOR} if stands_in else {}
        command.keep(
            args.results,
            "host",
            key=lambda record: (machine_name(record["machine"]), record.get("stands_in_for")),
            measured=measured,
            **more,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(command.run(main))
