"""Encoder-decoder Transformer with torch.nn's interface."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.errors import ArgumentError
from fasttfm.functional.signature import checks_arguments, names_arguments
from fasttfm.nn import masks
from fasttfm.nn.decoder import TransformerDecoder, TransformerDecoderLayer
from fasttfm.nn.encoder import TransformerEncoder, TransformerEncoderLayer
from fasttfm.nn.errors import check_sizes
from fasttfm.nn.modules import LayerNorm


class Transformer(torch.nn.Transformer):
    """torch.nn.Transformer (Vaswani et al. 2017) with fasttfm.nn's encoder and decoder.

    Arguments, initialization and state dict are torch.nn's.
    """

    @checks_arguments
    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
        dim_feedforward: int = 2048, dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = nn.functional.relu, custom_encoder: nn.Module | None = None,
        custom_decoder: nn.Module | None = None, layer_norm_eps: float = 1e-5, batch_first: bool = False,
        norm_first: bool = False, bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        check_sizes(num_encoder_layers=num_encoder_layers, num_decoder_layers=num_decoder_layers)
        nn.Module.__init__(self)  # torch.nn's constructor would build torch.nn's layers and draw random numbers
        layer = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)

        def stack(stack_class: Any, layer_class: Any, count: int) -> nn.Module:
            first = layer_class(*layer, device, dtype)
            return stack_class(first, count, LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype))

        encoder, decoder = custom_encoder, custom_decoder
        if encoder is None:
            encoder = stack(TransformerEncoder, TransformerEncoderLayer, num_encoder_layers)
        if decoder is None:
            decoder = stack(TransformerDecoder, TransformerDecoderLayer, num_decoder_layers)
        self.encoder, self.decoder = encoder, decoder
        self._reset_parameters()
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first

    @names_arguments
    def forward(
        self, src: Tensor, tgt: Tensor, src_mask: Tensor | None = None, tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        src_is_causal: bool | None = None, tgt_is_causal: bool | None = None, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """The output, in tgt's shape, for src (S, N, E), tgt (L, N, E), or batch first, or unbatched; masks as in the
        layers."""
        if isinstance(self.encoder, TransformerEncoder):
            masks.check_stack_mask("src_mask", src_mask, src, self.encoder.layers)
        batch_dim = 0 if self.batch_first else 1
        for name, tensor in (("src", src), ("tgt", tgt)):
            if tensor.shape[-1:] != (self.d_model,):
                raise ArgumentError(f"{name} {tuple(tensor.shape)} must be {self.d_model} wide (d_model)")
        if src.dim() == 3 and src.shape[batch_dim] != tgt.shape[batch_dim]:
            raise ArgumentError(
                f"src {tuple(src.shape)} and tgt {tuple(tgt.shape)} must have one batch size in dimension {batch_dim} "
                f"(batch_first is {self.batch_first})"
            )
        return super().forward(
            src, tgt, src_mask, tgt_mask, memory_mask, src_key_padding_mask, tgt_key_padding_mask,
            memory_key_padding_mask, src_is_causal, tgt_is_causal, memory_is_causal,
        )  # fmt: skip
