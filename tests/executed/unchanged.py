"""Pytest plugin that skips cases which passed before and have not changed since.

    EXECUTED_BEFORE=keys.jsonl python -m pytest -p tests.executed.unchanged ...

A case is rehearsed first: its kernels are compiled and their launches recorded, but not executed. Its key is a digest
of every launch (PTX without debug information, grid, shapes, numbers), of the machine that executes PTX, of the sources
of the tests and of the versions of PyTorch, NumPy and Triton. If the file, with a line of JSON [key, properties] per
case, has the key, the case has passed before and is skipped. Otherwise it is executed; if its launches equal those of
the rehearsal, the key is added to its properties and to the file, so that an interrupted run can be resumed. A case
without launches in this process, or whose launches depend on numbers computed by kernels, has no key and is always
executed.
"""

import functools
import hashlib
import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ptx_check.machine import Machine

ROOT = Path(__file__).parents[2]
VARIABLE = "EXECUTED_BEFORE"
_FOR_DEBUGGERS = re.compile(r"\.loc|\.file|\$L__(tmp|func)\w*:")
_MACHINE = ROOT / "ptx-check" / "src" / "ptx_check"
_ELSEWHERE = {"__main__.py", "plugin.py", "reports.py", "support.py", "version.py", "unchanged.py", "speeds.py"}
"""Files that no case depends on."""
_BESIDE = ("gpu/problems.py", "kernels/accuracy.py", "kernels/attention_once.py", "kernels/test_search_kernels.py",
           "keep_mask.py", "search_step.py")  # fmt: skip
"""Files of tests/ that its cases import from other folders."""
_EXPECTED = ("reference.py", "reference_cache.py", "search/device/choice.py", "search/device/state.py")
"""Files of fasttfm/ that compute what kernels are compared with."""


def code_of(ptx: str) -> str:
    """PTX without debug information and comments."""
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.partition(".section")[0].splitlines())
    return "\n".join(line for line in lines if line and not _FOR_DEBUGGERS.match(line))


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def files(folder: Path) -> list[Path]:
    """Everything that the cases of a folder depend on, besides their launches."""
    result = [*_MACHINE.rglob("*.py"), *folder.glob("*.py")]
    if folder == Path(__file__).parent:
        result += [ROOT / "tests" / name for name in _BESIDE] + [ROOT / "fasttfm" / name for name in _EXPECTED]
    return sorted(path for path in result if path.name not in _ELSEWHERE)


@functools.cache
def sources(folder: Path) -> str:
    """Digest of the files() of a folder, and of the packages that compute."""
    texts = [(path.name, path.read_bytes()) for path in files(folder)]
    return digest(texts, *(metadata.version(name) for name in ("torch", "numpy", "triton")))


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.stride(), value.data_ptr() % 16
    if isinstance(value, tuple):
        return tuple(map(_described, value))
    return value if isinstance(value, int | float) else type(value).__name__


class Unchanged:
    """The plugin."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self.before: dict[str, list] = dict(map(json.loads, lines))
        self.launches: set[str] = set()
        self.rehearsing = False

    def launchers(self, machine: Machine, source: Any, metadata: Any, *, made=Machine.launcher_cls) -> Any:
        """Machine.launcher_cls that records launches."""
        start = made(machine, source, metadata)

        def noted(x, y, z, stream, function, *rest):
            described = [_described(value) for value in rest[4:]]  # after the arguments of Triton's driver
            self.launches.add(digest(code_of(function), (x, y, z), described))
            return start(x, y, z, stream, function, *rest)

        return noted

    def execute(self, machine: Machine, *given: Any, really=Machine.execute) -> None:
        if not self.rehearsing:
            really(machine, *given)

    def launched(self, item: pytest.Function) -> set[str]:
        """Runs a case and returns its launches."""
        self.launches = set()
        names = item._fixtureinfo.argnames
        item.obj(**{name: item.funcargs[name] for name in names})
        return self.launches

    def rehearsed(self, item: pytest.Function) -> set[str]:
        state, properties = torch.get_rng_state(), len(item.user_properties)
        self.rehearsing = True
        try:
            return self.launched(item)
        except (Exception, pytest.skip.Exception, pytest.fail.Exception):  # kernels have computed nothing
            return self.launches
        finally:
            self.rehearsing = False
            torch.set_rng_state(state)
            del item.user_properties[properties:]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        expected = self.rehearsed(pyfuncitem)
        key = digest(pyfuncitem.name, sources(pyfuncitem.path.parent), sorted(expected))
        if key in self.before:
            pyfuncitem.user_properties += [("key", key), ("kept", key), *map(tuple, self.before[key])]
        elif self.launched(pyfuncitem) == expected and expected:
            if self.file is not None:
                with self.file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps([key, pyfuncitem.user_properties]) + "\n")
            pyfuncitem.user_properties.append(("key", key))
        return True


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    file = os.environ.get(VARIABLE)
    plugin = Unchanged(Path(file) if file else None)
    config.pluginmanager.register(plugin)
    for name, how in (("launcher_cls", plugin.launchers), ("execute", plugin.execute)):
        patch = mock.patch.object(Machine, name, bound(how))
        patch.start()
        config.add_cleanup(patch.stop)


def bound(how: Any) -> Any:
    """A method of Machine that calls how(machine, ...)."""
    return lambda machine, *args: how(machine, *args)
