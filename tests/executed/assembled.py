"""The machine code of every launch on sm_90, under each assembler, held against its PTX: a plugin of pytest.

    ASSEMBLED=found.jsonl ASSEMBLERS=PATH:PATH python -m pytest -p tests.executed.assembled -k sm_90 ...

Each PTX that a case launches is executed, and what every ptxas made of it, on the same memory; the file gets a line for
each. With ASSEMBLED_TUNED=1 a case runs again with each tile that `fasttfm tune` may take in place of a shipped one.
The case itself sees what the PTX computes. A PTX that the file has under an assembler is not assembled by it again.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fasttfm.kernels import choices
from fasttfm.kernels.chip import CHIPS
from ptx_check import Unsupported
from ptx_check.machine import Machine
from ptx_check.machine_code.compared import MachineCode, version
from tests.executed.unchanged import code_of, digest

CHIP = "sm_90"


class Noted(MachineCode):
    """Faults of machine code are noted, and the case goes on."""

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
        key = digest(code_of(ptx))
        left = [name for name in self.assemblers if (key, name) not in self.done]
        if machine.chip.name != CHIP or not left:
            return really(machine, *given)
        machine.machine_code = noted = Noted(CHIP, [self.assemblers[name] for name in left], compare=True)
        about = {"ptx": key, **described(source, metadata), "case": self.case, "choice_made": self.choice}
        try:
            really(machine, *given)
        except Unsupported as error:
            for name in left:
                self.note(**about, assembler=name, outcome="refused", told=[str(error)])
        finally:
            machine.machine_code = None
            self.done |= {(key, name) for name in left}
        for name, outcome in zip(left, noted.outcomes):
            told = [str(fault) for fault in outcome.faults]
            self.note(
                **about, assembler=name, outcome="wrong" if told else "right", told=told[:3],
                difference=outcome.difference, largest=outcome.largest,
            )  # fmt: skip
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function):
        chip = CHIPS[CHIP]
        self.case, self.choice = pyfuncitem.name, ""
        choices.keep(chip, {})
        result = yield
        if not self.tuned:
            return result
        given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        for name, size in choices.asked(chip):
            for text in choices.CHOICES[name].answers(chip, *size):
                choice = f"{name} {' '.join(map(str, size))}"
                if (choice, text) in self.taken:
                    continue
                self.taken.add((choice, text))
                choices.keep(chip, {(name, size): text})
                self.choice, outcome = f"{choice}: {text}", "ran"
                try:
                    pyfuncitem.obj(**given)
                except (Exception, pytest.fail.Exception) as error:  # of tiles that do not compile, and tests of tiles
                    outcome = f"{type(error).__name__}: {str(error)[:200]}"
                self.note(choice=choice, answer=text, outcome=outcome, case=self.case)
        choices.keep(chip, {})
        return result


def described(source: Any, metadata: Any) -> dict[str, Any]:
    """The kernel of a launch, its tile and its constants."""
    function = source.fn
    names = function.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items()
                 if len(path) == 1 and isinstance(value, int | str)}  # fmt: skip
    sizes = [str(constants[name]) for name in ("ROWS", "COLUMNS", "DEPTH") if name in constants]
    pointers = (kind for kind in source.signature.values() if isinstance(kind, str) and kind.startswith("*"))
    return {
        "kernel": f"{function.fn.__module__.removeprefix('fasttfm.kernels.')}.{metadata.name.strip('_')}",
        "tile": f"{'x'.join(sizes)}w{metadata.num_warps}s{metadata.num_stages}",
        "dtype": next(pointers, "").lstrip("*"),
        "constants": {name: value for name, value in constants.items() if name.isupper()},
    }


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    paths = os.environ["ASSEMBLERS"].split(":")
    plugin = Assembled(Path(os.environ["ASSEMBLED"]), paths, tuned=os.environ.get("ASSEMBLED_TUNED") == "1")
    config.pluginmanager.register(plugin)
    patch = mock.patch.object(Machine, "execute", functools.partialmethod(_by, plugin.execute))
    patch.start()
    config.add_cleanup(patch.stop)


def _by(machine: Machine, how: Any, *given: Any) -> Any:
    return how(machine, *given)
