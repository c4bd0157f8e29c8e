"""The recipes that come with the package: one commented YAML file each, model and training together."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from fasttfm.errors import UserError

_FOLDER = Path(__file__).parent


def preset_names() -> list[str]:
    """Names of all presets, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def preset_path(name: str) -> Path:
    """The YAML file of preset `name`; UserError that names the nearest when there is none."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"preset {name!r} is unknown: {hint}there are {', '.join(names)}")
    return _FOLDER / f"{name}.yaml"


def preset_section(name: str, section: str) -> dict[str, Any]:
    """One section (model, data, training or decoding) of preset `name`, as the file has it."""
    return dict(yaml.safe_load(preset_path(name).read_text(encoding="utf-8")).get(section) or {})
