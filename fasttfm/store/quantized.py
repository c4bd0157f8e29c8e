"""Storage of linear layers in int8 with one scale per output: a quarter of the bytes.

NAME is stored as int8 (N, K) and NAME.scale as float32 (N,). Dequantizing to float32 and quantizing again, as int8
translation does (cpu/int8.py), gives the same integers. Embeddings, a tied output matrix, norms and biases are
unchanged.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fasttfm.cpu.int8 import dequantize, quantize_weight

_MATRICES = ("in_proj_weight", "out_proj.weight", "linear1.weight", "linear2.weight", "output.weight")
_SCALE = ".scale"


def stored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with the matrices of all linear layers in int8."""
    result = {}
    for name, tensor in weights.items():
        if name.endswith(_MATRICES) and tensor.is_floating_point():
            result[name], result[name + _SCALE] = quantize_weight(tensor)
        else:
            result[name] = tensor
    return result


def restored(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with int8 matrices in float32; ValueError if scales are missing or do not match."""
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
            raise ValueError(f"{name} is int8 but has no float32 scale for each row")
        result[name] = dequantize(tensor, scales)
    return result
