"""Runs a command as if on a chip: its kernels are compiled and not launched, products are not computed.

    python -m benchmarks.queue.stand_in sm_90 python -m benchmarks --quick kernels
    python -m benchmarks.queue.stand_in sm_90 python -m fasttfm tune --quick

A device's tensors lie on the CPU meanwhile (ptx_check.cuda), so the numbers mean nothing and a program that checks them
may say so; what its launches compile lies in Triton's cache, for a device of the chip. Of the suite's cases ours alone
are run, once; `python -m pytest` runs its tests, whose failures mean nothing either.
"""

import contextlib
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import __main__ as program
from benchmarks.measure.harness import Trial
from benchmarks.measure.providers import CUDA_GRAPH, OURS, Absent
from fasttfm.functional import tuning
from fasttfm.search.device.engine import Engine
from fasttfm.search.device.state import column
from fasttfm.system.graphs import Graphs
from ptx_check.chips import CHIPS
from ptx_check.cuda import Answers
from ptx_check.ledger.collect import Compiling

_PRODUCTS = {"_addmm_activation", "addmm", "addmm_", "baddbmm", "bmm", "mm"}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LARGE = 1 << 20
"""Elements from which a product is zeros, memory that is never touched, in place of random numbers."""


def key() -> str:
    """The name of this version in Triton's cache, in place of a digest that each Python's build changes."""
    return f"triton-{triton.__version__}"


class _NoProducts(TorchDispatchMode):
    sees_through_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__ if func.namespace == "aten" else ""
        if name in _EMPTY:  # what a kernel would write is 0: a search ends where it finds no numbers
            result = func(*args, **kwargs)
            return torch.zeros_like(result) if result.numel() > _LARGE else result.zero_()
        if name not in _PRODUCTS:
            return func(*args, **kwargs)
        if "out" in kwargs:
            return kwargs["out"]
        shape = func(*map(_meta, args), **{name: _meta(value) for name, value in kwargs.items()})
        result = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
        return torch.zeros_like(result) if result.numel() > _LARGE else result.normal_()


def _once(providers: Mapping[str, Callable[[], Any]], *_: Any, **__: Any) -> dict[str, float | str]:
    """fasttfm.system.timing.measure, of which nothing is timed."""
    result: dict[str, float | str] = {}
    for name, run in providers.items():
        try:
            run()
            result[name] = 1.0
        except Exception as error:  # as on a device: an answer that cannot run there is passed over
            result[name] = f"{type(error).__name__}: {error}"
    return result


def _step_that_ends(engine: Engine, step: Callable[[Engine], None] = Engine.step) -> None:
    """A step of a search, after which every sentence has ended without words: kernels that compute nothing end none."""
    step(engine)
    state = engine.state
    state.finished.copy_(state.settings[:, column("number")])
    state.found_scores.zero_()
    state.found_ends.zero_()


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@contextlib.contextmanager
def standing_in(chip: str) -> Iterator[None]:
    """Inside the block this process is one on the chip, as far as compiling goes."""
    from triton.runtime import cache, driver

    with contextlib.ExitStack() as stack:
        stack.callback(setattr, driver, "_active", driver._active)
        driver.set_active(Compiling(chip))
        stack.enter_context(mock.patch.object(cache, "triton_key", key))
        stack.enter_context(mock.patch.object(torch.cuda, "_sleep"))
        stack.enter_context(mock.patch.object(torch.cuda, "get_rng_state", return_value=torch.get_rng_state()))
        stack.enter_context(mock.patch.object(torch.cuda, "set_rng_state"))
        stack.enter_context(mock.patch.object(tuning, "measure", _once))
        stack.enter_context(mock.patch.object(Graphs, "captures", False))
        stack.enter_context(mock.patch.object(Engine, "step", _step_that_ends))
        stack.enter_context(Answers(CHIPS[chip]))
        stack.enter_context(_NoProducts())
        yield


def suite(words: Sequence[str]) -> None:
    """Ours of the cases that `python -m benchmarks WORDS` would measure, once each."""
    args = program._parser().parse_args(words)
    setting = program.setting_of(args)
    for case in program.chosen_cases(args.groups, args.only, setting):
        work = case.make()
        trial = Trial(case, work, setting, None)  # type: ignore[arg-type]
        for name, provider in work.providers.items():
            if name.startswith(OURS) and name != CUDA_GRAPH and not isinstance(provider, Absent):
                with trial.gradients():
                    trial.prepare(provider, trial.inputs.next(name))()


def main(argv: Sequence[str] | None = None) -> int:
    chip, first, *words = sys.argv[1:] if argv is None else argv
    if first != "python" or words[0] != "-m":
        raise SystemExit(f"{first} is not a Python module that can be stood in for")
    module, arguments = words[1], words[2:]
    with standing_in(chip):
        if module == "benchmarks" and not {*program.COMMANDS} & {*arguments[:1]}:
            suite(arguments)
        else:
            sys.argv = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
