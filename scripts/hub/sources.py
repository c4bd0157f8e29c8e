"""Collects a module's source files in fasttfm, and rewrites their imports as relative ones."""

import ast
import functools
import importlib.util
from pathlib import Path, PurePosixPath

TOP = "fasttfm"


def sources(name: str, file: Path) -> dict[str, Path]:
    """Module -> file, for this module and all modules of fasttfm that it imports, including lazily."""
    found: dict[str, Path] = {name: file}
    waiting = list(_imports(file.read_text(encoding="utf-8")))
    while waiting:
        name = waiting.pop()
        if name in found or name == TOP:
            continue
        source = _file(name)
        if source is None:
            raise ModuleNotFoundError(f"there is no module {name}")
        found[name] = source
        waiting += [name.rpartition(".")[0], *_imports(source.read_text(encoding="utf-8"))]
    return dict(sorted(found.items()))


def place(module: str, file: Path) -> PurePosixPath:
    """Path of a module's file in a package with the same folders."""
    path = PurePosixPath(*module.split(".")[1:])
    return path / "__init__.py" if file.name == "__init__.py" else path.with_suffix(".py")


@functools.cache
def relative(text: str, place: PurePosixPath) -> str:
    """A file's source with relative imports of fasttfm's modules, for this place in the package."""
    lines = text.splitlines(keepends=True)
    dots = "." * len(place.parts)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import) and any(_ours(alias.name) for alias in node.names):
            raise ValueError(f"{place}:{node.lineno} imports a module by its absolute name: use `from … import …`")
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level and _ours(node.module):
            line = lines[node.lineno - 1]
            rest = node.module.removeprefix(TOP).lstrip(".")
            lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {dots}{rest} import", 1)
    return "".join(lines)


@functools.cache
def _imports(text: str) -> tuple[str, ...]:
    names = []
    tree = ast.parse(text)
    unseen = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and _ours(node.module) and id(node) not in unseen:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                names.append(whole if _file(whole) is not None else node.module)
    return tuple(names)


def _ours(module: str) -> bool:
    return module.split(".")[0] == TOP


def _file(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # its parent is a module that is not a package
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
