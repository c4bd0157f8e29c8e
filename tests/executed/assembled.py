"""Pytest plugin that compares the machine code of every launch on sm_90, by each assembler, with its PTX.

    ASSEMBLED=found.jsonl ASSEMBLERS=PATH:PATH python -m pytest -p tests.executed.assembled -k sm_90 ...

The PTX of every launch and the machine code of every ptxas are executed on the same memory, with a line each in the
file. Cases in float32 run again in TF32, and with ASSEMBLED_TUNED=1 every case runs with every tile that `fasttfm tune`
may choose. Only PROGRAMS of a launch run, without the checks of `make executed`, so that a case itself may fail for
lack of the results of the others. A PTX that the file has for an assembler is skipped.
"""

import contextlib
import functools
import gc
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

import ptx_check
from fasttfm.kernels import choices
from fasttfm.kernels.chip import CHIPS
from fasttfm.kernels.launch import power_of_two
from fasttfm.kernels.proof.compile_case import DTYPES
from ptx_check import Unsupported
from ptx_check.machine import Machine
from ptx_check.machine_code.compared import MachineCode, Outcome, version

CHIP = "sm_90"
PROGRAMS = 4
"""The first and the last program of a launch, and two others."""
_FOR_DEBUGGERS = re.compile(r"\.loc|\.file|\$L__(tmp|func)\w*:")


def key_of(ptx: str) -> str:
    """Digest of PTX without debug information and comments."""
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.partition(".section")[0].splitlines())
    code = "\n".join(line for line in lines if line and not _FOR_DEBUGGERS.match(line))
    return hashlib.sha256(repr((code,)).encode()).hexdigest()[:16]


class Noted(MachineCode):
    """Records the outcome of each assembler immediately; faults and refusals do not end the case."""

    def __init__(self, assemblers: list[str], note: Callable[..., None]) -> None:
        super().__init__(CHIP, assemblers, compare=True)
        self.note = note

    def held(self, launch: Any, values: list[bytes], ptxas: str, *tensors: list) -> Outcome:
        try:
            outcome = super().held(launch, values, ptxas, *tensors)
        except Unsupported as error:
            self.note(version(ptxas), outcome="refused", told=[str(error)])
            return Outcome(launch.facts.name, ptxas, (), 0.0, 0.0)
        told = [str(fault) for fault in outcome.faults]
        about = {"difference": outcome.difference, "largest": outcome.largest}
        self.note(version(ptxas), outcome="wrong" if told else "right", told=told[:3], **about)
        return outcome

    def told(self, outcomes: list) -> list:
        return []


class Assembled:
    """The plugin."""

    def __init__(self, file: Path, assemblers: list[str], *, tuned: bool) -> None:
        self.file, self.tuned = file, tuned
        self.assemblers = {version(path): path for path in assemblers}
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        self.done = {(line["ptx"], line["assembler"]) for line in lines if "ptx" in line}
        self.taken = {(line["choice"], line["answer"]) for line in lines if "choice" in line}
        self.case = self.choice = ""

    def note(self, **fields: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fields) + "\n")

    def execute(self, machine: Machine, *given: Any, really=Machine.execute) -> None:
        _, source, metadata, ptx, _ = given
        if machine.chip.name != CHIP:
            return really(machine, *given)
        key = key_of(ptx)
        about = {"ptx": key, **described(source, metadata), "case": self.case, "choice_made": self.choice}

        def note(assembler: str, **outcome: Any) -> None:
            self.done.add((key, assembler))
            self.note(**about, assembler=assembler, **outcome)

        left = [path for name, path in self.assemblers.items() if (key, name) not in self.done]
        machine.machine_code = Noted(left, note) if left else None
        try:
            return really(machine, *given)
        finally:
            machine.machine_code = None

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function):
        chip = CHIPS[CHIP]
        self.case, self.choice = pyfuncitem.name, ""
        choices.keep(chip, {})
        gc.freeze()  # else every collection scans all of PyTorch's objects: a fifth of the time
        try:
            return (yield)
        finally:
            if pyfuncitem.funcargs.get("dtype") == "fp32":
                choices.keep(chip, {})  # drops plans, which for CPU tensors do not depend on the precision
                with in_tf32():
                    self.again(pyfuncitem)
            for name, size in choices.asked(chip) if self.tuned else ():
                choice = f"{name} {' '.join(map(str, size))}"
                for text in choices.CHOICES[name].answers(chip, *size):
                    if (choice, text) not in self.taken:
                        self.taken.add((choice, text))
                        choices.keep(chip, {(name, size): text})
                        self.choice = f"{choice}: {text}"
                        self.note(choice=choice, answer=text, outcome=self.again(pyfuncitem), case=self.case)
            choices.keep(chip, {})

    def again(self, item: pytest.Function) -> str:
        """Runs a case again and returns its outcome: some tiles do not compile, and some tests check tiles."""
        try:
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
        except (Exception, pytest.fail.Exception) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return "ran"


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    """Context in which PyTorch allows TF32 for float32 products."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def by_tile(line: Mapping[str, Any]) -> tuple:
    """Key of a record: kernel, tile, dtype, head size and assembler."""
    return tuple(line[name] for name in ("kernel", "tile", "dtype", "width", "assembler"))


def width_of(constants: Mapping[str, Any]) -> int:
    """Head size of an attention tile; 0 for other kernels."""
    sizes = [constants[name] for name in ("D", "DV") if isinstance(constants.get(name), int)]
    return max(64, power_of_two(max(sizes))) if sizes else 0


def described(source: Any, metadata: Any) -> dict[str, Any]:
    """Kernel, tile and constants of a launch."""
    function = source.fn
    names = function.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items()
                 if len(path) == 1 and isinstance(value, int | str)}  # fmt: skip
    about = named(function, constants, source.signature.values(), metadata.num_warps, metadata.num_stages)
    kept = {name: value for name, value in constants.items() if name.isupper()}
    return {**about, "width": width_of(constants), "constants": kept}


def named(function: Any, constants: Mapping[str, Any], kinds: Iterable[Any], warps: int, stages: int) -> dict[str, str]:
    """Names of a kernel, its tile and its dtype: that of its products or else of its first pointer.

    kinds: of the arguments, pointers as "*bf16".
    """
    sizes = [str(constants[name]) for name in ("ROWS", "COLUMNS", "DEPTH") if name in constants]
    given = (kind[1:] for kind in tree_leaves(list(kinds)) if str(kind)[:1] == "*")
    return {
        "kernel": f"{function.fn.__module__.removeprefix('fasttfm.kernels.')}.{function.fn.__name__.strip('_')}",
        "tile": f"{'x'.join(sizes)}w{warps}s{stages}",
        "dtype": "tf32" if constants.get("PRECISION") == "tf32" else next(filter(DTYPES.__contains__, given), "fp32"),
    }


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    paths = os.environ["ASSEMBLERS"].split(":")
    plugin = Assembled(Path(os.environ["ASSEMBLED"]), paths, tuned=os.environ.get("ASSEMBLED_TUNED") == "1")
    config.pluginmanager.register(plugin)
    sampled = functools.partial(ptx_check.executed, checks=False, programs=PROGRAMS)

    def execute(machine: Machine, *given: Any) -> None:
        plugin.execute(machine, *given)

    for patch in (mock.patch.object(ptx_check, "executed", sampled), mock.patch.object(Machine, "execute", execute)):
        patch.start()
        config.add_cleanup(patch.stop)
