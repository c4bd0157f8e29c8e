"""Weights by name: taken from a model, put into one, and checked to be numbers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fasttfm.errors import UserError

M = TypeVar("M", bound=torch.nn.Module)


def model_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared one (tied embeddings) appears once, under its first name."""
    seen: set[int] = set()
    weights = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor
    return weights


def with_weights(make: Callable[[], M], weights: Mapping[str, Tensor], source: Path) -> M:
    """The model that make() gives, with `weights` in it. UserError as load_weights().

    What does not fit is refused before memory is taken: a configuration may tell of any size.
    """
    refuse_others(make, weights, source)
    model = make()
    load_weights(model, weights, source)
    return model


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    """Copy `weights` into `model`; UserError naming `source` and the first parameter that does not fit."""
    _refuse_others(model, weights, source)
    with torch.no_grad():
        for name, tensor in model_weights(model).items():
            tensor.copy_(weights[name])
            if weights[name].dtype == torch.float64 and tensor.dtype != torch.float64:
                refuse_what_is_no_number({name: tensor}, source)  # what float32 is too small for became infinite


def refuse_others(make: Callable[[], torch.nn.Module], weights: Mapping[str, Tensor], source: Path) -> None:
    """Raise UserError naming `source` and the first parameter that does not fit the model that make() gives.

    No memory is taken for it.
    """
    with torch.device("meta"):
        _refuse_others(make(), weights, source)


def _refuse_others(model: torch.nn.Module, weights: Mapping[str, Tensor], source: Path) -> None:
    wanted = model_weights(model)
    for name, tensor in wanted.items():
        if name not in weights:
            raise UserError(f"{source}: is of another model: it has no {name}; give the checkpoint of this model")
        if weights[name].shape != tensor.shape:
            given, needed = tuple(weights[name].shape), tuple(tensor.shape)
            what = "vocabulary" if "embed" in name and given[1:] == needed[1:] else "model"
            raise UserError(
                f"{source}: is of another {what}: {name} is {given}, this model needs {needed}; "
                "give the checkpoint of this model"
            )
        if tensor.is_floating_point() and not weights[name].is_floating_point():
            kind = str(weights[name].dtype).removeprefix("torch.")
            raise UserError(
                f"{source}: {name} is of {kind}, which would be cut to whole numbers without a scale; give weights in "
                "float32, bfloat16 or float16, or those of fasttfm quantize"
            )
    for name in weights:
        if name not in wanted:
            raise UserError(
                f"{source}: is of another model: it has {name}, which this one lacks; give this model's checkpoint"
            )


def is_finite(tensor: Tensor) -> bool:
    """Return whether a real tensor has neither NaN nor infinity; takes no memory for the types that training uses."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    try:
        ends = torch.stack(torch.aminmax(tensor.detach()))  # NaN passes through both
    except (RuntimeError, NotImplementedError):  # a type with 8 bits
        ends = tensor.detach().float()
    return bool(ends.isfinite().all())


def refuse_what_is_no_number(weights: Mapping[str, Tensor], source: Path) -> None:
    """Raise UserError for complex weights, and for NaN and infinity, which would answer anything with nothing."""
    for name, tensor in weights.items():
        if tensor.is_complex():
            raise UserError(
                f"{source}: {name} holds complex numbers ({str(tensor.dtype).removeprefix('torch.')}), which no model "
                "here has; give the weights of fasttfm train"
            )
        if not is_finite(tensor):
            raise UserError(
                f"{source}: {name} holds NaN or infinity: that training diverged; give an earlier checkpoint, or train "
                "anew with a lower learning rate"
            )


def layer_map(teacher_layers: int, student_layers: int) -> list[int]:
    """Choose the teacher's layer (from 0) that each of the student's learns from: every k-th, the last the last.

    Raises ValueError where the teacher's number of layers is not a multiple of the student's.
    """
    if student_layers < 1 or teacher_layers % student_layers:
        raise ValueError(f"{student_layers} layers cannot be spread evenly over the teacher's {teacher_layers}")
    step = teacher_layers // student_layers
    return [step * (number + 1) - 1 for number in range(student_layers)]
