"""Replaces torch.nn modules by fasttfm.nn's in an existing model, and back.

fasttfm.nn's classes derive from torch.nn's and add no state, so replacing only assigns __class__: the module keeps its
parameters, hooks, device, dtype, mode and requires_grad, and references from optimizers, DDP and others stay valid.
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
    """Qualified name in the model; '' for the model itself."""
    kind: str
    """Class before."""
    action: str
    """Class of the replacement, or 'left'."""
    reason: str = ""
    """Why the module, or a part of it, was left."""


@dataclass(slots=True)
class Report:
    """Result of replace_modules or restore_modules, or the plan of a dry run; prints as a table."""

    lines: list[Line] = field(default_factory=list)
    dry_run: bool = False

    @property
    def replaced(self) -> list[str]:
        """Names of the replaced modules."""
        return [line.name for line in self.lines if line.action != "left"]

    @property
    def left(self) -> dict[str, str]:
        """Names of the modules that were not replaced -> reason."""
        return {line.name: line.reason for line in self.lines if line.action == "left"}

    def __str__(self) -> str:
        verb = "would be replaced" if self.dry_run else "replaced"
        head = f"{len(self.replaced)} modules {verb}, {len(self.left)} left"
        rows = [(line.name or "(model)", line.kind, line.action, line.reason) for line in self.lines]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        table = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows]
        return "\n".join([head, *table])


def replace_modules(model: nn.Module, dry_run: bool = False) -> Report:
    """Replace a model's torch.nn modules by fasttfm.nn's, in place; with dry_run only report what would be replaced.

    References to the model, its parameters and submodules stay valid. Subclasses are left, because their forward may
    differ, and so are sharded, scripted and quantized modules. Preferably replace before torch.compile, DDP or
    fully_shard. restore_modules undoes it.
    """
    return _replace(model, dict(PAIRS), dry_run)


def restore_modules(model: nn.Module, dry_run: bool = False) -> Report:
    """Replace a model's fasttfm.nn modules by torch.nn's again, in place: for TorchScript, ONNX, or comparison."""
    return _replace(model, {ours: theirs for theirs, ours in PAIRS}, dry_run)


def _replace(model: nn.Module, classes: dict[type[nn.Module], type[nn.Module]], dry_run: bool) -> Report:
    report = Report(dry_run=dry_run)
    for name, module in model.named_modules():
        kind, action, reason = type(module), "left", ""
        if kind in classes:
            reason = _why_left(module)
            action = "left" if reason else _qualified_name(classes[kind])
            if not reason and not dry_run:
                module.__class__ = classes[kind]
                module.__dict__.pop("_prepared", None)  # of our layers alone: torch.nn's would pickle it
        elif issubclass(kind, tuple(classes)) and kind not in classes.values():  # isinstance() would trust __class__
            parent = next(c for c in kind.__mro__ if c in classes)
            reason = f"derived from {_qualified_name(parent)}: may compute otherwise"
        elif isinstance(module, torch.jit.ScriptModule):
            reason = "TorchScript"
        else:
            continue
        report.lines.append(Line(name, _qualified_name(kind), action, reason))
    return report


def _qualified_name(kind: type) -> str:
    package = next((p for p in ("torch.nn", "fasttfm.nn") if kind.__module__.startswith(f"{p}.")), kind.__module__)
    return f"{package}.{kind.__qualname__}"


def _why_left(module: nn.Module) -> str:
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the object"
    if not ordinary(*module.parameters(recurse=False)):
        return "its parameters are sharded or quantised tensors"
    return ""
