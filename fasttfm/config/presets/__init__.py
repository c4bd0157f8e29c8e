"""Built-in presets: one commented YAML file each, for model and training.

Translation presets are in this folder; those of other kinds of model are in the folder of their distribution.
"""

import difflib
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from fasttfm.config.kinds import TRANSFORMER, provider
from fasttfm.errors import UserError
from fasttfm.system.parsing import parse_yaml

_FOLDER = Path(__file__).parent


def preset_names(kind: str = TRANSFORMER) -> list[str]:
    """Sorted names of the presets for a kind of model."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def preset_path(name: str, kind: str = TRANSFORMER) -> Path:
    """The YAML file of a preset; UserError with the closest name if it does not exist."""
    names = preset_names(kind)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"preset {name!r} is unknown: {hint}choose from {', '.join(names)}")
    return _folder(kind) / f"{name}.yaml"


def preset_section(name: str, section: str, kind: str = TRANSFORMER) -> dict[str, Any]:
    """A section (model, data, training or decoding) of a preset's file."""
    return dict(parse_yaml(preset_path(name, kind).read_bytes()).get(section) or {})


def preset_summary(name: str) -> str:
    """The description of a preset of any kind: the first sentence of its file's leading comment."""
    path = _FOLDER / f"{name}.yaml"
    if not path.exists() and (module := provider()):
        path = next(module.PRESETS.rglob(path.name))
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"(?<=[.:]) (?=[A-Z])", comment)[0].rstrip(":.")


def _folder(kind: str) -> Path:
    module = provider() if kind != TRANSFORMER else None
    return module.PRESETS / kind if module else _FOLDER
