"""pytest plugin: executes every launch of a test suite for the named chips.

    pytest --ptx-check=sm_80,sm_90 [--ptx-report=faults.sarif] [--ptx-programs=16]

Each test runs once per chip, on CPU tensors, with torch.cuda answering as on that chip (during collection as on the
first), and fails with FaultyKernel if a launch has a fault. With --ptx-programs a launch executes a sample of its
programs (ptx_check.executed); tests that fail only because of missing results are skipped. A mark configures a test, a
class or a module:

    @pytest.mark.ptx_check("sm_90", sizes={"n": [1, 33]})     only these of the named chips; other values for a
                                                              parameter of parametrize that has too many or too large
    @pytest.mark.ptx_check(skip="reads a file of weights")    not executed at all
    @pytest.mark.ptx_check(checks=False, programs=64)         options of ptx_check.executed
"""

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ptx_check.machine import Machine

_CHIP = "ptx_chip"
_OPTIONS = {
    "sizes",
    "skip",
    "checks",
    "raising",
    "cuda",
    "configs",
    "programs",
    "seed",
    "rewrite",
    "machine_code",
    "ptxas",
}
"""Keywords of the mark: sizes and skip, and those of ptx_check.executed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx-check", "Triton kernels executed from their PTX on a CPU")
    group.addoption("--ptx-check", metavar="CHIPS", help="run every test once per chip, such as sm_80,sm_90")
    group.addoption("--ptx-report", type=Path, metavar="FILE", help="write the findings to FILE: .txt, .json or .sarif")
    group.addoption("--ptx-programs", type=int, metavar="N", help="execute a sample of N programs per launch")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ptx_check(*chips, sizes={}, skip='', **options): how --ptx-check executes a test"
    )
    if config.option.ptx_check:
        config.pluginmanager.register(_Checking(config), "ptx_check.checking")
    else:
        for name in ("report", "programs"):
            if getattr(config.option, f"ptx_{name}") is not None:
                raise pytest.UsageError(f"--ptx-{name} needs --ptx-check=CHIPS")


class _Checking:
    """pytest hooks, registered with --ptx-check."""

    def __init__(self, config: pytest.Config) -> None:
        if os.environ.setdefault("TRITON_INTERPRET", "0") == "1":
            raise pytest.UsageError("--ptx-check: unset TRITON_INTERPRET, the interpreter has no PTX")
        from ptx_check.chips import CHIPS
        from ptx_check.machine import executed
        from ptx_check.reports import Findings, form_of

        self.chips = [name.strip() for name in config.option.ptx_check.split(",")]
        unknown = [name for name in self.chips if name not in CHIPS]
        if unknown:
            raise pytest.UsageError(f"--ptx-check: {', '.join(unknown)}: choose among {', '.join(CHIPS)}")
        self.programs: int | None = config.option.ptx_programs
        if self.programs is not None and self.programs < 1:
            raise pytest.UsageError(f"--ptx-programs={self.programs}: must be at least 1")
        self.report: Path | None = config.option.ptx_report
        if self.report is not None:
            try:
                form_of(self.report)
            except ValueError as error:
                raise pytest.UsageError(f"--ptx-report: {error}") from None
        self.findings: Findings = Findings()
        self.machine: Machine | None = None
        """Machine of the running test."""
        self._collecting = contextlib.ExitStack()
        self._collecting.enter_context(executed(self.chips[0]))

    def pytest_collection_finish(self) -> None:
        self._collecting.close()

    def pytest_unconfigure(self) -> None:
        self._collecting.close()

    @pytest.hookimpl(tryfirst=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        chosen = _mark(metafunc.definition)
        if chosen.get("skip"):
            return
        _other_sizes(metafunc, dict(chosen.get("sizes", {})))
        chips = [chip for chip in self.chips if chip in (chosen["chips"] or self.chips)]
        metafunc.fixturenames.append(_CHIP)
        metafunc.parametrize(_CHIP, chips, indirect=True)

    @pytest.fixture
    def ptx_chip(self, request: pytest.FixtureRequest) -> str:
        return request.param

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        """Execute a test on its chip, including setup, because fixtures may launch kernels."""
        from ptx_check.machine import executed

        chosen = _mark(item)
        if chosen.pop("skip", ""):
            return (yield)
        chips = chosen.pop("chips")
        chosen.pop("sizes", None)
        spec = getattr(item, "callspec", None)
        chip = spec.params.get(_CHIP) if spec else None
        if chip is None:  # unittest's methods are not parametrized
            chip = next((name for name in self.chips if name in (chips or self.chips)), None)
        if chip is None:
            item.add_marker(pytest.mark.skip(reason="ptx_check: for other chips than those of --ptx-check"))
            return (yield)
        with executed(chip, **{"programs": self.programs, **chosen}) as machine:
            self.machine = machine
            result = yield
        self.machine = None
        self.findings.add(machine, item.nodeid)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo):
        """Skip a test whose assertion failed on missing results."""
        report = yield
        machine = self.machine
        if (
            machine is None
            or machine.differing
            or call.excinfo is None
            or not call.excinfo.errisinstance(AssertionError)
        ):
            return report
        left_out = sum(done.left_out for done in machine.launches)
        if left_out and report.outcome == "failed":
            path, line, _ = item.location
            reason = f"Skipped: {left_out:,} programs were left out, and it asserts something of their results"
            report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, reason)
        return report

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from ptx_check.reports import as_text, write

        terminalreporter.section("ptx-check")
        terminalreporter.write(as_text(self.findings))
        if self.report is not None:
            write(self.findings, self.report)
            terminalreporter.write_line(f"written to {self.report}")


def _mark(item: pytest.Item) -> dict[str, Any]:
    """Chips and options of the nearest mark."""
    from ptx_check.chips import CHIPS

    mark = item.get_closest_marker("ptx_check")
    if mark is None:
        return {"chips": ()}
    wrong = [repr(chip) for chip in mark.args if chip not in CHIPS] + sorted(mark.kwargs.keys() - _OPTIONS)
    if wrong:
        chips, options = ", ".join(CHIPS), ", ".join(sorted(_OPTIONS))
        raise pytest.UsageError(f"{item.nodeid}: ptx_check() of {', '.join(wrong)}: takes {chips}, and {options}")
    return {"chips": mark.args, **mark.kwargs}


def _other_sizes(metafunc: pytest.Metafunc, sizes: dict[str, Any]) -> None:
    """Replace values of the test's parametrize. sizes: by its argument names, "n", or "m,n" for both."""
    markers = metafunc.definition.own_markers
    for marker in [m for m in markers if m.name == "parametrize"]:
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        key = ",".join(n.strip() for n in (names.split(",") if isinstance(names, str) else names))
        if key in sizes:
            markers.remove(marker)
            metafunc.parametrize(key, sizes.pop(key))
    if sizes:
        raise pytest.UsageError(
            f"{metafunc.definition.nodeid}: ptx_check(sizes=...) names {', '.join(sizes)}, which no parametrize of "
            "this test has"
        )
