"""The recipes that come with the package: one commented YAML file each, model and training together.

Those of translation lie in this folder, those of another kind of model in the folder of whoever brings it.
"""

import difflib
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

from fasttfm.config.kinds import provider
from fasttfm.errors import UserError
from fasttfm.system.parsing import parse_yaml

_FOLDER = Path(__file__).parent
_TRANSFORMER = "transformer"


def preset_names(kind: str = _TRANSFORMER) -> list[str]:
    """Names of all presets of a kind of model, sorted."""
    return sorted(path.stem for path in _folder(kind).glob("*.yaml"))


def preset_path(name: str, kind: str = _TRANSFORMER) -> Path:
    """The YAML file of preset `name`; UserError that names the nearest when there is none."""
    names = preset_names(kind)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"preset {name!r} is unknown: {hint}there are {', '.join(names)}")
    return _folder(kind) / f"{name}.yaml"


def preset_section(name: str, section: str, kind: str = _TRANSFORMER) -> dict[str, Any]:
    """One section (model, data, training or decoding) of preset `name`, as the file has it."""
    return dict(parse_yaml(preset_path(name, kind).read_bytes()).get(section) or {})


def preset_summary(name: str) -> str:
    """Return the description of a preset of any kind: the first sentence of the comment that its file begins with."""
    path = _FOLDER / f"{name}.yaml"
    if not path.exists() and (found := provider()):
        path = next(found.PRESETS.rglob(path.name))
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    return re.split(r"(?<=[.:]) (?=[A-Z])", comment)[0].rstrip(":.")


def _folder(kind: str) -> Path:
    found = provider() if kind != _TRANSFORMER else None
    return found.PRESETS / kind if found else _FOLDER
