"""Mutations of compiled kernels: a recorded launch is executed again with its PTX changed in one place.

A mutation is noticed by a fault, a refusal, or memory that differs from the result of the original. Otherwise it is
missed, unless the inputs never reach it, or, for a load without its guard, the loaded values are undefined and unused,
which an execution shows. Some missed ones change nothing: a barrier beside another, a wait that comes again.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fasttfm.functional import backend
from fasttfm.kernels.proof.executed import executed
from ptx_check import FaultyKernel, Machine, Unsupported
from ptx_check.machine import translated

_BITS = {"rs": 16, "r": 32, "rd": 64}
_OPPOSITE = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_ADDRESS = r"(@!?%p\d+ )?((?:{0})\.{1}\S* [^;]*?\[ ?{2}\d+)(?: ?\+ ?(\d+))?( ?\])"


@dataclass(frozen=True)
class Kind:
    """A kind of mutation of an instruction."""

    pattern: str
    """The mutated text, from the guard or opcode of the instruction on."""
    change: Callable[[re.Match], str]
    differs: Callable[[re.Match], str] = lambda m: ""
    """Instructions, and the guard of a store, that detect whether the mutation makes a difference to a thread."""


def _moved(by: int) -> Callable[[re.Match], str]:
    return lambda m: f"{m[1] or ''}{m[2]} + {int(m[3] or 0) + by}{m[4]}"


def _guard(m: re.Match) -> str:
    return m[1] or ""


def _opposite(m: re.Match) -> str:
    return f"@%p{m[2]} " if m[1] else f"@!%p{m[2]} "


def _discarded(m: re.Match, after: str) -> str:
    """The original load, with its registers undefined afterwards in threads that its guard excludes."""
    statement, _, _ = after.partition(";")
    lines = [f"{m[0]}{statement};"]
    for name, letters in re.findall(r"(%(r[sd]?)\d+)", statement.partition("[")[0]):
        lines.append(f"@{'' if m[1] else '!'}%p{m[2]} mov.b{_BITS[letters]} {name}, %{letters}99998;")
    return "\n".join(lines) + after[len(statement) + 1 :]


KINDS: dict[str, Kind] = {
    "barrier removed": Kind(r"bar\.sync [^;]*;", lambda m: ""),
    "warp barrier removed": Kind(r"bar\.warp\.sync [^;]*;", lambda m: ""),
    "a group fewer waited for": Kind(
        r"((?:cp\.async|wgmma)\.wait_group(?:\.sync\.aligned)?)\s+(\d+);", lambda m: f"{m[1]} {int(m[2]) + 1};"
    ),
    "wait for products removed": Kind(r"wgmma\.wait_group\.sync\.aligned [^;]*;", lambda m: ""),
    "fence of registers removed": Kind(r"wgmma\.fence\.sync\.aligned;", lambda m: ""),
    "fence of proxies removed": Kind(r"fence\.proxy\.async[^;]*;", lambda m: ""),
    "wait for loads of tensor memory removed": Kind(r"tcgen05\.wait::ld\.sync\.aligned;", lambda m: ""),
    "wait for stores in tensor memory removed": Kind(r"tcgen05\.wait::st\.sync\.aligned;", lambda m: ""),
    "wait at an mbarrier removed": Kind(r"mbarrier\.try_wait[^;]*;\s*@!complete bra\.uni waitLoop;", lambda m: ""),
    "mbarrier not initialised": Kind(r"(@!?%p\d+ )?mbarrier\.init[^;]*;", lambda m: "", _guard),
    "arrival of products removed": Kind(r"(@!?%p\d+ )?tcgen05\.commit[^;]*;", lambda m: "", _guard),
    "operands of a product exchanged": Kind(
        r"(@!?%p\d+ )?(tcgen05\.mma[^;]*?\], )(%rd\d+), (%rd\d+)", lambda m: f"{m[1] or ''}{m[2]}{m[4]}, {m[3]}", _guard
    ),
    "guard of a load dropped": Kind(r"@(!)?%p(\d+) (ld\.global)", lambda m: m[3], _opposite),
    "guard of a store dropped": Kind(r"@(!)?%p(\d+) (st\.global)", lambda m: m[3], _opposite),
    "comparison off by one": Kind(
        r"setp\.(lt|le|gt|ge)\.([su]\d\d)(\s+%p\d+), ([^,;]+), ([^,;]+);",
        lambda m: f"setp.{_OPPOSITE[m[1]]}.{m[2]}{m[3]}, {m[4]}, {m[5]};",
        lambda m: f"setp.eq.{m[2]} %p99999, {m[4]}, {m[5]};\n@%p99999 ",
    ),
    "choice reversed": Kind(
        r"selp\.(\w)(\d\d)(\s+%\w+), ([^,;]+), ([^,;]+), (%p\d+);",
        lambda m: f"selp.{m[1]}{m[2]}{m[3]}, {m[5]}, {m[4]}, {m[6]};",
        lambda m: f"setp.ne.{'f' if m[1] == 'f' else 'b'}{m[2]} %p99999, {m[4]}, {m[5]};\n@%p99999 ",
    ),
    "shared address off by 4": Kind(_ADDRESS.format("st|ld", "shared", "%r"), _moved(4), _guard),
    "global address off by 8": Kind(_ADDRESS.format("st|ld", "global", "%rd"), _moved(8), _guard),
    "source of a copy off by 16": Kind(
        r"(@!?%p\d+ )?(cp\.async\.\S* [^;]*?, \[ ?%rd\d+)(?: ?\+ ?(\d+))?( ?\])", _moved(16), _guard
    ),
    "shuffle distance halved": Kind(
        r"(shfl\.sync\.bfly\.b32 [^;]*?, )(2|4|8|16), 31", lambda m: f"{m[1]}{int(m[2]) // 2}, 31"
    ),
    "matrix turned": Kind(
        r"((?:ld|st)matrix\.sync\.aligned\.m8n8\.x\d)(\.trans)?", lambda m: m[1] + ("" if m[2] else ".trans")
    ),
    "fragments exchanged": Kind(r"(mma\.sync[^;]*?\}, \{ ?)(%r\d+), (%r\d+)", lambda m: f"{m[1]}{m[3]}, {m[2]}"),
    "operand of a group turned": Kind(r"(wgmma\.mma_async[^;]*, )(\d);", lambda m: f"{m[1]}{1 - int(m[2])};"),
    "sum begun anew": Kind(r"(add\.f32\s+%\w+), (%\w+), (%\w+);", lambda m: f"{m[1]}, {m[2]}, {m[2]};"),
}
MOST = 3
"""Most mutations of a kind in one kernel, evenly spread."""


@dataclass(frozen=True)
class Mutant:
    kind: str
    line: int
    """Line number in the PTX, from 1."""
    text: str
    """The PTX."""
    probe: str
    """PTX that stores out of bounds if the mutation makes a difference to a thread."""
    discarded: str = ""
    """PTX that has a fault if the values loaded by the mutation are used."""


def mutants(ptx: str, most: int = MOST) -> Iterator[Mutant]:
    """Yields mutants with one change each."""
    for name, kind in KINDS.items():
        actual = list(re.finditer(kind.pattern, ptx))
        step = max(1, len(actual) // most)
        for match in actual[step // 2 :: step][:most]:
            before, after = ptx[: match.start()], ptx[match.end() :]
            probe = (
                f"mov.b64 %rd99999, 8;\nmov.b32 %r99999, 0;\n{kind.differs(match)}st.global.b32 [%rd99999], %r99999;\n"
            )
            line = before.count("\n") + 1
            unused = before + _discarded(match, after) if name == "guard of a load dropped" else ""
            probe = f"{before}{probe}{match[0]}{after}"
            yield Mutant(name, line, before + kind.change(match) + after, probe, unused)


OUTCOMES = ("noticed", "missed", "equivalent", "unreached")
"""unreached: the mutation makes no difference for these inputs."""


class Kept:
    """A launch that can be executed again on its initial memory."""

    def __init__(self, machine: Machine, arguments: tuple, names: str, ptx: str) -> None:
        self.machine, self.arguments, self.name, self.ptx = machine, arguments, names, ptx
        self.memory = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in _tensors(arguments[-1])}
        self.before = self._copy()
        self.after: dict[int, torch.Tensor] = {}

    def _copy(self) -> dict[int, torch.Tensor]:
        return {position: _bytes(storage).clone() for position, storage in self.memory.items()}

    def line(self, number: int) -> str:
        """A line of the PTX."""
        return self.ptx.splitlines()[number - 1].strip()

    def finish(self) -> None:
        """Records the memory after the original kernel as the expected result."""
        self.after = self._copy()

    def outcome(self, mutant: Mutant) -> str:
        """One of OUTCOMES."""
        if self.noticed(mutant.text):
            return "noticed"
        if self.noticed(mutant.probe) != "bounds":
            return "unreached"
        return "equivalent" if mutant.discarded and not self.noticed(mutant.discarded) else "missed"

    def again(self, ptx: str) -> None:
        """Executes the launch with this PTX on its initial memory."""
        for position, storage in self.memory.items():
            _bytes(storage).copy_(self.before[position])
        grid, source, metadata, arguments = self.arguments
        self.machine.execute(grid, source, metadata, ptx, arguments)

    def noticed(self, ptx: str) -> str:
        """How a run with this PTX is noticed: kind of fault, refused, numbers, or '' if it is not."""
        try:
            self.again(ptx)
        except FaultyKernel as error:
            return error.faults[0].kind
        except Unsupported:
            return "refused"
        finally:
            translated.cache_clear()
        same = all(torch.equal(_bytes(s), self.after[position]) for position, s in self.memory.items())
        return "" if same else "numbers"


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor) and value.untyped_storage().nbytes():
            yield value


def kept_launches(run: Callable[[], Any], chip: str) -> list[Kept]:
    """The first launch of every kernel in run()."""
    kept: dict[str, Kept] = {}
    with executed(chip) as machine, backend("triton"):
        execute = machine.execute

        def keep(grid, source, metadata, ptx: str, arguments) -> None:
            launch = Kept(machine, (grid, source, metadata, arguments), metadata.name, ptx)
            execute(grid, source, metadata, ptx, arguments)
            launch.finish()
            kept.setdefault(metadata.name, launch)

        vars(machine)["execute"] = keep
        run()
        del vars(machine)["execute"]
    return list(kept.values())
