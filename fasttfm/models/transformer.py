"""The encoder-decoder Transformer (Vaswani et al. 2017)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.config.model import TransformerConfig
from fasttfm.config.presets import preset_section
from fasttfm.functional.dropout import NO_DROPOUT, Dropout
from fasttfm.models.attention import Attention
from fasttfm.models.cache import DecoderCache
from fasttfm.models.embedding import LearnedPositions, Sinusoids, embed
from fasttfm.models.layers import DecoderLayer, EncoderLayer
from fasttfm.models.model import Model, recorded_weights, token_loss
from fasttfm.models.packing import Packing
from fasttfm.models.plain import apply_linear
from fasttfm.models.pretrained import read_pretrained, write_pretrained
from fasttfm.models.residual import SITES_PER_LAYER
from fasttfm.models.stack import Stack
from fasttfm.store.weights import model_weights, with_weights

if TYPE_CHECKING:
    from fasttfm.data.batches import Batch

_SOURCE_SITE, _TARGET_SITE = 0, 1  # dropouts of the embeddings; those of layers follow


class _Targets(NamedTuple):
    """Inputs of the loss besides those of forward()."""

    tokens: Tensor
    label_smoothing: float
    packed_tokens: tuple[int, int] | None


class Transformer(Model):
    """An encoder-decoder Transformer; see TransformerConfig for all options.

    Tokens are int64, padded with config.pad_id. Sources end in the end-of-sentence token; target inputs begin with the
    beginning-of-sentence token. Shared embeddings stay shared after load_state_dict(assign=True): the output layer then
    has the target embedding's table.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, shared = config.d_model, config.share_embeddings
        self.target_embedding = nn.Embedding(config.vocab_size, width)
        self.source_embedding = self.target_embedding
        if shared != "all":
            self.source_embedding = nn.Embedding(config.source_vocab_size or config.vocab_size, width)
        encoder_layers = [EncoderLayer(config) for _ in range(config.encoder_layers)]
        self.encoder = Stack(encoder_layers, self._final_norm(), first_site=SITES_PER_LAYER)
        decoder_layers = [DecoderLayer(config) for _ in range(config.decoder_layers)]
        self.decoder = Stack(decoder_layers, self._final_norm(), first_site=self.encoder.sites)
        self.output = nn.Linear(width, config.vocab_size, bias=config.output_bias)
        if config.positional_encoding == "learned":
            tables: list[Any] = [LearnedPositions(config.max_length, width) for _ in range(2)]
        else:
            kind, first = config.positional_encoding, config.first_position
            tables = [Sinusoids(config.max_length, width, kind, dtype=torch.float32, first=first)] * 2
        self.source_positions, self.target_positions = tables
        _share_tables(self)
        self.register_load_state_dict_post_hook(_share_tables)
        self.reset_parameters()

    @classmethod
    def from_preset(cls, name: str, *, vocab_size: int, **changes: Any) -> Transformer:
        """Build a preset (fasttfm/config/presets/NAME.yaml) for a vocabulary; changes: fields of TransformerConfig.

        Raises UserError for an unknown preset, ValueError for a wrong value, TypeError for an unknown field.
        """
        return cls(TransformerConfig(**{**preset_section(name, "model"), "vocab_size": vocab_size, **changes}))

    @classmethod
    def from_pretrained(cls, folder: str | Path, checkpoint: str = "best") -> Transformer:
        """Load a model, in float32, from a directory of save_pretrained(), `fasttfm import` or `fasttfm train`.

        checkpoint: best, last, average, an update's number or a path, for directories of `fasttfm train`. Raises
        UserError for a file that is missing, damaged or of another model.
        """
        config, weights, saved = read_pretrained(Path(folder), checkpoint)
        return with_weights(lambda: cls(config), weights, saved).eval()

    def save_pretrained(self, folder: str | Path, model_dir: str | Path | None = None) -> None:
        """Write config.json, model.safetensors and a model card to a directory for from_pretrained().

        model_dir: directory of `fasttfm train` or save_pretrained() to copy the tokenizer, decoding options and
        training records from; without it the model cannot translate text. Raises UserError if the directory holds other
        files or cannot be written.
        """
        source = None if model_dir is None else Path(model_dir)
        write_pretrained(Path(folder), self.config, model_weights(self), model_dir=source)

    def _final_norm(self) -> nn.LayerNorm | None:
        return nn.LayerNorm(self.config.d_model, self.config.layer_norm_eps) if self.config.final_norm else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize weights by config.init; with xavier, biases are 0 and norms 1."""
        xavier = self.config.init == "xavier"
        for module in self.modules():
            if isinstance(module, Attention):
                # Xavier's bound for each square projection; torch.nn draws the three as one (3d, d) matrix
                for part in module.in_proj_weight.chunk(3) if xavier else (module.in_proj_weight,):
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(module.in_proj_bias)
            elif module is self.output and self.config.share_embeddings != "none":
                if module.bias is not None:  # the weight is the target embedding's
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.Embedding | nn.Linear):
                module.reset_parameters()
                if xavier and isinstance(module, nn.Linear) and module is not self.output:
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        if xavier:
            tables: list[Any] = [self.source_embedding, self.target_embedding, self.output]  # shared ones drawn again
            if self.config.positional_encoding == "learned":
                tables += [self.source_positions, self.target_positions]
            for module in tables:
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            if self.output.bias is not None:
                nn.init.zeros_(self.output.bias)
        for embedding in (self.source_embedding, self.target_embedding):
            embedding.weight[self.config.pad_id] = 0.0

    def __prepare_scriptable__(self) -> Any:
        """Refuse torch.jit.script, which calls this first. Raises RuntimeError."""
        raise RuntimeError(
            "fasttfm.models.Transformer cannot be scripted: torch.compile and torch.export take it; TorchScript takes "
            "torch.nn.Transformer, which load_state_dict() fills with encoder.* and decoder.* of this model"
        )

    # ----------------------------------------------------------------------------------------------- the forward pass

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None, *, targets: _Targets | None = None,
    ) -> Any:  # fmt: skip
        """Logits (B, L, V) for source (B, S) and target inputs (B, L), with causal attention over the targets.

        source_lengths, target_lengths (B,): tokens before padding; None: no padding. targets: passed by loss(), which
        calls the model so that wrappers (FSDP) take effect; returns its two losses.
        """
        seed = self._seed()
        lengths: tuple[Any, Any] = (source_lengths, target_lengths)
        if targets is not None and targets.packed_tokens is not None:
            lengths = _packings((source, target), lengths, targets.packed_tokens)
            source, target = (x.pack_tokens(tokens) for x, tokens in zip(lengths, (source, target)))
            targets = targets._replace(tokens=lengths[1].pack_tokens(targets.tokens))
        memory = self._encode(source, lengths[0], seed)  # (B, S, d)
        hidden = self._decode(target, lengths[1], memory, lengths[0], seed)  # (B, L, d)
        if targets is None:
            return apply_linear(self.output, hidden)
        smoothing, pad_id = targets.label_smoothing, self.config.pad_id
        return token_loss(hidden, self.output, targets.tokens, label_smoothing=smoothing, pad_id=pad_id)

    def loss(
        self, source: Tensor, target_in: Tensor, target_out: Tensor, source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None, *, label_smoothing: float = 0.1,
        packed_tokens: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The training loss, summed over target tokens except padding.

        packed_tokens: sums of source_lengths and target_lengths, which it requires; sequences are packed and padding is
        not computed. The loss is the same, with other dropout masks. Returns (label-smoothed loss, loss without
        smoothing and without gradient, number of tokens), each 0-d. The logits (B, L, V) are materialized only where
        the operator cannot avoid it.
        """
        targets = _Targets(target_out, label_smoothing, packed_tokens)
        losses = self(source, target_in, source_lengths, target_lengths, targets=targets)
        return *losses, (target_out != self.config.pad_id).sum()

    def batch_loss(self, batch: Batch, *, label_smoothing: float = 0.1, packed: bool = False) -> tuple[Tensor, Tensor]:
        """The two losses of loss() for a batch of sentence pairs."""
        tokens = (batch.source_tokens, batch.target_tokens) if packed else None
        targets = _Targets(batch.target_out, label_smoothing, tokens)
        return self(batch.source, batch.target_in, batch.source_lengths, batch.target_lengths, targets=targets)

    def _seed(self) -> Tensor | None:
        """The seed of all dropouts of a forward pass, or None in eval mode."""
        return F.draw_seed(self.target_positions.table.device) if self.training else None

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """The encoder's output (B, S, d) for source (B, S)."""
        return self._encode(source, source_lengths, self._seed())

    def _embed(
        self, side: str, tokens: Tensor, lengths: Any, site: int, seed: Tensor | None, first_position: int = 0
    ) -> Tensor:
        return embed(
            tokens, getattr(self, f"{side}_embedding"), getattr(self, f"{side}_positions"), pad_id=self.config.pad_id,
            dropout=NO_DROPOUT if seed is None else Dropout(self.config.embedding_dropout_p, seed, site),
            first_position=first_position, packing=lengths if isinstance(lengths, Packing) else None,
        )  # fmt: skip

    def _encode(self, source: Tensor, lengths: Any, seed: Tensor | None) -> Tensor:
        return self.encoder(self._embed("source", source, lengths, _SOURCE_SITE, seed), lengths, seed=seed)

    def _decode(
        self, target: Tensor, lengths: Any, memory: Tensor, memory_lengths: Any, seed: Tensor | None,
        cache: DecoderCache | None = None,
    ) -> Tensor:  # fmt: skip
        """The decoder's output (B, L, d) for target inputs (B, L) over the memory (B, S, d); cache: of earlier ones."""
        x = self._embed("target", target, lengths, _TARGET_SITE, seed, 0 if cache is None else cache.length)
        return self.decoder(x, memory, lengths, memory_lengths, seed=seed, cache=cache)

    @torch.no_grad()
    def attention_weights(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None, target_lengths: Tensor | None = None
    ) -> dict[str, list[Tensor]]:
        """Weights of every layer, without dropout: encoder (B, H, S, S), decoder (B, H, L, L), cross (B, H, L, S)."""
        attentions = {
            "encoder": [layer.self_attn for layer in self.encoder.layers],
            "decoder": [layer.self_attn for layer in self.decoder.layers],
            "cross": [layer.multihead_attn for layer in self.decoder.layers],
        }
        with contextlib.ExitStack() as stack:
            weights = {name: stack.enter_context(recorded_weights(each)) for name, each in attentions.items()}
            self._decode(target, target_lengths, self._encode(source, source_lengths, None), source_lengths, None)
        return weights

    @torch.no_grad()
    def cross_attention(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None, *, layer: int,
    ) -> Tensor:  # fmt: skip
        """Cross-attention weights of a decoder layer (from 1), averaged over heads, without dropout: (B, L, S) float32.

        Layer 0 means the last but one, or the last of two: the first has seen too little of the target. Raises
        ValueError for a layer that does not exist.
        """
        layers = len(self.decoder.layers)
        if not 0 <= layer <= layers:
            raise ValueError(f"layer {layer} is not there: the model has layers 1 to {layers}")
        module = self.decoder.layers[(layer or max(min(2, layers), layers - 1)) - 1].multihead_attn
        with recorded_weights([module]) as weights:
            self._decode(target, target_lengths, self._encode(source, source_lengths, None), source_lengths, None)
        return weights[0].float().mean(dim=1)


def _packings(
    tokens: tuple[Tensor, Tensor], lengths: tuple[Any, Any], sums: tuple[int, int]
) -> tuple[Packing, Packing]:
    """Packings of sources and targets, each (B, L) with lengths (B,); sums: of the lengths."""
    if lengths[0] is None or lengths[1] is None:
        raise ValueError("packed_tokens needs source_lengths and target_lengths: it holds their sums")
    source, target = (Packing.from_lengths(each, x.shape[1], n) for each, x, n in zip(lengths, tokens, sums))
    return source, target


def _share_tables(model: Transformer, _: Any = None) -> None:
    """Tie shared tables again after load_state_dict(assign=True), unless an adapter (PEFT) wraps one of them."""
    plain = isinstance(model.output, nn.Linear) and isinstance(model.target_embedding, nn.Embedding)
    if plain and model.config.share_embeddings != "none":
        model.output.weight = model.target_embedding.weight
