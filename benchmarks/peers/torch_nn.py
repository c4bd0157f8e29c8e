"""Transformer and training step in good plain PyTorch: torch.nn's layers, autocast, clipping, fused Adam.

    https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerDecoderLayer.html      layers, masks, is_causal
    https://docs.pytorch.org/docs/stable/amp.html                                             autocast
    https://docs.pytorch.org/docs/stable/generated/torch.optim.Adam.html                      fused=True
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html                      set_to_none, mask as None

Batches without padding get no padding mask, and the decoder gets is_causal and no padding mask for targets (positions
past a target's end are never attended from before it, and have no loss): both let torch choose its faster attention.
Parameters have the names of fasttfm.models.Transformer's.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.data.batches import Batch
from fasttfm.data.tokenizer import PAD
from fasttfm.models import TransformerConfig


class TorchTransformer(nn.Module):
    """torch.nn's encoder and decoder, with one shared embedding that is also the output layer."""

    def __init__(self, config: TransformerConfig) -> None:
        """config must have share_embeddings "all" and the paper's positional encoding."""
        super().__init__()
        self.target_embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.source_embedding = self.target_embedding
        options: dict[str, Any] = {
            "d_model": config.d_model,
            "nhead": config.heads,
            "dim_feedforward": config.d_ff,
            "dropout": config.dropout,
            "activation": config.activation,
            "layer_norm_eps": config.layer_norm_eps,
            "norm_first": config.norm_first,
            "batch_first": True,
        }

        def norm() -> nn.LayerNorm | None:
            return nn.LayerNorm(config.d_model, config.layer_norm_eps) if config.final_norm else None

        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**options), config.encoder_layers, norm(), enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), config.decoder_layers, norm())
        for module in self.modules():  # torch.nn has one rate for all dropouts of a layer; ours are separate
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = config.attention_dropout
            if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
                module.dropout.p = config.relu_dropout
        self.dropout = nn.Dropout(config.embedding_dropout_p)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.output.weight = self.target_embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        nn.init.normal_(self.target_embedding.weight, std=config.d_model**-0.5)
        self.scale = math.sqrt(config.d_model)
        angle = torch.arange(config.max_length)[:, None] * 10_000.0 ** -(
            torch.arange(0, config.d_model, 2) / config.d_model
        )
        self.register_buffer("positions", torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1), persistent=False)
        causal = nn.Transformer.generate_square_subsequent_mask(config.max_length)
        self.register_buffer("causal", causal, persistent=False)

    def embed(self, tokens: Tensor, first: int = 0) -> Tensor:
        """Embed tokens (B, L) as (B, L, d)."""
        positions = self.positions[first : first + tokens.shape[1]]  # type: ignore[index]
        return self.dropout(self.target_embedding(tokens) * self.scale + positions)

    def forward(self, source: Tensor, target: Tensor, source_padding: Tensor | None = None) -> Tensor:
        """Logits (B, L, V) for source (B, S) and target inputs (B, L); source_padding (B, S) bool, True is padding."""
        memory = self.encoder(self.embed(source), src_key_padding_mask=source_padding)
        return self.output(self.decode(target, memory, source_padding))

    def decode(self, target: Tensor, memory: Tensor, source_padding: Tensor | None) -> Tensor:
        """Decoder output (B, L, d) for target inputs (B, L) and encoder output (B, S, d)."""
        length = target.shape[1]
        return self.decoder(
            self.embed(target),
            memory,
            tgt_mask=self.causal[:length, :length],  # type: ignore[index]
            tgt_is_causal=True,
            memory_key_padding_mask=source_padding,
        )


def padding_of(batch: Batch) -> Tensor | None:
    """Padding mask (B, S) of the source, None without padding; decided without a device synchronization."""
    if batch.source_tokens == batch.source.numel():
        return None
    return torch.arange(batch.source.shape[1], device=batch.source.device) >= batch.source_lengths[:, None]


def loss(model: Callable[..., Tensor], batch: Batch, label_smoothing: float) -> Tensor:
    """Label-smoothed cross entropy summed over the target tokens, 0-d; model: TorchTransformer, compiled or not."""
    logits = model(batch.source, batch.target_in, padding_of(batch))
    return summed_cross_entropy(logits, batch.target_out, label_smoothing)


def summed_cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """Label-smoothed cross entropy of logits (B, L, V), summed over the targets (B, L) without padding, 0-d.

    In float32, as under autocast.
    """
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        targets.flatten(),
        ignore_index=PAD,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


class Step:
    """Training step: forward, backward, optional clipping, Adam."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Batch, float], Tensor],
        training: TrainingConfig,
        autocast: torch.dtype | None,
        *,
        compiled: bool = False,
        captured: bool = False,
    ) -> None:
        """loss: function of (model, batch, label_smoothing), summed over the target tokens.

        autocast: dtype of matrix products, None for float32; float16 uses loss scaling. compiled: torch.compile.
        captured: the step is captured in a CUDA graph.
        """
        self.model, self.loss, self.training, self.autocast = model.train(), loss, training, autocast
        self.device = next(model.parameters()).device
        self.forward = torch.compile(model) if compiled else model
        self.adam = torch.optim.Adam(
            model.parameters(),
            lr=training.lr,
            betas=training.adam_betas,
            eps=training.adam_eps,
            fused=True,
            capturable=captured,
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=autocast == torch.float16)

    def __call__(self, batch: Batch, lr: float | None = None, divisor: Tensor | None = None) -> Tensor:
        """Loss per target token before the step, 0-d without gradient.

        lr: learning rate, if it changes. divisor: number of target tokens, 0-d on the device (default: the batch's).
        """
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            value = self.loss(self.forward, batch, self.training.label_smoothing)
            value = value / (batch.target_tokens if divisor is None else divisor)
        self.scaler.scale(value).backward()
        if self.training.clip_norm:
            self.scaler.unscale_(self.adam)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_norm)
        if lr is not None:
            for group in self.adam.param_groups:
                group["lr"] = lr
        self.scaler.step(self.adam)
        self.scaler.update()
        self.adam.zero_grad(set_to_none=True)
        return value.detach()
