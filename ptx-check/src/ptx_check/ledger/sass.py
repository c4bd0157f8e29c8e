"""Parser for nvdisasm's output: instructions, branch targets and control codes."""

import re
import subprocess
import tempfile
from pathlib import Path

from ptx_check.ledger.code import Function, Instruction

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)")
_LABEL = re.compile(r"^(\.L_\w+|\$[\w$]+):")
_LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<guard>@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<operands>[^;]*);"
)
_WORD = re.compile(r"/\* (0x[0-9a-f]{16}) \*/\s*$")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_JUMPS = frozenset(("BRA", "BRX", "JMP", "CALL", "BREAK"))
_LAST = frozenset(("BRA", "JMP", "EXIT", "RET", "BRX", "JMX"))


def tool(name: str) -> Path:
    """Return the path of a tool that ships with Triton: nvdisasm, ptxas or cuobjdump."""
    import triton  # lazily: callers must be able to switch the interpreter off first

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _told(program: str, words: list[str], cubin: bytes) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(tool(program)), *words, file.name], capture_output=True, text=True, check=False)


def disassemble(cubin: bytes) -> str:
    """Return nvdisasm's text with encodings, for sm_75 and newer. Raises ValueError if it cannot read the cubin."""
    done = _told("nvdisasm", ["-c", "-hex"], cubin)
    if done.returncode:
        raise ValueError(f"nvdisasm cannot read the cubin: {done.stderr.strip()[-300:]}")
    return done.stdout


def resource_usage(cubin: bytes) -> dict[str, tuple[int, int, int]]:
    """Return kernel -> (registers per thread, bytes of local memory per thread, bytes of static shared memory).

    Empty for images that cuobjdump cannot read on their own (some for sm_90).
    """
    output = _told("cuobjdump", ["--dump-resource-usage"], cubin).stdout
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", output)
    return {
        name: (int(registers), max(int(stack), int(local)), int(shared))
        for name, registers, stack, shared, local in found
    }


def parse(text: str) -> list[Function]:
    """Return the functions of a disassembly, in its order."""
    functions: list[Function] = []
    for name, lines in _sections(text):
        labels: dict[str, int] = {}
        rows: list[tuple[int, str, str, str, int]] = []
        waiting: list[str] = []
        for number, line in enumerate(lines):
            if label := _LABEL.match(line):
                waiting.append(label[1])
            elif match := _LINE.match(line):
                address = int(match["address"], 16)
                labels |= dict.fromkeys(waiting, address)
                waiting.clear()
                stall = _stall(lines[number + 1]) if number + 1 < len(lines) and _WORD.search(line) else 0
                guard = (match["guard"] or "").strip()
                rows.append((address, match["opcode"], match["operands"].strip(), guard, stall))
        functions.append(Function(name, tuple(_instruction(row, labels) for row in rows), labels))
    return functions


def _sections(text: str) -> list[tuple[str, list[str]]]:
    result: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if section := _SECTION.match(line):
            result.append((section[1], []))
        elif result:
            result[-1][1].append(line)
    return result


def _instruction(row: tuple[int, str, str, str, int], labels: dict[str, int]) -> Instruction:
    address, opcode, operands, guard, stall = row
    name, target = opcode.partition(".")[0], None
    if name in _JUMPS and (label := _TARGET.search(operands)):
        target = labels.get(label[1])
    # The condition of a branch may be an operand: BRA.U !UP0, `(.L_x_4)
    conditional = bool(guard) or (target is not None and not operands.startswith("`"))
    table = operands.partition("BRANCH_TARGETS")[2]
    targets = tuple(labels[label] for label in re.findall(r"\.L_\w+", table) if label in labels)
    return Instruction(address, opcode, operands, target, name in _LAST and not conditional, stall, guard, targets)


def _stall(line: str) -> int:
    """Return the stall count of an instruction for sm_70 and newer from the line of its upper word (bits 105 to 108).

    0 if the line has no encoding.

    Source: Jia et al. 2018, "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", section 2.1.
    """
    word = _WORD.search(line)
    return int(word[1], 16) >> 41 & 15 if word else 0
