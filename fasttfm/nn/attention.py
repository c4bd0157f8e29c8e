"""Multi-head attention with torch.nn's interface."""

from typing import Any

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.cpu.linear import linear
from fasttfm.errors import ArgumentError
from fasttfm.functional.attention.routes import takes_fused
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.signature import checks_arguments, is_flag, names_arguments
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.attention import Projected, attend, projected
from fasttfm.models.cache import AttentionCache
from fasttfm.models.packing import Packing
from fasttfm.nn import masks
from fasttfm.nn.errors import check_dropout, check_sizes, check_tensor, refuse_scripting


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention (Vaswani et al. 2017, section 3.2.2) on fasttfm's fused attention.

    Arguments, initial values and state dict are torch.nn's. Beyond it: a query with no key to attend gives zeros
    (before the output projection) and passes no gradient, in training and in eval, with weights and without;
    is_causal=True needs no attn_mask; `cache` keeps keys and values between calls; `packing` leaves padding out.
    is_causal is believed: attn_mask is not read then. Raises ArgumentError (a ValueError) for sizes or shapes that do
    not agree, ArgumentTypeError (a TypeError) for a mask that is neither bool nor floating.
    """

    stands_for = "attention"

    @checks_arguments
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
        check_sizes(kdim=kdim, vdim=vdim)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    __prepare_scriptable__ = refuse_scripting

    @names_arguments
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
        """Attention of query over key and value, and its weights with need_weights.

        query (L, N, E), key (S, N, kdim), value (S, N, vdim); batch first: (N, L, E) ...; unbatched: (L, E) ...
        key_padding_mask (N, S), unbatched (S,); attn_mask (L, S) or (N * H, L, S): bool, True hides, or floats that are
        added to the scores. is_causal: query i sees the keys up to i. need_weights asks for the weights, averaged over
        the heads (N, L, S) or with average_attn_weights=False of each (N, H, L, S), dropout included.
        cache: keys and values of earlier calls come before these, and S counts them too; see fasttfm.nn.DecoderCache.
        packing: query is packed (T, E), and so are key and value, by key_packing where it differs; no other mask than
        is_causal is possible then, and no weights.
        Returns the output, shaped as query, and the weights or None.
        """
        for name, flag in (
            ("need_weights", need_weights), ("average_attn_weights", average_attn_weights), ("is_causal", is_causal)
        ):  # fmt: skip
            is_flag(name, flag)
        if packing is None and not self.takes(query, key, value):
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        heads, weights = self.joined_heads(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
            cache=cache, packing=packing, key_packing=key_packing,
        )  # fmt: skip
        return linear(heads, self.out_proj.weight, self.out_proj.bias), weights

    def takes(self, *inputs: Tensor) -> bool:
        """Return whether these inputs and the parameters are tensors that the operators take."""
        parameters = (self.in_proj_weight, self.in_proj_bias, self.q_proj_weight, self.out_proj.weight)
        return ordinary(*inputs, *parameters, self.out_proj.bias)

    def joined_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: AttentionCache | None = None,
        packing: Packing | None = None,
        key_packing: Packing | None = None,
        seed: Tensor | None = None,
        site: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Concat(head_1 .. head_H), which forward() multiplies by W^O, shaped as query, and the weights or None.

        seed (1,) int64 and site decide the dropout's mask, as in fasttfm.functional.attention; the rest as there.
        """
        dropout = Dropout(self.dropout if self.training else 0.0, seed, site)
        if packing is not None:
            self._check_packed(query, key, value, key_padding_mask, attn_mask, is_causal, need_weights, cache)
            return self._packed_heads(query, key, value, packing, key_packing or packing, is_causal, dropout), None
        batched = query.dim() == 3
        self.check(query, key, value, key_padding_mask, attn_mask, cache)
        if not batched:
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if self._joins(query, key, value, attn_mask, key_padding_mask) and cache is None and not need_weights:
            return self._joint_heads(query, key, attn_mask, key_padding_mask, is_causal, dropout), None
        q, k, v = self._heads(query, key, value, batched, cache)
        offset = 0
        if cache is not None:
            offset = cache.length if cache.grows else 0
            k, v = cache.update(k, v)
        causal = is_causal and not (offset and q.shape[2] == 1)  # the newest query sees every key
        k, v, attn_mask, key_padding_mask, causal = self._with_extra_keys(
            q, k, v, None if causal else attn_mask, key_padding_mask, causal, offset
        )
        options: dict[str, Any] = {
            "mask": masks.merged(attn_mask, key_padding_mask, self.num_heads),
            "causal": causal,
            "causal_offset": offset if causal else 0,
            **dropout.options(),
        }
        weights = None
        if need_weights:
            weights = F.attention_weights(q, k, **options)  # (B, H, L, S)
            output = weights @ v
        else:
            output = F.attention(q, k, v, **options)  # (B, H, L, D)
        joined = self._batch_led(output.transpose(1, 2), batched) if batched else output.transpose(1, 2)[0]
        joined = joined.flatten(-2)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return joined, weights if weights is None or batched else weights[0]

    def _joins(self, query: Tensor, key: Tensor, value: Tensor, *given: Tensor | None) -> bool:
        """Return whether one product projects keys and values, and attention takes them as written; given: masks."""
        return (
            key is value
            and self.in_proj_weight is not None
            and self.bias_k is None
            and not self.add_zero_attn
            and not any(mask is not None and mask.requires_grad for mask in given)
        )

    def _joint_heads(
        self,
        query: Tensor,
        memory: Tensor,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        causal: bool,
        dropout: Dropout,
    ) -> Tensor:
        """The joined heads of query over memory, batched or not."""
        batched = query.dim() == 3
        mask = masks.merged(None if causal else attn_mask, key_padding_mask, self.num_heads)
        heads = self._project(query, memory, batched)
        views = _views(heads) if heads.joint.is_cpu and dropout.dropout_p == 0.0 else None
        if views is not None and takes_fused(*views, mask):
            output = F.attention(*views, mask=mask, causal=causal).transpose(1, 2).flatten(2)
        else:
            output = attend(heads, mask=mask, causal=causal, dropout=dropout)  # (B, L, E)
        return self._batch_led(output, batched) if batched else output[0]

    def _batch_led(self, x: Tensor, batched: bool) -> Tensor:
        """x (B, L, ...), (L, B, ...) or unbatched (L, ...) to (B, L, ...); of a batch also the way back."""
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _packed_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packing: Packing,
        key_packing: Packing,
        causal: bool,
        dropout: Dropout,
    ) -> Tensor:
        """The joined heads (T, E) of packed query (T, E), key and value (Tk, E)."""
        if self._joins(query, key, value):
            joint = self._project(query, key, batched=False)
            return attend(joint, packing, key_packing, causal=causal, dropout=dropout)[0]
        heads = self._heads(query, key, value, batched=False, cache=None)
        q, k, v = (x[0].transpose(0, 1) for x in heads)  # (T, H, D)
        sequences = (packing.starts, key_packing.starts, packing.longest, key_packing.longest)
        return F.varlen_attention(q, k, v, *sequences, causal=causal, **dropout.options()).flatten(1)

    def _project(self, query: Tensor, memory: Tensor, batched: bool) -> Projected:
        """Projections as one product, or two, wrote them, the batch first, of 1 where input has none."""
        given = None if memory is query else memory
        heads = projected(query, given, self.in_proj_weight, self._in_proj_bias(), self.num_heads)
        return Projected(*(None if x is None else self._batch_led(x, batched) for x in heads))  # type: ignore[arg-type]

    def _in_proj_bias(self) -> Tensor | None:
        bias: Tensor | None = self.in_proj_bias
        if bias is not None and bias.dtype != self.out_proj.weight.dtype:
            bias = bias.to(self.out_proj.weight.dtype)  # torch.nn adds a bias of any dtype
        return bias

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool, cache: AttentionCache | None
    ) -> tuple[Any, ...]:
        """Queries (B, H, L, D), keys and values (B, H, S, D): views of as few matrix products as the inputs allow.

        Keys and values are None where the cache holds them already.
        """
        if key is value and self.in_proj_weight is not None and not (cache is not None and cache.complete):
            return _views(self._project(query, key, batched))
        bias = self._in_proj_bias()
        weights: tuple[Tensor, ...]
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases: tuple[Tensor | None, ...] = (None,) * 3 if bias is None else bias.chunk(3)
        inputs = (query,) if cache is not None and cache.complete else (query, key, value)
        heads = []
        for x, w, b in zip(inputs, weights, biases):
            product = torch.nn.functional.linear(x, w, b).unflatten(-1, (self.num_heads, self.head_dim))
            heads.append(self._batch_led(product, batched).transpose(1, 2))
        return (*heads, None, None)[:3]

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

    def check(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        cache: AttentionCache | None,
    ) -> None:
        dims = query.dim()
        if dims not in (2, 3):
            raise ArgumentError(f"query {tuple(query.shape)} must be 3-D (batched) or 2-D (unbatched)")
        if key.dim() != dims or value.dim() != dims:
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
        self.check(query, key, value, None, None, None)


def _views(projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, ., D) of batched projections."""
    parts = projected.joint.permute(2, 0, 3, 1, 4).unbind(0)
    if projected.query is None:
        return parts  # type: ignore[return-value]
    return projected.query.transpose(1, 2), *parts  # type: ignore[return-value]
