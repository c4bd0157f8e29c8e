"""Measures the fastest tile and route of each kernel on this GPU, or the sizes from which compiled passes are faster on
this CPU. Keeps the result in the cache directory ($FASTTFM_CACHE, by default ~/.cache/fasttfm) for this device, its
driver or number of threads, and the installed versions.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fasttfm.cli.output import Output, add_output_flags

if TYPE_CHECKING:
    import torch

    from fasttfm.kernels.choice_cache import System

Progress = Callable[[int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true",
        help="measure less: on a GPU half precision and the base model's sizes, on a CPU float32",
    )  # fmt: skip
    parser.add_argument("--device", help="cuda, cuda:1, ... or cpu (default: a GPU if there is one)")
    add_output_flags(parser, "what was measured and where it is kept")


def run(args: argparse.Namespace) -> None:
    """Measure, store the result, and print what changed."""
    from fasttfm.cpu import thresholds
    from fasttfm.errors import UserError
    from fasttfm.kernels import choice_cache
    from fasttfm.machine import pick_device

    device, output = pick_device(args.device), Output.of(args, "tune")
    if device.type not in ("cuda", "cpu"):
        raise UserError(f"device {args.device} cannot be tuned: give cuda, cuda:1 or cpu")
    key, measure = (_of_cpu if device.type == "cpu" else _of_gpu)(device, args.quick)
    try:
        kept = choice_cache.read(key)
    except ValueError:  # damaged: this run writes it anew
        kept = []
    before = {(each.choice, each.size_class): each.answer for each in kept}
    fresh = []
    with _told(output) as (progress, tell):
        for measured in measure(progress):
            tell(measured.line())
            fresh.append(measured)
    answers = [measured.as_answer() for measured in fresh]
    stays = [] if device.type == "cpu" else kept  # on a CPU everything has been measured
    file = str(choice_cache.write(key, choice_cache.merged(stays, answers)))
    thresholds.forget()
    differ = sum(measured.changed for measured in fresh)
    new = sum(before.get((each.choice, each.size_class)) != each.answer for each in answers)
    output.result(
        f"{key.device}: {len(fresh)} decisions measured, {differ} differ from what ships, {new} from the last tuning\n"
        f"kept in {file}",
        device=key.device, decisions=len(fresh), differ_from_shipped=differ, differ_from_last=new, file=file,
    )  # fmt: skip


def _of_gpu(device: "torch.device", quick: bool) -> "tuple[System, Callable[[Progress], Iterator[Any]]]":
    """The GPU as the cache names it, and what measures its decisions one after the other."""
    import torch

    from fasttfm import tuning
    from fasttfm.errors import UserError
    from fasttfm.functional.backends import use_triton
    from fasttfm.timing import DeviceClock

    torch.cuda.set_device(device)
    if not use_triton(device):
        raise UserError("the kernels are off (FASTTFM_BACKEND=torch, or Triton is not installed): nothing to tune")

    from fasttfm.kernels import choice_cache, choices, launch

    chip = launch.chip(device)

    def measure(progress: Progress) -> Iterator[Any]:
        choices.keep(chip, {})  # compare with what ships, not with what an earlier run found
        work, seconds = tuning.model_work(device, quick=quick), 0.5 if quick else 2.0
        return tuning.tune(work, chip, DeviceClock(device), seconds_per_decision=seconds, progress=progress)

    return choice_cache.system_of(device, chip), measure


def _of_cpu(device: "torch.device", quick: bool) -> "tuple[System, Callable[[Progress], Iterator[Any]]]":
    """The same, for this processor and number of threads."""
    import torch

    from fasttfm.cpu import step_passes, thresholds, tuning
    from fasttfm.errors import UserError
    from fasttfm.timing import HostClock

    if not step_passes.usable():
        raise UserError('numba is not installed or does not work here, and nothing to tune: pip install "fasttfm[cpu]"')
    key = thresholds.system(torch.get_num_threads())
    return key, lambda progress: tuning.tune(HostClock(), quick=quick, progress=progress)


@contextmanager
def _told(output: Output) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Report how far the measuring is, and a line of its results."""
    with output.bar(total=1.0, bar_format="{percentage:3.0f}%|{bar:30}| {elapsed}<{remaining}") as bar:

        def progress(done: int, total: int) -> None:
            bar.n = done / max(total, 1)
            bar.refresh()

        def tell(line: str) -> None:
            if not output.quiet:
                bar.write(line, file=sys.stderr if output.as_json else sys.stdout)

        yield progress, tell
