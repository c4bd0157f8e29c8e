"""Runs one case with every provider of it in turns, checks what each computes, and only then looks at the clock.

A group of benchmarks is a module with one function, `cases(setting) -> list[Case]`, and a line in
benchmarks/__main__.py. A Case names the work, its shape and pass, and knows how to make it; `make()` returns a Work
when the case's turn has come, because all works together would not fit in memory. A Work brings

    inputs(i)      the i-th tuple of arguments, always the same; the harness has seeded torch before it calls
    providers      name -> function of those arguments, or Absent(how to install it)
    reference      the same function in float64: it is called with the inputs cast so

A provider never sees the clock, and never the same input twice in a row: the harness draws ROTATION inputs, hands them
round, empties the caches and synchronizes. Within a round of timed runs all providers get the same input, so that their
times and throughputs are of the same work. A case whose times spread, or that was timed on a busy machine (machine.py),
is timed once more, and marked noisy when that is no better.

The harness refuses inputs that are constant, a provider whose numbers are wrong at the moment the clock stops, before
the timed runs or after them (status "wrong", no time), one that writes over its inputs, one that answers from memory
when the same memory has new contents, one whose answer computes itself only when it is looked at, and one that leaves
out the dropout it was given. What a pass means:

    forward            function(*inputs) without gradients, as in inference
    training forward   function(*inputs), keeping what its backward needs
    backward           the gradients of the outputs of a fresh graph, built before the clock starts on cold caches, with
                       respect to the inputs that ask for one and the parameters of a provider that is a module
    forward+backward   both, in one run
    step, decode, ...  function(*inputs) as it is; timed by the host between two synchronizations, not by device events

A provider that uses memory in a run and keeps it until the next, as a CUDA graph does, has a method held_bytes(): the
allocator sees none of it during a run. It is added to the peak; what a graph launches is not counted.

`run(case, setting, clock, seconds)` returns one record a provider (schemas.yaml says what is in it).
"""

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import numerics, rows
from benchmarks.measure.case import GRADIENT_PASSES, PURE_PASSES, Case, Clock, Entry, Setting, Work
from benchmarks.measure.machine import MOST_SPREAD, Watch, disturbed
from benchmarks.measure.providers import ELSEWHERE, UNSEEN, Absent, Provider
from benchmarks.measure.records import Record
from fasttfm.kernels.proof.costs import Machine

ROTATION = 4
"""Inputs that are handed round."""
REFUSALS = (Exception, SystemExit)
"""Exceptions of a provider that do not end the run."""


class Inputs:
    """The inputs of a case: handed round, to a provider never one twice in a row; and watched."""

    def __init__(self, case: Case, work: Work, seed: int) -> None:
        """Raises ValueError for what would flatter, constant or shared inputs, and for what cannot be drawn again."""
        self._case, self._work, self._seed = case, work, seed
        self.draws = [self.draw(i) for i in range(ROTATION)]
        numerics.refuse_flattering_inputs(self.draws)
        if not numerics.equal(self.draws[0], self.draw(0)):
            raise ValueError(
                "inputs(0) gave other numbers the second time: draw from torch's generator or from i alone"
            )
        self._untimed: dict[str, int] = {}

    def draw(self, i: int) -> tuple:
        """The i-th inputs, anew."""
        torch.manual_seed(self._seed + i)
        inputs = self._work.inputs(i)
        if self._case.passes == "forward":
            # as in inference; some providers refuse to compute without a gradient otherwise
            for x in numerics.tensors(inputs):
                x.requires_grad_(False)
        return inputs

    def next(self, provider: str, round_: int | None = None) -> tuple:
        """Return a timed round's draws, the same for all providers; None: of a run before, never that of round 0."""
        if round_ is None:
            round_ = self._untimed[provider] = self._untimed.get(provider, 0) % (ROTATION - 1) + 1
        return self.given(provider, self.draws[round_ % ROTATION])

    def given(self, provider: str, inputs: tuple) -> tuple:
        """The inputs, copied for a provider that is documented to write over them."""
        return numerics.copied(inputs) if provider in self._work.overwrites else inputs

    def written(self, inputs: tuple) -> bool:
        """Return whether these inputs, if some of the draws, were written over; they are then as drawn again."""
        position = next((i for i, each in enumerate(self.draws) if each is inputs), None)
        if position is None or numerics.equal(inputs, drawn := self.draw(position)):
            return False
        numerics.overwrite(inputs, drawn)
        return True


def _parameters(function: Provider) -> list[Tensor]:
    return [p for p in function.parameters() if p.requires_grad] if isinstance(function, nn.Module) else []


class Wrong(Exception):
    """Fault of a provider for which no time may be printed."""


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


@contextmanager
def same_threads() -> Iterator[None]:
    """The CPU threads that torch computes with are afterwards what they were.

    OpenMP keeps one number for a whole thread, and a provider may set it.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Trial:
    """A case while it is measured: its inputs, and what is known so far of every provider."""

    def __init__(self, case: Case, work: Work, setting: Setting, clock: Clock) -> None:
        self.case, self.work, self.setting, self.clock = case, work, setting, clock
        self.inputs = Inputs(case, work, setting.seed)
        self.load: dict[str, float | None] | None = None
        self._round: int | None = None
        """The number of a timed round."""
        self.entries = {
            name: Entry(None, "absent", provider.install) if isinstance(provider, Absent) else Entry(provider)
            for name, provider in work.providers.items()
        }

    def begin(self) -> None:
        """Calls every provider once and checks it: what may be timed has status "timed"."""
        self._try(self._first_call)
        self._check()

    def standing(self) -> list[str]:
        """Providers that may be timed."""
        return [name for name, entry in self.entries.items() if entry.status == "timed"]

    def gradients(self) -> torch.set_grad_enabled:
        """The context of a pass: without gradients in inference."""
        return torch.set_grad_enabled(self.case.passes != "forward")

    def prepare(self, function: Provider, inputs: tuple) -> Callable[[], Any]:
        """Return what the clock is to see of a pass: for a backward alone, the forward is run here."""
        if self.case.passes not in GRADIENT_PASSES:
            return lambda: function(*inputs)
        wanted = [x for x in numerics.tensors(inputs) if x.requires_grad] + _parameters(function)

        def forward() -> list[Tensor]:
            outputs = [x for x in numerics.tensors(function(*inputs)) if x.requires_grad]
            if not outputs:
                raise RuntimeError("returned nothing that has a gradient")
            return outputs

        if self.case.passes == "forward+backward":

            def both() -> Any:
                outputs = forward()
                return torch.autograd.grad(outputs, wanted, [self.work.gradient(o) for o in outputs])

            return both
        outputs = forward()
        cotangents = [self.work.gradient(o) for o in outputs]
        return lambda: torch.autograd.grad(outputs, wanted, cotangents)

    def answer(self, function: Provider, inputs: tuple) -> Any:
        """Return what is compared: the output; with gradients [outputs], [input gradients], [the parameters' norm]."""
        if self.case.passes not in GRADIENT_PASSES:
            with self.gradients():
                return function(*inputs)
        outputs = numerics.tensors(function(*inputs))
        differentiable = [x for x in outputs if x.requires_grad]
        wanted = [x for x in numerics.tensors(inputs) if x.requires_grad]
        cotangents = [self.work.gradient(o) for o in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted + _parameters(function), cotangents)
        norms = [g.double().norm() for g in gradients[len(wanted) :]]  # the same however a module splits its parameters
        norm = [torch.stack(norms).norm()] if norms else []
        return [o.detach() for o in outputs], list(gradients[: len(wanted)]), norm

    def _try(self, act: Callable[[str, Entry], None], names: Sequence[str] = ()) -> None:
        """act on every provider that still stands, or these; one that raises is refused, in its own words, or wrong."""
        for name in names or self.standing():
            entry = self.entries[name]
            try:
                with same_threads():
                    act(name, entry)
            except Wrong as error:
                entry.fail("wrong", str(error))
            except REFUSALS as error:  # a provider that refuses these inputs is a result
                entry.fail("refused", _words(error))

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

    def _when_time_is_up(self, function: Provider, inputs: tuple, expected: Any) -> Any:
        """The answer as it stands when the clock stops: what is not finished then is wrong."""
        for x in numerics.tensors(expected):  # so that freed memory does not hold the right answer by chance
            torch.full(x.shape, -77, dtype=getattr(torch, self.case.dtype), device=x.device)
        made: list[Any] = []
        self.clock.microseconds(lambda: made.append(self.answer(function, inputs)))
        if kind := numerics.unread(made[0]):
            raise Wrong(f"answers with a {kind}, which may compute only when it is looked at: return tensors")
        return numerics.copied(made[0])

    def _error(self, result: Any, expected: Any) -> float:
        try:
            return self.work.error(result, expected)
        except Exception as error:  # not even of the shape that can be compared
            raise Wrong(f"an answer that cannot be compared: {_words(error)}") from error

    @staticmethod
    def _hold(error: float, allowed: float, when: str = "") -> None:
        if not error <= allowed:
            raise Wrong(f"error {error:.3g} against the reference{when}, {allowed:.3g} is allowed")

    def _expected(self, inputs: tuple) -> Any:
        return self.answer(self.work.reference, numerics.in_float64(inputs))

    def _check(self) -> None:
        """Gives every provider its error, and status "wrong" to one whose error is too large."""
        work, inputs = self.work, self.inputs.draws[0]
        compared: Mapping[str, Any] = work.providers if work.without_dropout is None else work.without_dropout
        expected = self._expected(inputs)

        def check(name: str, entry: Entry) -> None:
            first = self.entries.get(work.plain)
            plain = first.error if first is not None and first.status == "timed" and name != work.plain else None
            entry.allowed = numerics.allowed(self.case.dtype, plain) if work.allowed is None else work.allowed
            result = self._when_time_is_up(compared[name], self.inputs.given(name, inputs), expected)
            entry.error = self._error(result, expected)
            self._hold(entry.error, entry.allowed)
            if work.without_dropout is not None:
                one, other = (numerics.tensors(self.answer(entry.function, inputs)) for _ in range(2))
                if all(torch.equal(a, b) for a, b in zip(one, other)):
                    raise Wrong("two runs with dropout gave the same: it leaves dropout out")

        # the plain one first: the others' bound is made from its error
        for name in sorted(self.standing(), key=lambda name: name != work.plain):
            self._try(check, [name])
            if self.inputs.written(inputs) and self.entries[name].status == "timed":
                self.entries[name].fail("wrong", "writes over its inputs")

    def _check_again(self) -> None:
        """After the timed runs: the same memory with new contents must give the right answer to these."""
        inputs = self.inputs.draws[0]
        pure = self.case.passes in PURE_PASSES and self.work.without_dropout is None
        if not pure or not numerics.tensors(inputs):
            return
        fresh = self.inputs.draw(ROTATION)
        if not numerics.overwrite(inputs, fresh):
            return
        expected = self._expected(fresh)

        def check(name: str, entry: Entry) -> None:
            result = self._when_time_is_up(entry.function, self.inputs.given(name, inputs), expected)
            # another draw has another error of the plain one, which nobody took: half of the digits, as for that one
            allowed = max(entry.allowed or 0.0, numerics.allowed(self.case.dtype, None))
            now = ", by now or where its inputs' memory has new contents"
            self._hold(self._error(result, expected), allowed, now)

        self._try(check)

    def _run(self, name: str, entry: Entry, look: Callable[[Callable[[], Any]], Any]) -> tuple[Any, tuple]:
        """look(run) at a run of this provider on its next inputs, and these."""
        inputs = self.inputs.next(name, self._round)
        versions = [x._version for x in numerics.tensors(inputs)]
        with self.gradients():
            result = look(self.prepare(entry.function, inputs))
        if name not in self.work.overwrites and [x._version for x in numerics.tensors(inputs)] != versions:
            self.inputs.written(inputs)  # puts them right
            raise Wrong("writes over its inputs in later runs")
        return result, inputs

    def _warm(self, name: str, entry: Entry) -> None:
        for _ in range(self.work.warm_up):
            self._run(name, entry, lambda act: act())
        if self.work.rounds is None:  # a run too long to repeat is not repeated to be counted
            if name not in ELSEWHERE:
                entry.peak_bytes, _ = self._run(name, entry, self.clock.peak_bytes)
            held_bytes = getattr(entry.function, "held_bytes", None)
            if entry.peak_bytes is not None and held_bytes is not None:
                entry.peak_bytes += held_bytes()
            if name not in UNSEEN and held_bytes is None:
                entry.launches, _ = self._run(name, entry, self.clock.launches)

    def _time(self, name: str, entry: Entry) -> None:
        def look(act: Callable[[], Any]) -> tuple[float, str | None, Any]:
            made: list[Any] = []  # dropped when the clock has stopped: freeing it is not the provider's work
            taken = self.clock.microseconds(lambda: made.append(act()))
            return taken, numerics.unread(made[0]), self.work.details and self.work.details(made[0])

        (taken, kind, details), inputs = self._run(name, entry, look)
        if kind:
            raise Wrong(f"answers timed runs with a {kind}, which may compute only when it is looked at")
        entry.times.append(taken)
        entry.details = details
        if self.work.units is not None:
            entry.units.append(self.work.units(*inputs))

    def measure(self, seconds: float, least_rounds: int, now: Callable[[], float]) -> None:
        """Times those that stand in turns for about `seconds`, twice where that is noisy, and checks them again."""
        self._try(self._warm)
        order = random.Random(self.setting.seed)
        done = self._rounds(0, seconds, least_rounds, now, order)
        if self.setting.level != "smoke" and self._noisy():
            for name in self.standing():
                self.entries[name].forget()
            self._rounds(done, seconds, least_rounds, now, order)
        written = [self.inputs.written(inputs) for inputs in self.inputs.draws]
        if any(written):  # past the tensors' version counters, so that nobody knows who it was
            for name in self.standing():
                self.entries[name].fail("wrong", "some provider of this case wrote over timed inputs")
        self._check_again()

    def _rounds(
        self, first: int, seconds: float, least_rounds: int, now: Callable[[], float], order: random.Random
    ) -> int:
        """Timed rounds from that number on, and the machine's load meanwhile; the number of the next."""
        watch, end, self._round = Watch(), now() + seconds, first
        while names := self.standing():
            if self._round - first >= (self.work.rounds or least_rounds) and (self.work.rounds or now() >= end):
                break
            order.shuffle(names)  # who follows whom changes from round to round
            self._try(self._time, names)
            self._round += 1
        done, self.load, self._round = self._round, watch.read(), None
        return done

    def _noisy(self) -> bool:
        """Return whether the runs so far are too noisy to be claimed."""
        quantiles = (np.quantile(self.entries[name].times, (0.2, 0.5, 0.8)) for name in self.standing())
        return disturbed(self.load) or any(p80 - p20 > MOST_SPREAD * p50 for p20, p50, p80 in quantiles)


def run(
    case: Case,
    setting: Setting,
    clock: Clock,
    seconds: float,
    *,
    ceilings: Machine | None = None,
    machine: Mapping[str, Any] | None = None,
    least_rounds: int = 5,
    now: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """One record for every provider of the case, timed in turns for about `seconds` altogether."""
    with same_threads():
        trial = Trial(case, case.make(), setting, clock)
    trial.begin()
    trial.measure(seconds, least_rounds, now)
    result = [
        rows.record(case, trial.work, name, entry, setting, clock, ceilings, machine, trial.load)
        for name, entry in trial.entries.items()
    ]
    del trial
    gc.collect()
    if "torch._dynamo" in sys.modules:  # so that the next case compiles for its own shape, and says how long that took
        torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    return result
