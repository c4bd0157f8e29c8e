"""Runs a few lines of PTX: what the tests of the machine's instructions stand on."""

import numpy as np
import torch

from ptx_check.allocations import POISON, bytes_of, mark
from ptx_check.faults import Fault
from ptx_check.memory import buffers
from ptx_check.operands import parameters_of
from ptx_check.run import Code, Launch

HEAD = """.version 8.7
.target {target}
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry {name}({parameters})
.reqntid {threads}
{{
\t.reg .pred \t%p<64>;
\t.reg .b16 \t%rs<128>;
\t.reg .b32 \t%r<512>;
\t.reg .b64 \t%rd<128>;
"""


class Ran:
    """What a run left: its memory, as it was given, and its faults."""

    def __init__(self, memory: dict[str, np.ndarray], faults: list[Fault]) -> None:
        self.memory, self.faults = memory, faults

    def __getitem__(self, name: str) -> np.ndarray:
        return self.memory[name]

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}


def run(
    body: str,
    *,
    threads: int = 32,
    grid=(1, 1, 1),
    shared: int = 0,
    target: str = "sm_80",
    fresh=(),
    scalars=(),
    **memory,
) -> Ran:
    """Runs `body` with one parameter for every array, whose address is in %rd1, %rd2, ... in their order. fresh: names
    of arrays whose bytes that hold POISON nobody wrote. scalars: types and values of further parameters."""
    names = list(memory)
    kinds = ["u64"] * len(names) + [kind for kind, _ in scalars]
    text = HEAD.format(
        name="probe",
        target=target,
        threads=threads,
        parameters=",\n".join(f"\t.param .{kind} probe_param_{n}" for n, kind in enumerate(kinds)),
    )
    text += "".join(f"\tld.param.b64 %rd{n + 1}, [probe_param_{n}];\n" for n in range(len(names)))
    lines = body.strip().split("\n")
    text += "\n".join(line if line.startswith("}") else f"\t{line}" for line in lines) + "\n\tret;\n}\n"
    tensors = [torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).copy()) for array in memory.values()]
    for name, tensor in zip(names, tensors):
        if name in fresh:
            written = tensor.clone()
            mark(tensor)
            bytes_of(tensor.untyped_storage())[:] = written.numpy().reshape(-1)
    code = Code(text)
    launch = Launch(
        code,
        grid,
        threads,
        shared,
        parameters_of(code.facts.parameters, [*(t.data_ptr() for t in tensors), *(value for _, value in scalars)]),
        buffers(tensors),
    )
    faults = launch.execute()
    left = {name: t.numpy().view(memory[name].dtype) for name, t in zip(names, tensors)}
    return Ran(left, faults)


WORD = np.arange(1000, 1064, dtype="u4")
NONE = np.zeros(64, dtype="u4")
OWN = """
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd10, %r1, 4;
add.s64 %rd11, %rd1, %rd10;
add.s64 %rd12, %rd2, %rd10;
"""
"""%rd11, %rd12: the thread's own word of the first and the second array."""


def run_on_words(body: str, *, x: np.ndarray = WORD, y: np.ndarray = NONE, **options) -> Ran:
    """run() of body behind OWN, on two arrays of words."""
    return run(OWN + body, x=x, y=y, **options)


REGISTERS = {"b16": "%rs", "b32": "%r", "b64": "%rd", "pred": "%p"}
BYTES = {"b16": 2, "b32": 4, "b64": 8}


def execute(opcodes: list[str], result: str, operands, fresh=()) -> Ran:
    """Runs opcodes on each element of the operands: (kind, array) or a constant written out; an opcode may have one of
    its own behind a blank. What they give stands in "out", opcode after opcode. result: the kind of register. fresh:
    operands that nobody wrote, by their places."""
    threads = -(-max(len(o[1]) for o in operands if isinstance(o, tuple)) // 32) * 32
    memory, lines, words = {}, ["mov.u32 %r500, %tid.x;"], []
    for position, operand in enumerate(operands):
        if not isinstance(operand, tuple):
            words.append(operand)
            continue
        kind, values = operand
        stored = "b16" if kind == "pred" else kind
        padded = np.resize(np.asarray(values), threads)
        memory[f"x{position}"] = padded.view(f"u{BYTES[stored]}") if kind != "pred" else padded.astype("u2")
        if position in fresh:
            memory[f"x{position}"].view("u2")[:] = POISON[2]
        register = f"{REGISTERS[stored]}{10 + position}"
        lines += [
            f"mad.wide.u32 %rd{50 + position}, %r500, {BYTES[stored]}, %rd{len(memory)};",
            f"ld.global.{stored} {register}, [%rd{50 + position}];",
        ]
        if kind == "pred":
            lines.append(f"setp.ne.b16 %p{10 + position}, {register}, 0;")
            register = f"%p{10 + position}"
        words.append(register)
    out = "b32" if result == "pred" else result
    memory["out"] = np.zeros(threads * len(opcodes), f"u{BYTES[out]}")
    lines.append(f"mad.wide.u32 %rd70, %r500, {BYTES[out]}, %rd{len(memory)};")
    for place, opcode in enumerate(opcodes):
        code, *constant = opcode.split()
        pair = code.startswith("setp") and code.endswith("x2")
        target = "%p40|%p41" if pair else f"{REGISTERS[result]}40"
        lines.append(f"{code} {target}, {', '.join([*words, *constant])};")
        if result == "pred":
            lines.append("selp.b32 %r40, 1, 0, %p40;")
        if pair:
            lines += ["selp.b32 %r41, 2, 0, %p41;", "or.b32 %r40, %r40, %r41;"]
        lines.append(f"st.global.{out} [%rd70+{place * threads * BYTES[out]}], {REGISTERS[out]}40;")
    return run("\n".join(lines), threads=threads, fresh=[f"x{position}" for position in fresh], **memory)
