"""README's table of kernels on a GPU: ours and the fastest other, forward and backward."""

from collections.abc import Sequence

from benchmarks.measure.machine import is_cpu, noisy
from benchmarks.measure.providers import OURS
from benchmarks.measure.records import Entry, Loaded, grouped
from benchmarks.measure.text_table import duration
from benchmarks.report.headline import plus_minus, usable

NOTE = (
    "Ours and the fastest other that computes the same with right numbers, ± half of p20 to p80; **bold** where ours "
    "is not the fastest."
)
HEAD = ["kernel", "forward", "backward"]
_BACKWARD = "backward"
_BOTH = "forward+backward"
_LEFT_OUT = ("attention weights", "cross attention", "packed attention", "LayerNorm", "cross entropy")


def kernels(files: Loaded) -> list[Entry]:
    """Timed rows of kernels on a GPU that the table shows: those of training, long rows, and forms that few have."""
    return [entry for entry in files.suite if usable(entry) and not is_cpu(entry.machine) and _shown(entry.record)]


def _shown(record: dict) -> bool:
    if record["group"] != "kernels" or record["case"] in _LEFT_OUT:
        return False
    shape = record["shape"]
    return bool(shape.get("dropout", 1)) or shape.get("mask") in ("causal", "bool")


def rows(entries: Sequence[Entry]) -> list[list[str]]:
    """A line a shape."""
    result = []
    for name, members in grouped(entries, _name).items():
        passes = grouped(members, lambda entry: entry.record["pass"])
        both = passes.pop(_BOTH, [])
        backward = passes.pop(_BACKWARD, [])
        forward = [entry for each in passes.values() for entry in each]
        result.append([name, _cell(forward), _cell(backward) or (f"both: {_cell(both)}" if both else "")])
    return result


def _name(entry: Entry) -> str:
    """The case and what its shape says, in the fewest words."""
    record, shape = entry.record, entry.record["shape"]
    words = [f"{shape['B']} × {shape['H']} heads"] if "H" in shape else []
    if "L" in shape and "H" in shape:
        words.append(f"{shape['L']} × {shape['D']}")
    words += [f"{shape[key]:,} {word}" for key, word in (("M", "rows"), ("N", "wide"), ("V", "words")) if key in shape]
    words += [str(shape[key]) for key in ("mask", "form") if key in shape]
    words += [f"dropout {shape['dropout']}"] if shape.get("dropout") else []
    return f"{record['case']}: {', '.join(words)}"


def _cell(entries: Sequence[Entry]) -> str:
    ours = [entry for entry in entries if entry.provider.startswith(OURS)]
    if not ours:
        return ""
    if any(noisy(entry.record) for entry in entries):
        return "too noisy to say"
    best = min(ours, key=lambda entry: entry.p50)
    others = [entry for entry in entries if not entry.provider.startswith(OURS)]
    text = f"{duration(best.p50)} {plus_minus([best])}"
    if not others:
        return text
    other = min(others, key=lambda entry: entry.p50)
    text = text if best.p50 <= other.p50 else f"**{text}**"
    return f"{text}<br>{other.provider} {duration(other.p50)}"
