"""Exchanges torch.nn's modules for fasttfm.nn's in a model that exists already, and back.

fasttfm.nn's classes are derived from torch.nn's and add no state, so the exchange gives an object its other class:
the same module with the same parameters, hooks, device, dtype, mode and requires_grad, to which optimizers, DDP and
every other holder of a reference still point.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

import fasttfm.nn
from fasttfm.functional.subclasses import ordinary

PAIRS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = tuple(
    (getattr(torch.nn, name), getattr(fasttfm.nn, name))
    for name in (
        "LayerNorm",
        "RMSNorm",
        "MultiheadAttention",
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerDecoder",
        "Transformer",
    )
)


@dataclass(frozen=True, slots=True)
class Line:
    """Result for one module."""

    name: str
    """Its dotted name in the model; '' for the model itself."""
    kind: str
    """Its class before."""
    action: str
    """Class of the replacement, or 'left'."""
    reason: str = ""
    """Why it was left, or what of it was."""


@dataclass(slots=True)
class Report:
    """Result of replace_modules or restore_modules, or with dry_run their plan; print it to read it as a table."""

    lines: list[Line] = field(default_factory=list)
    dry_run: bool = False

    @property
    def replaced(self) -> list[str]:
        """Names of the replaced modules."""
        return [line.name for line in self.lines if line.action != "left"]

    @property
    def left(self) -> dict[str, str]:
        """Names of the modules that were not replaced, and why."""
        return {line.name: line.reason for line in self.lines if line.action == "left"}

    def __str__(self) -> str:
        verb = "would be replaced" if self.dry_run else "replaced"
        head = f"{len(self.replaced)} modules {verb}, {len(self.left)} left"
        rows = [(line.name or "(model)", line.kind, line.action, line.reason) for line in self.lines]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        table = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows]
        return "\n".join([head, *table])


def replace_modules(model: nn.Module, dry_run: bool = False) -> Report:
    """Replaces model's torch.nn modules by fasttfm.nn's, in place; with dry_run it only reports what it would do.

    Whatever holds the model, its parameters or its sub-modules keeps holding the same objects. Modules of a derived
    class are left, because their forward may be another, and so are sharded, scripted and quantised ones. Replace
    before torch.compile, DDP or fully_shard where you can choose. restore_modules undoes it.
    """
    return _exchange(model, dict(PAIRS), dry_run)


def restore_modules(model: nn.Module, dry_run: bool = False) -> Report:
    """Replaces model's fasttfm.nn modules by torch.nn's again, in place: for TorchScript, ONNX, or to compare."""
    return _exchange(model, {ours: theirs for theirs, ours in PAIRS}, dry_run)


def _exchange(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]], dry_run: bool) -> Report:
    report = Report(dry_run=dry_run)
    for name, module in model.named_modules():
        kind = type(module)
        if kind in classes:
            reason = _why_not(module)
            if not reason and not dry_run:
                module.__class__ = classes[kind]
            report.lines.append(Line(name, _called(kind), "left" if reason else _called(classes[kind]), reason))
        elif issubclass(kind, tuple(classes)) and kind not in classes.values():  # isinstance() believes __class__
            parent = next(c for c in kind.__mro__ if c in classes)
            report.lines.append(
                Line(name, _called(kind), "left", f"derived from {_called(parent)}: may compute otherwise")
            )
        elif isinstance(module, torch.jit.ScriptModule):
            report.lines.append(Line(name, _called(kind), "left", "TorchScript"))
    return report


def _called(kind: type) -> str:
    module = "torch.nn" if kind.__module__.startswith("torch.nn.") else kind.__module__
    module = "fasttfm.nn" if module.startswith("fasttfm.nn.") else module
    return f"{module}.{kind.__qualname__}"


def _why_not(module: nn.Module) -> str:
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the object"
    if not ordinary(*module.parameters(recurse=False)):
        return "its parameters are sharded or quantised tensors"
    return ""
