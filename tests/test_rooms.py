"""Imports point down only: a room knows the rooms below it, and files import each other in no circle.

Files and functions stay short enough to be read in one sitting, and every docstring can be read alone.
"""

import ast
import functools
import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

LEVELS = (
    ("ptx_check",),
    ("fasttfm.kernels",),
    ("fasttfm.errors", "fasttfm.reference"),
    ("fasttfm.reference_cache", "fasttfm.system"),
    ("fasttfm.cpu",),
    ("fasttfm.config",),
    ("fasttfm.functional",),
    ("fasttfm.data", "fasttfm.store"),
    ("fasttfm.models",),
    ("fasttfm.nn",),
    ("fasttfm.compat",),
    ("fasttfm.search",),
    ("fasttfm.translate",),
    ("fasttfm.convert", "fasttfm.training"),
    ("fasttfm.cli",),
    ("fasttfm.__main__", "fasttfm"),
    ("scripts.hub",),
    ("fasttfm_pretraining.config",),
    ("fasttfm_pretraining.kinds",),
    ("fasttfm_pretraining.data",),
    ("fasttfm_pretraining.models",),
    ("fasttfm_pretraining.decoding", "fasttfm_pretraining.interop"),
    ("fasttfm_pretraining.training",),
    ("fasttfm_pretraining",),
    ("benchmarks.measure", "benchmarks.peers"),
    ("benchmarks.command",),
    ("benchmarks.cases", "benchmarks", "benchmarks.peers.torch_nn_trainer"),
    ("benchmarks.host",),
    ("benchmarks.report",),
    ("benchmarks.__main__", "pretraining"),
    ("benchmarks.queue.stand_in",),
)
"""From the ground up; rooms of one level do not know each other. A file that is not named belongs to the longest name
that begins its own."""
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}


def modules() -> dict[str, Path]:
    """Every module of the runtime code."""
    results = {}
    for top, folder in (
        ("fasttfm", ROOT / "fasttfm"),
        ("fasttfm.kernels", ROOT / "kernels"),
        ("benchmarks", ROOT / "benchmarks"),
        ("fasttfm_pretraining", ROOT / "pretraining" / "src" / "fasttfm_pretraining"),
        ("pretraining", ROOT / "pretraining"),
        ("scripts.hub", ROOT / "scripts" / "hub"),
        ("ptx_check", ROOT / "ptx-check" / "src" / "ptx_check"),
    ):
        files = sorted(folder.rglob("*.py"))
        assert files, f"{folder} has no code: has it moved?"
        for path in files:
            parts = path.relative_to(folder).with_suffix("").parts
            if (parts[0] == "kernels" and top == "fasttfm") or (top == "pretraining" and len(parts) > 1):
                continue  # the link; the package and its tests, of which only the benchmark is beside them
            name = ".".join([top, *(part for part in parts if part != "__init__")])
            results[name] = path
    return results


MODULES = modules()


def nodes(name: str) -> list[ast.AST]:
    """All nodes of a module."""
    return list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


@functools.cache
def imports(name: str) -> frozenset[str]:
    """The modules of ours that a module imports, in functions and for the type checker alone too."""
    results = set()
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                results.add(whole if whole in MODULES else node.module)
        elif isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
    return frozenset(module for module in results if module in MODULES and module != name)


def package_of(module: str) -> tuple[int, str]:
    """Level and name of the room that a module belongs to."""
    parts = module.split(".")
    name = next(n for n in (".".join(parts[:i]) for i in range(len(parts), 0, -1)) if n in LEVEL_OF)
    return LEVEL_OF[name], name


def test_every_room_of_the_levels_has_files():
    assert {package_of(name)[1] for name in MODULES} == LEVEL_OF.keys()


def test_no_import_points_up():
    wrong = []
    for name in MODULES:
        level, ours = package_of(name)
        for other in imports(name):
            below, theirs = package_of(other)
            if theirs != ours and below >= level:
                wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(sorted(wrong))


def test_the_core_does_not_know_the_pre_trained_family():
    """It is a distribution of its own, which the core finds by an entry point: no import, no name for importlib."""
    room = "fasttfm_pretraining"
    quoted = re.compile(rf"""["']{room}""")
    for name, path in MODULES.items():
        if name.split(".")[0] in ("fasttfm", "benchmarks"):
            assert not [each for each in imports(name) if each.startswith(room)], name
            assert not quoted.search(path.read_text(encoding="utf-8")), name


def test_the_pre_trained_family_takes_nothing_private_of_the_core():
    for name in MODULES:
        if name.startswith("fasttfm_pretraining"):
            for node in nodes(name):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fasttfm":
                    assert not [alias.name for alias in node.names if alias.name.startswith("_")], name


def test_no_files_import_each_other_in_a_circle():
    graph = {name: imports(name) for name in MODULES}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_runtime_of_the_kernels_knows_nothing_of_the_proof():
    proof = ("ptx_check", "fasttfm.kernels.proof")
    for name in MODULES:
        if name.startswith("fasttfm.kernels") and not name.startswith(proof):
            assert not [other for other in imports(name) if other.startswith(proof)], name


def test_the_machine_of_ptx_knows_nothing_of_fasttfm():
    """It is a distribution of its own: numpy, Triton, torch, and pytest for its plugin."""
    known = {"__future__", "ptx_check", "numpy", "torch", "triton", "pytest", *sys.stdlib_module_names}
    for name in MODULES:
        if name.startswith("ptx_check"):
            named = [alias.name for node in nodes(name) if isinstance(node, ast.Import) for alias in node.names]
            named += [node.module or "" for node in nodes(name) if isinstance(node, ast.ImportFrom)]
            assert {each.split(".")[0] for each in named} <= known, name


MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 70


def functions(name: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function but Triton kernels, which cannot be cut without a cost in registers or launches."""
    every = [node for node in nodes(name) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    kernels = {"jit", "triton.jit"}
    return [f for f in every if not any(ast.unparse(d).split("(")[0] in kernels for d in f.decorator_list)]


def test_files_and_functions_are_short():
    long = []
    for name, path in MODULES.items():
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES:
            long.append(f"{path} has {lines} lines: at most {MAX_FILE_LINES}")
        for function in functions(name):
            if (lines := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES:
                long.append(f"{path}: {function.name} has {lines} lines: at most {MAX_FUNCTION_LINES}")
    assert not long, "\n".join(long)


LEANING = ("As", "How", "Likewise", "Of", "That", "Those", "What", "Where", "Which", "Who", "Why")
"""First words of a sentence that leans on another one, or is half of one."""


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    leaning = []
    for module in MODULES:
        for node in nodes(module):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                words = (ast.get_docstring(node) or "A").split()
                if words[0].strip(",.:;") in LEANING:
                    leaning.append(f"{module}.{getattr(node, 'name', '')}: {' '.join(words[:8])}")
    assert not leaning, "\n".join(leaning)
