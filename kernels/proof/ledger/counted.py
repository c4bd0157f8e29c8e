"""Counts of compile cases, cached in the user's cache folder.

Compiling and disassembling takes a second or two per case. The cache key is a hash of everything that a count depends
on: source of the kernel, arguments, options, Triton and the ledger itself.
"""

import ast
import functools
import hashlib
import inspect
import itertools
import json
import os
import re
import tempfile
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

from fasttfm.kernels import choice_cache
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.proof import compiling
from fasttfm.kernels.proof.assembler import assembler
from fasttfm.kernels.proof.compile_case import CompileCase
from fasttfm.kernels.proof.ledger import work
from ptx_check.ledger import code, count, gcn, order, resources, sass, units
from ptx_check.ledger import counted as counting
from ptx_check.ledger.counted import Counted


def of_case(chip: Chip, case: CompileCase) -> Counted:
    """The count of a case, cached. Raises what the compiler raises."""
    file = choice_cache.folder() / "ledger" / f"{digest(chip, case)}.json"
    try:
        return Counted.from_json(json.loads(file.read_text()))  # noqa: TID251 (kernels know nothing of fasttfm)
    except (OSError, ValueError, LookupError, TypeError):  # missing, or written in part by a killed process
        pass
    result = counting.of_compiled(chip.name, compiling.compiled(chip, case))
    bound = round(result.count.main.bound / work.elements(chip, case), 2)
    result = replace(result, resources=replace(result.resources, bound=bound))
    _keep(file, result)
    return result


def digest(chip: Chip, case: CompileCase) -> str:
    """Cache key of a case; comments, docstrings and line numbers do not change it."""
    described = [sorted(map(repr, part.items())) for part in compiling.specialization(case)]
    made_by = metadata.version("triton"), assembler(chip.capability).version if chip.capability else None
    options = (case.num_warps, case.num_stages, *made_by)
    parts = (chip, case.name, source_of(case.kernel), described, options, _own_digest())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def source_of(kernel: JITCallable) -> tuple[tuple[str, str], ...]:
    """The statements of a kernel and of everything that it names, by name, without comments and docstrings."""
    sources: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("", kernel)]
    while waiting:
        name, value = waiting.pop()
        code = isinstance(value, JITCallable | type) or inspect.isroutine(value)
        if name in sources or (code and str(value.__module__).partition(".")[0] == "triton"):
            continue
        if not isinstance(value, JITCallable):
            if not inspect.isroutine(value):  # decorators: kernels call no other routine than a JITCallable
                text = ast.unparse(_statements(value)) if isinstance(value, type) else repr(value)
                sources[name] = re.sub(" at 0x[0-9a-f]+", "", text)  # addresses of annotations differ by process
            continue
        tree = _statements(value)
        sources[name] = ast.unparse(tree)
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        named |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        scope = value.fn.__globals__
        modules = [scope[each] for each in named if isinstance(scope.get(each), ModuleType)]
        places = {value.fn.__module__: scope} | {module.__name__: vars(module) for module in modules}
        for (of, place), each in itertools.product(places.items(), named):
            if each in place and not isinstance(place[each], ModuleType):
                waiting.append((f"{of}.{each}", place[each]))
    return tuple(sorted(sources.items()))


def _statements(value: Any) -> ast.Module:
    """The syntax tree of a kernel, a class or a module, without docstrings."""
    tree = ast.parse(value.src if isinstance(value, JITCallable) else inspect.getsource(value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return tree


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


@functools.cache
def _own_digest() -> str:
    """Digest of the statements that compile, disassemble and count."""
    modules = (code, compiling, count, counting, gcn, order, resources, sass, units, work)
    text = "".join(ast.unparse(_statements(module)) for module in modules)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _keep(file: Path, result: Counted) -> None:
    """Writes the file atomically, for concurrent processes; an unwritable folder is ignored."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False) as part:
            json.dump(result.as_json(), part)
        os.replace(part.name, file)
    except OSError:
        pass
