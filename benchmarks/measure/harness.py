"""Runs one case with every provider of it in turns, checks what each computes, and only then looks at the clock.

A group of benchmarks is a module with one function, `cases(setting) -> list[Case]`, and a line in
benchmarks/__main__.py. A Case names the work, its shape and pass, and knows how to make it; `make(setting)` returns a
Work when the case's turn has come, because all works together would not fit in memory. A Work brings

    inputs(i)      the i-th tuple of arguments, drawn anew; the harness has seeded torch before it calls
    providers      name -> function of those arguments, or Absent(how to install it)
    reference      the same function in float64: it is called with the inputs cast so

A provider never sees the clock, and never the same input twice in a row: the harness draws ROTATION inputs, hands them
round, empties the caches and synchronizes. It refuses inputs that are constant, a provider whose numbers are wrong at
the moment the clock stops, before the timed runs or after them (status "wrong", no time), one that writes over its
inputs, one that answers from memory when the same memory has new contents, one whose answer computes itself only when
it is looked at, and one that leaves out the dropout it was given. What a pass means:

    forward            function(*inputs) without gradients, as in inference
    training forward   function(*inputs), keeping what its backward needs
    backward           the gradients of the outputs of a fresh graph, built before the clock starts on cold caches, with
                       respect to the inputs that ask for one and the parameters of a provider that is a module
    forward+backward   both, in one run
    step, decode, ...  function(*inputs) as it is; timed by the host between two synchronizations, not by device events

`run(case, setting, clock, seconds)` returns one record a provider (schemas.py says what is in it).
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import numerics, rows
from benchmarks.measure.case import GRADIENT_PASSES, PURE_PASSES, Case, Ceilings, Clock, Entry, Setting, Work
from benchmarks.measure.providers import UNSEEN, Absent, Provider
from benchmarks.measure.records import Record

ROTATION = 4
"""Inputs that are handed round."""
REFUSALS = (Exception, SystemExit)
"""What a provider may raise without ending the run."""


class Rotation:
    """Hands inputs round: never one twice in a row, neither in all nor to one provider."""

    def __init__(self, draws: list[tuple], overwrites: frozenset[str] = frozenset()) -> None:
        """overwrites: providers that get copies."""
        if len(draws) < 3:
            raise ValueError(f"{len(draws)} inputs cannot be handed round: three are needed at least")
        self._draws, self._overwrites = draws, overwrites
        self._last = -1
        self._last_of: dict[str, int] = {}

    def next(self, provider: str) -> tuple:
        index = (self._last + 1) % len(self._draws)
        if index == self._last_of.get(provider):
            index = (index + 1) % len(self._draws)
        self._last = self._last_of[provider] = index
        return numerics.copied(self._draws[index]) if provider in self._overwrites else self._draws[index]


def draw(case: Case, work: Work, seed: int, count: int = ROTATION) -> list[tuple]:
    """The inputs of a work. Raises ValueError where they are constant or shared, so that a time would flatter."""
    draws = [_drawn(case, work, seed, i) for i in range(count)]
    numerics.refuse_flattering_inputs(draws)
    return draws


def _drawn(case: Case, work: Work, seed: int, i: int) -> tuple:
    torch.manual_seed(seed + i)
    inputs = work.inputs(i)
    if case.passes == "forward":  # as in inference; some providers refuse to compute without a gradient otherwise
        for x in numerics.tensors(inputs):
            x.requires_grad_(False)
    return inputs


class Guard:
    """Knows what the inputs held when they were drawn."""

    def __init__(self, case: Case, work: Work, draws: list[tuple], seed: int) -> None:
        self._draws, self._again = draws, lambda i: _drawn(case, work, seed, i)
        self._drawn = [numerics.fingerprint(inputs) for inputs in draws]

    def written(self, inputs: tuple) -> bool:
        """Whether these inputs, if they are some of the draws, were written over; they are then as drawn again."""
        position = next((i for i, each in enumerate(self._draws) if each is inputs), None)
        if position is None or numerics.fingerprint(inputs) == self._drawn[position]:
            return False
        numerics.overwrite(inputs, self._again(position))
        return True


def _parameters(function: Provider) -> list[Tensor]:
    return [p for p in function.parameters() if p.requires_grad] if isinstance(function, nn.Module) else []


def prepare(passes: str, function: Provider, inputs: tuple, gradient: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """What the clock is to see of a pass: for a backward alone, the forward is run here."""
    if passes not in GRADIENT_PASSES:
        return lambda: function(*inputs)
    wanted = [x for x in numerics.tensors(inputs) if x.requires_grad] + _parameters(function)

    def forward() -> list[Tensor]:
        outputs = [x for x in numerics.tensors(function(*inputs)) if x.requires_grad]
        if not outputs:
            raise RuntimeError("returned nothing that has a gradient")
        return outputs

    if passes == "forward+backward":

        def both() -> Any:
            outputs = forward()
            return torch.autograd.grad(outputs, wanted, [gradient(o) for o in outputs])

        return both
    outputs = forward()
    cotangents = [gradient(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, wanted, cotangents)


def answer(passes: str, function: Provider, inputs: tuple, gradient: Callable[[Tensor], Tensor]) -> Any:
    """What the check compares: the output; in passes with gradients [outputs], [input gradients], parameters' norm."""
    if passes not in GRADIENT_PASSES:
        with torch.set_grad_enabled(passes != "forward"):
            return function(*inputs)
    outputs = numerics.tensors(function(*inputs))
    differentiable = [x for x in outputs if x.requires_grad]
    parameters = _parameters(function)
    wanted = [x for x in numerics.tensors(inputs) if x.requires_grad]
    cotangents = [gradient(o) for o in differentiable]
    gradients = torch.autograd.grad(differentiable, wanted + parameters, cotangents)
    norms = [g.double().norm() for g in gradients[len(wanted) :]]  # the same however a module splits its parameters
    norm = [torch.stack(norms).norm()] if norms else []
    return [o.detach() for o in outputs], list(gradients[: len(wanted)]), norm


class Wrong(Exception):
    """What a provider did that no time may be printed for."""


def _words(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"[:300]


def _first_call(entry: Entry, case: Case, work: Work, inputs: tuple, guard: Guard, device: torch.device) -> None:
    assert entry.function is not None
    start = time.perf_counter()
    with torch.set_grad_enabled(case.passes != "forward"):
        prepare(case.passes, entry.function, inputs, work.gradient)()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    entry.compile_s = time.perf_counter() - start
    if guard.written(inputs):
        entry.fail("wrong", "writes over its inputs")


def _when_time_is_up(clock: Clock, case: Case, work: Work, function: Provider, inputs: tuple, expected: Any) -> Any:
    """The answer as it stands when the clock stops: what is not finished then is wrong."""
    for x in numerics.tensors(expected):  # so that freed memory does not hold the right answer by chance
        torch.full(x.shape, -77, dtype=getattr(torch, case.dtype), device=x.device)
    made: list[Any] = []
    clock.microseconds(lambda: made.append(answer(case.passes, function, inputs, work.gradient)))
    kind = numerics.unread(made[0])
    return Unread(kind) if kind else numerics.copied(made[0])


@dataclass(frozen=True, slots=True)
class Unread:
    """In the place of an answer that may compute itself only when it is looked at."""

    kind: str


def _compare(entry: Entry, work: Work, result: Any, expected: Any, allowed: float, when: str = "") -> None:
    """Status "wrong" for an answer that is not the expected one."""
    if isinstance(result, Unread):
        entry.fail(
            "wrong", f"answers with a {result.kind}, which may compute only when it is looked at: return tensors"
        )
        return
    try:
        entry.error = work.error(result, expected)
    except Exception as error:  # not even of the shape that can be compared
        entry.fail("wrong", f"an answer that cannot be compared: {_words(error)}")
        return
    if not entry.error <= allowed:
        entry.fail("wrong", f"error {entry.error:.3g} against the reference{when}, {allowed:.3g} is allowed")


def _check(entries: dict[str, Entry], case: Case, work: Work, inputs: tuple, guard: Guard, clock: Clock) -> None:
    """Gives every provider its error, and status "wrong" to one whose error is too large."""
    compared: Mapping[str, Any] = work.providers if work.without_dropout is None else work.without_dropout
    expected = answer(case.passes, work.reference, numerics.in_float64(inputs), work.gradient)
    # the plain one first: the others' bound is made from its error
    for name in sorted((n for n, e in entries.items() if e.status == "timed"), key=lambda n: n != work.plain):
        entry = entries[name]
        first = entries.get(work.plain)
        plain = first.error if first is not None and first.status == "timed" and name != work.plain else None
        entry.allowed = numerics.allowed(case.dtype, plain) if work.allowed is None else work.allowed
        try:
            operands = numerics.copied(inputs) if name in work.overwrites else inputs
            with same_threads():
                result = _when_time_is_up(clock, case, work, compared[name], operands, expected)
            _compare(entry, work, result, expected, entry.allowed)
            if entry.status == "timed" and work.without_dropout is not None:
                _check_dropout(entry, case, work, inputs)
        except REFUSALS as error:
            entry.fail("refused", _words(error))
        if guard.written(inputs) and entry.status == "timed":
            entry.fail("wrong", "writes over its inputs")


def _check_dropout(entry: Entry, case: Case, work: Work, inputs: tuple) -> None:
    assert entry.function is not None
    one, other = (numerics.tensors(answer(case.passes, entry.function, inputs, work.gradient)) for _ in range(2))
    if all(torch.equal(a, b) for a, b in zip(one, other)):
        entry.fail("wrong", "two runs with dropout gave the same: it leaves dropout out")


def _check_again(
    entries: dict[str, Entry], case: Case, work: Work, draws: list[tuple], seed: int, clock: Clock
) -> None:
    """After the timed runs: the same memory with new contents must give the right answer to these."""
    inputs = draws[0]
    if case.passes not in PURE_PASSES or work.without_dropout is not None or not numerics.tensors(inputs):
        return
    fresh = _drawn(case, work, seed, ROTATION)
    if not numerics.overwrite(inputs, fresh):
        return
    expected = answer(case.passes, work.reference, numerics.in_float64(fresh), work.gradient)

    def check(name: str, entry: Entry) -> None:
        assert entry.function is not None
        first = entry.error, entry.allowed
        operands = numerics.copied(inputs) if name in work.overwrites else inputs
        result = _when_time_is_up(clock, case, work, entry.function, operands, expected)
        # another draw has another error of the plain one, which nobody took: half of the digits, as for that one
        allowed = max(entry.allowed or 0.0, numerics.allowed(case.dtype, None))
        _compare(entry, work, result, expected, allowed, ", by now or where its inputs' memory has new contents")
        entry.error, entry.allowed = first

    _try(entries, check)


def _try(entries: dict[str, Entry], act: Callable[[str, Entry], None]) -> None:
    """act on every provider that still stands; one that raises is refused, in its own words, or wrong."""
    for name, entry in entries.items():
        if entry.status == "timed":
            try:
                with same_threads():
                    act(name, entry)
            except Wrong as error:
                entry.fail("wrong", str(error))
            except REFUSALS as error:  # a provider that refuses these inputs is a result
                entry.fail("refused", _words(error))


@contextmanager
def same_threads() -> Iterator[None]:
    """The CPU threads that torch computes with are afterwards what they were.

    OpenMP keeps one number for the whole thread: CTranslate2 with a thread for each of several workers sets it to 1,
    and whoever came after it was timed with one core.
    """
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def begun(
    case: Case,
    work: Work,
    rotation: Rotation,
    draws: list[tuple],
    seed: int,
    device: torch.device,
    clock: Clock,
) -> tuple[dict[str, Entry], Guard]:
    """Every provider called once and checked: what may be timed has status "timed". And who watches the inputs."""
    entries = {
        name: Entry(None, "absent", provider.install) if isinstance(provider, Absent) else Entry(provider)
        for name, provider in work.providers.items()
    }
    guard = Guard(case, work, draws, seed)
    _try(entries, lambda name, entry: _first_call(entry, case, work, rotation.next(name), guard, device))
    _check(entries, case, work, draws[0], guard, clock)
    return entries, guard


def run(
    case: Case,
    setting: Setting,
    clock: Clock,
    seconds: float,
    *,
    ceilings: Ceilings | None = None,
    machine: Mapping[str, Any] | None = None,
    least_rounds: int = 5,
    now: Callable[[], float] = time.monotonic,
) -> list[Record]:
    """One record for every provider of the case, timed in turns for about `seconds` altogether."""
    with same_threads():
        work = case.make(setting)
    entries = _measure(case, work, setting, clock, seconds, least_rounds, now)
    result = [
        rows.record(case, work, name, entry, setting, clock, ceilings, machine) for name, entry in entries.items()
    ]
    del work, entries
    gc.collect()
    if "torch._dynamo" in sys.modules:  # so that the next case compiles for its own shape, and says how long that took
        torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    return result


def _measure(
    case: Case,
    work: Work,
    setting: Setting,
    clock: Clock,
    seconds: float,
    least_rounds: int,
    now: Callable[[], float],
) -> dict[str, Entry]:
    draws = draw(case, work, setting.seed)
    rotation = Rotation(draws, work.overwrites)
    entries, guard = begun(case, work, rotation, draws, setting.seed, setting.device, clock)

    def one(name: str, entry: Entry, look: Callable[[Callable[[], Any]], Any]) -> tuple[Any, tuple]:
        """look(run) at a run of this provider on its next inputs."""
        assert entry.function is not None
        inputs = rotation.next(name)
        versions = [x._version for x in numerics.tensors(inputs)]
        with torch.set_grad_enabled(case.passes != "forward"):
            result = look(prepare(case.passes, entry.function, inputs, work.gradient))
        if name not in work.overwrites and [x._version for x in numerics.tensors(inputs)] != versions:
            guard.written(inputs)  # puts them right
            raise Wrong("writes over its inputs in later runs")
        return result, inputs

    def warm(name: str, entry: Entry) -> None:
        for _ in range(work.warm_up):
            one(name, entry, lambda act: act())
        if work.rounds is None:  # a run too long to repeat is not repeated to be counted
            entry.peak_bytes, _ = one(name, entry, clock.peak_bytes)
            if name not in UNSEEN:
                entry.launches, _ = one(name, entry, clock.launches)

    def timed(name: str, entry: Entry) -> None:
        def look(act: Callable[[], Any]) -> tuple[float, str | None]:
            made: list[Any] = []  # dropped when the clock has stopped: freeing it is not the provider's work
            taken = clock.microseconds(lambda: made.append(act()))
            if work.details is not None:
                entry.last = made[0]
            return taken, numerics.unread(made[0])

        (taken, kind), inputs = one(name, entry, look)
        if kind:
            raise Wrong(f"answers timed runs with a {kind}, which may compute only when it is looked at")
        entry.times.append(taken)
        if work.units is not None:
            entry.rates.append(work.units(*inputs) / taken * 1e6)

    _try(entries, warm)
    order = random.Random(setting.seed)
    end = now() + seconds
    done = 0
    while any(e.status == "timed" for e in entries.values()):
        if done >= (work.rounds or least_rounds) and (work.rounds or now() >= end):
            break
        names = list(entries)
        order.shuffle(names)  # who follows whom changes from round to round
        _try({name: entries[name] for name in names}, timed)
        done += 1
    written = [guard.written(inputs) for inputs in draws]
    if any(written):  # past the tensors' version counters, so that nobody knows who it was
        _try(entries, lambda name, entry: entry.fail("wrong", "some provider of this case wrote over timed inputs"))
    _check_again(entries, case, work, draws, setting.seed, clock)
    return entries
