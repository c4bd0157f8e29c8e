"""Weights by name: extraction from a model, loading, and checks for shapes and finite values."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fasttfm.errors import UserError

M = TypeVar("M", bound=torch.nn.Module)


def model_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared tensor (tied embeddings) only under its first name."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor
    return weights


def with_weights(make: Callable[[], M], weights: Mapping[str, Tensor], source: Path) -> M:
    """make() with `weights` loaded. Raises the errors of load_weights().

    Shapes are checked on the meta device first, because a damaged configuration may describe a model of any size.
    """
    refuse_others(make, weights, source)
    model = make()
    load_weights(model, weights, source)
    return model


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Copy `weights` into `model`; UserError with `source` and the first parameter that does not match."""
    _refuse_others(model, weights, source)
    with torch.no_grad():
        for name, tensor in model_weights(model).items():
            tensor.copy_(weights[name])
            if weights[name].dtype == torch.float64 and tensor.dtype != torch.float64:
                refuse_nonfinite({name: tensor}, source)  # overflow to infinity


def refuse_others(make: Callable[[], torch.nn.Module], weights: Mapping[str, Tensor], source: Path) -> None:
    """Raise UserError with `source` and the first parameter that does not match make(), without allocating it."""
    with torch.device("meta"):
        _refuse_others(make(), weights, source)


def _refuse_others(model: torch.nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    expected = model_weights(model)
    for name, tensor in expected.items():
        if name not in weights:
            raise UserError(f"{source}: is for another model: it has no {name}; use a checkpoint of this model")
        if weights[name].shape != tensor.shape:
            shape, needed = tuple(weights[name].shape), tuple(tensor.shape)
            what = "vocabulary" if "embed" in name and shape[1:] == needed[1:] else "model"
            raise UserError(
                f"{source}: is for another {what}: {name} has shape {shape}, this model needs {needed}; use a "
                "checkpoint of this model"
            )
        if tensor.is_floating_point() and not weights[name].is_floating_point():
            dtype = str(weights[name].dtype).removeprefix("torch.")
            raise UserError(
                f"{source}: {name} is {dtype} without a scale; use weights in float32, bfloat16 or float16, or those "
                "of fasttfm quantize"
            )
    for name in weights:
        if name not in expected:
            raise UserError(
                f"{source}: is for another model: it has {name}, which this one lacks; use a checkpoint of this model"
            )


def is_finite(tensor: Tensor) -> bool:
    """Whether a real tensor has neither NaN nor infinity; allocates nothing for dtypes used in training."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    try:
        ends = torch.stack(torch.aminmax(tensor.detach()))  # propagates NaN
    except (RuntimeError, NotImplementedError):  # 8-bit floats
        ends = tensor.detach().float()
    return bool(ends.isfinite().all())


def refuse_nonfinite(weights: Mapping[str, Tensor], source: Path) -> None:
    """Raise UserError for NaN, infinity and complex weights."""
    for name, tensor in weights.items():
        if tensor.is_complex():
            raise UserError(
                f"{source}: {name} is complex ({str(tensor.dtype).removeprefix('torch.')}), which no model supports; "
                "use the weights of fasttfm train"
            )
        if not is_finite(tensor):
            raise UserError(
                f"{source}: {name} contains NaN or infinity: the training diverged; use an earlier checkpoint, or "
                "train again with a lower learning rate"
            )


def layer_map(teacher_layers: int, student_layers: int) -> list[int]:
    """The teacher's layer (from 0) that each student layer learns from: every k-th, including the last.

    Raises ValueError if the teacher's number of layers is not a multiple of the student's.
    """
    if student_layers < 1 or teacher_layers % student_layers:
        raise ValueError(f"the teacher's {teacher_layers} layers are not a multiple of the student's {student_layers}")
    step = teacher_layers // student_layers
    return [step * (number + 1) - 1 for number in range(student_layers)]
