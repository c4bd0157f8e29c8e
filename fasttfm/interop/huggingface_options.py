"""Arguments of transformers' models for attention beside queries, keys, values and mask, with the refused ones.

refuse() looks at the options of a call; refused_by() knows from a module's source, before any call, whether one of its
options would be refused, so that accelerate() leaves such a model the attention that it has.
"""

import ast
import functools
import inspect
import sys
import textwrap
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.interop.huggingface_classes import NAME

TAKEN = frozenset({
    "query", "key", "value", "attention_mask", "dropout", "scaling", "is_causal", "position_bias", "softcap", "s_aux",
    "sinks", "indices",
})  # fmt: skip
"""Arguments that attention_forward() computes with."""
_CARRIED = frozenset({
    "sliding_window",  # the mask has it
    "output_attentions", "position_ids", "cache_position", "token_type_ids", "mm_token_type_ids", "num_items_in_batch",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",  # FlashAttention's: the mask has them
    "deterministic",
})  # fmt: skip
"""Arguments that do not change what transformers' own eager attention computes."""
_REFUSED = frozenset({"cache", "block_indices"})
"""Arguments that change the result: a paged cache, sparse attention by blocks."""
_UNKNOWN = object()
"""The value of an argument that is known only when the call is made."""


def refuse(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises ValueError for an option that would change the result, or that might: a tensor, a number with a fraction,
    or whatever the eager attention of the module's own file names among its parameters."""
    for name, value in options.items():
        if _changes(module, name, value):
            needs = f"attention {NAME!r} has no {name}, which {type(module).__name__} needs"
            raise ValueError(f"{needs}: use 'eager' or accelerate()")


def refused_by(module: nn.Module) -> str:
    """Name of an option that module passes to its attention and that refuse() would not take; '' where there is none.

    Read from the source of module's class: an option that is an attribute of module has its value, one that is known
    only in the call counts as given.
    """
    kind: Any = type(module)
    for name, expression in _passed(kind):
        if name not in TAKEN and _changes(module, name, _value(module, expression)):
            return name
    return ""


def _changes(module: nn.Module, name: str, value: Any) -> bool:
    if value is None or name in _CARRIED:
        return False
    might = value is _UNKNOWN or isinstance(value, Tensor | float)
    return might or name in _REFUSED or name in _eager_parameters(type(module).__module__)


@torch.compiler.assume_constant_result
@functools.cache
def _eager_parameters(file: str) -> frozenset[str]:
    """The parameters of a modeling file's eager attention."""
    eager = getattr(sys.modules.get(file), "eager_attention_forward", None)
    return frozenset() if eager is None else frozenset(inspect.signature(eager).parameters) - {"kwargs"}


@functools.cache
def _passed(kind: type[nn.Module]) -> tuple[tuple[str, ast.expr], ...]:
    """The keyword arguments, with their expressions, of each call of an attention that kind looks up by name."""
    found: list[tuple[str, ast.expr]] = []
    for name in dir(kind):
        method = getattr(kind, name)
        code = getattr(method, "__code__", None)
        if code is None or _TABLE not in code.co_names:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, SyntaxError):  # a class that was typed into an interpreter
            continue
        nodes = list(ast.walk(tree))
        bound = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign) and _looks_up(node.value)]
        names = {t.id for node in bound for t in _targets(node) if isinstance(t, ast.Name)}
        calls = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in names]
        found += [(word.arg, word.value) for call in calls for word in call.keywords if word.arg is not None]
    return tuple(found)


_TABLE = "ALL_ATTENTION_FUNCTIONS"
"""The name under which modeling files look their attention up."""


def _looks_up(value: ast.expr | None) -> bool:
    return value is not None and any(isinstance(n, ast.Name) and n.id == _TABLE for n in ast.walk(value))


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _value(module: nn.Module, expression: ast.expr) -> Any:
    """Return the value of a constant or of a chain of attributes of self; _UNKNOWN for any other expression."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name) and expression.id == "self":
        return module
    if isinstance(expression, ast.Attribute):
        return getattr(_value(module, expression.value), expression.attr, _UNKNOWN)
    return _UNKNOWN
