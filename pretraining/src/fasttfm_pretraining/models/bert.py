"""BERT (Devlin et al. 2019): an encoder alone, which sees both sides of every token, and its heads of pre-training.

    x = dropout(norm(word + position + segment))          (B, L, E), a linear map to (B, L, d) where E is another width
    hidden = layers(x)                                    (B, L, d), post-norm
    masked tokens: norm(gelu(hidden W)) word^T + bias     (M, V), of the masked positions alone
    pairs: tanh(hidden[:, 0] W_p) W_s                     (B, 2), next sentence or sentence order

ALBERT is the same with other fields of the configuration (AlbertConfig), ELECTRA two of the bodies (models/electra.py).
Rows are padded, with lengths (B,), or lie packed one after the other in a single row.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.cpu.linear import linear
from fasttfm.functional.feed_forward import ACTIVATIONS
from fasttfm.models.attention import Lengths
from fasttfm.models.embedding import table_of
from fasttfm.models.layers import EncoderLayer
from fasttfm.models.model import Model, recorded_weights, reset_parameters
from fasttfm.models.packing import Packing
from fasttfm.models.plain import apply_linear
from fasttfm.models.residual import SITES_PER_LAYER, normalise
from fasttfm.models.stack import Stack
from fasttfm_pretraining.config.bert import BertConfig


class Embeddings(nn.Module):
    """norm(word + position + segment)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.word = nn.Embedding(config.vocab_size, width)
        self.position = nn.Embedding(config.max_length, width)
        self.segment = nn.Embedding(config.segments, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)

    def forward(self, tokens: Tensor, segments: Tensor | None, packing: Packing | None) -> Tensor:
        """tokens, segments (B, L), or packed (1, T), to (B, L, E). Raises ValueError for more than max_length."""
        longest = tokens.shape[1] if packing is None else packing.longest
        if longest > self.position.num_embeddings:
            raise ValueError(
                f"a sequence has {longest} tokens: this model has positions for {self.position.num_embeddings}"
            )
        positions = table_of(self.position)[:longest] if packing is None else self.position(packing.columns)
        kinds = table_of(self.segment)[0] if segments is None else self.segment(segments)
        x = self.word(tokens) + positions + kinds  # (B, L, E)
        return normalise(x, self.norm)


class Bert(Model):
    """The body: tokens to hidden states, and the pooled vector of a whole sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        width = config.embedding_width
        self.embedding_projection = None if width == config.d_model else nn.Linear(width, config.d_model)
        self.encoder = Stack(_layers(config), first_site=SITES_PER_LAYER)
        self.pooler = nn.Linear(config.d_model, config.d_model) if config.pooler else None
        reset_parameters(self, config.init_std)

    def forward(self, tokens: Tensor, segments: Tensor | None = None, lengths: Lengths = None) -> Tensor:
        """Hidden states (B, L, d) of tokens (B, L) int64, with segments (B, L) int64 from 0 (None: all 0).

        lengths (B,): tokens before padding, None where nothing is padded; or a Packing, and then tokens and segments
        are (1, T) and so is the result, (1, T, d). Raises ValueError for sequences longer than config.max_length.
        """
        packing = lengths if isinstance(lengths, Packing) else None
        x = self.embeddings(tokens, segments, packing)
        x = nn.functional.dropout(x, self.config.dropout, self.training)
        if self.embedding_projection is not None:
            x = self.embedding_projection(x)
        seed = F.draw_seed(x.device) if self.training else None
        return self.encoder(x, lengths, seed=seed)

    def pooled(self, hidden: Tensor, lengths: Lengths = None) -> Tensor:
        """tanh(W hidden + b) of each sequence's first token, (B, d). Raises ValueError for a body without pooler."""
        if self.pooler is None:
            raise ValueError("this body has no pooler: its configuration says pooler: false")
        return torch.tanh(self.pooler(first_tokens(hidden, lengths)))

    @torch.no_grad()
    def attention_weights(
        self, tokens: Tensor, segments: Tensor | None = None, lengths: Tensor | None = None
    ) -> list[Tensor]:
        """Every layer's weights, (B, H, L, L), without dropout."""
        mode = self.training
        self.eval()
        try:
            with recorded_weights(layer.self_attn for layer in self.encoder.layers) as weights:
                self(tokens, segments, lengths)
        finally:
            self.train(mode)
        return weights


def first_tokens(hidden: Tensor, lengths: Lengths = None) -> Tensor:
    """The hidden state of each sequence's first token: (B, d) of (B, L, d), or of packed (1, T, d)."""
    return hidden[0, lengths.starts[:-1].long()] if isinstance(lengths, Packing) else hidden[:, 0]


def _layers(config: BertConfig) -> list[EncoderLayer]:
    """The layers, with what they share; one object many times where they share all."""
    layers = [EncoderLayer(config.layer_config()) for _ in range(1 if config.share == "all" else config.layers)]
    first = layers[0]
    for layer in layers:
        if config.share == "attention":
            layer.self_attn, layer.norm1 = first.self_attn, first.norm1
        elif config.share == "ffn":
            layer.linear1, layer.linear2, layer.norm2 = first.linear1, first.linear2, first.norm2
    return layers * config.layers if config.share == "all" else layers


class MaskedHead(nn.Module):
    """Hidden states to logits over the vocabulary, through the word embeddings: norm(gelu(x W + b)) word^T + bias."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.embedding_width
        self.transform = nn.Linear(config.d_model, width)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        reset_parameters(self, config.init_std)

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        """hidden (..., d) and the table of word embeddings (V, E) to (..., V)."""
        y = self.activation(self.transform(hidden))  # (..., E)
        return linear(normalise(y, self.norm), words, self.bias)


class Predictions(NamedTuple):
    """Outputs of a pre-training model for a batch."""

    masked: Tensor
    """(M, V): logits of the tokens at the masked positions; (B, L, V) where none were named."""
    sentence: Tensor | None
    """(B, 2): logits of 0, the second segment follows the first, and 1, it does not; None without that head."""


class BertPretraining(Model):
    """BERT with the heads of masked language modelling and, by the configuration, of sentence pairs."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.body = Bert(config)
        self.masked = MaskedHead(config)
        self.sentence = nn.Linear(config.d_model, 2) if config.sentence_head else None
        if self.sentence is not None:
            reset_parameters(self.sentence, config.init_std)

    def forward(
        self, tokens: Tensor, segments: Tensor | None = None, lengths: Lengths = None, positions: Tensor | None = None
    ) -> Predictions:
        """Compute the logits; tokens, segments and lengths as Bert takes them.

        positions (M,) int64: the masked ones, counted over the rows of tokens (or of the packed tokens); None: all. The
        product with the vocabulary is of these alone.
        """
        hidden = self.body(tokens, segments, lengths)  # (B, L, d)
        picked = hidden if positions is None else hidden.flatten(0, 1)[positions]  # (M, d)
        masked = self.masked(picked, self.body.embeddings.word.weight)
        if self.sentence is None:
            return Predictions(masked, None)
        pooled = self.body.pooled(hidden, lengths)
        pooled = nn.functional.dropout(pooled, self.config.dropout, self.training)
        return Predictions(masked, apply_linear(self.sentence, pooled))

    def batch_loss(self, batch: Any, *, label_smoothing: float = 0.0, packed: bool = False) -> tuple[Tensor, Tensor]:
        """The loss of a data.masking.MaskedBatch, and that of its masked tokens alone without gradient, 0-d sums.

        The first is, over the number of masked tokens, the mean loss of masked tokens plus the mean loss of pairs.
        packed: the layers see the tokens alone, one row after the other, and compute no padding.
        """
        loss, nll, _ = self._losses(batch, label_smoothing, packed)
        return loss, nll

    def batch_scores(self, batch: Any, *, label_smoothing: float = 0.0) -> dict[str, Tensor]:
        """Sums over a batch, 0-d each: `loss` and `nll` of batch_loss(); how many masked tokens (`masked`) and, with
        that head, pairs (`sentences`) are told right."""
        loss, nll, predicted = self._losses(batch, label_smoothing, False)
        scores = {"loss": loss, "nll": nll, "masked": (predicted.masked.argmax(-1) == batch.labels).sum()}
        if predicted.sentence is not None and batch.sentence_labels is not None:
            scores["sentences"] = (predicted.sentence.argmax(-1) == batch.sentence_labels).sum()
        return scores

    def _losses(self, batch: Any, label_smoothing: float, packed: bool) -> tuple[Tensor, Tensor, Predictions]:
        tokens, segments, lengths, positions = inputs(batch, packed)
        predicted: Predictions = self(tokens, segments, lengths, positions)
        loss, nll = F.cross_entropy(predicted.masked, batch.labels, label_smoothing=label_smoothing, reduction="sum")
        if predicted.sentence is not None and batch.sentence_labels is not None:
            pairs = nn.functional.cross_entropy(predicted.sentence.float(), batch.sentence_labels)
            loss = loss + pairs * batch.target_tokens
        return loss, nll, predicted


def inputs(batch: Any, packed: bool) -> tuple[Tensor, Tensor | None, Lengths, Tensor]:
    """Tokens, segments, lengths and masked positions of a MaskedBatch, padded or packed."""
    length, tokens = batch.tokens.shape[1], batch.source_tokens + batch.target_tokens
    if not packed:
        lengths = None if tokens == batch.tokens.numel() else batch.lengths  # nothing is padded
        return batch.tokens, batch.segments, lengths, batch.positions
    packing = Packing.from_lengths(batch.lengths, length, tokens)
    rows, columns = batch.positions // length, batch.positions % length
    segments = None if batch.segments is None else packing.pack_tokens(batch.segments)
    return packing.pack_tokens(batch.tokens), segments, packing, packing.starts[rows] + columns
