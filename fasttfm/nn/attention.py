"""Multi-head attention with torch.nn's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.nn import masks
from fasttfm.nn._inspect import ordinary
from fasttfm.nn.cache import AttentionCache
from fasttfm.nn.errors import ArgumentError, check_dropout, check_tensor
from fasttfm.nn.packing import Packing


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention (Vaswani et al. 2017, section 3.2.2) on fasttfm's fused attention.

    Arguments, initial values and state dict are torch.nn's. Beyond it: a query with no key to attend gives zeros
    (before the output projection) and passes no gradient, in training and in eval, with weights and without;
    is_causal=True needs no attn_mask; `cache` keeps keys and values between calls; `packing` leaves padding out.
    is_causal is believed: attn_mask is not read then. Raises ArgumentError (a ValueError) for sizes or shapes that do
    not agree, ArgumentTypeError (a TypeError) for a mask that is neither bool nor floating.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_dropout(dropout)
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise ArgumentError(
                f"embed_dim {embed_dim} must be divisible by num_heads {num_heads}, and both greater than 0"
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
        packing: Packing | None = None,
        key_packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of query over key and value, and its weights where they are asked for.

        query (L, N, E), key (S, N, kdim), value (S, N, vdim); batch first: (N, L, E) ...; unbatched: (L, E) ...
        key_padding_mask (N, S), unbatched (S,); attn_mask (L, S) or (N * H, L, S): bool, True hides, or floats that are
        added to the scores. is_causal: query i sees the keys up to i. need_weights asks for the weights, averaged over
        the heads (N, L, S) or with average_attn_weights=False of each (N, H, L, S), dropout included.
        cache: keys and values of earlier calls come before these, and S counts them too; see fasttfm.nn.DecoderCache.
        packing: query is packed (T, E), and so are key and value, by key_packing where it differs; no other mask than
        is_causal is possible then, and no weights.
        Returns the output, shaped as query, and the weights or None.
        """
        if packing is not None:
            self._check_packed(query, key, value, key_padding_mask, attn_mask, is_causal, need_weights, cache)
            return self._attend_packed(query, key, value, packing, key_packing or packing, is_causal), None
        if not ordinary(query, key, value, self.in_proj_weight, self.q_proj_weight, self.out_proj.weight):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        self._check(query, key, value, key_padding_mask, attn_mask, cache)
        if not batched:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        batch_first = self.batch_first or not batched
        q, k, v = self._heads(query, key, value, batch_first, batched, cache)
        offset = 0
        if cache is not None:
            offset = cache.length if cache.grows else 0
            k, v = cache.extend(k, v)
        causal = is_causal and not (offset and q.shape[2] == 1)  # the newest query sees every key
        k, v, attn_mask, key_padding_mask, causal = self._with_extra_keys(
            q, k, v, None if causal else attn_mask, key_padding_mask, causal, offset
        )
        options: dict[str, Any] = {
            "mask": masks.merged(attn_mask, key_padding_mask, self.num_heads),
            "causal": causal,
            "causal_offset": offset if causal else 0,
            "dropout_p": self.dropout if self.training else 0.0,
        }
        weights = None
        if need_weights:
            weights = F.attention_weights(q, k, **options)  # (B, H, L, S)
            output = weights @ v
        else:
            output = F.attention(q, k, v, **options)  # (B, H, L, D)
        joined = output.transpose(1, 2) if batch_first else output.permute(2, 0, 1, 3)
        output = torch.nn.functional.linear(joined.flatten(2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output, weights

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, key_packing: Packing, is_causal: bool
    ) -> Tensor:
        """The output (T, E) of packed query (T, E), key and value (Tk, E)."""
        heads = self._heads(query, key, value, batch_first=True, batched=False, cache=None)
        q, k, v = (x[0].transpose(0, 1) for x in heads)  # (T, H, D)
        output = F.varlen_attention(
            q,
            k,
            v,
            packing.starts,
            key_packing.starts,
            packing.longest,
            key_packing.longest,
            causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return torch.nn.functional.linear(output.flatten(1), self.out_proj.weight, self.out_proj.bias)

    def _heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_first: bool,
        batched: bool,
        cache: AttentionCache | None,
    ) -> tuple[Any, ...]:
        """Queries (B, H, L, D), keys and values (B, H, S, D): views of as few matrix products as the inputs allow.

        Keys and values are None where the cache holds them already.
        """
        width = self.embed_dim
        bias: Tensor | None = self.in_proj_bias
        if bias is not None and bias.dtype != self.out_proj.weight.dtype:
            bias = bias.to(self.out_proj.weight.dtype)  # torch.nn adds a bias of any dtype
        linear = torch.nn.functional.linear
        one_memory, one_input = key is value, query is key and key is value
        if not batched:
            query, key, value = query[None], key[None], value[None]
        if cache is not None and cache.complete:
            weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[:width]
            return (*self._split(linear(query, weight, _part(bias, 0, width)), 1, batch_first), None, None)
        if self.in_proj_weight is None:
            q = linear(query, self.q_proj_weight, _part(bias, 0, width))
            k = linear(key, self.k_proj_weight, _part(bias, width, 2 * width))
            v = linear(value, self.v_proj_weight, _part(bias, 2 * width, 3 * width))
        elif one_input:
            return self._split(linear(query, self.in_proj_weight, bias), 3, batch_first)
        elif one_memory:
            q = linear(query, self.in_proj_weight[:width], _part(bias, 0, width))
            kv = linear(key, self.in_proj_weight[width:], _part(bias, width, 3 * width))
            return (*self._split(q, 1, batch_first), *self._split(kv, 2, batch_first))
        else:
            q, k, v = (
                linear(x, w, _part(bias, i * width, (i + 1) * width))
                for i, (x, w) in enumerate(zip((query, key, value), self.in_proj_weight.chunk(3)))
            )
        return tuple(self._split(x, 1, batch_first)[0] for x in (q, k, v))

    def _split(self, x: Tensor, parts: int, batch_first: bool) -> tuple[Tensor, ...]:
        """(B, L, parts * E), or (L, B, ...), to parts times (B, H, L, D)."""
        x = x.unflatten(-1, (parts, self.num_heads, self.head_dim))
        return x.permute(2, 0, 3, 1, 4).unbind(0) if batch_first else x.permute(2, 1, 3, 0, 4).unbind(0)

    def _with_extra_keys(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        causal: bool,
        offset: int,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, bool]:
        """Appends the keys of add_bias_kv and add_zero_attn, which every query sees; keys (B, H, S, D)."""
        extra = (self.bias_k is not None) + self.add_zero_attn
        if not extra:
            return key, value, attn_mask, key_padding_mask, causal
        if causal:
            attn_mask = masks.causal_mask(query.shape[2], key.shape[2], key.device, offset)
        batch = key.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            shape = (batch, self.num_heads, 1, self.head_dim)
            key = torch.cat([key, self.bias_k.view(1, self.num_heads, 1, -1).expand(shape).to(key.dtype)], dim=2)
            value = torch.cat([value, self.bias_v.view(1, self.num_heads, 1, -1).expand(shape).to(value.dtype)], dim=2)
        if self.add_zero_attn:
            key, value = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (key, value))
        attn_mask, key_padding_mask = (masks.with_extra_keys(m, extra) for m in (attn_mask, key_padding_mask))
        return key, value, attn_mask, key_padding_mask, False

    def _check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        cache: AttentionCache | None,
    ) -> None:
        dims = query.dim()
        if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
            raise ArgumentError(
                f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must all be 3-D "
                "(batched) or all be 2-D (unbatched)"
            )
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        for name, tensor, argument in (("query", query, "embed_dim"), ("key", key, "kdim"), ("value", value, "vdim")):
            check_tensor(name, tensor, getattr(self, argument), argument, weight)
        if key.shape[:-1] != value.shape[:-1]:
            raise ArgumentError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} must agree in batch size and length"
            )
        batch_dim = 0 if self.batch_first else 1
        if dims == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ArgumentError(
                f"query {tuple(query.shape)} and key {tuple(key.shape)} must have one batch size, in dimension "
                f"{batch_dim} (batch_first is {self.batch_first})"
            )
        if key_padding_mask is None and attn_mask is None:
            return
        queries, keys = ((x.shape[1 - batch_dim] if dims == 3 else x.shape[0]) for x in (query, key))
        if cache is not None and cache.grows:
            keys += cache.length
        batch = query.shape[batch_dim] if dims == 3 else 1
        shape = (batch, keys) if dims == 3 else (keys,)
        masks.check_mask("key_padding_mask", key_padding_mask, (shape,), query.device)
        shapes = ((queries, keys), (batch * self.num_heads, queries, keys))
        masks.check_mask("attn_mask", attn_mask, shapes, query.device)

    def _check_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
        cache: AttentionCache | None,
    ) -> None:
        masked = key_padding_mask is not None or (attn_mask is not None and not is_causal)
        for name, given in (
            ("a mask other than is_causal", masked),
            ("need_weights", need_weights),
            ("cache", cache is not None),
            ("add_bias_kv", self.bias_k is not None),
            ("add_zero_attn", self.add_zero_attn),
        ):
            if given:
                raise ArgumentError(f"packing does not go with {name}: unpack first")
        if query.dim() != 2:
            raise ArgumentError(f"query {tuple(query.shape)} must be packed, (T, E): packing.pack(query)")
        self._check(query, key, value, None, None, None)


def _part(bias: Tensor | None, start: int, end: int) -> Tensor | None:
    return None if bias is None else bias[start:end]
