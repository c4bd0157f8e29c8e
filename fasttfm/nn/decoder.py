"""Decoder with torch.nn's interface and a KV cache."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.transformer import TransformerDecoderLayer as TorchDecoderLayer

from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional.signature import checks_arguments, names_arguments
from fasttfm.models.cache import DecoderCache, LayerCache
from fasttfm.models.packing import Packing
from fasttfm.models.plain import attentions_of, plain_width
from fasttfm.nn import masks
from fasttfm.nn._layers import Attends, Layer, argument_names, overrides
from fasttfm.nn.errors import check_sizes

SELF_NAMES, CROSS_NAMES = argument_names("tgt", "tgt"), argument_names("tgt", "memory")


class TransformerDecoderLayer(Layer, torch.nn.TransformerDecoderLayer):
    """torch.nn.TransformerDecoderLayer (Vaswani et al. 2017, section 3.1) on fused operators.

    Arguments, initialization and state dict are torch.nn's; fused as in TransformerEncoderLayer.
    """

    stands_for = "layer"

    @names_arguments
    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False, memory_is_causal: bool = False, *, cache: LayerCache | None = None,
        packing: Packing | None = None, memory_packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """tgt (L, N, E), memory (S, N, E), or batch first, or unbatched; masks as in MultiheadAttention.

        cache: DecoderCache.layer(i); tgt then holds only the new positions, which attend to all cached ones, and
        causally to each other unless tgt_mask (new, all) is given; tgt_key_padding_mask is (N, all).
        packing, memory_packing: tgt and memory are packed, (T, E); excludes all masks but tgt_is_causal.
        """
        if overrides(self, TorchDecoderLayer, cache=cache, packing=packing):
            return super().forward(
                tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal,
                memory_is_causal,
            )  # fmt: skip
        self_cache, memory_cache = cache if cache is not None else (None, None)
        _check_packings(packing, memory_packing)
        if self_cache is not None and tgt_mask is None:
            tgt_is_causal = True
        if self_cache is not None and self_cache.length and memory_is_causal:  # new queries start at an offset
            queries, keys = masks.length_of(tgt, [self]), masks.length_of(memory, [self])
            memory_mask, memory_is_causal = masks.causal_mask(queries, keys, tgt.device, self_cache.length), False
        own = Attends(None, tgt_mask, tgt_key_padding_mask, tgt_is_causal, SELF_NAMES, self_cache)
        cross = Attends(memory, memory_mask, memory_key_padding_mask, memory_is_causal, CROSS_NAMES, memory_cache)
        return self._compute(tgt, [own, cross], (packing, memory_packing))


class TransformerDecoder(torch.nn.TransformerDecoder):
    """torch.nn.TransformerDecoder with the same arguments, and a cache for token-by-token generation."""

    @checks_arguments
    def __init__(self, decoder_layer: nn.Module, num_layers: int, norm: nn.Module | None = None) -> None:
        check_sizes(num_layers=num_layers)
        super().__init__(decoder_layer, num_layers, norm)  # type: ignore[arg-type]

    @names_arguments
    def forward(
        self, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None, memory_is_causal: bool = False, *, cache: DecoderCache | None = None,
        packing: Packing | None = None, memory_packing: Packing | None = None,
    ) -> Tensor:  # fmt: skip
        """tgt (L, N, E), memory (S, N, E), or batch first, or unbatched; masks as in MultiheadAttention.

        tgt_is_causal: None compares tgt_mask with the causal mask; True is trusted, and needs no mask.
        cache: tgt holds only the new positions and attention is causal; outputs equal those of a causal pass over all
        positions. Raises ArgumentTypeError for layers without a cache.
        packing, memory_packing: replace the padding masks of tgt and memory; padding is skipped and its outputs are
        zeros. Both inputs may also be packed already, (T, E), and so is the output then.
        """
        if cache is None:
            tgt_is_causal = masks.detect_causal(tgt_mask, tgt_is_causal, masks.length_of(tgt, self.layers))
        elif not all(isinstance(layer, TransformerDecoderLayer) for layer in self.layers):
            names = sorted({type(layer).__name__ for layer in self.layers})
            raise ArgumentTypeError(
                f"cache needs layers of fasttfm.nn.TransformerDecoderLayer: these are {', '.join(names)}"
            )
        _check_packings(packing, memory_packing)
        masked = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, packing)
        if cache is not None and not memory_is_causal and all(each is None for each in masked):
            layers, lengths = [*self.layers], cache.source_lengths
            stepped = cache.step(tgt, memory, layers, self.norm, lengths, lambda: _plain(layers, tgt, memory))
            if stepped is not None:
                return stepped
        if cache is not None and cache.source_lengths is not None and memory_key_padding_mask is None:
            places = torch.arange(masks.length_of(memory, self.layers), device=memory.device)
            hidden = places >= cache.source_lengths[:, None]
            memory_key_padding_mask = hidden if memory.dim() == 3 else hidden[0]
        batch_first = masks.batch_first(self.layers)
        output, is_padded = tgt, tgt.dim() == 3
        if packing is not None and memory_packing is not None:
            output = packing.pack(tgt, batch_first) if is_padded else tgt
            memory = memory_packing.pack(memory, batch_first) if memory.dim() == 3 else memory
        options: dict[str, Any] = {
            "tgt_mask": tgt_mask, "memory_mask": memory_mask, "tgt_key_padding_mask": tgt_key_padding_mask,
            "memory_key_padding_mask": memory_key_padding_mask, "tgt_is_causal": bool(tgt_is_causal),
            "memory_is_causal": memory_is_causal,
        }  # fmt: skip
        if packing is not None:
            options |= {"packing": packing, "memory_packing": memory_packing}
        for number, layer in enumerate(self.layers):
            kept = {} if cache is None else {"cache": cache.layer(number)}
            output = layer(output, memory, **options, **kept)
        output = output if self.norm is None else self.norm(output)
        return packing.unpack(output, batch_first) if packing is not None and is_padded else output


def _plain(layers: Any, tgt: Tensor, memory: Tensor) -> bool:
    """Return whether all layers are plain and in eval mode, and tgt is one new position per row."""
    if not (layers and all(plain_width(each) and not overrides(each, TorchDecoderLayer) for each in layers)):
        return False
    attentions = [a for each in layers for a in attentions_of(each)]
    width, first, heads = attentions[0].embed_dim, attentions[0].batch_first, attentions[0].num_heads
    lead = (*memory.shape[:1], 1) if first else (1, *memory.shape[1:2])
    return (
        tgt.shape == (*lead, width)
        and memory.shape[2:] == (width,)
        and (memory.dtype, memory.device) == (tgt.dtype, tgt.device)
        and all((a.embed_dim, a.batch_first, a.num_heads) == (width, first, heads) for a in attentions)
        and not any(module.training for layer in layers for module in layer.modules())
    )


def _check_packings(packing: Packing | None, memory_packing: Packing | None) -> None:
    """Raise ArgumentError unless both or neither is None."""
    if (packing is None) != (memory_packing is None):
        raise ArgumentError("packing and memory_packing go together: pass both (Packing.from_padding_mask) or neither")
