"""Prints versions, processor, device, assembler, backend of each operator and tuning. Attach it to bug reports.
With --check it looks for problems, and exits with status 1 if it finds one.
"""

import argparse
import json
from dataclasses import asdict
from typing import Any

from fasttfm.cli import check
from fasttfm.cli.parser import Parser
from fasttfm.cli.paths import LOADED_FOLDER
from fasttfm.system.machine import describe_gpu, gpu, processor, processor_units, version
from fasttfm.system.wording import counted

_NAMES = {"panels": "fasttfm's packed panels", "tiles": "fasttfm's packed panels in tile registers (AMX)"}
_NO_INT8 = "needs numba and a processor with AVX2: --precision int8 computes in float32"
_PACKAGES = ("fasttfm", "torch", "triton", "numpy", "sentencepiece", "sacrebleu", "transformers")
_KEYS = (16, 32, 64, 128, 512, 2048)
_DTYPES = ("fp16", "bf16", "fp32")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--check",
        nargs="*",
        type=LOADED_FOLDER,
        help="find what slows this machine down, or which files of models or prepared data are damaged",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report; with --check print the problems and return 1 if there are any."""
    if args.check is None:
        result = environment()
        print(json.dumps(result) if args.json else text(result))
        return 0
    findings = [each for folder in args.check for each in check.check_folder(folder)]
    if not args.check:
        findings = [*check.judge(check.gather(None if gpu() is None else environment()))]
    document = json.dumps({"findings": [each._asdict() for each in findings]})
    print(document if args.json else check.text(findings, args.check))
    return int(bool(findings))


def environment() -> dict[str, Any]:
    """Return the report as a JSON object."""
    import os
    import platform

    import torch

    from fasttfm.cpu.linear import product_routes
    from fasttfm.functional import backends
    from fasttfm.kernels import launch

    device = gpu()
    chip = None if device is None else launch.chip(device)
    return {
        "versions": {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}},
        "system": platform.platform(),
        "processor": {
            "name": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "units": processor_units(),
            **product_routes(),
        },
        "device": describe_gpu(),
        "assembler": _assembler(),
        "tuned": _tuned(),
        "backend": backends.current,
        "chip": None if chip is None else chip.name,
        "routes": _routes(chip),
    }


def text(result: dict[str, Any]) -> str:
    cpu, device = result["processor"], result["device"]
    units = " ".join(cpu["units"]) or "no AVX2"
    cores, threads = counted(cpu["cores"], "core"), counted(cpu["threads"], "thread")
    shown = "none that torch can use"
    if device is not None:
        shown = f"{device['name']}, {device['chip']}, {device['memory_gib']} GiB, driver {device['driver']}"
    lines = [
        ("versions", ", ".join(f"{name} {version or '(none)'}" for name, version in result["versions"].items())),
        ("system", result["system"]),
        ("processor", f"{cpu['name']}, {cores}, {threads}, {units}"),
    ]
    for precision in ("float32", "bfloat16", "int8"):
        name = cpu[precision]
        lines.append((precision, f"products of a search by {_NAMES.get(name, name)}" if name else _NO_INT8))
    lines.append(("device", shown))
    for name, assembler in result["assembler"].items():
        line = f"ptxas {assembler['version']} for {name}; {assembler['variable']}=FILE overrides it"
        lines.append(("assembler", line + (f"; {assembler['fault']}" if assembler["fault"] else "")))
        lines += [("", f"ptxas {newer} is not used: {why}") for newer, why in assembler["left"].items()]
    tuned = result["tuned"]
    if tuned is not None:
        local = f"{tuned['answers']} of {tuned['file']}" if tuned["answers"] else "nothing: `fasttfm tune` measures"
        lines.append(("tuned", local))
    lines.append(("routes", f"of {result['chip'] or 'a CPU'}, backend {result['backend']}"))
    lines += [(f"  {name}", route) for name, route in result["routes"].items()]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)


def _assembler() -> dict[str, dict[str, Any]]:
    """Return the assembler for each range of chips; empty if Triton has no NVIDIA backend."""
    try:
        from fasttfm.kernels.proof import assembler

        used = assembler.by_chips()
    except (ImportError, OSError, AttributeError, RuntimeError):
        return {}
    return {
        chips: {**asdict(each), "fault": assembler.FAULTS.get(each.version), "left": assembler.left(each)}
        for chips, each in used.items()
    }


def _tuned() -> dict[str, Any] | None:
    """Return the tuning results for the device; None without a device."""
    device = gpu()
    if device is None:
        return None
    from fasttfm.kernels import choice_cache, launch

    system = choice_cache.system_of(device, launch.chip(device))
    try:
        answers = len(choice_cache.read(system))
    except ValueError:  # damaged: launches warn of it
        answers = 0
    return {"file": str(choice_cache.file_of(system)), "answers": answers}


def _routes(chip: Any) -> dict[str, str]:
    """Return for each operator its kernels, or torch."""
    from fasttfm.functional import backends

    operators = ("layer_norm", "residual_layer_norm", "residual_add", "rotary", "cross_entropy", "embed")
    if chip is None or backends.current == "torch" or version("triton") is None:
        return dict.fromkeys(("attention", "feed_forward", *operators), "torch")
    from fasttfm.kernels.attention import launch as attention
    from fasttfm.kernels.tiles import feed_forward
    from fasttfm.kernels.tiles.attention import LIBRARY

    routes = {}
    for kind in _DTYPES:
        of_keys = {}
        for keys in _KEYS:
            size = attention.key_class(keys)
            library = backends.current == "auto" and LIBRARY(chip, kind, 64, "causal", size) == "cudnn"
            of_keys[keys] = attention.route(chip, kind, 64, size) + " or cudnn" * library
        routes[f"attention {kind}"] = ", ".join(f"{keys} keys {route}" for keys, route in of_keys.items())
    for kind in _DTYPES:
        passes = ("forward", "forward+dropout", "backward")
        of_pass = {name: feed_forward.ROUTE(chip, kind, name) for name in passes}
        if backends.current == "triton":
            of_pass = dict.fromkeys(passes, "fused")
        routes[f"feed_forward {kind}"] = ", ".join(f"{name} {route}" for name, route in of_pass.items())
    return routes | dict.fromkeys(operators, "triton")
