"""Weights as Hugging Face's libraries save them: model.safetensors or pytorch_model.bin, whole or in several files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from fasttfm.convert.names import TheirWeights
from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.store.weights import refuse_what_is_no_number
from fasttfm.system.files import read_json, refuse_bytes
from fasttfm.system.parsing import field

_NAMES = ("model.safetensors", "pytorch_model.bin")


def read_tensors(folder: Path) -> TheirWeights:
    """Weights of model.safetensors, or of pytorch_model.bin without running any code in it, in float32.

    Those of several files are found by NAME.index.json. Raises UserError where all are missing, and for a file that is
    cut off or holds something else than numbers.
    """
    for name in _NAMES:
        if (folder / name).exists():
            return TheirWeights(folder, _read_file(folder / name))
        index = folder / f"{name}.index.json"
        if index.exists():
            return TheirWeights(folder, _read_shards(index))
    raise UserError(f"{folder}: has no {' or '.join(_NAMES)}, nor one in several files with its index")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """The weights of several files. Raises UserError where one is missing, or has not what the index says."""
    places = field(read_json(index), "weight_map", dict, str(index))
    weights: dict[str, Tensor] = {}
    for name in sorted({str(place) for place in places.values()}):
        if Path(name).name != name:
            raise UserError(f"{index}: weight_map names the file {name!r}: only files beside it are read")
        if not (index.parent / name).exists():
            raise UserError(f"{index.parent / name}: is missing: {index.name} says that it has weights")
        found = _read_file(index.parent / name)
        told = {weight for weight, place in places.items() if place == name}
        for verb, others in (("has no", told - found.keys()), ("has", found.keys() - told)):
            if others:
                raise UserError(
                    f"{index.parent / name}: {verb} {min(others)}, unlike {index.name} says: copy both again"
                )
        weights |= found
    return weights


def _read_file(path: Path) -> dict[str, Tensor]:
    refuse_bytes(path)
    try:
        if path.suffix == ".safetensors":
            weights = load_file(path)
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, ValueError, RuntimeError, EOFError, KeyError) as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise UserError(f"{path}: is cut off or not what its name says ({first_line(error)}): copy it again") from None
    except Exception as error:  # unpickling raises of every kind
        raise UserError(f"{path}: holds more than weights ({first_line(error)}): it is not loaded") from None
    if not isinstance(weights, dict):
        raise UserError(f"{path}: holds more than weights: it is not loaded")
    return plain_weights(weights, path)


def plain_weights(weights: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Weights of a file, floats among them in float32; UserError for what is no plain tensor of numbers, by name."""
    for name, each in weights.items():
        if not (isinstance(name, str) and isinstance(each, Tensor)):
            raise UserError(f"{path}: holds more than weights ({name!r}): it is not loaded")
        if each.layout != torch.strided or each.is_nested or each.is_quantized or each.is_meta:
            raise UserError(f"{path}: {name} is a sparse, nested, quantized or empty tensor: save it as plain numbers")
    refuse_what_is_no_number(weights, path)
    return {name: each.float() if each.is_floating_point() else each for name, each in weights.items()}


def first_line(error: BaseException) -> str:
    """Return what an error of another library says, or its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
