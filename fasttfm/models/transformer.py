"""The encoder-decoder Transformer (Vaswani et al. 2017), trainable and decodable."""

from __future__ import annotations

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

_SOURCE_SITE, _TARGET_SITE = 0, 1  # of the embeddings' dropouts, before those of the layers


class _Targets(NamedTuple):
    """Inputs of the loss besides those of a pass."""

    tokens: Tensor
    label_smoothing: float
    packed_tokens: tuple[int, int] | None


class Transformer(Model):
    """An encoder-decoder Transformer; see TransformerConfig for every choice.

    Tokens are int64; config.pad_id fills short sequences. Sources end in the end-of-sentence token; target inputs begin
    with the beginning-of-sentence token. Shared tables stay shared when a state dict is loaded, with assign=True too:
    the output's is then the target embedding's.
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
        """Build the model of a preset (fasttfm/config/presets/NAME.yaml) for a vocabulary, with any fields changed.

        Raises UserError for an unknown preset, ValueError for a wrong value, TypeError for an unknown field.
        """
        return cls(TransformerConfig(**{**preset_section(name, "model"), "vocab_size": vocab_size, **changes}))

    @classmethod
    def from_pretrained(cls, folder: str | Path, checkpoint: str = "best") -> Transformer:
        """Load the model of a directory that save_pretrained(), `fasttfm import` or `fasttfm train` made, in float32.

        checkpoint: of a directory of `fasttfm train`: best, last, average, an update's number, or a path. Raises
        UserError naming what is missing, damaged or of another model.
        """
        config, weights, saved = read_pretrained(Path(folder), checkpoint)
        return with_weights(lambda: cls(config), weights, saved).eval()

    def save_pretrained(self, folder: str | Path, model_dir: str | Path | None = None) -> None:
        """Write config.json, model.safetensors and a model card to a directory: what from_pretrained() reads.

        model_dir: the directory of `fasttfm train` or from_pretrained() that the tokenizer's files, the way of decoding
        and the training's records are copied from; without it the directory has no tokenizer and translates no text.
        Raises UserError for a directory that holds other files, and where nothing can be written.
        """
        source = None if model_dir is None else Path(model_dir)
        write_pretrained(Path(folder), self.config, model_weights(self), model_dir=source)

    def _final_norm(self) -> nn.LayerNorm | None:
        return nn.LayerNorm(self.config.d_model, self.config.layer_norm_eps) if self.config.final_norm else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws new initial weights by config.init; with xavier, biases are 0 and norms 1."""
        xavier = self.config.init == "xavier"
        for module in self.modules():
            if isinstance(module, Attention):
                # Glorot's bound for each square projection; torch.nn draws the three as one (3d, d) matrix
                for part in module.in_proj_weight.chunk(3) if xavier else (module.in_proj_weight,):
                    nn.init.xavier_uniform_(part)
                nn.init.zeros_(module.in_proj_bias)
            elif module is self.output and self.config.share_embeddings != "none":
                if module.bias is not None:  # its table was drawn as the target embedding
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.LayerNorm | nn.Embedding | nn.Linear):
                module.reset_parameters()
                if xavier and isinstance(module, nn.Linear) and module is not self.output:
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
        if xavier:
            # a shared table is drawn again
            drawn: list[Any] = [self.source_embedding, self.target_embedding, self.output]
            if self.config.positional_encoding == "learned":
                drawn += [self.source_positions, self.target_positions]
            for module in drawn:
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            if self.output.bias is not None:
                nn.init.zeros_(self.output.bias)
        for embedding in (self.source_embedding, self.target_embedding):
            embedding.weight[self.config.pad_id] = 0.0

    def __prepare_scriptable__(self) -> Any:
        """Answer torch.jit.script, which asks this of a module first."""
        raise RuntimeError(
            "fasttfm.models.Transformer cannot be scripted: torch.compile and torch.export take it; TorchScript takes "
            "torch.nn.Transformer, which load_state_dict() fills with encoder.* and decoder.* of this model"
        )

    # ----------------------------------------------------------------------------------------------- the forward pass

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None, *, targets: _Targets | None = None,
    ) -> Any:  # fmt: skip
        """Logits (B, L, V) for source (B, S) and target inputs (B, L), each position seeing the targets up to itself.

        source_lengths, target_lengths (B,): tokens before padding; None where nothing is padded. targets: what loss()
        asks for, by calling the model, so that whoever wraps it (FSDP) takes part; then its two losses come back.
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
        """The training loss, summed over the target tokens that are not padding.

        packed_tokens, the sums of source_lengths and of target_lengths (which must then be given): the layers see the
        tokens alone, one sentence after the other, and compute no padding; the loss is the same, dropout drawn anew.
        Returns (label-smoothed loss, loss without smoothing and without gradient, number of tokens), each 0-d. The
        logits (B, L, V) never exist all at once where the operator can avoid it.
        """
        targets = _Targets(target_out, label_smoothing, packed_tokens)
        losses = self(source, target_in, source_lengths, target_lengths, targets=targets)
        return *losses, (target_out != self.config.pad_id).sum()

    def batch_loss(self, batch: Batch, *, label_smoothing: float = 0.1, packed: bool = False) -> tuple[Tensor, Tensor]:
        """loss() of a batch of pairs, without its number of tokens, which the batch knows."""
        tokens = (batch.source_tokens, batch.target_tokens) if packed else None
        targets = _Targets(batch.target_out, label_smoothing, tokens)
        return self(batch.source, batch.target_in, batch.source_lengths, batch.target_lengths, targets=targets)

    def _seed(self) -> Tensor | None:
        """One for all dropouts of a pass, whose sites tell them apart."""
        return F.draw_seed(self.target_positions.table.device) if self.training else None

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """The encoder's output (B, S, d) for source (B, S)."""
        return self._encode(source, source_lengths, self._seed())

    def _embed(self, side: str, tokens: Tensor, site: int, seed: Tensor | None, **given: Any) -> Tensor:
        dropout = NO_DROPOUT if seed is None else Dropout(self.config.embedding_dropout_p, seed, site)
        embedding, positions = getattr(self, f"{side}_embedding"), getattr(self, f"{side}_positions")
        return embed(tokens, embedding, positions, pad_id=self.config.pad_id, dropout=dropout, **given)

    def _encode(self, source: Tensor, lengths: Any, seed: Tensor | None) -> Tensor:
        """(B, S, d) of source (B, S)."""
        packing = lengths if isinstance(lengths, Packing) else None
        x = self._embed("source", source, _SOURCE_SITE, seed, packing=packing)
        return self.encoder(x, lengths, seed=seed)

    def _decode(
        self, target: Tensor, lengths: Any, memory: Tensor, memory_lengths: Any, seed: Tensor | None,
        cache: DecoderCache | None = None,
    ) -> Tensor:  # fmt: skip
        """(B, L, d) of target inputs (B, L) over the encoder's output (B, S, d); cache: of the targets before them."""
        places: dict[str, Any] = {"packing": lengths if isinstance(lengths, Packing) else None}
        if cache is not None:
            places["first_position"] = cache.length
        x = self._embed("target", target, _TARGET_SITE, seed, **places)
        return self.decoder(x, memory, lengths, memory_lengths, seed=seed, cache=cache)

    @torch.no_grad()
    def attention_weights(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None, target_lengths: Tensor | None = None
    ) -> dict[str, list[Tensor]]:
        """Every layer's weights, without dropout: encoder (B, H, S, S), decoder (B, H, L, L), cross (B, H, L, S)."""
        encoder = [layer.self_attn for layer in self.encoder.layers]
        decoder = [layer.self_attn for layer in self.decoder.layers]
        cross = [layer.multihead_attn for layer in self.decoder.layers]
        with recorded_weights(encoder) as of_encoder, recorded_weights(decoder) as own, recorded_weights(cross) as over:
            self._decode(target, target_lengths, self._encode(source, source_lengths, None), source_lengths, None)
        return {"encoder": of_encoder, "decoder": own, "cross": over}

    @torch.no_grad()
    def cross_attention(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None,
        target_lengths: Tensor | None = None, *, layer: int,
    ) -> Tensor:  # fmt: skip
        """The weights of a decoder layer (from 1), the mean of its heads, (B, L, S) float32.

        Without dropout. Layer 0 is the last but one, and the last of two; the first has not seen enough of the target.
        Raises ValueError for a layer that is not there.
        """
        layers = len(self.decoder.layers)
        if not 0 <= layer <= layers:
            raise ValueError(f"layer {layer} is not there: the model has layers 1 to {layers}")
        chosen_layer = self.decoder.layers[(layer or max(min(2, layers), layers - 1)) - 1]
        with recorded_weights([chosen_layer.multihead_attn]) as weights:
            self._decode(target, target_lengths, self._encode(source, source_lengths, None), source_lengths, None)
        return weights[0].float().mean(dim=1)


def _packings(
    tokens: tuple[Tensor, Tensor], lengths: tuple[Any, Any], sums: tuple[int, int]
) -> tuple[Packing, Packing]:
    """The packings of sources and of targets, padded (B, L); sums: of their lengths."""
    if lengths[0] is None or lengths[1] is None:
        raise ValueError("packed_tokens needs source_lengths and target_lengths, whose sums they are")
    source, target = (Packing.from_lengths(each, x.shape[1], n) for each, x, n in zip(lengths, tokens, sums))
    return source, target


def _share_tables(model: Transformer, _: Any = None) -> None:
    """Makes shared tables one parameter again, which load_state_dict(assign=True) does not.

    An adapter's layer around one of them has no parameter of that name, and keeps what it is around.
    """
    plain = isinstance(model.output, nn.Linear) and isinstance(model.target_embedding, nn.Embedding)
    if plain and model.config.share_embeddings != "none":
        model.output.weight = model.target_embedding.weight
