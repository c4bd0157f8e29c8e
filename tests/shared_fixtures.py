"""Fixtures of all tests, of those in pretraining/tests too: the interpreter switch, and where real corpora lie."""

import argparse
import collections
import gc
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import forked
import hypothesis
import numpy as np
import pytest
import torch
from quick_interpreter import make_quick

CASES = os.environ.setdefault("FASTTFM_TESTS", "gate")
assert CASES in ("gate", "all"), f"FASTTFM_TESTS={CASES}: gate or all"
"""`gate`: N cases of a test marked sample(N), and none marked whole; `all`: every case. pytest's workers inherit it."""


def examples(count: int) -> int:
    """How many examples Hypothesis draws of a test: `count` in `make test-all`, a third in the gate."""
    return count if CASES == "all" else -(-count // 3)


# The same examples in every run: what is green on one machine is green on another. To look for others:
# pytest --hypothesis-profile=default. How long an example takes, or its drawing, tells nothing on a busy machine.
hypothesis.settings.register_profile(
    "fixed",
    max_examples=examples(100),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("fixed")

# A shell has its background commands ignore Ctrl-C, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What somebody has tuned on this machine decides no test, and no test writes there.
_CACHE = tempfile.TemporaryDirectory(prefix="fasttfm-tests-")  # removed when Python ends
os.environ["FASTTFM_CACHE"] = _CACHE.name

_ENTERED: list[object] = []
"""Contexts that end with Python."""

# Before any kernel is imported: without a GPU the kernels run on CPU tensors through Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    make_quick()
    from fasttfm.kernels import jit

    def _checked(self: jit.Launch, arguments: tuple, first: Callable[..., None] = jit.Launch._first) -> None:
        """Compiled, a Launch takes all arguments for what the first were; the interpreter looks at each."""
        if 0 not in self.grid and isinstance(self.kernel, jit.InterpretedKernel):
            key = jit._key(self.kernel, tuple(map(jit.typed, self.kernel.kinds.values(), arguments)), self.constants)
            self._values = known = getattr(self, "_values", key)
            assert key == known, f"{self.kernel.fn.__name__} was first called with {known}, and now with {key}"
        first(self, arguments)

    jit.Launch._first = _checked


def _seed(name: str) -> None:
    number = zlib.crc32(name.encode())
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002 (what packages draw)
    torch.manual_seed(number)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is collected here is let go of: the garbage collector walks over it neither now nor in any test."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a file draws when it is imported is the same whatever was imported before."""
    _seed(f"import of {collector.nodeid}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws is the same whatever ran before, in whichever process."""
    _seed(item.nodeid)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    """What a fixture of several tests draws is the same whichever of them asks first, and so is what that one draws."""
    if fixturedef.scope == "function":
        yield
    else:
        _seed(fixturedef.argname)
        yield
        _seed(request._pyfuncitem.nodeid)


@pytest.fixture(scope="session")
def corpora() -> Path:
    """The folder of real corpora: $FASTTFM_DATA, else shared/data beside the project."""
    folder = Path(os.environ.get("FASTTFM_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real corpora: {folder} does not exist (set FASTTFM_DATA)")
    return folder


@pytest.fixture(autouse=True, scope="module")
def nothing_tuned() -> Iterator[None]:
    """What a file's tests have tuned decides nothing in the files after it."""
    yield
    for path in Path(_CACHE.name).iterdir():
        shutil.rmtree(path, ignore_errors=True)  # a process that still ends may write there


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of a test; the next one has again what this one had, whatever it did."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def forked_workers() -> Iterator[None]:
    """Processes that search, serve or draw for this one are forked: starting one takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr("fasttfm.system.processes.subprocess", forked.SUBPROCESS)
        yield


@pytest.fixture(autouse=True, scope="session")
def loops_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A worker that needs a loop which another one compiles waits, and loads it from numba's cache."""
    with pytest.MonkeyPatch.context() as patch:
        if "PYTEST_XDIST_WORKER" in os.environ and sys.platform == "linux" and importlib.util.find_spec("numba"):
            import compiled_once

            folder = tmp_path_factory.getbasetemp().parent  # of all workers
            patch.setenv(compiled_once.FOLDER, str(folder))
            patch.setattr(compiled_once.Dispatcher, "compile", compiled_once.compiling_once(folder))
        yield


@pytest.fixture(autouse=True)
def plans() -> None:
    """What a test has patched decides nothing in the next one."""
    if (operators := sys.modules.get("fasttfm.functional.operator")) is not None:
        operators.forget_plans()


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """A test that leaves PyTorch without gradients fails, and not the hundred tests after it."""
    yield
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        for context in (torch.inference_mode(False), torch.enable_grad()):
            context.__enter__()
            _ENTERED.append(context)
        pytest.fail("gradients are off after this test: it entered a context and did not leave it")


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """Under nohup the hangup signal is ignored, also by what a test starts: not while a test runs."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    if ignored:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def advised_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line that a command fails with names flags of that command alone, whatever the test is about."""
    from fasttfm.cli import main

    fail = main._fail

    def checked(name: str | None, arguments: list[str], message: str, status: int = 2) -> int:
        if name is not None and not re.search("is unknown|[Tt]oo many open files", message):
            known = _flags(arguments).union(arguments)
            # the flags of another command, which the line names, and of pip are not meant
            advised = re.findall(
                r"(?<!\S)\(?(--[a-z][a-z0-9-]+)", re.sub(r"(fasttfm [a-z]|pip install).*", "", message)
            )
            assert known.issuperset(advised), f"{arguments[:2]} has no {set(advised) - known}: {message}"
        return fail(name, arguments, message, status)

    monkeypatch.setattr(main, "_fail", checked)


@pytest.fixture
def refusal_of(capsys: pytest.CaptureFixture) -> Callable[[Sequence[object]], str]:
    """The one line on standard error with which `fasttfm WORDS` ends with status 2: refusal_of(words)."""
    from fasttfm.cli.main import main

    def line(words: Sequence[object]) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        return said

    return line


def _flags(words: list[str]) -> set[str]:
    """The flags of the command, and verb, that these arguments begin with."""
    from fasttfm.cli import main

    parser = main.build_parser(words[:1])
    for word in words[:2]:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                parser = action.choices[word]
    return set(parser._option_string_actions)


def unlinkable() -> str:
    """The path on account of which Inductor cannot link for the CPU; '' where it can."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    paths = (str(Path(torch.__file__).parent), sysconfig.get_config_var("LIBDIR") or "", cache_dir())
    return next((path for path in paths if " " in path), "")


def spread(cases: Sequence[Sequence[str]], count: int) -> list[int]:
    """The places of `count` cases, the same every time, of which each value of an axis comes about equally often.

    cases: each one's value on every axis. Among cases whose values have come as often, the one farthest from those
    chosen.
    """
    chosen: list[int] = []
    times: collections.Counter[tuple[int, str]] = collections.Counter()
    while len(chosen) < min(count, len(cases)):
        left = [place for place in range(len(cases)) if place not in chosen]
        place = min(
            left,
            key=lambda place: (
                sum(times[value] for value in enumerate(cases[place])),
                -min((abs(place - other) for other in chosen), default=0),
                place,
            ),
        )
        chosen.append(place)
        times.update(enumerate(cases[place]))
    return sorted(chosen)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The cases that `make test-all` runs and the gate does not.

    Of a test with several axes and no mark the gate runs every value of each axis (four cases at least), not every
    combination.
    """
    tests: dict[str, list[pytest.Item]] = collections.defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    left = []
    for cases in tests.values():
        sample = cases[0].get_closest_marker("sample")
        kept = [case for case in cases if not case.get_closest_marker("whole")]
        values = [case.callspec._idlist for case in kept if hasattr(case, "callspec")]
        axes = [len(set(axis)) for axis in zip(*values)]
        if values and (sample or len(axes) > 1):
            kept = [kept[place] for place in spread(values, *(sample.args if sample else [max(4, *axes)]))]
        chosen = set(map(id, kept))
        left += [case for case in cases if id(case) not in chosen]
    return left


def pytest_report_header() -> str:
    return f"cases: {CASES} (FASTTFM_TESTS; gate: a fixed part, all: every case)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if CASES != "all" and not any("[" in argument for argument in config.args):  # a case that is named runs
        others = left_out(items)
        if others:
            config.hook.pytest_deselected(items=others)
            left = set(map(id, others))
            items[:] = [item for item in items if id(item) not in left]
    if torch.cuda.is_available():
        return
    needs_gpu = pytest.mark.skip(reason="needs a CUDA or ROCm device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not by keyword: the folder of these tests has that name too
            item.add_marker(needs_gpu)
    compiled = [item for item in items if "inductor" in item.keywords]
    path = unlinkable() if compiled else ""
    if path:
        reason = f"PyTorch's Inductor gives paths unquoted to the linker (pytorch#191010), and one has a space: {path}"
        for item in compiled:
            item.add_marker(pytest.mark.skip(reason=reason))
