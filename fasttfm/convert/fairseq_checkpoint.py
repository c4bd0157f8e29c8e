"""Reads a checkpoint of fairseq-train without fairseq, and without running anything in it.

Settings are an argparse.Namespace, a dict, or a DictConfig of OmegaConf, which may lie one in the other. A class that
torch does not know becomes a Shell, which keeps what the file says of an object and does nothing.
https://omegaconf.readthedocs.io     a container has _content, a value _val; ${model.dropout} names another value
"""

import argparse
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm.convert.names import TheirWeights
from fasttfm.convert.weight_files import foreign_errors, load_pickle, plain_weights
from fasttfm.errors import UserError

_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_DEEPEST = 30
_JOINT = re.compile(r"(.+_attn)\.in_proj_(weight|bias)")
_NORM = re.compile(r"((encoder|decoder)\.layers\.\d+)\.layer_norms\.(\d)\.(weight|bias)")
_NORMS = {
    "encoder": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}
"""Norms that old checkpoints number."""


class Shell:
    """An object of a class that is not loaded: what it was made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(path: Path) -> tuple[dict[str, Any], TheirWeights]:
    """Settings, flat as fairseq's flags are, with those of the task, and float32 weights of a checkpoint."""
    if not path.is_file():
        raise UserError(f"{path}: no such file: give a checkpoint of fairseq-train")
    names = set(_unknown_classes(path)) - {"argparse.Namespace"}
    loaded = load_pickle(path, [argparse.Namespace, *((Shell, name) for name in names)])
    weights, settings = loaded.get("model"), _settings(loaded)
    if not isinstance(weights, dict) or not settings:
        raise UserError(f"{path}: has no weights (model) or no settings (cfg, args): give one of fairseq-train")
    found = {name: each for name, each in weights.items() if not str(name).endswith("embed_positions._float_tensor")}
    return settings, TheirWeights(path, _renamed(plain_weights(found, path)))


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under today's names, which checkpoints of 2018 (WMT14 and WMT16) have not."""
    result: dict[str, Tensor] = {}
    for name, weight in weights.items():
        joint, norm = _JOINT.fullmatch(name), _NORM.fullmatch(name)
        if joint:
            parts = zip(("q_proj", "k_proj", "v_proj"), weight.chunk(3))
            result |= {f"{joint[1]}.{part}.{joint[2]}": each for part, each in parts}
        elif norm and int(norm[3]) < len(_NORMS[norm[2]]):
            result[f"{norm[1]}.{_NORMS[norm[2]][int(norm[3])]}.{norm[4]}"] = weight
        else:
            result[name] = weight
    return result


def _unknown_classes(path: Path) -> list[str]:
    """Names of what a checkpoint refers to and torch does not load."""
    if not zipfile.is_zipfile(path):
        return []  # before PyTorch 1.6, when settings were a Namespace
    with foreign_errors(f"{path}: is cut off", "copy it again"):
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)


def _settings(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model and of its task; empty where there are none."""
    whole = _plain(loaded.get("cfg"), 0)
    whole = whole if isinstance(whole, dict) and whole.get("model") else {"model": _plain(loaded.get("args"), 0)}
    given: dict[str, Any] = {}
    for section in ("task", "model"):
        values = whole.get(section)
        if isinstance(values, dict):
            given |= _flat({name: _resolved(value, whole) for name, value in values.items()})
    return given


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """encoder: {embed_dim: 512} is --encoder-embed-dim 512."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("encoder", "decoder") and isinstance(value, dict):
            flat |= {f"{name}_{inner}": each for inner, each in value.items()}
        else:
            flat[name] = value
    return flat


def _plain(value: Any, depth: int) -> Any:
    """A value without the objects around it."""
    if depth > _DEEPEST:
        return None
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Shell):
        state = getattr(value, "state", None)
        if isinstance(state, dict):
            inner = state.get("_content", state.get("_val"))
        else:
            inner = value.arguments[0] if value.arguments else None  # a member of an enumeration
        return _plain(inner, depth + 1)
    if isinstance(value, dict):
        return {str(name): _plain(each, depth + 1) for name, each in value.items()}
    return [_plain(each, depth + 1) for each in value] if isinstance(value, list | tuple) else value


def _resolved(value: Any, whole: Mapping[str, Any], depth: int = 0) -> Any:
    """Return the value that ${section.name} stands for."""
    if isinstance(value, dict):
        return {name: _resolved(each, whole, depth) for name, each in value.items()}
    match = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth > _DEEPEST:
        return value
    found: Any = whole
    for name in match[1].split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return _resolved(found, whole, depth + 1)
