"""Weight files of Hugging Face's libraries: model.safetensors or pytorch_model.bin, single or sharded."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from fasttfm.convert.names import TheirWeights
from fasttfm.errors import UserError, is_out_of_memory
from fasttfm.store.weights import refuse_nonfinite
from fasttfm.system.files import read_json, refuse_bytes
from fasttfm.system.parsing import field

_NAMES = ("model.safetensors", "pytorch_model.bin")


def read_tensors(folder: Path) -> TheirWeights:
    """Read model.safetensors, or pytorch_model.bin without running code from it, as float32.

    Shards are found by NAME.index.json. Raises UserError if no file exists, and for a truncated file or one that holds
    anything other than tensors.
    """
    for name in _NAMES:
        if (folder / name).exists():
            return TheirWeights(folder, _read_file(folder / name))
        index = folder / f"{name}.index.json"
        if index.exists():
            return TheirWeights(folder, _read_shards(index))
    raise UserError(f"{folder}: has no {' or '.join(_NAMES)}, nor one in several files with its index")


def _read_shards(index: Path) -> dict[str, Tensor]:
    """Read sharded weights. Raises UserError if a shard is missing or differs from the index."""
    places = field(read_json(index), "weight_map", dict, str(index))
    weights: dict[str, Tensor] = {}
    for name in sorted({str(place) for place in places.values()}):
        path = index.parent / name
        if Path(name).name != name:
            raise UserError(f"{index}: weight_map names the file {name!r}: only files beside it are read")
        if not path.exists():
            raise UserError(f"{path}: is missing, but {index.name} lists it")
        found = _read_file(path)
        if others := found.keys() ^ {weight for weight, place in places.items() if place == name}:
            raise UserError(f"{path}: {index.name} disagrees about the weight {min(others)}: copy both again")
        weights |= found
    return weights


def _read_file(path: Path) -> dict[str, Tensor]:
    refuse_bytes(path)
    if path.suffix == ".safetensors":
        with foreign_errors(f"{path}: is truncated or no safetensors file", "copy it again"):
            return plain_weights(load_file(path), path)
    return plain_weights(load_pickle(path), path)


def load_pickle(path: Path, allowed: Sequence[Any] = ()) -> dict[Any, Any]:
    """Load a dict written by torch.save() without running code from it. allowed: classes that it may contain."""
    problem, remedy = f"{path}: is truncated, or holds more than weights", "it is not loaded"
    with foreign_errors(problem, remedy), torch.serialization.safe_globals(list(allowed)):
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, dict):
        raise UserError(f"{problem} ({type(loaded).__name__}): {remedy}")
    return loaded


@contextmanager
def foreign_errors(problem: str, remedy: str) -> Iterator[None]:
    """Convert exceptions of other packages to UserError: the problem, the first line of the exception, the remedy."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # unpickling may raise any class
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{problem} ({line}): {remedy}") from None


def plain_weights(weights: Mapping[Any, Any], path: Path) -> dict[str, Tensor]:
    """Return the weights, floating-point ones as float32; UserError for entries that are not finite dense tensors."""
    for name, each in weights.items():
        if not (isinstance(name, str) and isinstance(each, Tensor)):
            raise UserError(f"{path}: holds more than weights ({name!r}): it is not loaded")
        if each.layout != torch.strided or each.is_nested or each.is_quantized or each.is_meta:
            raise UserError(f"{path}: {name} is a sparse, nested, quantized or empty tensor: save it as plain numbers")
    result = {name: each.float() if each.is_floating_point() else each for name, each in weights.items()}
    refuse_nonfinite(result, path)  # float64 may overflow
    return result
