"""torch.export of modules that use fasttfm's operators, kept as such or decomposed to PyTorch's."""

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
    """Export a module with torch.export.export(), for torch.export.save().

    decompose: replace fasttfm's operators by PyTorch's, so that the file loads without fasttfm. Otherwise the graph
    calls fasttfm's kernels and loads after `import fasttfm.functional`; its first node names that import in the error
    of a process that lacks it. options: dynamic_shapes and other arguments of torch.export.export().
    Raises ArgumentTypeError if module is not a Module or args not a tuple.
    """
    is_flag("decompose", decompose)
    for name, value, kind in (("module", module, nn.Module), ("args", args, tuple)):
        if not isinstance(value, kind):
            raise ArgumentTypeError(f"{name} is a {type(value).__name__}: a {kind.__name__} is needed")
    kwargs = dict(kwargs or {})
    if decompose:
        with torch.no_grad(), decomposed():
            program = torch.export.export(module, args, kwargs, **{**options, "strict": False})
            return program.run_decompositions({})  # also functionalizes operators that mutate their arguments
    program = torch.export.export(module, args, kwargs, **options)
    first = next(node for node in program.graph.nodes if node.op != "placeholder")
    with program.graph.inserting_before(first):
        program.graph.call_function(getattr(getattr(torch.ops, NAMESPACE), MARK).default)
    return program
