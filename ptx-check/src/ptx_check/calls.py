"""Functions that kernels call: vprintf of tl.device_print, and __assertfail of tl.device_assert.

PTX wraps a call in braces that declare and store its arguments; parse.py reads such a sequence as one instruction. The
values to print are consecutive in the thread's local memory, each aligned to its size.
Source: NVIDIA, "CUDA C++ Programming Guide", chapters on formatted output and assertion; "PTX ISA", chapter 9.7.12.
"""

import ctypes
import re

import numpy as np

NAMES = ("vprintf", "__assertfail")
CALL = re.compile(
    r"call(?:\.uni)?\s+(?:\((?P<result>[^)]*)\)\s*,\s*)?(?P<name>[\w$]+)\s*(?:,\s*\((?P<given>[^)]*)\)\s*)?;"
)
SEQUENCE = re.compile(r"\{[ \t]*// callseq.*?\}[ \t]*// callseq[^\n]*", re.DOTALL)
_ARGUMENT = re.compile(r"st\.param\.\w+\s+\[(\w+)\]\s*,\s*([^;\s]+)\s*;")
_RESULT = re.compile(r"\.param\s[^;]*;|ld\.param\.\w+\s+%\w+\s*,\s*\[retval\d+\]\s*;")
_CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(ll|l)?([a-zA-Z%])")


def as_instructions(body: str) -> str:
    """Replace each call of these functions by one instruction, call.NAME with its arguments, keeping line numbers."""

    def called(sequence: re.Match) -> str:
        call = CALL.search(sequence[0])
        if call is None or call["name"] not in NAMES:
            return sequence[0]
        given = dict(_ARGUMENT.findall(sequence[0]))
        arguments = ", ".join(given[name.strip()] for name in call["given"].split(","))
        text = _RESULT.sub("", _ARGUMENT.sub("", sequence[0]))
        return CALL.sub(f"call.{call['name']} {arguments};" + "\n" * call[0].count("\n"), text)

    return SEQUENCE.sub(called, body)


class Calls:
    """Executes the calls of a chunk of programs."""

    def __init__(self, run) -> None:
        self.run = run

    def printed(self, index: int, guard, text, values) -> None:
        """Print one line per thread, in order of programs and threads."""
        run = self.run
        mask = run.where(guard)
        here = np.broadcast_to(True if mask is None else mask, run.shape)
        pattern = _text(text)
        offset = 0
        columns: list[list] = []
        for length, letter in _CONVERSION.findall(pattern):
            if letter == "%":
                continue
            size = 8 if length or letter in "fegapsFEGA" else 4
            offset = -(-offset // size) * size
            place = values.astype(np.uint32) + np.uint32(offset)
            (read,) = run.local.load(index, place, guard, size, 1, None)
            kind = "f8" if letter in "fegFEGA" else f"{'i' if letter in 'di' else 'u'}{size}"
            columns.append(np.broadcast_to(read, run.shape).view(kind)[here].tolist())
            offset += size
        plain = re.sub(r"(%[-+ #0]*\d*(?:\.\d+)?)(?:ll|l)", r"\1", pattern).replace("%p", "0x%016x")
        for row in zip(*columns) if columns else [()] * int(here.sum()):
            print(plain % row, end="")

    def failed(self, index: int, guard, message) -> None:
        """Report a fault if any thread executes the call."""
        mask = self.run.where(guard)
        if mask is None or mask.any():
            self.run.fault("assertion", index, f"device_assert: {_text(message)}")


def _text(address) -> str:
    """String at an address that is the same in all threads."""
    return ctypes.string_at(int(address.flat[0])).decode(errors="replace")
