"""The encoder-decoder Transformer (Vaswani et al. 2017), trainable and decodable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.linear import linear
from fasttfm.models.cache import DecoderCache
from fasttfm.models.config import TransformerConfig
from fasttfm.models.layers import STREAMS_PER_LAYER, Attention, DecoderLayer, EncoderLayer, Lengths, Pass
from fasttfm.models.packing import Packing
from fasttfm.models.parameters import Parameters, Rows, as_they_are, together
from fasttfm.presets import preset_section
from fasttfm.reference import positional_encoding

_SOURCE_STREAM, _TARGET_STREAM, _FIRST_LAYER_STREAM = 0, 1, 8


class _Stack(nn.Module):
    """Layers and, for pre-norm, the norm after the last of them."""

    def __init__(self, layers: list[Any], config: TransformerConfig) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)  # of EncoderLayer or DecoderLayer
        self.norm = nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.final_norm else None
        self.norm_first = config.norm_first

    def enter(self, x: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """The pair (y, stream) that the first layer takes."""
        if not self.norm_first:
            return x, x
        norm = self.layers[0].norm1
        return F.branch_layer_norm(x, at.parameters(norm.weight), at.parameters(norm.bias), norm.eps)

    def following(self, index: int) -> Any:
        """The norm that the layer's last sub-layer ends in, for pre-norm; None where there is none."""
        if index + 1 < len(self.layers):
            return self.layers[index + 1].norm1
        return self.norm


def _padded(tokens: Tensor) -> Rows:
    """Of tokens (B, L), padding included."""
    return Rows(tokens.shape[0], tokens.numel(), tokens.shape[1])


def _packed(packing: Packing) -> Rows:
    sequences = packing.sequences
    return Rows(sequences.count, packing.places.shape[0], sequences.longest)


def _apart(lengths: Tensor | Packing | None) -> tuple[Packing | None, Lengths]:
    """The packing, if there is one, and what the layers need of it."""
    return (lengths, lengths.sequences) if isinstance(lengths, Packing) else (None, lengths)


class Transformer(nn.Module):
    """An encoder-decoder Transformer; see TransformerConfig for every choice.

    Tokens are int64; config.pad_id fills short sequences. Sources end in the end-of-sentence token; target inputs begin
    with the beginning-of-sentence token.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        shared = config.share_embeddings
        streams = iter(range(_FIRST_LAYER_STREAM, 1 << 30, STREAMS_PER_LAYER))
        self.target_embedding = nn.Embedding(config.vocab_size, width)
        self.source_embedding = (
            self.target_embedding
            if shared == "all"
            else nn.Embedding(config.source_vocab_size or config.vocab_size, width)
        )
        self.encoder = _Stack(
            [EncoderLayer(config, first_stream=next(streams)) for _ in range(config.encoder_layers)], config
        )
        self.decoder = _Stack(
            [DecoderLayer(config, first_stream=next(streams)) for _ in range(config.decoder_layers)], config
        )
        self.output = nn.Linear(width, config.vocab_size, bias=False)
        if shared != "none":
            self.output.weight = self.target_embedding.weight
        self.positions: Tensor
        self.register_buffer(
            "positions", positional_encoding(config.max_length, width, config.positional_encoding), persistent=False
        )
        self.reset_parameters()

    @classmethod
    def from_preset(cls, name: str, *, vocab_size: int, **changes: Any) -> Transformer:
        """The model of a preset (fasttfm/presets/<name>.yaml) with a vocabulary and any fields changed.

        Raises UserError for an unknown preset, ValueError for a wrong value, TypeError for an unknown field.
        """
        return cls(TransformerConfig(**{**preset_section(name, "model"), "vocab_size": vocab_size, **changes}))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws fresh weights as config.init says; biases 0 and norms 1 under xavier."""
        xavier = self.config.init == "xavier"
        for module in self.modules():
            if isinstance(module, Attention):
                # Glorot's bound for each square projection; torch.nn draws the three as one (3d, d) matrix
                for part in module.in_proj_weight.chunk(3) if xavier else (module.in_proj_weight,):
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(module.in_proj_bias)
            elif module is self.output and self.config.share_embeddings != "none":
                continue  # its table was drawn as the target embedding
            elif isinstance(module, nn.LayerNorm | nn.Embedding | nn.Linear):
                module.reset_parameters()
                if xavier and isinstance(module, nn.Linear) and module is not self.output:
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        if xavier:
            for module in (self.source_embedding, self.target_embedding, self.output):  # a shared table is drawn again
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
        for embedding in (self.source_embedding, self.target_embedding):
            embedding.weight[self.config.pad_id] = 0.0

    # ----------------------------------------------------------------------------------------------- the forward pass

    def _begin(self, source: Rows, target: Rows) -> Pass:
        """One seed for the whole pass; every place in the model has a stream of its own."""
        return Pass(self._seed(), together(self, source, target) or as_they_are(self.decoder))

    def _seed(self) -> Tensor | None:
        return F.draw_seed(self.positions.device) if self.training else None

    def _embed(
        self,
        embedding: nn.Embedding,
        tokens: Tensor,
        stream: int,
        at: Pass,
        first: int = 0,
        packing: Packing | None = None,
    ) -> Tensor:
        last = packing.sequences.longest if packing is not None else first + tokens.shape[1]
        if last > self.positions.shape[0]:
            table = positional_encoding(2 * last, self.config.d_model, self.config.positional_encoding)
            self.positions = table.to(self.positions.device)
        return F.embed(
            tokens,
            embedding.weight,
            self.positions if packing is None else self.positions[packing.positions],
            scale=self.config.d_model**0.5,
            pad_id=self.config.pad_id,
            first_position=first,
            dropout_p=at.p(self.config.embedding_dropout_p),
            seed=at.seed,
            stream=stream,
        )

    def _encode(
        self, source: Tensor, lengths: Tensor | Packing | None, at: Pass, weights: list[Tensor] | None = None
    ) -> Tensor:
        packing, own = _apart(lengths)
        x = self._embed(self.source_embedding, source, _SOURCE_STREAM, at, packing=packing)
        y, stream = self.encoder.enter(x, at)
        for i, layer in enumerate(self.encoder.layers):
            y, stream = layer(y, stream, self.encoder.following(i), own, at, weights)
        return y

    def _project_memory(self, memory: Tensor, at: Pass) -> list[Tensor]:
        """Every decoder layer's keys and values (B, S, 2, H, D) of the encoder's output (B, S, d)."""
        attention = self.decoder.layers[0].multihead_attn
        joints = [attention.project_memory(memory, projection) for projection in at.parameters.memory]
        if len(joints) == len(self.decoder.layers):
            return joints
        return list(joints[0].unflatten(2, (-1, 2)).unbind(2))

    def _decode(
        self,
        target: Tensor,
        lengths: Tensor | Packing | None,
        memory: Tensor,
        memory_lengths: Tensor | Packing | None,
        at: Pass,
        weights: tuple[list[Tensor], list[Tensor]] | None = None,
    ) -> Tensor:
        packing, own = _apart(lengths)
        _, others = _apart(memory_lengths)
        x = self._embed(self.target_embedding, target, _TARGET_STREAM, at, packing=packing)
        joint = self._project_memory(memory, at)
        y, stream = self.decoder.enter(x, at)
        for i, layer in enumerate(self.decoder.layers):
            y, stream = layer(y, stream, self.decoder.following(i), own, joint[i], others, at, weights)
        return y

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, L, V) for source (B, S) and target inputs (B, L), each position seeing the targets up to itself.

        source_lengths, target_lengths (B,): tokens before padding; None where nothing is padded.
        """
        at = self._begin(_padded(source), _padded(target))
        memory = self._encode(source, source_lengths, at)
        return self.output(self._decode(target, target_lengths, memory, source_lengths, at))

    def loss(
        self,
        source: Tensor,
        target_in: Tensor,
        target_out: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
        *,
        label_smoothing: float = 0.1,
        packed_tokens: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The training loss, summed over the target tokens that are not padding.

        packed_tokens, the sums of source_lengths and of target_lengths (which must then be given): the layers see the
        tokens alone, one sentence after the other, and compute no padding; the loss is the same, dropout drawn anew.
        Returns (label-smoothed loss, loss without smoothing and without gradient, number of tokens), each 0-d. The
        logits (B, L, V) never exist all at once where the operator can avoid it.
        """
        if packed_tokens is None:
            at = self._begin(_padded(source), _padded(target_in))
            memory = self._encode(source, source_lengths, at)
            hidden = self._decode(target_in, target_lengths, memory, source_lengths, at)
        else:
            if source_lengths is None or target_lengths is None:
                raise ValueError("packed_tokens needs source_lengths and target_lengths, whose sums they are")
            from_source = Packing.of(source_lengths, source.shape[1], packed_tokens[0])
            from_target = Packing.of(target_lengths, target_in.shape[1], packed_tokens[1])
            at = self._begin(_packed(from_source), _packed(from_target))
            memory = self._encode(from_source.pack(source), from_source, at)
            hidden = self._decode(from_target.pack(target_in), from_target, memory, from_source, at)
            target_out = from_target.pack(target_out)
        loss, nll = F.linear_cross_entropy(
            hidden.flatten(0, 1),
            self.output.weight,
            target_out.flatten(),
            label_smoothing=label_smoothing,
            ignore_index=self.config.pad_id,
        )
        return loss, nll, (target_out != self.config.pad_id).sum()

    @torch.no_grad()
    def attention_weights(
        self,
        source: Tensor,
        target: Tensor,
        source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Every layer's weights, without dropout: encoder (B, H, S, S), decoder (B, H, L, L), cross (B, H, L, S)."""
        weights: dict[str, list[Tensor]] = {"encoder": [], "decoder": [], "cross": []}
        at = Pass(None, as_they_are(self.decoder))
        memory = self._encode(source, source_lengths, at, weights["encoder"])
        both = (weights["decoder"], weights["cross"])
        self._decode(target, target_lengths, memory, source_lengths, at, both)
        return weights

    # ------------------------------------------------------------------------------------------ step-by-step decoding

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """The encoder's output (B, S, d) for source (B, S)."""
        return self._encode(source, source_lengths, Pass(self._seed(), Parameters()))

    def start_cache(
        self, memory: Tensor, source_lengths: Tensor | None = None, *, rows_per_sentence: int = 1, max_length: int
    ) -> DecoderCache:
        """An empty cache for max_length target tokens; keys and values of memory (B, S, d) are computed here."""
        at = Pass(None, as_they_are(self.decoder))
        cross = [joint.transpose(1, 3).unbind(2) for joint in self._project_memory(memory, at)]
        head = (self.config.heads, max_length, self.config.d_model // self.config.heads)
        rows = memory.shape[0] * rows_per_sentence
        return DecoderCache(
            self_keys=[key.new_empty(rows, *head) for key, _ in cross],
            self_values=[value.new_empty(rows, *head) for _, value in cross],
            cross_keys=[key.contiguous() for key, _ in cross],
            cross_values=[value.contiguous() for _, value in cross],
            source_lengths=source_lengths,
            capacity=max_length,
        )

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Logits (R, V) float32 for the token after tokens (R,), one per row of the cache, which grows by one."""
        if cache.length >= cache.capacity:
            raise ValueError(
                f"the cache holds {cache.capacity} positions and is full: start it with a larger max_length"
            )
        at = Pass(None, Parameters())
        x = self._embed(self.target_embedding, tokens[:, None], _TARGET_STREAM, at, first=cache.length)
        y, stream = self.decoder.enter(x, at)
        for i, layer in enumerate(self.decoder.layers):
            y, stream = layer.step(
                y,
                stream,
                self.decoder.following(i),
                cache.self_keys[i],
                cache.self_values[i],
                cache.length,
                cache.cross_keys[i],
                cache.cross_values[i],
                cache.source_lengths,
                at,
            )
        cache.length += 1
        return linear(y[:, 0], self.output.weight).float()
