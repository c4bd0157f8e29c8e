"""Measures which tile or route each kernel should take on this GPU and keeps the result in the user's cache directory
($FASTTFM_CACHE, else ~/.cache/fasttfm) for this device, driver and these versions.
"""

from __future__ import annotations

import argparse

from fasttfm.cli.output import Output, add_output_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="half precision and the base model's sizes only")
    parser.add_argument("--device", default="cuda", help="which GPU, as torch names it (default: %(default)s)")
    add_output_flags(parser, "what was measured and where it is kept")


def run(args: argparse.Namespace) -> None:
    """Measure, keep, and say what changed."""
    import sys

    import torch

    from fasttfm import tuning
    from fasttfm.errors import UserError
    from fasttfm.functional.backends import use_triton
    from fasttfm.timing import DeviceClock

    if not torch.cuda.is_available():
        raise UserError(
            "there is no CUDA or ROCm device that torch can use here, and nothing to tune without one: run this on the "
            "machine with the GPU that models will run on"
        )
    try:
        device = torch.device(args.device)
    except RuntimeError:
        raise UserError(f"--device {args.device} is no device: cuda or cuda:0 is meant") from None
    if device.type != "cuda" or (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {args.device} is none of this machine's {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(device)
    if not use_triton(device):
        raise UserError("the kernels are off (FASTTFM_BACKEND=torch, or Triton is not installed): nothing to tune")

    from fasttfm.kernels import choice_cache, choices, launch

    chip = launch.chip(device)
    key = choice_cache.system_of(device, chip)
    before = {(a.choice, a.size_class): a.answer for a in _kept(key)}
    choices.keep(chip, {})  # compare with what ships, not with what an earlier run found
    work = tuning.model_work(device, quick=args.quick)
    output = Output.of(args, "tune")
    with output.bar(total=1.0, bar_format="{percentage:3.0f}%|{bar:30}| {elapsed}<{remaining}") as bar:

        def progress(done: int, total: int) -> None:
            bar.n = done / max(total, 1)
            bar.refresh()

        fresh = []
        seconds = 0.5 if args.quick else 2.0
        for measured in tuning.tune(work, chip, DeviceClock(device), seconds_per_decision=seconds, progress=progress):
            if not args.quiet:
                bar.write(measured.line(), file=sys.stderr if args.json else sys.stdout)
            fresh.append(measured)
    answers = choice_cache.merged(_kept(key), [m.as_answer() for m in fresh])
    file = choice_cache.write(key, answers)
    faster = sum(m.changed for m in fresh)
    new = sum(before.get(m.decision) != m.as_answer().answer for m in fresh)
    output.result(
        f"{key.device}: {len(fresh)} decisions measured, {faster} differ from what ships, {new} from the last tuning\n"
        f"kept in {file}",
        device=key.device, decisions=len(fresh), differ_from_shipped=faster, differ_from_last=new, file=str(file),
    )  # fmt: skip


def _kept(key):
    from fasttfm.kernels import choice_cache

    try:
        return choice_cache.read(key)
    except ValueError:  # damaged: this run writes it anew
        return []
