"""The machine code of every launch on sm_90, under each assembler, held against its PTX: a plugin of pytest.

    ASSEMBLED=found.jsonl ASSEMBLERS=PATH:PATH python -m pytest -p tests.executed.assembled -k sm_90 ...

Each PTX that a case launches is executed, and what every ptxas made of it, on the same memory; the file gets a line for
each. A case in float32 runs again in TF32, and with ASSEMBLED_TUNED=1 each case with each tile that `fasttfm tune` may
take in place of a shipped one. Of a launch PROGRAMS run, without the checks that `make executed` makes; the case itself
may fail for want of what the others write. A PTX that the file has under an assembler is not assembled by it again;
with ASSEMBLED_ONCE=1 nor is another one of its kernel, tile, head size and dtype.
"""

import contextlib
import functools
import gc
import json
import os
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
from tests.executed.unchanged import code_of, digest

CHIP = "sm_90"
PROGRAMS = 4
"""The first and the last of a launch, and two neighbours."""


class Noted(MachineCode):
    """Notes each assembler's outcome as soon as it is known; faults and refusals do not end the case."""

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

    def __init__(self, file: Path, assemblers: list[str], *, tuned: bool, once: bool) -> None:
        self.file, self.tuned, self.once = file, tuned, once
        self.assemblers = {version(path): path for path in assemblers}
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        self.done = {(line["ptx"], line["assembler"]) for line in lines if "ptx" in line}
        self.tiles = {(*by_tile(line), width_of(line["constants"])) for line in lines if "ptx" in line}
        self.taken = {(line["choice"], line["answer"]) for line in lines if "choice" in line}
        self.case = self.choice = ""

    def note(self, **fields: Any) -> None:
        with self.file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(fields) + "\n")

    def execute(self, machine: Machine, *given: Any, really=Machine.execute) -> None:
        _, source, metadata, ptx, _ = given
        if machine.chip.name != CHIP:
            return really(machine, *given)
        key = digest(code_of(ptx))
        about = {"ptx": key, **described(source, metadata), "case": self.case, "choice_made": self.choice}

        def tile(assembler: str) -> tuple:
            return *by_tile({**about, "assembler": assembler}), width_of(about["constants"])

        def known(assembler: str) -> bool:
            return (key, assembler) in self.done or (self.once and tile(assembler) in self.tiles)

        def note(assembler: str, **outcome: Any) -> None:
            self.done.add((key, assembler))
            self.tiles.add(tile(assembler))
            self.note(**about, assembler=assembler, **outcome)

        left = [path for name, path in self.assemblers.items() if not known(name)]

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
        gc.freeze()  # each collection would go through all of PyTorch's objects: a fifth of the time
        try:
            return (yield)
        finally:
            if pyfuncitem.funcargs.get("dtype") == "fp32":
                choices.keep(chip, {})  # plans of tensors on a CPU do not ask for the precision: new ones
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
        """Runs a case once more. Returns how it ended: some tiles do not compile, and some tests are of tiles."""
        try:
            item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
        except (Exception, pytest.fail.Exception) as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return "ran"


@contextlib.contextmanager
def in_tf32() -> Iterator[None]:
    """Products of float32 numbers are computed in TF32, as PyTorch is told here."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def by_tile(line: Mapping[str, Any]) -> tuple:
    """A record is of a kernel's tile under an assembler."""
    return tuple(line[name] for name in ("kernel", "tile", "dtype", "assembler"))


def width_of(constants: Mapping[str, Any]) -> int:
    """The head size that a tile of attention is for; 0: of another kernel."""
    sizes = [constants[name] for name in ("D", "DV") if isinstance(constants.get(name), int)]
    return max(64, power_of_two(max(sizes))) if sizes else 0


def described(source: Any, metadata: Any) -> dict[str, Any]:
    """The kernel of a launch, its tile and its constants."""
    function = source.fn
    names = function.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items()
                 if len(path) == 1 and isinstance(value, int | str)}  # fmt: skip
    about = named(function, constants, source.signature.values(), metadata.num_warps, metadata.num_stages)
    return {**about, "constants": {name: value for name, value in constants.items() if name.isupper()}}


def named(function: Any, constants: Mapping[str, Any], kinds: Iterable[Any], warps: int, stages: int) -> dict[str, str]:
    """A kernel, its tile, and the type of what it multiplies or else of the first numbers that it is given.

    kinds: of its arguments, pointers as "*bf16".
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
    tuned, once = (os.environ.get(f"ASSEMBLED_{name}") == "1" for name in ("TUNED", "ONCE"))
    plugin = Assembled(Path(os.environ["ASSEMBLED"]), paths, tuned=tuned, once=once)
    config.pluginmanager.register(plugin)
    sampled = functools.partial(ptx_check.executed, checks=False, programs=PROGRAMS)
    execute = functools.partialmethod(_by, plugin.execute)
    for patch in (mock.patch.object(ptx_check, "executed", sampled), mock.patch.object(Machine, "execute", execute)):
        patch.start()
        config.add_cleanup(patch.stop)


def _by(machine: Machine, how: Any, *given: Any) -> Any:
    return how(machine, *given)
