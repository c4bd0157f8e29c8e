"""Multi-head attention with torch.nn's interface."""

from typing import Any

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.cpu.linear import linear
from fasttfm.errors import ArgumentError
from fasttfm.functional.attention.backend import takes_fused
from fasttfm.functional.attention.call import Options
from fasttfm.functional.dropout import Dropout
from fasttfm.functional.signature import checks_arguments, is_flag, names_arguments
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.attention import Projected, attend, projected
from fasttfm.models.cache import AttentionCache
from fasttfm.models.packing import Packing
from fasttfm.nn import masks
from fasttfm.nn.errors import check_dropout, check_sizes, check_tensor, refuse_scripting


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention (Vaswani et al. 2017, section 3.2.2) on fused attention.

    Arguments, initialization and state dict are torch.nn's. Differences: a fully masked query gives zeros (before the
    output projection) and no gradient, in training and eval, with and without weights; is_causal=True needs no
    attn_mask and does not read its values; `cache` keeps keys and values between calls; `packing` skips padding. Raises
    ArgumentError (a ValueError) for sizes or shapes that do not agree, ArgumentTypeError (a TypeError) for a mask that
    is neither bool nor floating.
    """

    stands_for = "attention"

    @checks_arguments
    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
        add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
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
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, cache: AttentionCache | None = None, packing: Packing | None = None,
        key_packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Attention of query over key and value; returns the output, in query's shape, and the weights or None.

        query (L, N, E), key (S, N, kdim), value (S, N, vdim); batch first: (N, L, E) ...; unbatched: (L, E) ...
        key_padding_mask (N, S), unbatched (S,); attn_mask (L, S) or (N * H, L, S): bool, True is masked, or floats to
        add to the scores. is_causal: query i attends to keys up to i. need_weights: also return the weights with
        dropout, averaged over heads (N, L, S), or per head (N, H, L, S) with average_attn_weights=False.
        cache: keys and values of earlier calls precede these and count in S; see fasttfm.nn.DecoderCache.
        packing: query is packed (T, E), key and value too, by key_packing if it differs; excludes need_weights and all
        masks but is_causal.
        """
        for name, flag in (
            ("need_weights", need_weights), ("average_attn_weights", average_attn_weights), ("is_causal", is_causal)
        ):  # fmt: skip
            is_flag(name, flag)
        if key_packing is not None and packing is None:
            raise ArgumentError("key_packing goes with packing: pass both, or neither")
        if packing is None and not self.takes(query, key, value):
            if cache is not None:
                raise ArgumentError("cache does not go with tensor subclasses: give plain tensors and parameters")
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        heads, weights = self.joined_heads(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal,
            cache=cache, packing=packing, key_packing=key_packing,
        )  # fmt: skip
        return linear(heads, self.out_proj.weight, self.out_proj.bias), weights

    def takes(self, *inputs: Tensor) -> bool:
        """Return whether the operators support the tensor classes of these inputs and the parameters."""
        parameters = (self.in_proj_weight, self.in_proj_bias, self.q_proj_weight, self.out_proj.weight)
        return ordinary(*inputs, *parameters, self.out_proj.bias)

    def joined_heads(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
        need_weights: bool = False, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
        is_causal: bool = False, *, cache: AttentionCache | None = None, packing: Packing | None = None,
        key_packing: Packing | None = None, seed: Tensor | None = None, site: int = 0,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """Concat(head_1 .. head_H), in query's shape, and the weights or None; forward() multiplies by W^O.

        seed (1,) int64, site: select the dropout mask, as in fasttfm.functional.attention; others as in forward().
        """
        dropout = Dropout(self.dropout if self.training else 0.0, seed, site)
        batched, packings = query.dim() == 3, (packing, key_packing or packing)
        if packing is not None:
            self._check_packed(query, key_padding_mask, attn_mask, is_causal, need_weights, cache)
        self.check(query, key, value, key_padding_mask, None if packing is not None else attn_mask, cache)
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask[None]
        used_masks = () if packing is not None else (attn_mask, key_padding_mask)
        if cache is None and not need_weights and self._is_joint(key, value, *used_masks):
            mask = masks.merged(None if is_causal else attn_mask, key_padding_mask, self.num_heads)
            return self._joint_heads(query, key, mask, is_causal, dropout, packings), None
        q, k, v = self._heads(query, key, value, batched, cache)
        if packing is not None:
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (T, H, D)
            starts, longest = zip(*((each.starts, each.longest) for each in packings))  # type: ignore[union-attr]
            output = F.varlen_attention(q, k, v, *starts, *longest, causal=is_causal, **dropout.options())
            return output.flatten(1), None
        offset = 0
        if cache is not None:
            offset = cache.length if cache.grows else 0
            k, v = cache.update(k, v)
        causal = is_causal and not (offset and q.shape[2] == 1)  # the newest query attends to all keys
        attn_mask = None if causal else attn_mask
        if extra := (self.bias_k is not None) + self.add_zero_attn:
            if causal:
                attn_mask, causal = masks.causal_mask(q.shape[2], k.shape[2], k.device, offset), False
            k, v = self._with_extra_keys(k, v)
            attn_mask, key_padding_mask = (masks.with_extra_keys(m, extra) for m in (attn_mask, key_padding_mask))
        options: dict[str, Any] = {
            "mask": masks.merged(attn_mask, key_padding_mask, self.num_heads), "causal": causal,
            "causal_offset": offset if causal else 0, **dropout.options(),
        }  # fmt: skip
        weights = F.attention_weights(q, k, **options) if need_weights else None  # (B, H, L, S)
        output = F.attention(q, k, v, **options) if weights is None else weights @ v  # (B, H, L, D)
        joined = self._batch_led(output.transpose(1, 2), batched) if batched else output.transpose(1, 2)[0]
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return joined.flatten(-2), weights if weights is None or batched else weights[0]

    def _is_joint(self, key: Tensor, value: Tensor, *used_masks: Tensor | None) -> bool:
        """Return whether attention can read packed projections: one product for keys and values, nothing appended."""
        appended = self.bias_k is not None or self.add_zero_attn
        needs_grad = any(mask is not None and mask.requires_grad for mask in used_masks)
        return key is value and self.in_proj_weight is not None and not appended and not needs_grad

    def _joint_heads(
        self, query: Tensor, memory: Tensor, mask: Tensor | None, causal: bool, dropout: Dropout, packings: tuple
    ) -> Tensor:
        """Concatenated heads of query over memory; batched, unbatched or packed."""
        batched = query.dim() == 3
        heads = self._project(query, memory, batched)
        may_fuse = packings[0] is None and heads.joint.is_cpu and dropout.dropout_p == 0.0
        if may_fuse and takes_fused(*(views := _views(heads)), Options(None, mask, causal, 0, 0.0, 1.0, None, 0)):
            output = F.attention(*views, mask=mask, causal=causal).transpose(1, 2).flatten(2)
        else:
            output = attend(heads, *packings, mask=mask, causal=causal, dropout=dropout)  # (B, L, E)
        return self._batch_led(output, batched) if batched else output[0]

    def _batch_led(self, x: Tensor, batched: bool) -> Tensor:
        """Convert x (B, L, ...), (L, B, ...) or unbatched (L, ...) to (B, L, ...); batched, its own inverse."""
        if not batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, memory: Tensor, batched: bool) -> Projected:
        """Packed projections, batch first; unbatched, a batch of 1."""
        source = None if memory is query else memory
        heads = projected(query, source, self.in_proj_weight, self._in_proj_bias(), self.num_heads)
        return Projected(*(None if x is None else self._batch_led(x, batched) for x in heads))  # type: ignore[arg-type]

    def _in_proj_bias(self) -> Tensor | None:
        bias: Tensor | None = self.in_proj_bias
        if bias is not None and bias.dtype != self.out_proj.weight.dtype:
            bias = bias.to(self.out_proj.weight.dtype)  # torch.nn accepts any dtype
        return bias

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, batched: bool, cache: AttentionCache | None
    ) -> tuple[Any, ...]:
        """Queries (B, H, L, D), keys and values (B, H, S, D), None if cached; by as few products as possible."""
        complete = cache is not None and cache.complete
        if key is value and self.in_proj_weight is not None and not complete:
            return _views(self._project(query, key, batched))
        bias, separate = self._in_proj_bias(), (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases: tuple[Tensor | None, ...] = (None,) * 3 if bias is None else bias.chunk(3)
        heads = []
        for x, w, b in zip((query,) if complete else (query, key, value), weights, biases):
            product = torch.nn.functional.linear(x, w, b).unflatten(-1, (self.num_heads, self.head_dim))
            heads.append(self._batch_led(product, batched).transpose(1, 2))
        return (*heads, None, None)[:3]

    def _with_extra_keys(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Append the keys and values of add_bias_kv and add_zero_attn to key and value (B, H, S, D)."""
        pairs = []
        for x, bias in ((key, self.bias_k), (value, self.bias_v)):
            if bias is not None:
                shape = (x.shape[0], self.num_heads, 1, self.head_dim)
                x = torch.cat([x, bias.view(1, self.num_heads, 1, -1).expand(shape).to(x.dtype)], dim=2)
            pairs.append(torch.nn.functional.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x)
        return pairs

    def check(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None,
        cache: AttentionCache | None,
    ) -> None:  # fmt: skip
        """Raise for inputs and masks that do not agree."""
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
        self, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None, is_causal: bool,
        need_weights: bool, cache: AttentionCache | None,
    ) -> None:  # fmt: skip
        masked = key_padding_mask is not None or (attn_mask is not None and not is_causal)
        refused = {
            "a mask other than is_causal": masked, "need_weights": need_weights, "cache": cache is not None,
            "add_bias_kv": self.bias_k is not None, "add_zero_attn": self.add_zero_attn,
        }  # fmt: skip
        for name, is_set in refused.items():
            if is_set:
                raise ArgumentError(f"packing does not go with {name}: unpack first")
        if query.dim() != 2:
            raise ArgumentError(f"query {tuple(query.shape)} must be packed, (T, E): packing.pack(query)")


def _views(projected: Projected) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, ., D), views of batched projections."""
    parts = projected.joint.permute(2, 0, 3, 1, 4).unbind(0)
    if projected.query is None:
        return parts  # type: ignore[return-value]
    return projected.query.transpose(1, 2), *parts  # type: ignore[return-value]
