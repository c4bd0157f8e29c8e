"""Matrices of a model in 8 bits: a quarter of the bytes, with one scale for each output.

NAME is stored as int8 (N, K) and NAME.scale as float32 (N,). Read back as float32 and quantized once more, which is
what translating in int8 does (cpu/int8.py), they are the same integers. Embeddings, and the output's matrix
where it is one of them, norms and biases stay as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fasttfm.cpu.int8 import dequantize, quantize_weight

_MATRICES = ("in_proj_weight", "out_proj.weight", "linear1.weight", "linear2.weight", "output.weight")
_SCALE = ".scale"


def stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with every matrix of a linear layer in int8."""
    result = {}
    for name, tensor in weights.items():
        if name.endswith(_MATRICES) and tensor.is_floating_point():
            result[name], result[name + _SCALE] = quantize_weight(tensor)
        else:
            result[name] = tensor
    return result


def restored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with every matrix in float32; ValueError for one whose scales are missing or do not fit."""
    result = {}
    for name, tensor in weights.items():
        owner = name.removesuffix(_SCALE)
        if owner != name and owner in weights and weights[owner].dtype == torch.int8:
            continue
        if tensor.dtype != torch.int8:
            result[name] = tensor
            continue
        scales = weights.get(name + _SCALE)
        if scales is None or tensor.dim() != 2 or scales.shape != tensor.shape[:1] or scales.dtype != torch.float32:
            raise ValueError(f"{name} is in int8 without a float32 scale for each of its rows")
        result[name] = dequantize(tensor, scales)
    return result
