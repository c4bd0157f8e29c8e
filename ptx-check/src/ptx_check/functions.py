"""Inlining of device functions: those that Triton does not inline, and slow paths of libdevice.

Parameters, return values and a function's local memory are placed in the thread's local memory, after the kernel's;
their names become offsets. A function's registers are scoped in braces.
Source: NVIDIA, "PTX ISA", chapters 5.1.6 (parameters), 7.1 (functions), 9.7.12.5 (call).
"""

import re
from dataclasses import dataclass

from ptx_check.calls import CALL, SEQUENCE, as_instructions

_FUNCTION = re.compile(r"\.func\s*(?:\(([^)]*)\)\s*)?([\w$]+)(?:\s|//[^\n]*)*\(([^)]*)\)[^{;]*\{")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]+(\d+)\s+([\w$]+)(?:\[(\d+)\])?")
_LOCAL = re.compile(r"\.local\s+\.align\s+\d+\s+\.b8\s+(__local_depot\d+)\[(\d+)\];")
_DECLARED = re.compile(r"\.param\s[^;]*;")
_FOR_DEBUGGERS = re.compile(r"\.(?:loc|file|pragma)\b|\$L__(?:tmp|func)\w*:")
_ALIGNMENT = 16
"""Alignment in bytes of each allocation in local memory."""


@dataclass(frozen=True, slots=True)
class Function:
    result: str
    """Name of the return value; empty if there is none."""
    parameters: tuple[str, ...]
    body: str


class Functions:
    """The functions of a PTX text. local: bytes of local memory already in use."""

    def __init__(self, text: str, local: int) -> None:
        self.local = local
        self._calls = 0
        self._of: dict[str, Function] = {}
        for found in _FUNCTION.finditer(text):
            result, parameters = (tuple(p[1] for p in _PARAMETER.findall(part or "")) for part in found.group(1, 3))
            body = as_instructions(up_to_its_brace(text[found.end() :]))
            self._of[found[2]] = Function("".join(result), parameters, body)

    def written_out(self, body: str, within: tuple[str, ...] = ()) -> str:
        """Inline all calls in a body, keeping line numbers. within: enclosing functions, which must not be called
        recursively."""

        def called(sequence: re.Match) -> str:
            call = CALL.search(sequence[0])
            function = self._of.get(call["name"]) if call and call["name"] not in within else None
            if call is None or function is None:
                return sequence[0]
            places = {name: self._place(int(bits) // 8 * int(count or 1))
                      for bits, name, count in _PARAMETER.findall(sequence[0])}  # fmt: skip
            given = [places[name.strip()] for name in (call["given"] or "").split(",") if name.strip()]
            inner = dict(zip(function.parameters, given))
            if function.result:
                inner[function.result] = places[call["result"].strip()]
            for name, size in _LOCAL.findall(function.body):
                inner[name] = self._place(int(size))
            self._calls += 1
            label = f"$L__BB_{self._calls}"
            text = _in_one_line(self.written_out(_LOCAL.sub("", function.body), (*within, call["name"])))
            text = re.sub(r"\$L__BB\d\w+", lambda m: f"{m[0]}_{label[7:]}", _placed(text, inner))
            text = re.sub(r"\bret(?:\.uni)?\s*;", f"bra {label};", text)
            before, after = sequence[0][: call.start()], sequence[0][call.end() :]
            text = f"{{ {text} }} {label}:" + "\n" * call[0].count("\n")
            return _placed(before, places) + text + _placed(after, places)

        return SEQUENCE.sub(called, body)

    def _place(self, size: int) -> int:
        """Allocate `size` bytes of local memory; returns the offset."""
        place = -(-self.local // _ALIGNMENT) * _ALIGNMENT
        self.local = place + size
        return place


def _placed(text: str, places: dict[str, int]) -> str:
    """Replace parameters by local memory, and remove their declarations."""
    text = re.sub(r"\b(ld|st)\.param\b", r"\1.local", _DECLARED.sub("", text))
    return re.sub(r"[\w$]+", lambda name: str(places.get(name[0], name[0])), text)


def _in_one_line(body: str) -> str:
    lines = (line.split("//")[0].strip() for line in body.splitlines())
    return " ".join(line for line in lines if line and not _FOR_DEBUGGERS.match(line))


def up_to_its_brace(text: str) -> str:
    """Text up to the closing brace of a body; inline assembly may contain nested braces."""
    depth, taken = 1, []
    for line in text.split("\n"):
        code = line.split("//")[0]
        depth += code.count("{") - code.count("}")
        if depth <= 0:
            break
        taken.append(line)
    return "\n".join(taken)
