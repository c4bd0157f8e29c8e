"""torch.export of modules on our operators: as a graph of these, or of torch's own."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fasttfm.errors import ArgumentTypeError
from fasttfm.functional.namespace import NAMESPACE
from fasttfm.functional.operator import MARK, decomposed
from fasttfm.functional.signature import is_flag


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    decompose: bool = False,
    **options: Any,
) -> torch.export.ExportedProgram:
    """torch.export.export() of a module, for torch.export.save().

    decompose: the graph holds none of our operators but what PyTorch's own compute in their place, so that its file
    loads where fasttfm is not installed; else it runs on our kernels, and loads behind `import fasttfm.functional`:
    its first node says so in the error of a process that has not. options: dynamic_shapes and others of torch.export.
    Raises ArgumentTypeError for what is no module or no tuple.
    """
    is_flag("decompose", decompose)
    for name, value, kind in (("module", module, nn.Module), ("args", args, tuple)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(f"{name} is a {type(value).__name__}: a {kind.__name__} is needed")
    given = dict(kwargs or {})
    if decompose:
        with torch.no_grad(), decomposed():
            program = torch.export.export(module, args, given, **{**options, "strict": False})
            return program.run_decompositions({})  # which also leaves nothing that writes to its arguments
    program = torch.export.export(module, args, given, **options)
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    with program.graph.inserting_before(first):
        program.graph.call_function(getattr(getattr(torch.ops, NAMESPACE), MARK).default)
    return program
