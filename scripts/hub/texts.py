"""Generated files of a kernel repository other than sources."""

from pathlib import Path
from string import Template

_TEMPLATES = Path(__file__).parent / "templates"

FUNCTIONS = (
    "attention",
    "backend",
    "cross_entropy",
    "draw_seed",
    "embed",
    "feed_forward",
    "layer_norm",
    "linear_cross_entropy",
    "residual_add",
    "residual_layer_norm",
    "scaled_dot_product_attention",
    "varlen_attention",
)
"""Functions of fasttfm.functional in the package."""

INIT = f'''"""The encoder-decoder Transformer's operators and layers on fused Triton kernels."""

from . import layers
from .functional import {", ".join(FUNCTIONS)}

__all__ = {sorted([*FUNCTIONS, "layers"])}
'''

NAMESPACE = '''"""The namespace of torch.ops that this build's operators are registered in."""

from .._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")
'''

OLDER = '''"""For versions of `kernels` that look for a folder of the package's name: the same module once more."""

import importlib.util
import sys
from pathlib import Path

_folder = Path(__file__).parents[1]
_name = f"{__name__}_{abs(hash(str(_folder))):x}"
_spec = importlib.util.spec_from_file_location(_name, _folder / "__init__.py")
_module = importlib.util.module_from_spec(_spec)
sys.modules[_name] = _module
_spec.loader.exec_module(_module)
globals().update({name: getattr(_module, name) for name in [*_module.__all__, "__all__"]})
'''

FLAKE = _TEMPLATES.joinpath("flake.nix").read_text(encoding="utf-8")


def build(repo_id: str, version: int, backends: tuple[str, ...]) -> str:
    """Text of build.toml, for a package without compiled code."""
    return _filled("build.toml", repo_id=repo_id, version=version, backends="".join(f'    "{b}",\n' for b in backends))


def namespace(unique: str) -> str:
    """Text of _ops.py, which kernel-builder writes for each build."""
    return (
        f"import torch\n\nops = torch.ops.{unique}\n\n\ndef add_op_namespace_prefix(op_name: str) -> str:\n"
        f'    """The operator\'s name in this build\'s namespace."""\n    return f"{unique}::{{op_name}}"\n'
    )


def card(repo_id: str, version: int, release: str) -> str:
    """Text of CARD.md."""
    functions = ", ".join(f"`{name}`" for name in FUNCTIONS)
    return _filled("CARD.md", repo_id=repo_id, version=version, release=release, functions=functions)


def _filled(name: str, **values: object) -> str:
    return Template(_TEMPLATES.joinpath(name).read_text(encoding="utf-8")).substitute(values)
