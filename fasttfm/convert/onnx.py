"""Export to two ONNX graphs: the encoder with the decoder's cross-attention keys and values, and one decoding step.

encoder.onnx    source (B, S) int64, source_mask (B, S) bool, True at tokens
                -> memory_keys, memory_values (layers, B, H, S, D)
step.onnx       tokens (B,) int64, keys, values (layers, B, H, L, D) of the L previous tokens (L = 0 at first),
                memory_keys, memory_values, source_mask
                -> logits (B, V), keys, values (layers, B, H, L + 1, D)

Written in plain PyTorch after reference.py, because the ONNX exporter does not know fasttfm's operators.
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.config.model import TransformerConfig
from fasttfm.convert.exchange import Model, left_out, positions, suppressed
from fasttfm.data.tokenizer import BOS, EOS, PAD, UNK
from fasttfm.data.tokenizer_files import save_tokenizers
from fasttfm.errors import optional
from fasttfm.functional.feed_forward import ACTIVATIONS

_OPSET = 18


def export(model: Model, folder: Path) -> list[str]:
    """Write encoder.onnx, step.onnx, the tokenizers and search.json, the constants of a search; returns notes."""
    for package in ("onnx", "onnxscript"):
        optional(package, "onnx")
    encoder, step = Encoder(model.config, model.weights).eval(), Step(model.config, model.weights).eval()
    heads, layers = model.config.heads, model.config.decoder_layers
    size = model.config.d_model // heads
    source = torch.full((2, 5), EOS, device="cpu")
    mask = torch.ones_like(source, dtype=torch.bool)
    memory, past = (torch.zeros(layers, 2, heads, n, size, dtype=torch.float32, device="cpu") for n in (5, 3))
    batch, length, target = (torch.export.Dim(name) for name in ("batch", "source_length", "target_length"))
    kept, over_source = {1: batch, 3: target}, {1: batch, 3: length}
    options: dict[str, Any] = {"opset_version": _OPSET, "external_data": False, "verbose": False}
    with _quiet():
        torch.onnx.export(
            encoder,
            (source, mask),
            folder / "encoder.onnx",
            input_names=["source", "source_mask"],
            output_names=["memory_keys", "memory_values"],
            dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}),
            **options,
        )
        torch.onnx.export(
            step,
            (source[:, 0], past, past.clone(), memory, memory.clone(), mask),
            folder / "step.onnx",
            input_names=["tokens", "keys", "values", "memory_keys", "memory_values", "source_mask"],
            output_names=["logits", "new_keys", "new_values"],
            dynamic_shapes=({0: batch}, kept, kept, over_source, over_source, {0: batch, 1: length}),
            **options,
        )
    save_tokenizers(folder, *model.tokenizers)
    search = {
        "pad": PAD,
        "unk": UNK,
        "start": BOS,
        "end": EOS,
        "never": suppressed(model.decoding),
        "shortest": model.decoding.min_len,
        "source_prefix": model.source_tokenizer.prefix,
        "source_end": model.source_tokenizer.source_end,
        "target_prefix": model.target_tokenizer.prefix,
        "layers": layers,
        "heads": heads,
        "head_size": size,
        "longest": len(positions(model.config, model.weights, "decoder")),
    }
    (folder / "search.json").write_text(json.dumps(search, indent=1) + "\n", encoding="utf-8")
    ends = "end with" if model.source_tokenizer.source_end else "have no"
    note = f"sources {ends} the end token; a search must never choose the tokens in search.json's `never`"
    note += ", nor the end before `shortest` tokens"
    return [note, *left_out(model.decoding, ("min_len", "allow_unk"))]


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's dozens of warnings about itself."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Half(nn.Module):
    """Base of the encoder and step graphs; buffers are the model's weights."""

    def __init__(self, config: TransformerConfig, weights: Mapping[str, Tensor], side: str) -> None:
        super().__init__()
        self.config = config
        self.side = side
        table = weights["target_embedding.weight"]
        table = weights.get("source_embedding.weight", table) if side == "encoder" else table
        self.register_buffer("embedding", table.float())
        self.register_buffer("positions", positions(config, weights, side))
        self.names = {name: name.replace(".", "_") for name in weights if name.startswith(side)}
        for name, buffer in self.names.items():
            self.register_buffer(buffer, weights[name].float())

    def weight(self, name: str) -> Tensor:
        return getattr(self, self.names[f"{self.side}.{name}"])

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """embedding(tokens) * sqrt(d) + positions."""
        return self.embedding[tokens] * self.config.d_model**0.5 + positions  # type: ignore[index]

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weight(f"{name}.weight"), self.weight(f"{name}.bias")
        return nn.functional.layer_norm(x, (x.shape[-1],), weight, bias, self.config.layer_norm_eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return nn.functional.linear(x, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))

    def projected(self, x: Tensor, name: str, part: int) -> Tensor:
        """Project x (B, L, d) to queries (part 0), keys (1) or values (2), (B, H, L, D)."""
        weight = self.weight(f"{name}.in_proj_weight").chunk(3)[part]
        bias = self.weight(f"{name}.in_proj_bias").chunk(3)[part]
        return nn.functional.linear(x, weight, bias).unflatten(-1, (self.config.heads, -1)).transpose(1, 2)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, name: str, mask: Tensor | None) -> Tensor:
        """softmax(Q K^T / sqrt(D)) V W^O, (B, L, d); mask (B, 1, 1, S), True at keys to attend."""
        scores = query @ keys.transpose(-2, -1) * query.shape[-1] ** -0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -1e9)
        return self.linear((scores.softmax(-1) @ values).transpose(1, 2).flatten(2), f"{name}.out_proj")

    def before(self, x: Tensor, norm: str) -> Tensor:
        """The input of a sublayer: normalized if norm_first."""
        return self.norm(x, norm) if self.config.norm_first else x

    def after(self, x: Tensor, norm: str) -> Tensor:
        """The output of a sublayer with its residual: normalized unless norm_first."""
        return x if self.config.norm_first else self.norm(x, norm)

    def feed_forward(self, x: Tensor, layer: str, norm: str) -> Tensor:
        hidden = ACTIVATIONS[self.config.activation](self.linear(self.before(x, norm), f"{layer}.linear1"))
        return self.after(x + self.linear(hidden, f"{layer}.linear2"), norm)


class Encoder(_Half):
    """encoder.onnx."""

    def __init__(self, config: TransformerConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__(config, weights, "encoder")
        self.decoder = Step(config, weights)

    def forward(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoder's cross-attention keys and values of the encoder's output."""
        mask = source_mask[:, None, None, :]
        x = self.embed(source, self.positions[: source.shape[1]])  # type: ignore[index]
        for number in range(self.config.encoder_layers):
            layer = f"layers.{number}"
            y = self.before(x, f"{layer}.norm1")
            query, keys, values = (self.projected(y, f"{layer}.self_attn", part) for part in range(3))
            x = self.after(x + self.attend(query, keys, values, f"{layer}.self_attn", mask), f"{layer}.norm1")
            x = self.feed_forward(x, layer, f"{layer}.norm2")
        if self.config.final_norm:
            x = self.norm(x, "norm")
        names = [f"layers.{number}.multihead_attn" for number in range(self.config.decoder_layers)]
        keys, values = (torch.stack([self.decoder.projected(x, name, part) for name in names]) for part in (1, 2))
        return keys, values


class Step(_Half):
    """step.onnx."""

    def __init__(self, config: TransformerConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__(config, weights, "decoder")
        self.register_buffer("output", weights.get("output.weight", weights["target_embedding.weight"]).float())
        self.register_buffer("output_bias", weights["output.bias"].float() if "output.bias" in weights else None)

    def forward(
        self,
        tokens: Tensor,
        keys: Tensor,
        values: Tensor,
        memory_keys: Tensor,
        memory_values: Tensor,
        source_mask: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits of the next token, and all keys and values so far."""
        mask = source_mask[:, None, None, :]
        position = keys.shape[3]
        x = self.embed(tokens[:, None], self.positions[position : position + 1])  # type: ignore[index]
        all_keys: list[Tensor] = []
        all_values: list[Tensor] = []
        for number in range(self.config.decoder_layers):
            layer = f"layers.{number}"
            y = self.before(x, f"{layer}.norm1")
            query, key, value = (self.projected(y, f"{layer}.self_attn", part) for part in range(3))
            all_keys.append(torch.cat([keys[number], key], dim=2))
            all_values.append(torch.cat([values[number], value], dim=2))
            y = self.attend(query, all_keys[-1], all_values[-1], f"{layer}.self_attn", None)
            x = self.after(x + y, f"{layer}.norm1")
            query = self.projected(self.before(x, f"{layer}.norm2"), f"{layer}.multihead_attn", 0)
            y = self.attend(query, memory_keys[number], memory_values[number], f"{layer}.multihead_attn", mask)
            x = self.after(x + y, f"{layer}.norm2")
            x = self.feed_forward(x, layer, f"{layer}.norm3")
        if self.config.final_norm:
            x = self.norm(x, "norm")
        logits = nn.functional.linear(x[:, 0], self.output, self.output_bias)  # type: ignore[arg-type]
        return logits, torch.stack(all_keys), torch.stack(all_values)
