"""Encoder with torch.nn's interface."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.transformer import TransformerEncoderLayer as TorchEncoderLayer

from fasttfm.functional.signature import checks_arguments, names_arguments
from fasttfm.models.packing import Packing
from fasttfm.models.plain import NORM, fused_activation, plain_width, untouched
from fasttfm.nn import masks
from fasttfm.nn._layers import Attends, Layer, argument_names, overrides
from fasttfm.nn.errors import check_sizes

NAMES = argument_names("src", "src")


class TransformerEncoderLayer(Layer, torch.nn.TransformerEncoderLayer):
    """torch.nn.TransformerEncoderLayer (Vaswani et al. 2017, section 3.1) on fused operators.

    Arguments, initialization and state dict are torch.nn's. Each residual connection is fused with its dropout and
    LayerNorm, and the feed-forward network's bias, ReLU and dropout are fused; a submodule that was replaced, wrapped
    or hooked is called instead. If _sa_block or _ff_block is overridden, by a subclass or on the object, torch.nn's
    forward runs.
    """

    stands_for = "layer"

    @names_arguments
    def forward(
        self, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False, *, packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """src (S, N, E), (N, S, E) with batch_first, or unbatched (S, E); masks as in MultiheadAttention.

        packing: src is packed, (T, E); excludes all masks but is_causal.
        """
        if src.is_nested or overrides(self, TorchEncoderLayer, packing=packing):
            return super().forward(src, src_mask, src_key_padding_mask, is_causal)
        args = Attends(None, src_mask, src_key_padding_mask, is_causal, NAMES)
        return self._compute(src, [args], (packing, packing))


class TransformerEncoder(torch.nn.TransformerEncoder):
    """torch.nn.TransformerEncoder with the same arguments; encoder_layer: any layer with torch.nn's interface.

    enable_nested_tensor: at inference, skip padding and return zeros there, if layers and norm are plain and the
    activation is ReLU or GELU; with mask_check, only padding at the end of sequences.
    """

    @checks_arguments
    def __init__(
        self, encoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None,
        enable_nested_tensor: bool = True, mask_check: bool = True,
    ) -> None:  # fmt: skip
        check_sizes(num_layers=num_layers)
        with warnings.catch_warnings():  # torch.nn cannot nest some layers; we pack instead
            warnings.filterwarnings("ignore", "enable_nested_tensor is True")
            super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor, mask_check)  # type: ignore[arg-type]

    @names_arguments
    def forward(
        self, src: Tensor, mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None, *, packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """src (S, N, E), (N, S, E) with batch_first, or unbatched (S, E); masks as in MultiheadAttention.

        is_causal: None compares mask with the causal mask; True is trusted, and needs no mask.
        packing: replaces src_key_padding_mask; padding is skipped, in training too, and its outputs are zeros. src may
        also be packed already, (T, E), and so is the output then.
        """
        if src.is_nested:
            return super().forward(src, mask, src_key_padding_mask, is_causal)
        batch_first = masks.batch_first(self.layers)
        if packing is None:
            masks.check_stack_mask("mask", mask, src, self.layers)  # layers call it src_mask in errors
        is_causal = masks.detect_causal(mask, is_causal, masks.length_of(src, self.layers))
        if packing is None and src_key_padding_mask is not None and (mask is None or is_causal):
            packing = self._packing(src, src_key_padding_mask)
            src_key_padding_mask = None if packing is not None else src_key_padding_mask
        options = {} if packing is None else {"packing": packing}
        output, is_padded = src, src.dim() == 3
        if packing is not None and is_padded:
            output = packing.pack(src, batch_first)
        for layer in self.layers:
            output = layer(
                output, src_mask=mask, src_key_padding_mask=src_key_padding_mask, is_causal=is_causal, **options
            )
        output = output if self.norm is None else self.norm(output)
        return packing.unpack(output, batch_first) if packing is not None and is_padded else output

    def _packing(self, src: Tensor, key_padding_mask: Tensor) -> Packing | None:
        """A packing for inference, or None if a layer or the mask does not allow it."""
        if not self.enable_nested_tensor or self.training or src.dim() != 3 or torch.compiler.is_compiling():
            return None
        if key_padding_mask.dtype != torch.bool or key_padding_mask.is_meta:
            return None
        if torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in self.parameters())):
            return None
        if not (self.norm is None or untouched(self.norm, NORM)) or not all(map(_packs, self.layers)):
            return None
        batch_first = masks.batch_first(self.layers)
        shape = tuple(src.shape[:2] if batch_first else src.shape[1::-1])
        masks.check_mask("src_key_padding_mask", key_padding_mask, (shape,))
        if getattr(self, "mask_check", True) and bool((key_padding_mask[:, :-1] & ~key_padding_mask[:, 1:]).any()):
            return None
        return Packing.from_padding_mask(key_padding_mask)


def _packs(layer: Any) -> bool:
    """Return whether layer computes the same on packed input: a plain layer of ours with a fused activation."""
    is_ours = isinstance(layer, TransformerEncoderLayer) and not overrides(layer, TorchEncoderLayer)
    return is_ours and plain_width(layer) > 0 and fused_activation(layer.activation) is not None
