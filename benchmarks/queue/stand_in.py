"""Runs a command as if on a chip: kernels are compiled but not launched, products are not computed.

    python -m benchmarks.queue.stand_in sm_90 python -m benchmarks --quick kernels
    python -m benchmarks.queue.stand_in sm_90 python -m fasttfm tune --quick

CUDA tensors are on the CPU (ptx_check.cuda), so results are meaningless and checks of them fail; compiled kernels go to
Triton's cache, for a device of this chip. Of the suite's cases only our providers run, once. `python -m pytest` runs
tests, whose failures are meaningless, too.
"""

import contextlib
import mmap
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.backends.nvidia.compiler import CUDABackend

from benchmarks import __main__ as program
from benchmarks.measure import numerics
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
_LARGE = 1 << 18
"""Floating-point tensors with as many elements are zeros that occupy no memory, whatever is computed or written."""


def key() -> str:
    """Key of this Triton version in its cache, instead of a digest that depends on the Python build."""
    return f"triton-{triton.__version__}"


class _NoProducts(TorchDispatchMode):
    sees_through_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if schema.is_mutable and torch.Tag.inplace_view not in func.tags:
            written = kwargs.get("out", args[0] if args else None)
            if name in _PRODUCTS or any(map(_large, tree_leaves(written))):
                return written if schema.returns else None
        elif name in _PRODUCTS or ((not given or any(map(_large, given))) and not _is_view(schema)):
            shapes = _shapes(func, args, kwargs)
            if isinstance(shapes, torch.Tensor) and _large(shapes):
                return _untouched(shapes)
            if name in _PRODUCTS:
                return torch.empty_strided(shapes.shape, shapes.stride(), dtype=shapes.dtype).normal_()
        result = func(*args, **kwargs)
        return result.zero_() if name in _EMPTY else result  # kernels' outputs: a search stops at undefined numbers


def _large(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() >= _LARGE


def _is_view(schema: Any) -> bool:
    return any(returned.alias_info is not None for returned in schema.returns)


def _shapes(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Result on the meta device; None if it depends on values."""
    try:
        device = {"device": "meta"} if any(each.name == "device" for each in func._schema.arguments) else {}
        return func(*tree_map(_meta, args), **{**tree_map(_meta, kwargs), **device})
    except (NotImplementedError, RuntimeError):
        return None


def _untouched(shape: torch.Tensor) -> torch.Tensor:
    """Zeros with this shape, strides and dtype whose pages exist once they are written."""
    pages = mmap.mmap(-1, shape.untyped_storage().nbytes(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=shape.dtype).as_strided(shape.shape, shape.stride())


def _once(providers: Mapping[str, Callable[[], Any]], *_: Any, **__: Any) -> dict[str, float | str]:
    """Replacement for fasttfm.system.timing.measure that runs each provider once, untimed."""
    result: dict[str, float | str] = {}
    for name, run in providers.items():
        try:
            run()
            result[name] = 1.0
        except Exception as error:  # as on a device: a candidate that cannot run is skipped
            result[name] = f"{type(error).__name__}: {error}"
    return result


def _step_that_ends(engine: Engine, step: Callable[[Engine], None] = Engine.step) -> None:
    """Search step after which all sentences have ended, empty: kernels that compute nothing end none."""
    step(engine)
    state = engine.state
    state.finished.copy_(state.settings[:, column("number")])
    state.found_scores.zero_()
    state.found_ends.zero_()


def _without_line_info(backend: Any, *args: Any, make: Callable[..., bytes] = CUDABackend.make_cubin) -> bytes:
    """The same machine code without debug sections, which are most of a kernel: the archive is two fifths as large."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True
        return make(backend, *args)


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None if isinstance(value, torch.Generator) else value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


@contextlib.contextmanager
def standing_in(chip: str) -> Iterator[None]:
    """Context in which this process compiles as if on the chip."""
    from triton.runtime import cache, driver

    patch = mock.patch.object
    with (
        patch(driver, "_active", Compiling(chip)),
        patch(cache, "triton_key", key),
        patch(CUDABackend, "make_cubin", _without_line_info),
        patch(torch.cuda, "_sleep"),
        patch(torch.cuda, "get_rng_state", return_value=torch.get_rng_state()),
        patch(torch.cuda, "set_rng_state"),
        patch(tuning, "measure", _once),
        patch(numerics, "refuse_flattering_inputs"),
        patch(Graphs, "captures", False),
        patch(Engine, "step", _step_that_ends),
        Answers(CHIPS[chip]),
        _NoProducts(),
    ):
        yield


def suite(words: Sequence[str]) -> None:
    """Runs our providers in the cases that `python -m benchmarks WORDS` would measure, once each."""
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
        raise SystemExit(f"{first} is not `python -m MODULE`, which alone can be stood in for")
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
