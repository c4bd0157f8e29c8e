"""Measures the fastest tile and backend of each kernel on this GPU, and stores the result in the cache directory
($FASTTFM_CACHE, by default ~/.cache/fasttfm) for this device, driver and package versions. On a CPU there is nothing to
tune.
"""

import argparse
import sys

from fasttfm.cli.output import Output, add_output_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="measure only half precision and the base model's sizes")
    parser.add_argument("--only", default="", metavar="WORD", help="only decisions whose name contains WORD")
    parser.add_argument("--device", help="cuda, cuda:1, ... (default: a GPU if there is one)")
    add_output_flags(parser, "the measurements and the file that stores them")


def run(args: argparse.Namespace) -> None:
    import torch

    from fasttfm.errors import UserError
    from fasttfm.functional import tuning
    from fasttfm.functional.backends import use_triton
    from fasttfm.system.machine import pick_device
    from fasttfm.system.timing import DeviceClock

    device, output = pick_device(args.device), Output.of(args, "tune")
    if device.type == "cpu":
        output.result(
            "on a CPU there is nothing to tune: the shipped settings are used",
            device="cpu", decisions=0, differ_from_shipped=0, differ_from_last=0, file=None,
        )  # fmt: skip
        return
    if device.type != "cuda":
        raise UserError(f"device {args.device} cannot be tuned: give cuda or cuda:1")
    torch.cuda.set_device(device)
    if not use_triton(device):
        raise UserError("the kernels are off (FASTTFM_BACKEND=torch, or Triton is not installed): nothing to tune")

    from fasttfm.kernels import choice_cache, choices, launch

    chip = launch.chip(device)
    system = choice_cache.system_of(device, chip)
    try:
        kept = choice_cache.read(system)
    except ValueError:  # damaged: replaced by this run
        kept = {}
    choices.keep(chip, {})  # compare with the shipped settings, not with those of an earlier run
    every = tuning.decisions_of(tuning.model_work(device, quick=args.quick), chip)
    decisions = {decision: work for decision, work in every.items() if args.only in decision[0]}
    if not decisions:
        names = ", ".join(sorted({name for name, _ in every}))
        raise UserError(f"--only {args.only}: no decision has such a name: they are {names}")
    clock, fresh, seconds = DeviceClock(device).microseconds, {}, 0.5 if args.quick else 2.0
    with output.bar(total=len(decisions)) as bar:
        for decision, work in decisions.items():
            fresh[decision], line = tuning.tune(decision, work, chip, clock, seconds=seconds)
            if not output.quiet:
                bar.write(line, file=sys.stderr if output.as_json else sys.stdout)
            bar.update()
    file = str(choice_cache.write(system, kept | fresh))
    name, differ = system["device"], len(choices.kept(chip))
    new = sum(decision not in kept or kept[decision].answer != each.answer for decision, each in fresh.items())
    output.result(
        f"{name}: {len(fresh)} decisions measured, {differ} differ from what ships, {new} from the last tuning\n"
        f"kept in {file}",
        device=name, decisions=len(fresh), differ_from_shipped=differ, differ_from_last=new, file=file,
    )  # fmt: skip
