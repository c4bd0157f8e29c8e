"""Group blocks: encoder and decoder layer of the paper's base model; ours, torch.nn's and Hugging Face's.

All layers have the same weights and padding; sentences have L / 2 to L tokens. Rows of padding are not checked and get
no gradient, because packed layers do not compute them.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import numerics
from benchmarks.measure import providers as peers
from benchmarks.measure.case import Case, Setting, Work
from benchmarks.measure.providers import Absent, Provider
from fasttfm import nn as fnn
from fasttfm.config.model import TransformerConfig
from fasttfm.convert import names
from fasttfm.convert.bart import BART
from fasttfm.convert.marian import marian_config
from fasttfm.kernels.proof import costs
from fasttfm.kernels.proof.costs import Cost

PACKED = f"{peers.OURS}, packed"
COMPILED = f"{peers.TORCH_NN}, compiled"


def cases(setting: Setting) -> list[Case]:
    smoke = setting.level == "smoke"
    B, L = (3, 9) if smoke else (250, 100) if setting.on_gpu else (4 if setting.level == "quick" else 16, 100)
    sizes = [(32, 2)] if smoke else [(512, 8)] + ([(1024, 16)] if setting.level == "full" else [])
    return [
        layer(decoder, B, L, d_model, heads, dropout, passes, setting)
        for d_model, heads in sizes
        for decoder in (False, True)
        for dropout, passes in ((0.0, "forward"), (0.1, "training forward"), (0.1, "backward"))
    ]


def layer(
    decoder: bool, B: int, L: int, d_model: int, heads: int, dropout: float, passes: str, setting: Setting
) -> Case:
    """One layer on B sentences of up to L tokens."""
    device, dtype = setting.device, setting.dtype
    lengths = [int(x) for x in torch.linspace(L / 2, L, B).ceil()]
    # quick compiles only training
    compile = setting.at_least("standard") or (setting.level == "quick" and not decoder and dropout > 0)

    def inputs(i: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(B, L, d_model, device=device).to(dtype).requires_grad_() for _ in range(1 + decoder))

    def make() -> Work:
        padding = torch.arange(L, device=device) >= torch.tensor(lengths, device=device)[:, None]
        torch.manual_seed(setting.seed)
        kind = "TransformerDecoderLayer" if decoder else "TransformerEncoderLayer"
        options: dict[str, Any] = {"batch_first": True, "device": device, "dtype": dtype}
        plain = getattr(nn, kind)(d_model, heads, 4 * d_model, 0.0, **options)
        for parameter in plain.parameters():  # no zero biases, no norm weights of one
            nn.init.normal_(parameter, std=d_model**-0.5 if parameter.dim() > 1 else 0.5)

        def layers(p: float) -> Mapping[str, Provider | Absent]:
            ours, in_packing, theirs = (
                getattr(package, kind)(d_model, heads, 4 * d_model, p, **options) for package in (fnn, fnn, nn)
            )
            for layer in (ours, in_packing, theirs):
                layer.load_state_dict(plain.state_dict())
            result: dict[str, Any] = {
                peers.OURS: _Layer(ours, padding),
                PACKED: _Packed(in_packing, padding),
                peers.TORCH_NN: _Layer(theirs, padding),
            }
            if compile:
                result[COMPILED] = peers.compiled(_Layer(copy.deepcopy(theirs), padding), device)
            marian = partial(_hugging_face, plain, padding, p)
            result[peers.HUGGING_FACE] = peers.provider(peers.HUGGING_FACE, device, marian)
            for module in result.values():
                if isinstance(module, nn.Module):
                    module.train(dropout > 0)
            return result

        def without_padding(value: Any) -> list[Tensor]:
            return [
                x.masked_fill(padding[..., None], 0) if x.shape[:2] == padding.shape else x
                for x in numerics.tensors(value)
            ]

        return Work(
            inputs=inputs,
            providers=layers(dropout),
            reference=_Layer(copy.deepcopy(plain).double(), padding).train(dropout > 0),
            without_dropout=layers(0.0) if dropout else None,
            plain=peers.TORCH_NN,
            gradient=lambda output: numerics.cotangent(output).masked_fill(padding[..., None], 0),
            error=lambda *values: numerics.kinked_error(*map(without_padding, values)),
            measure=numerics.KINKED_MEASURE,
            unit="real tokens/s",
            units=lambda *x: float(sum(lengths)),
        )

    return Case(
        group="blocks",
        name="decoder layer" if decoder else "encoder layer",
        shape={"B": B, "L": L, "d_model": d_model, "heads": heads, "d_ff": 4 * d_model, "dropout": dropout},
        dtype=setting.dtype_name,
        passes=passes,
        cost=_cost(decoder, lengths, d_model, heads, dropout > 0, dtype.itemsize, passes == "backward"),
        make=make,
    )


def _cost(decoder: bool, lengths: Sequence[int], d: int, heads: int, dropout: bool, size: int, backward: bool) -> Cost:
    """Cost of the real tokens, without padding."""
    T = sum(lengths)
    total = Cost()
    for N, F in [(d, 3 * d), (d, d), (d, 4 * d), (4 * d, d)] + ([(d, d), (d, 2 * d), (d, d)] if decoder else []):
        total += costs.linear_backward(T, N, F, size, bias=True) if backward else costs.linear(T, N, F, size)
    attend = costs.attention_backward_short if backward else costs.attention
    for length in lengths:
        sizes = (1, heads, length, length, d // heads, size)
        total += attend(*sizes, causal=decoder)
        if decoder:
            total += attend(*sizes, causal=False)
    for _ in range(3 if decoder else 2):
        if backward:
            total += costs.residual_layer_norm_backward(T, d, size, dropout=dropout)
        else:
            total += costs.residual_layer_norm(T, d, size)
    return total


class _Layer(nn.Module):
    """A layer with torch.nn's interface and its padding mask; called with memory it is a decoder layer."""

    def __init__(self, layer: nn.Module, padding: Tensor) -> None:
        super().__init__()
        self.layer, self.padding = layer, padding
        length = padding.shape[1]
        self.mask = torch.ones(length, length, dtype=torch.bool, device=padding.device).triu(1)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            return self.layer(x, src_key_padding_mask=self.padding)
        masks = {"tgt_key_padding_mask": self.padding, "memory_key_padding_mask": self.padding}
        return self.layer(x, memory, tgt_mask=self.mask, tgt_is_causal=True, **masks)


class _Packed(nn.Module):
    """Our packed layer, including packing and unpacking, which a model does once for all layers."""

    def __init__(self, layer: nn.Module, padding: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.packing = fnn.Packing.from_padding_mask(padding)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = self.packing.pack(x)
        if memory is None:
            return self.packing.unpack(self.layer(x, packing=self.packing))
        memory = self.packing.pack(memory)
        y = self.layer(x, memory, tgt_is_causal=True, packing=self.packing, memory_packing=self.packing)
        return self.packing.unpack(y)


class _HuggingFace(nn.Module):
    """https://huggingface.co/docs/transformers/model_doc/marian: post-norm and ReLU as in the paper, on SDPA."""

    def __init__(self, layer: nn.Module, padding: Tensor, decoder: bool) -> None:
        super().__init__()
        self.layer, self.decoder = layer, decoder
        real = ~padding[:, None, None, :]
        length = padding.shape[1]
        # built once per batch, as in the model
        self.cross = real.expand(-1, 1, length, -1)
        triangle = torch.ones(length, length, dtype=torch.bool, device=padding.device).tril()
        self.mask = real & triangle if decoder else self.cross

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if not self.decoder:
            return self.layer(x, self.mask)
        y = self.layer(
            x,
            attention_mask=self.mask,
            encoder_hidden_states=memory,
            encoder_attention_mask=self.cross,
            use_cache=False,
        )
        return y[0] if isinstance(y, tuple) else y


def _hugging_face(plain: Any, padding: Tensor, p: float) -> nn.Module:
    from transformers import MarianConfig
    from transformers.models.marian.modeling_marian import MarianDecoderLayer, MarianEncoderLayer

    decoder = isinstance(plain, nn.TransformerDecoderLayer)
    d_model, heads = plain.self_attn.embed_dim, plain.self_attn.num_heads
    shape: dict[str, Any] = {"vocab_size": 8, "d_model": d_model, "heads": heads, "d_ff": 4 * d_model}
    ours = TransformerConfig(**shape, dropout=p, attention_dropout=p, relu_dropout=p)
    # https://huggingface.co/docs/transformers/attention_interface
    config = MarianConfig(**marian_config(ours) | {"attn_implementation": "sdpa"})
    layer: nn.Module = (MarianDecoderLayer if decoder else MarianEncoderLayer)(config, layer_idx=0)
    layer.load_state_dict(names.theirs(plain.state_dict(), names.parameters(BART.decoder if decoder else BART.encoder)))
    weight = plain.linear1.weight
    return _HuggingFace(layer.to(weight.device, weight.dtype), padding, decoder)
