"""Control flow: paths of threads through a kernel's blocks, and concurrent teams of warps.

Threads that diverge at a branch reconverge at its immediate post-dominator (control.py): one side runs up to it, then
the other, then both continue together. The order of blocks in the text does not matter.

In a warp-specialized kernel (producer and consumer warps), diverging warps become teams. A team runs until it waits: at
a barrier for other threads, at an mbarrier for a phase, at setmaxnreg for registers. Then another team runs; if none
can, the kernel has a deadlock. Teams that leave a barrier at the same block merge.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ptx_check.faults import Unsupported

_MOST_BLOCKS = 5_000_000
_TURN = 16
"""Blocks per turn of a program."""
_SWITCHING = 0.3
"""Probability, with a seed, that a team yields early or that a copy arrives."""


@dataclass(slots=True)
class Path:
    """Threads that run in lockstep."""

    block: int
    threads: np.ndarray | None
    """None: all that have not exited."""
    join: int
    """Reconvergence block."""


class Waiting(NamedTuple):
    """A wait of a team: its instruction, its condition, and its description."""

    instruction: int
    over: Callable[[], bool]
    reason: Callable[[], str]


@dataclass(slots=True, eq=False)
class Team:
    """Warps with a stack of paths; the top one runs."""

    paths: list[Path]
    whole: "Team | None" = None
    """Parent team; it continues at the join."""
    parts: int = 0
    """Child teams that have not reached the join."""
    waiting: Waiting | None = None


@dataclass(slots=True)
class Meeting:
    """Threads that have arrived at a barrier."""

    threads: np.ndarray
    teams: list[Team] = field(default_factory=list)


class Teams:
    """The teams of a run. Kernels without specialization have one, which never waits."""

    def __init__(self, run) -> None:
        self.run = run
        facts = run.launch.facts
        self.specialised = facts.specialised
        self.end = len(facts.joins)
        self.team = Team([Path(0, None, self.end)])
        self.all = [self.team]
        seed = run.launch.seed
        self.random = None if seed is None else random.Random(f"{seed} {run.numbers.flat[0]}")
        self.meetings: dict[int, Meeting] = {}
        """Barrier number -> threads that have arrived."""
        self.met: list[Team] = []
        """Teams just released by a barrier."""
        self.stretch = 0
        self.registers = np.full(run.width // 32, facts.maxnreg)
        """Registers per thread of each warp."""

    def steps(self) -> Iterator[None]:
        """Run to the end; yields every _TURN blocks."""
        run = self.run
        functions = run.launch.code.functions
        registers: list = [None] * (4 + run.launch.facts.registers)
        for count in range(1, _MOST_BLOCKS):
            if count % _TURN == 0:
                yield
            if self.specialised and not self.choose():
                break
            paths = self.team.paths
            path = paths[-1]
            run.active = self.living(path, alone=len(paths) == 1 == len(self.all))
            if path.block in (path.join, self.end) or (run.active is not None and not run.active.any()):
                if path.block == self.end and path.threads is not None:
                    run.end_threads(path.threads)
                paths.pop()
                if not paths and not self.remove(self.team):
                    break
                continue
            if self.specialised and run.active is not None:
                run.lead(int(run.active.argmax()) // 32)
            block = path.block
            following = functions[block](run, registers, path.threads)
            if isinstance(following, int):
                self.go(path, following)
            elif len(following) == 2:
                self.scatter(block, *following)
            else:
                self.branch(paths, block, *following)
            if self.met:
                self.merge()
        else:
            raise Unsupported(f"kernel {run.launch.facts.name} runs for {_MOST_BLOCKS} blocks: it may never end")
        if run.checks:
            run.races.barrier(None)

    def remove(self, team: Team) -> bool:
        """Remove a team that has reached its join. Returns whether other teams are left."""
        self.all.remove(team)
        if team.whole is not None:
            team.whole.parts -= 1
        return bool(self.all)

    def living(self, path: Path, *, alone: bool) -> np.ndarray | None:
        """Live threads of a path; None: all."""
        alive = self.run.alive
        if alone:  # all other threads have ended, so their registers may be overwritten
            path.threads = None
        if path.threads is None or alive is None:
            return alive if path.threads is None else path.threads
        path.threads = path.threads & alive
        return path.threads

    def go(self, path: Path, block: int) -> None:
        """Continue a path in a block; -1: its threads exit."""
        path.block = block
        if block < 0:
            path.block = path.join
            self.run.end_threads(self.run.active)

    def branch(self, paths: list[Path], block: int, taken, target: int, following: int) -> None:
        """Split the top path after `block`, unless all its threads take the same branch."""
        path, live = paths[-1], self.run.active
        if taken.size == 1:
            return self.go(path, target if taken.flat[0] else following)
        if taken.shape[1] != 1 and (taken == taken[:, :1]).all():
            taken = taken[:, :1]
        one, other = (part if live is None else part & live for part in (taken, ~taken))
        if not one.any() or not other.any():
            return self.go(path, target if one.any() else following)
        join = self.run.launch.facts.joins[block]
        parts = [(target, one), (following, other)]
        if self.specialised and all(_of_warps(part) for _, part in parts):
            return self.part(parts, join)
        if join == path.join:
            paths.pop()
        else:
            path.block = join
        for destination, part in sorted(parts, key=lambda way: way[0], reverse=True):
            if destination < 0:
                self.run.end_threads(part)
            elif destination != join or not paths:
                paths.append(Path(destination, part, join))
        return None

    # ------------------------------------------------------------------------------------------------------- teams

    def scatter(self, block: int, chosen, targets: tuple[int, ...]) -> None:
        """brx: each thread branches to its own target."""
        run = self.run
        active = run.spread(np.ones((1, 1), dtype=bool) if run.active is None else run.active)
        chosen = run.spread(chosen)
        parts = [(target, active & (chosen == number)) for number, target in enumerate(targets)]
        parts = [(target, part) for target, part in parts if part.any()]
        if sum(part.sum() for _, part in parts) != active.sum() or not all(_of_warps(part) for _, part in parts):
            raise Unsupported(f"kernel {run.launch.facts.name} parts at brx.idx within a warp, or goes nowhere")
        if len(parts) == 1:
            return self.go(self.team.paths[-1], parts[0][0])
        return self.part(parts, run.launch.facts.joins[block])

    def part(self, parts: list[tuple[int, np.ndarray]], join: int) -> None:
        """Split into child teams; the parent waits at the join for all of them."""
        whole = self.team
        whole.paths[-1].block = join
        for target, threads in parts:
            if target < 0:
                self.run.end_threads(threads)
            else:
                self.all.append(Team([Path(target, threads, join)], whole))
                whole.parts += 1

    def choose(self) -> bool:
        """Choose the next team to run. Returns False for a deadlock, which is reported."""
        run, late = self.run, self.run.barriers_of_memory.late
        while not (ready := [team for team in self.all if self.ready(team)]):
            if not late:
                self.deadlock()
                return False
            run.barriers_of_memory.arrived(self.random)
        if self.random is not None:
            if late and self.random.random() < _SWITCHING:
                run.barriers_of_memory.arrived(self.random)
            if self.team not in ready or self.random.random() < _SWITCHING:
                self.team = self.random.choice(ready)
        elif self.team not in ready:
            self.team = ready[0]
        return True

    def ready(self, team: Team) -> bool:
        if team.waiting is not None and team.waiting.over():
            team.waiting = None
        return team.waiting is None and not team.parts

    def wait(self, index: int, over: Callable[[], bool], reason: Callable[[], str]) -> None:
        """Suspend the running team until `over` returns true."""
        self.team.waiting = Waiting(index, over, reason)

    def deadlock(self) -> None:
        stuck = [team for team in self.all if team.waiting is not None]
        reasons = [f"{_warps(team.paths[-1].threads)} for {team.waiting.reason()}" for team in stuck if team.waiting]
        if not stuck or stuck[0].waiting is None:
            raise Unsupported(f"kernel {self.run.launch.facts.name} has ended in parts that nothing joins")
        other = next((team.waiting.instruction for team in stuck[1:] if team.waiting), None)
        self.run.fault("deadlock", stuck[0].waiting.instruction, f"nothing goes on: {'; '.join(reasons)}", other)

    def meet(self, index: int, number: int, count: int | None) -> None:
        """bar.sync: wait until `count` threads (None: all live ones) have arrived at the barrier."""
        run = self.run
        here = run.everyone()
        if not _of_warps(here):
            run.fault("divergence", index, "not all threads of a warp come to this barrier together")
        meeting = self.meetings.setdefault(number, Meeting(np.zeros_like(here)))
        wanted = int((~run.spread(run.ended())).sum()) if count is None else count
        meeting.threads = meeting.threads | here
        meeting.teams.append(self.team)
        arrived = int(meeting.threads.sum())
        self.stretch += 1
        run.barriers = np.where(here, self.stretch, run.barriers)
        run.warps_met(here)
        if arrived > wanted:
            run.fault("divergence", index, f"{arrived} threads come to barrier {number}, which takes {wanted}")
        if arrived < wanted:
            reason = f"barrier {number}, at which {{}} of {wanted} threads are"
            return self.wait(index, lambda: False, lambda: reason.format(int(meeting.threads.sum())))
        if run.orders is not None:
            run.orders.meet(meeting.threads)
        del self.meetings[number]
        self.met = meeting.teams
        for team in self.met:
            team.waiting = None
        return None

    def merge(self) -> None:
        """Merge teams that leave a barrier at the same block."""
        first: dict[tuple, Team] = {}
        for team in self.met:
            path = team.paths[-1]
            if len(team.paths) > 1 or team.parts or path.threads is None:
                continue
            kept = first.setdefault((path.block, path.join, id(team.whole)), team)
            if kept is not team:
                kept.paths[-1].threads = kept.paths[-1].threads | path.threads
                self.remove(team)
                if self.team is team:
                    self.team = kept
        self.met = []

    def setmaxnreg(self, index: int, count: int) -> None:
        """setmaxnreg: release registers, or wait until enough are free."""
        warps = self.run.everyone()[0, ::32]

        def over() -> bool:
            after = np.where(warps, count, self.registers)
            if (after > self.registers).any() and after.sum() > len(warps) * self.run.launch.facts.maxnreg:
                return False
            self.registers = after
            return True

        if not over():
            self.wait(index, over, lambda: f"{count} registers a thread, with {self.registers.tolist()} taken by warps")


def _of_warps(threads: np.ndarray) -> bool:
    """Whether threads of one program form whole warps."""
    if threads.shape[1] == 1:
        return True
    warps = threads.reshape(len(threads), -1, 32)
    return bool((warps.any(2) == warps.all(2)).all())


def _warps(threads: np.ndarray | None) -> str:
    if threads is None:
        return "all warps wait"
    warps = np.flatnonzero(threads[0, ::32]).tolist()
    return f"warp{'s' if warps[1:] else ''} {', '.join(map(str, warps))} wait{'' if warps[1:] else 's'}"
