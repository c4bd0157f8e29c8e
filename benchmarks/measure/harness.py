"""Runs all providers of one case in turns: checks their results first, then times them.

A group of benchmarks is a module with `cases(setting) -> list[Case]` and a line in benchmarks/cases/__init__.py. A Case
names the operation, its shape and its pass; make() returns its Work when its turn comes, because not all works fit in
memory at once.

Providers never see the clock, and never the same input twice in a row: ROTATION inputs take turns, caches are flushed
and the device is synchronized. In each timed round all providers get the same input. A case with a large spread, or
timed on a busy machine (machine.py), is timed once more, and marked noisy if that is no better.

The harness rejects constant inputs. A provider gets status "wrong" and no time if its result is wrong when the clock
stops, before or after the timed runs, if it writes over its inputs, caches results by memory address, returns lazy
results, or ignores dropout. Passes:

    forward            function(*inputs) without gradients, as in inference
    training forward   function(*inputs), saving what backward needs
    backward           gradients of the outputs with respect to inputs that require them and the parameters of a module;
                       the graph is built before the clock starts, with cold caches
    forward+backward   both in one run
    step, decode, ...  function(*inputs), timed on the host between two synchronizations instead of device events

A provider that keeps memory between runs, such as a CUDA graph, has a method held_bytes(), which is added to the peak
that the allocator sees. Launches of a graph are not counted.

`run(case, setting, clock, seconds)` returns one record per provider (schemas.yaml).
"""

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import numerics
from benchmarks.measure.case import GRADIENT_PASSES, PURE_PASSES, Case, Entry, Setting, Work
from benchmarks.measure.clocks import Clock
from benchmarks.measure.machine import MOST_SPREAD, Watch, disturbed, noisy, spread
from benchmarks.measure.providers import ELSEWHERE, UNSEEN, Absent, Provider
from benchmarks.measure.records import Record, rounded
from fasttfm.errors import is_out_of_memory
from fasttfm.kernels.proof.costs import Cost, Machine

ROTATION = 4
"""Number of inputs that take turns."""
REFUSALS = (Exception, SystemExit)
"""Exceptions of a provider that do not end the run."""


class Inputs:
    """Rotating inputs of a case; detects providers that write over them."""

    def __init__(self, case: Case, work: Work, seed: int) -> None:
        """Raises ValueError for constant or shared inputs, and for inputs that are not reproducible."""
        self._case, self._work, self._seed = case, work, seed
        self.draws = [self.draw(i) for i in range(ROTATION)]
        numerics.refuse_flattering_inputs(self.draws)
        if not numerics.equal(self.draws[0], self.draw(0)):
            raise ValueError("inputs(0) is not reproducible: draw from torch's generator, or compute from i alone")
        self._untimed: dict[str, int] = {}

    def draw(self, i: int) -> tuple:
        torch.manual_seed(self._seed + i)
        inputs = self._work.inputs(i)
        if self._case.passes == "forward":  # some providers choose a training path if inputs require gradients
            for x in numerics.tensors(inputs):
                x.requires_grad_(False)
        return inputs

    def next(self, provider: str, round_: int | None = None) -> tuple:
        """Inputs of a timed round, equal for all providers; None: the provider's next untimed inputs, not draw 0."""
        if round_ is None:
            round_ = self._untimed[provider] = self._untimed.get(provider, 0) % (ROTATION - 1) + 1
        return self.private(provider, self.draws[round_ % ROTATION])

    def private(self, provider: str, inputs: tuple) -> tuple:
        """The inputs, copied for providers documented to overwrite them."""
        return numerics.copied(inputs) if provider in self._work.overwrites else inputs

    def written(self, inputs: tuple) -> bool:
        """Return whether one of the draws was written over; restores it."""
        position = next((i for i, draw in enumerate(self.draws) if draw is inputs), None)
        if position is None or numerics.equal(inputs, drawn := self.draw(position)):
            return False
        numerics.overwrite(inputs, drawn)
        return True


def _parameters(function: Provider) -> list[Tensor]:
    return [p for p in function.parameters() if p.requires_grad] if isinstance(function, nn.Module) else []


class Wrong(Exception):
    """A provider's fault that disqualifies its time."""


def _summary(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


@contextmanager
def same_threads() -> Iterator[None]:
    """Restore torch's number of CPU threads, which a provider may set for the whole process."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Trial:
    """One case during its measurement: inputs, and state of each provider."""

    def __init__(self, case: Case, work: Work, setting: Setting, clock: Clock) -> None:
        self.case, self.work, self.setting, self.clock = case, work, setting, clock
        self.inputs = Inputs(case, work, setting.seed)
        self.load: dict[str, float | None] | None = None
        self._round: int | None = None
        """Number of the current timed round."""
        self.entries = {
            name: Entry(None, "absent", provider.install) if isinstance(provider, Absent) else Entry(provider)
            for name, provider in work.providers.items()
        }

    def standing(self) -> list[str]:
        """Names of the providers that may still be timed."""
        return [name for name, entry in self.entries.items() if entry.status == "timed"]

    def gradients(self) -> torch.set_grad_enabled:
        """Grad mode of the pass: off for inference."""
        return torch.set_grad_enabled(self.case.passes != "forward")

    def prepare(self, function: Provider, inputs: tuple) -> Callable[[], Any]:
        """The timed part of a pass; for a backward the forward runs here."""
        if self.case.passes not in GRADIENT_PASSES:
            return lambda: function(*inputs)
        leaves = [x for x in numerics.tensors(inputs) if x.requires_grad] + _parameters(function)

        def forward() -> list[Tensor]:
            outputs = [x for x in numerics.tensors(function(*inputs)) if x.requires_grad]
            if not outputs:
                raise RuntimeError("no output requires a gradient")
            return outputs

        def backward(outputs: list[Tensor]) -> Callable[[], Any]:
            return partial(torch.autograd.grad, outputs, leaves, [self.work.gradient(o) for o in outputs])

        return (lambda: backward(forward())()) if self.case.passes == "forward+backward" else backward(forward())

    def result(self, function: Provider, inputs: tuple) -> Any:
        """The compared values: outputs; in gradient passes [outputs], [input gradients], [norm of all parameters']."""
        if self.case.passes not in GRADIENT_PASSES:
            with self.gradients():
                return function(*inputs)
        outputs = numerics.tensors(function(*inputs))
        differentiable = [x for x in outputs if x.requires_grad]
        leaves = [x for x in numerics.tensors(inputs) if x.requires_grad]
        cotangents = [self.work.gradient(o) for o in differentiable]
        gradients = torch.autograd.grad(differentiable, leaves + _parameters(function), cotangents)
        norms = [g.double().norm() for g in gradients[len(leaves) :]]  # independent of how modules split parameters
        norm = [torch.stack(norms).norm()] if norms else []
        return [o.detach() for o in outputs], list(gradients[: len(leaves)]), norm

    def _try(self, act: Callable[[str, Entry], None], names: Sequence[str] = ()) -> None:
        """Run act for all providers still standing, or these; on an exception the provider is wrong or refused."""
        for name in names or self.standing():
            entry = self.entries[name]
            try:
                with same_threads():
                    act(name, entry)
            except Wrong as error:
                entry.status, entry.reason = "wrong", str(error)
            except REFUSALS as error:  # refusing these inputs is a result
                entry.status, entry.reason = "refused", _summary(error)

    def _first_call(self, name: str, entry: Entry) -> None:
        inputs = self.inputs.next(name)
        start = time.perf_counter()
        with self.gradients():
            self.prepare(entry.function, inputs)()
        if self.setting.on_gpu:
            torch.cuda.synchronize(self.setting.device)
        entry.compile_s = time.perf_counter() - start
        if self.inputs.written(inputs):
            raise Wrong("writes over its inputs")

    def _error_when_stopped(self, function: Provider, name: str, inputs: tuple, expected: Any) -> float:
        """Error of the result as it is when the clock stops; unfinished work counts as wrong."""
        for x in numerics.tensors(expected):  # freed memory must not hold the expected result by chance
            torch.full(x.shape, -77, dtype=getattr(torch, self.case.dtype), device=x.device)
        results: list[Any] = []
        private = self.inputs.private(name, inputs)
        self.clock.microseconds(lambda: results.append(self.result(function, private)))
        if kind := numerics.lazy(results[0]):
            raise Wrong(f"returns a {kind}, which may be computed only when it is read: return tensors")
        try:
            return self.work.error(numerics.copied(results[0]), expected)
        except Exception as error:  # for example another number of outputs
            if is_out_of_memory(error):
                raise
            raise Wrong(f"returns a result that cannot be compared: {_summary(error)}") from error

    @staticmethod
    def _require(error: float, allowed: float, when: str = "") -> None:
        if not error <= allowed:
            raise Wrong(f"error {error:.3g} against the reference{when}, {allowed:.3g} is allowed")

    def _expected(self, inputs: tuple) -> Any:
        return self.result(self.work.reference, numerics.in_float64(inputs))

    def _check(self) -> None:
        """Set each provider's error; those whose error is too large get status "wrong"."""
        work, inputs = self.work, self.inputs.draws[0]
        compared: Mapping[str, Any] = work.providers if work.without_dropout is None else work.without_dropout
        expected = self._expected(inputs)

        def check(name: str, entry: Entry) -> None:
            first = self.entries.get(work.plain)
            plain = first.error if first is not None and first.status == "timed" and name != work.plain else None
            entry.allowed = numerics.allowed(self.case.dtype, plain) if work.allowed is None else work.allowed
            entry.error = self._error_when_stopped(compared[name], name, inputs, expected)
            self._require(entry.error, entry.allowed)
            if work.without_dropout is not None:
                trained = () if work.trained is None else tuple(work.trained[name].parameters())
                began = numerics.copied(trained)
                one = numerics.tensors(self.result(entry.function, inputs))
                numerics.overwrite(trained, began)
                other = numerics.tensors(self.result(entry.function, inputs))
                if all(torch.equal(a, b) for a, b in zip(one, other)):
                    raise Wrong("two runs with dropout gave equal results: it ignores dropout")

        # plain first: its error bounds the others'
        for name in sorted(self.standing(), key=lambda name: name != work.plain):
            self._try(check, [name])
            if self.inputs.written(inputs) and self.entries[name].status == "timed":
                self.entries[name].status, self.entries[name].reason = "wrong", "writes over its inputs"

    def _check_again(self) -> None:
        """After the timed runs: new contents in the same memory must give the result for the new contents."""
        inputs = self.inputs.draws[0]
        pure = self.case.passes in PURE_PASSES and self.work.without_dropout is None
        if not pure or not numerics.tensors(inputs):
            return
        fresh = self.inputs.draw(ROTATION)
        if not numerics.overwrite(inputs, fresh):
            return
        expected = self._expected(fresh)

        def check(name: str, entry: Entry) -> None:
            error = self._error_when_stopped(entry.function, name, inputs, expected)
            # plain's error on this draw is unknown: allow half the digits, as for plain itself
            allowed = max(entry.allowed or 0.0, numerics.allowed(self.case.dtype, None))
            self._require(error, allowed, " after the timed runs, with new contents in the inputs' memory")

        self._try(check)

    def _run(self, name: str, entry: Entry, observe: Callable[[Callable[[], Any]], Any]) -> tuple[Any, tuple]:
        """(observe(run), inputs) for one run of a provider on its next inputs."""
        inputs = self.inputs.next(name, self._round)
        versions = [x._version for x in numerics.tensors(inputs)]
        with self.gradients():
            result = observe(self.prepare(entry.function, inputs))
        if name not in self.work.overwrites and [x._version for x in numerics.tensors(inputs)] != versions:
            self.inputs.written(inputs)  # restores them
            raise Wrong("writes over its inputs in later runs")
        return result, inputs

    def _warm(self, name: str, entry: Entry) -> None:
        for _ in range(self.work.warm_up):
            self._run(name, entry, lambda run: run())
        if self.work.rounds is None:  # long runs are not repeated to measure memory
            if name not in ELSEWHERE:
                entry.peak_bytes, _ = self._run(name, entry, self.clock.peak_bytes)
            held_bytes = getattr(entry.function, "held_bytes", None)
            if entry.peak_bytes is not None and held_bytes is not None:
                entry.peak_bytes += held_bytes()
            if name not in UNSEEN and held_bytes is None:
                entry.launches, _ = self._run(name, entry, self.clock.launches)

    def _time(self, name: str, entry: Entry) -> None:
        def observe(run: Callable[[], Any]) -> tuple[float, str | None, Any]:
            results: list[Any] = []  # keeps the result, whose deallocation must not be timed
            elapsed = self.clock.microseconds(lambda: results.append(run()))
            return elapsed, numerics.lazy(results[0]), self.work.details and self.work.details(results[0])

        (elapsed, kind, entry.details), inputs = self._run(name, entry, observe)
        if kind:
            raise Wrong(f"returns a {kind} in timed runs, which may be computed only when it is read")
        entry.times.append(elapsed)
        if self.work.units is not None:
            entry.units.append(self.work.units(*inputs))

    def measure(self, seconds: float, least_rounds: int) -> None:
        """Check the providers, time the right ones in turns for about `seconds`, twice if noisy, and check again."""
        self._try(self._first_call)
        self._check()
        self._try(self._warm)
        order = random.Random(self.setting.seed)
        done = self._rounds(0, seconds, least_rounds, order)
        if self.setting.level != "smoke" and self._noisy():
            for name in self.standing():
                self.entries[name].times, self.entries[name].units = [], []
            self._rounds(done, seconds, least_rounds, order)
        if sum(map(self.inputs.written, self.inputs.draws)):  # checks, and restores, all of them
            for name in self.standing():  # behind the tensors' version counters, so it may have been any of them
                self.entries[name].status = "wrong"
                self.entries[name].reason = "some provider of this case wrote over timed inputs"
        self._check_again()

    def _rounds(self, first: int, seconds: float, least_rounds: int, order: random.Random) -> int:
        """Run timed rounds from number `first` on, with the machine's load; returns the number of the next round."""
        watch, end, self._round, exact = Watch(), time.monotonic() + seconds, first, self.work.rounds
        while names := self.standing():
            if self._round - first >= (exact or least_rounds) and (exact or time.monotonic() >= end):
                break
            order.shuffle(names)
            self._try(self._time, names)
            self._round += 1
        done, self.load, self._round = self._round, watch.read(), None
        return done

    def _noisy(self) -> bool:
        quantiles = (np.quantile(self.entries[name].times, (0.2, 0.5, 0.8)) for name in self.standing())
        return disturbed(self.load) or any(p80 - p20 > MOST_SPREAD * p50 for p20, p50, p80 in quantiles)


def _record(trial: Trial, name: str, ceilings: Machine | None, machine: Mapping[str, Any] | None) -> Record:
    case, work, setting, entry, load = trial.case, trial.work, trial.setting, trial.entries[name], trial.load
    timed = entry.status == "timed"
    row: Record = {
        "schema": 1,
        "group": case.group,
        "case": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "pass": case.passes,
        "provider": name,
        "status": entry.status,
        "reason": entry.reason,
        "clock": trial.clock.name,
        **dict.fromkeys(("time_us", "throughput", "tflop_per_s", "gb_per_s", "roofline")),
        "peak_bytes": entry.peak_bytes if timed else None,
        "launches": entry.launches if timed else None,
        "compile_s": rounded(entry.compile_s) if timed else None,
        "error": None,
        "seed": setting.seed,
        "level": setting.level,
        "threads": setting.threads,
        "machine": dict(machine or {}),
    }
    if entry.error is not None and entry.allowed is not None:
        row["error"] = {"value": rounded(entry.error), "allowed": rounded(entry.allowed), "measure": work.measure}
    if timed and entry.times:
        p20, p50, p80 = np.quantile(entry.times, (0.2, 0.5, 0.8)).tolist()
        row["time_us"] = {"p20": rounded(p20), "p50": rounded(p50), "p80": rounded(p80), "runs": len(entry.times)}
        row |= {"load": load, "spread": rounded(spread(row["time_us"]))} if load else {}
        row["noisy"] = setting.level != "smoke" and (disturbed(load) or noisy(row))
        fewer_bits = " int8" in name and case.dtype != "int8"  # the ceilings are for the case's dtype
        row |= _rates(case.cost, p50, None if fewer_bits else ceilings)
        if work.unit is not None and entry.units:
            # over the median time: inputs are the same for all providers, so throughputs compare as times do
            row["throughput"] = {"value": rounded(statistics.mean(entry.units) / p50 * 1e6), "unit": work.unit}
        if entry.details is not None:
            row["details"] = entry.details
    return row


def _rates(cost: Cost | None, p50: float, ceilings: Machine | None) -> Record:
    """TFLOP/s, GB/s and the share of the roofline."""
    if cost is None:
        return {}
    result: Record = {
        "tflop_per_s": rounded(cost.flops / p50 / 1e6) if cost.flops else None,
        "gb_per_s": rounded(cost.bytes / p50 / 1e3) if cost.bytes else None,
    }
    if ceilings is not None:
        floor = 1e6 * cost.seconds(ceilings)
        result["roofline"] = {
            "floor_us": rounded(floor),
            "share": rounded(floor / p50),
            "ceilings": {"gb_per_s": rounded(ceilings.bandwidth / 1e9), "tflop_per_s": rounded(ceilings.flops / 1e12)},
        }
    return result


def run(
    case: Case,
    setting: Setting,
    clock: Clock,
    seconds: float,
    *,
    ceilings: Machine | None = None,
    machine: Mapping[str, Any] | None = None,
    least_rounds: int = 5,
) -> list[Record]:
    """Measure a case, all providers in turns for about `seconds` in total; returns one record per provider."""
    with same_threads():
        trial = Trial(case, case.make(), setting, clock)
    trial.measure(seconds, least_rounds)
    result = [_record(trial, name, ceilings, machine) for name in trial.entries]
    del trial
    gc.collect()
    if "torch._dynamo" in sys.modules:  # the next case compiles, and times it, for its own shape
        torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    return result
