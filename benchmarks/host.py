"""Host cost of calls beside their peers': function calls, microseconds, launches.

    python -m benchmarks host [--quick] [--only WORD]

On a GPU its kernels take no time to speak of, calls follow one another and nothing waits for the device in between. A
CPU would compute in the call itself, so there a process of its own runs all the Python of a GPU's call and starts no
kernel (measure/exchanged.py): its counts are a GPU's, its times are CPU times of a stand-in and good for ratios alone.
Nothing of it was run on a GPU. A time is the least of many short runs, in turns with the peer's, since whatever else
the machine does only adds to it.
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
"""Of timed runs a call."""
_SIDES = ("", "peer_")
_RUN = 3e-3
"""Seconds that a run of several calls takes, about."""


def least(calls: Sequence["Call"], device: torch.device, seconds: float) -> list[float]:
    """Microseconds of the host for each call, the least of its runs in turns for so long."""
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
                torch.cuda.synchronize(device)  # an empty queue: a full one would make the host wait
            start = clock()
            for _ in range(counts[place]):
                call()
            best[place] = min(best[place], (clock() - start) / counts[place] * 1e6)
        if round >= 7 and clock() > end:
            break
    return best


def function_calls(call: "Call") -> int:
    """Calls of functions, of Python and of C, that one call makes."""
    count = 0

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with torch.autograd.set_multithreading_enabled(False):  # a backward pass on this thread, which is watched
        call()
        call()
        sys.setprofile(hook)
        try:
            call()
        finally:
            sys.setprofile(None)
    return count - 2  # less the call itself and sys.setprofile


def launches(call: "Call") -> dict[str, int]:
    """Launches of Triton's kernels and of ATen's operators."""
    from fasttfm.kernels.proof.launch_log import LaunchLog

    with LaunchLog():  # which has plans of its own, as every dispatch mode
        call()
    with LaunchLog() as log:
        call()
    return {"triton": log.triton.total(), "aten": log.products.total() + log.others.total()}


def row(case: "Case", device: torch.device, seconds: float | None) -> dict[str, Any]:
    """Cost of one call of ours and of the peer, of a search a step. seconds: as least() takes them, None for counts
    alone."""
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
    """A row of the report's table; launches are Triton's + ATen's."""
    result = [row["what"]]
    for side in _SIDES:
        if side:
            told = any(name.startswith(side) for name in row)
            result.append(f"{row['peer']}, absent" if "absent" in row else row["peer"] if told else "")
        counted = f"{side}calls" in row
        result.append(f"{row[f'{side}calls']:,}" if counted else "")
        result.append(f"{row[f'{side}us']:,}" if f"{side}us" in row else "")
        result.append(f"{row[f'{side}triton']} + {row[f'{side}aten']}" if counted else "")
    return [*result, f"{row['ratio']:.2f}" if "ratio" in row else ""]


def note(record: dict[str, Any]) -> str:
    """Sentence before the table of a record."""
    told = (
        "Function calls of Python and C, time of the host and launches (Triton + ATen) of one call, of a search a step."
    )
    if chip := record.get("stands_in_for"):
        told += (
            f" **Not run on a GPU**: a CPU stands in for the host of an {chip}, runs all the Python of its calls on "
            "tiny tensors and starts no kernel; counts are the GPU's, times are CPU times, and ratios hold better."
        )
    return told


def main(argv: Sequence[str] | None = None) -> int:
    parser = command.parser("benchmarks host", __doc__)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name contains it; they are not kept")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", action="store_true", help="fewer runs")
    level.add_argument("--counts", action="store_true", help="function calls and launches alone, without times")
    parser.add_argument("--json", action="store_true", help="a JSON line a case")
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default: a GPU if there is one)")
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
        command.keep(args.results, "host", key=_measured_on, measured=measured, **more)
    return 0


def _measured_on(record: dict[str, Any]) -> tuple:
    return machine_name(record["machine"]), record.get("stands_in_for")


if __name__ == "__main__":
    raise SystemExit(command.run(main))
