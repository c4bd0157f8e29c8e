"""transformers' own tiny models: the configurations and inputs that its tests make (their ModelTester classes).

They are in transformers' repository and not in its wheel, so a checkout is named by its folder. It need not be of the
installed version: what a test file asks for and the installed transformers or this environment has not is left out of
it, statement by statement, and only what then cannot be made is missing.
"""

import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

FOLDER = Path("tests", "models")


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __bool__(cls) -> bool:
        return False


class Absent(metaclass=_Kind):
    """Stands for what a test file imports and is not there: a decorator that does nothing, a mixin without methods."""

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None: ...

    def __call__(self, decorated: Any = None, *arguments: Any, **options: Any) -> Any:
        return decorated

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


def _alias(name: str) -> ast.stmt:
    return ast.parse(f"class {name}(__absent__): pass").body[0]


class _Lenient(ast.NodeTransformer):
    """Each statement of a module in a try of its own; a name that cannot be imported is one that does nothing."""

    def visit_Module(self, node: ast.Module) -> ast.Module:
        future = [s for s in node.body if isinstance(s, ast.ImportFrom) and s.module == "__future__"]
        rest = [one for s in node.body if s not in future for one in self._parts(s)]
        node.body = [*future, *rest]
        return ast.fix_missing_locations(node)

    def _parts(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.If | ast.With | ast.Try):  # "if is_torch_available(): import ..."
            for field in ("body", "orelse", "finalbody"):
                block = getattr(statement, field, [])
                setattr(statement, field, [one for s in block for one in self._parts(s)])
            return [_guarded(statement, [ast.Pass()])]
        if isinstance(statement, ast.Import | ast.ImportFrom):
            result = []
            for name in statement.names:
                alone: ast.stmt = ast.Import([name])
                if isinstance(statement, ast.ImportFrom):
                    alone = ast.ImportFrom(statement.module, [name], statement.level)
                bound = (name.asname or name.name).split(".")[0]
                result.append(_guarded(alone, [_alias(bound)] if bound != "*" else [ast.Pass()]))
            return result
        return [_guarded(statement, [ast.Pass()])]


def _guarded(statement: ast.stmt, otherwise: list[ast.stmt]) -> ast.stmt:
    every = ast.Name("Exception", ast.Load())
    return ast.Try([statement], [ast.ExceptHandler(every, None, otherwise)], [], [])


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> types.CodeType:  # type: ignore[override]
        return compile(_Lenient().visit(ast.parse(data)), path, "exec", dont_inherit=True, optimize=_optimize)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module)["__absent__"] = Absent
        super().exec_module(module)

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        parts = name.split(".")
        if parts[0] != "tests":
            return None
        file = self.root.joinpath(*parts).with_suffix(".py")
        if file.exists():
            return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, str(file)))
        folder = self.root.joinpath(*parts)
        if not folder.is_dir():
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        return spec


def cases(folder: Path) -> dict[str, list[type]]:
    """Test classes of a checkout, by the model type that their first model's configuration has."""
    sys.meta_path.insert(0, _Finder(folder))
    found: dict[str, list[type]] = {}
    for file in sorted(folder.joinpath(FOLDER).glob("*/test_modeling_*.py")):
        name = ".".join(["tests", "models", file.parent.name, file.stem])
        try:
            module = importlib.import_module(name)
        except Exception:
            continue
        for kind in list(vars(module).values()):
            if not isinstance(kind, type) or kind.__module__ != name:
                continue
            types_of = [model.config_class.model_type for model in _models(kind)[:1] if hasattr(kind, "setUp")]
            if types_of and isinstance(types_of[0], str):  # of what is absent everything is Absent
                found.setdefault(types_of[0], []).append(kind)
    return found


def _models(case: type) -> list[Any]:
    """The classes of models that a test class tests."""
    tester = getattr(case, "model_tester_class", None)
    classes: Any = getattr(case, "all_model_classes", None)
    if not isinstance(classes, tuple | list) or not classes:
        classes = [getattr(tester, "base_model_class", None)]
    return [c for c in classes if isinstance(getattr(c, "config_class", None), type)]


def made(case: type) -> tuple[Any, Any, dict[str, Any]]:
    """A test class's first model class, a tiny configuration, and inputs. Raises whatever the tester raises."""
    test = case("setUp") if hasattr(case, "run") else case()
    test.setUp()
    torch.manual_seed(0)
    config, inputs = test.model_tester.prepare_config_and_inputs_for_common()
    kind = (_models(type(test)) or list(getattr(test, "all_model_classes", ())))[0]
    prepare = getattr(test, "_prepare_for_class", None)
    return kind, config, dict(prepare(inputs, kind) if isinstance(prepare, types.MethodType) else inputs)
