"""Attention cases: dense with masks and dropout, packed, and attention weights.

Inputs have a model's strides: query, key and value are views of one projection's output. A provider that does not
support a form (a mask, dropout) raises, and its row is "refused".
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as nnF
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cases.operators import case
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from fasttfm import functional as F
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of dense attention: q (B, H, L, D), k and v (B, H, S, D)."""

    B: int
    H: int
    L: int
    S: int
    D: int
    mask: str = "none"
    """none, causal, lengths, lengths+causal, bool or additive.

    lengths: sentences of S / 2 to S keys. bool: three of four keys at random. additive: a float per head, query and
    key, as for relative positions.
    """
    dropout: float = 0.0

    def lengths(self) -> list[int]:
        """Number of keys of each sentence."""
        if "lengths" not in self.mask:
            return [self.S] * self.B
        return [int(x) for x in torch.linspace(self.S / 2, self.S, self.B).ceil()]

    def key_lengths(self, device: torch.device) -> Tensor | None:
        """lengths() as a tensor; None if all sentences have S keys."""
        return torch.tensor(self.lengths(), device=device) if "lengths" in self.mask else None

    @property
    def causal(self) -> bool:
        return "causal" in self.mask

    def costs(self, size: int) -> tuple[Cost, Cost]:
        """(forward, backward) cost: attended pairs, every tensor once; a backward has at least five products."""
        mask = {"bool": self.L * self.S, "additive": self.H * self.L * self.S * size}.get(self.mask, 0)
        return _costs([(1, self.H, self.L, keys, self.D, size) for keys in self.lengths()], self.causal, mask)


def _costs(sentences: Sequence[tuple[int, ...]], causal: bool, mask: int = 0) -> tuple[Cost, Cost]:
    """(forward, backward) cost; sentences: sizes of each; mask: its bytes."""
    forward, backward = (
        sum((attend(*sizes, causal=causal) for sizes in sentences), start=Cost(0, mask))
        for attend in (costs.attention, costs.attention_backward_short)
    )
    return forward, backward


def projected(setting: Setting, B: int, L: int, H: int, D: int, parts: int = 3) -> tuple[Tensor, ...]:
    """`parts` tensors (B, H, L, D) that are views of one projection's output, as in a model."""
    joint = torch.randn(B, L, parts, H, D, dtype=setting.dtype, device=setting.device)
    return tuple(x.detach().requires_grad_() for x in joint.permute(2, 0, 3, 1, 4))


def dense(form: Form, passes: str, setting: Setting, *, compile: bool) -> Case:
    device, L, S = setting.device, form.L, form.S

    def inputs(i: int) -> tuple[Tensor, ...]:
        q, k, v = projected(setting, form.B, S, form.H, form.D)
        if L != S:
            (q,) = projected(setting, form.B, L, form.H, form.D, parts=1)
        return q, k, v

    def make() -> Work:
        lengths = form.key_lengths(device)
        mask = _mask(form, lengths, setting)  # for providers without arguments for lengths or causal
        ours: dict[str, Any] = {"mask": mask} if form.mask in ("bool", "additive") else {"key_lengths": lengths}

        def functions(p: float) -> Mapping[str, Provider | Absent]:
            return {
                peers.OURS: partial(F.attention, causal=form.causal, dropout_p=p, **ours),
                peers.EAGER: _eager(mask, p),
                **_sdpa(form, mask, p, device),
                **({peers.COMPILE: _compiled(_eager(mask, p), device)} if compile else {}),
                **({peers.FLEX: _flex(form, lengths, mask, p, device)} if compile else {}),
                peers.FLASH_ATTN: peers.provider(peers.FLASH_ATTN, device, lambda: _flash_attn(form, p)),
            }

        checked = functions(0.0) if form.dropout else None
        reference = _eager(mask, 0.0)
        return Work(inputs=inputs, providers=functions(form.dropout), reference=reference, without_dropout=checked)

    name = "attention" if L == S else "cross attention"
    return case(name, asdict(form), passes, setting, form.costs(setting.dtype.itemsize), make)


def _mask(form: Form, lengths: Tensor | None, setting: Setting) -> Tensor | None:
    """Mask with SDPA's meaning: bool (True attends), or floats that are added; None without one."""
    L, S, device = form.L, form.S, setting.device
    generator = torch.Generator(device).manual_seed(setting.seed)
    if form.mask == "bool":
        result = torch.rand(1, 1, L, S, device=device, generator=generator) < 0.75
        return result | torch.eye(L, S, dtype=torch.bool, device=device)  # every query has a key
    if form.mask == "additive":
        return torch.randn(1, form.H, L, S, device=device, generator=generator).to(setting.dtype)
    mask = None
    if lengths is not None:
        mask = (torch.arange(S, device=device) < lengths[:, None])[:, None, None, :]
    if form.causal:
        triangle = torch.ones(L, S, dtype=torch.bool, device=device).tril()
        mask = triangle if mask is None else mask & triangle
    return mask


def _eager_weights(mask: Tensor | None) -> Provider:
    """softmax(Q K^T * scale) in plain PyTorch."""

    def run(q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if mask is not None:
            additive = mask.is_floating_point()
            scores = scores + mask.to(scores.dtype) if additive else scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1)

    return run


def _eager(mask: Tensor | None, p: float) -> Provider:
    weights = _eager_weights(mask)
    return lambda q, k, v: nnF.dropout(weights(q, k), p) @ v


def _compiled(function: Provider, device: torch.device) -> Provider:
    """torch.compile; on a CPU without Inductor's SDPA pattern matcher, with which training fails in torch 2.13."""
    return peers.compiled(function, device, **({"pattern_matcher": False} if device.type == "cpu" else {}))


def _sdpa(form: Form, mask: Tensor | None, p: float, device: torch.device) -> dict[str, Provider]:
    """https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html"""
    alone = form.mask == "causal"  # is_causal enables the backends without masks

    def run(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return nnF.scaled_dot_product_attention(q, k, v, None if alone else mask, p, is_causal=alone)

    result: dict[str, Provider] = {
        peers.SDPA_MATH: partial(run, SDPBackend.MATH),
        peers.SDPA_FLASH: partial(run, SDPBackend.FLASH_ATTENTION),
    }
    if device.type == "cuda":
        result[peers.SDPA_EFFICIENT] = partial(run, SDPBackend.EFFICIENT_ATTENTION)
        result[peers.SDPA_CUDNN] = partial(run, SDPBackend.CUDNN_ATTENTION)
    return result


def flex(
    device: torch.device, allowed: Callable | None, sizes: tuple[int | None, int, int], **options: Any
) -> Provider:
    """https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html

    allowed: (b, h, query, key) -> bool, None without a mask; sizes: (sentences or None, queries, keys) of the mask. The
    block mask is built once, as a model builds it once per batch for all layers.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    sentences, queries, keys = sizes
    mask = allowed and create_block_mask(allowed, sentences, None, queries, keys, device=device)
    return partial(peers.compiled(flex_attention, device), block_mask=mask, **options)


def _flex(form: Form, lengths: Tensor | None, mask: Tensor | None, p: float, device: torch.device) -> Provider:
    if p:
        return peers.refusing("flex_attention takes no dropout")

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = key >= 0
        if lengths is not None:
            keep = keep & (key < lengths[b])
        if form.causal:
            keep = keep & (query >= key)
        if form.mask == "bool" and mask is not None:
            keep = keep & mask[0, 0, query, key]
        return keep

    def add(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert mask is not None
        return score + mask[0, h, query, key]

    sizes = (form.B if lengths is not None else None, form.L, form.S)
    return flex(
        device,
        None if form.mask in ("none", "additive") else allowed,
        sizes,
        score_mod=add if form.mask == "additive" else None,
    )


def _flash_attn(form: Form, p: float) -> Provider:
    if form.mask not in ("none", "causal"):
        return peers.refusing("flash_attn_func takes no mask and no key lengths")
    return flash_attn(dropout_p=p, causal=form.causal)


def flash_attn(**options: Any) -> Provider:
    """https://github.com/Dao-AILab/flash-attention#how-to-use-flashattention"""
    from flash_attn import flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, L, H, D)
        return flash_attn_func(q, k, v, **options).transpose(1, 2)

    return run


def packed(
    sequences: int, longest: int, H: int, D: int, passes: str, setting: Setting, *, causal: bool, compile: bool
) -> Case:
    """Packed sentences without padding, of a quarter of `longest` to `longest` tokens."""
    device = setting.device
    lengths = [int(x) for x in torch.linspace(longest / 4, longest, sequences).ceil()]
    tokens, longest = sum(lengths), max(lengths)

    def inputs(i: int) -> tuple[Tensor, ...]:
        joint = torch.randn(tokens, 3, H, D, dtype=setting.dtype, device=device)
        return tuple(x.detach().requires_grad_() for x in joint.unbind(1))

    def make() -> Work:
        counts = torch.tensor(lengths, device=device)
        starts = nnF.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        number = torch.repeat_interleave(torch.arange(sequences, device=device), counts)
        row = torch.arange(tokens, device=device) - starts[number]
        mask = (torch.arange(longest, device=device) < counts[:, None])[:, None, None, :]
        if causal:
            mask = mask & torch.ones(longest, longest, dtype=torch.bool, device=device).tril()

        def padded(attend: Provider) -> Provider:
            """attend() on rows padded to (B, H, longest, D), for providers without packed attention."""

            def pad(x: Tensor) -> Tensor:
                return x.new_zeros(sequences, longest, H, D).index_put((number, row), x).transpose(1, 2)

            return lambda *qkv: attend(*map(pad, qkv)).transpose(1, 2)[number, row]

        def varlen(function: Provider) -> Provider:
            return lambda q, k, v: function(q, k, v, starts, starts, longest, longest, causal=causal)

        def flash_attn() -> Provider:  # https://github.com/Dao-AILab/flash-attention#how-to-use-flashattention
            from flash_attn import flash_attn_varlen_func

            return varlen(flash_attn_varlen_func)

        eager = padded(_eager(mask, 0.0))
        providers: dict[str, Provider | Absent] = {
            peers.OURS: varlen(F.varlen_attention),
            peers.EAGER: eager,
            peers.SDPA_PADDED: padded(partial(nnF.scaled_dot_product_attention, attn_mask=mask)),
            peers.SDPA_NESTED: _nested(starts, longest, causal),
            **({peers.FLEX: _flex_packed(number, causal)} if compile else {}),
            peers.FLASH_ATTN: peers.provider(peers.FLASH_ATTN, device, flash_attn),
        }
        return Work(inputs=inputs, providers=providers, reference=eager)

    sizes = [(1, H, length, length, D, setting.dtype.itemsize) for length in lengths]
    cost = _costs(sizes, causal)
    shape = {"T": tokens, "sequences": sequences, "longest": longest, "H": H, "D": D, "causal": causal}
    return case("packed attention", shape, passes, setting, cost, make)


def _nested(starts: Tensor, longest: int, causal: bool) -> Provider:
    """https://docs.pytorch.org/docs/stable/nested.html (jagged layout; on a CPU rows must be contiguous)"""
    offsets = starts.long()

    def nested(x: Tensor) -> Tensor:
        x = x if x.is_cuda else x.contiguous()
        return torch.nested.nested_tensor_from_jagged(x, offsets, max_seqlen=longest).transpose(1, 2)

    sdpa: Provider = partial(nnF.scaled_dot_product_attention, is_causal=causal)
    return lambda *qkv: sdpa(*map(nested, qkv)).transpose(1, 2).values()


def _flex_packed(number: Tensor, causal: bool) -> Provider:
    """FlexAttention with a mask of tokens in the same sequence."""

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = number[query] == number[key]
        return same & (query >= key) if causal else same

    function = flex(number.device, allowed, (None, len(number), len(number)))
    return lambda *qkv: function(*(x.transpose(0, 1)[None] for x in qkv))[0].transpose(0, 1)


def weights(form: Form, passes: str, setting: Setting) -> Case:
    """Attention weights, as for need_weights and attention plots."""
    size = setting.dtype.itemsize
    scores = form.B * form.H * form.L * form.S
    rows = size * form.B * form.H * (form.L + form.S) * form.D
    cost = (
        Cost(2 * scores * form.D, rows + size * scores),
        Cost(4 * scores * form.D, 2 * rows + 2 * size * scores),
    )

    def make() -> Work:
        lengths = form.key_lengths(setting.device)
        eager = _eager_weights(_mask(form, lengths, setting))
        ours = partial(F.attention_weights, key_lengths=lengths, causal=form.causal)
        inputs = partial(projected, setting, form.B, form.S, form.H, form.D, parts=2)
        return Work(inputs=lambda i: inputs(), providers={peers.OURS: ours, peers.EAGER: eager}, reference=eager)

    return case("attention weights", asdict(form), passes, setting, cost, make)
