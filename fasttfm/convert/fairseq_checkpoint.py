"""Reads a checkpoint of fairseq-train without fairseq and without running code from it.

Settings are an argparse.Namespace, a dict or an OmegaConf DictConfig, possibly nested. Classes that torch does not load
are replaced by Shell, an inert object that keeps the pickled state.
https://omegaconf.readthedocs.io     a container has _content, a value _val; ${model.dropout} refers to another value
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
"""Names of the norms that old checkpoints number."""


class Shell:
    """Inert stand-in for an object of a class that is not loaded; keeps its arguments and state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


def load(path: Path) -> tuple[dict[str, Any], TheirWeights]:
    """Return the settings of task and model, flat like fairseq's flags, and the float32 weights of a checkpoint."""
    if not path.is_file():
        raise UserError(f"{path}: no such file: give a checkpoint of fairseq-train")
    names: set[str] = set()  # of classes that torch does not load by default
    if zipfile.is_zipfile(path):  # written since PyTorch 1.6; before, settings were a Namespace
        with foreign_errors(f"{path}: is truncated", "copy it again"):
            names = {*torch.serialization.get_unsafe_globals_in_checkpoint(path)} - {"argparse.Namespace"}
    loaded = load_pickle(path, [argparse.Namespace, *((Shell, name) for name in names)])
    weights, settings = loaded.get("model"), _settings(loaded)
    if not isinstance(weights, dict) or not settings:
        raise UserError(f"{path}: has no weights (model) or no settings (cfg, args): give one of fairseq-train")
    kept = {name: each for name, each in weights.items() if not str(name).endswith("embed_positions._float_tensor")}
    return settings, TheirWeights(path, _renamed(plain_weights(kept, path)))


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the weights of 2018's checkpoints (WMT14 and WMT16) to the current names."""
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


def _settings(loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of task and model; empty if there are none."""
    whole = _plain(loaded.get("cfg"), 0)
    whole = whole if isinstance(whole, dict) and whole.get("model") else {"model": _plain(loaded.get("args"), 0)}
    given: dict[str, Any] = {}
    for section in ("task", "model"):
        values = whole.get(section)
        if isinstance(values, dict):
            for name, value in values.items():
                value = _resolved(value, whole)
                if name in ("encoder", "decoder") and isinstance(value, dict):  # {embed_dim: 512}: encoder_embed_dim
                    given |= {f"{name}_{inner}": each for inner, each in value.items()}
                else:
                    given[name] = value
    return given


def _plain(value: Any, depth: int) -> Any:
    """Unwrap Namespace and Shell objects recursively."""
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
    """Resolve ${section.name} references."""
    if isinstance(value, dict):
        return {name: _resolved(each, whole, depth) for name, each in value.items()}
    match = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or depth > _DEEPEST:
        return value
    target: Any = whole
    for name in match[1].split("."):
        target = target.get(name) if isinstance(target, dict) else None
    return _resolved(target, whole, depth + 1)
