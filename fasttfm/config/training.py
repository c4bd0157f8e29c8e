"""Training settings: optimizer, schedule, regularization, saving, validation, stopping.

Names are fairseq's if the meaning is the same. Source: Vaswani et al. 2017, section 5.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fasttfm.config.checks import Amount, Count, Positive, Range, Rate, Seed, Whole, check_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The training recipe. Invalid values raise ValueError on construction."""

    packed: bool = False
    """Pack sentences without padding (cu_seqlens)."""
    update_freq: Count = 1
    """Batches per update; their gradients are accumulated."""
    optimizer: Literal["adam", "adamw", "muon"] = "adam"
    """adam adds weight_decay times the weight to the gradient; adamw shrinks weights by lr * weight_decay instead. muon
    orthogonalizes the updates of the layers' matrices and uses adamw for all other parameters."""
    schedule: Literal["noam", "inverse-sqrt", "cosine", "linear", "cosine-minutes", "constant"] = "inverse-sqrt"
    """Learning rate schedule, with linear warm-up. noam is the paper's and uses noam_scale instead of lr. cosine and
    linear end at max_update. cosine-minutes ends at max_minutes and is not reproducible."""
    lr: Positive = 5e-4
    """Peak learning rate, reached after warmup_updates; noam computes its own."""
    min_lr: Amount = 0.0
    """Final learning rate of cosine, linear and cosine-minutes; GPT-3 uses a tenth of lr."""
    noam_scale: Positive = 1.0
    """Factor of d_model^-0.5 * min(step^-0.5, step * warmup_updates^-1.5); 1 in the paper, tensor2tensor: 2."""
    rates: tuple[str, ...] = ()
    """Learning rate factors by parameter name, such as encoder.*=0.1,*embedding.weight=0. 0 freezes parameters; the
    last matching pattern counts."""
    warmup_updates: Whole = 4000
    """Updates over which the learning rate rises from 0."""
    adam_betas: tuple[float, float] = (0.9, 0.98)
    """Decay rates of Adam's two moments."""
    adam_eps: Positive = 1e-9
    """Epsilon in Adam's denominator."""
    weight_decay: Amount = 0.0
    """Weight decay of the optimizer."""
    decayed: Literal["all", "matrices"] = "all"
    """Parameters with weight_decay: all, or only matrices and embeddings (BERT, GPT)."""
    clip_norm: Amount = 0.0
    """Maximum global gradient norm; 0: do not clip."""
    label_smoothing: Rate = 0.1
    """Share of the target's probability that is spread over the vocabulary."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"
    """Data type of matrix products. Weights and statistics stay fp32; fp16 also scales the loss. auto: bf16 on a device
    with bf16 units, else fp32; decided when the run starts."""
    shard: bool = False
    """Shard weights, gradients and optimizer state across workers (FSDP2), for models that do not fit on one."""
    cuda_graph: bool = True
    """On a GPU, launch an update as one CUDA graph, captured per batch shape; work that cannot be captured (packed
    batches, several workers) is launched eagerly, with a message. No effect on a CPU."""
    checkpoint_activations: bool = False
    """Keep only each layer's input and recompute the rest in the backward pass: the same gradients with less memory,
    for a third more computation."""
    ema_decay: Rate = 0.0
    """Decay per update of a moving average of the weights, which is validated and saved instead of them; 0: none."""
    max_update: Count = 100_000
    """Stop after this many updates."""
    max_epoch: Whole = 0
    """Stop after this many passes over the training data; 0: no limit."""
    max_minutes: Amount = 0.0
    """Stop this many minutes after the start of the command, including earlier sessions of a resumed run; 0: no limit.
    The current update is completed and the model is saved."""
    patience: Whole = 0
    """Stop after this many consecutive validations without a better score; 0: never."""
    valid_interval_updates: Whole = 1000
    """Validate after every N updates and at the end; 0: never."""
    valid_bleu: bool = True
    """Translate the validation set and select the best checkpoint by BLEU instead of validation loss."""
    valid_beam: Count = 1
    """Beam size for valid_bleu during training; 1: greedy search. At the end, the best and the last checkpoint are
    validated with `beam`."""
    valid_bleu_tokenizer: str = "auto"
    """sacreBLEU's tokenizer for valid_bleu: 13a, intl, or char or zh for scripts without spaces; auto: by the script of
    the validation text, usually 13a."""
    save_interval_updates: Whole = 1000
    """Save a checkpoint after every N updates and at the end; 0: only at the end and when validation improves."""
    keep_interval_updates: int = 10
    """Number of newest checkpoints to keep; -1: all."""
    keep_best: Count = 1
    """Number of checkpoints with the best validation scores to keep in addition."""
    average_last: Whole = 0
    """At the end, average this many of the newest checkpoints into the checkpoint `average`; 0: do not average."""
    seed: Seed = 1
    """Seed of initialization, dropout and data order; makes the run reproducible."""
    log_interval: Count = 50
    """Log the training loss after every N updates."""
    tensorboard: bool = True
    """Write TensorBoard event files beside train.log.jsonl."""
    skip_limit: Count = 10
    """Stop after this many consecutive updates with a non-finite gradient; each is skipped and logged. fp16 allows 16
    more while its loss scale settles."""
    rank_timeout_minutes: Annotated[float, Range(0, 1_000_000, above=True)] = 180.0
    """Minutes that ranks wait for a rank that does not answer before the run ends. With shard, one rank validates
    alone: use more than a validation takes."""
    threads: Annotated[int, Range(0, 1024)] = 0  # OpenMP crashes if it cannot start that many
    """CPU threads; 0: PyTorch chooses. A run is reproducible only with the same number."""

    def __post_init__(self) -> None:
        check_fields(self)
        _require(self, "shard", not (self.shard and self.precision == "fp16"), "needs precision bf16 or fp32")
        is_plain = not self.shard and self.precision != "fp16"
        _require(self, "optimizer", is_plain or self.optimizer != "muon", "does not support shard and precision fp16")
        betas = len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas)
        _require(self, "adam_betas", betas, "must be two numbers, each at least 0 and below 1")
        keeps = self.keep_interval_updates == -1 or self.keep_interval_updates >= 1
        _require(self, "keep_interval_updates", keeps, "must be at least 1, or -1 to keep all")
        for rate in self.rates:
            _require(self, "rates", _is_rate(rate), "must be pattern=number of at least 0, such as encoder.*=0.1")
        if self.schedule == "noam":
            _require(self, "warmup_updates", self.warmup_updates >= 1, "must be at least 1 with schedule noam")
        if self.schedule == "cosine-minutes":
            _require(self, "max_minutes", self.max_minutes > 0, "must be above 0 with schedule cosine-minutes")
        if self.schedule in ("cosine", "linear"):
            most = self.max_update
            rule = f"must be below max_update ({most}) with schedule {self.schedule}, such as {most // 10}"
            _require(self, "warmup_updates", self.warmup_updates < most, rule)
        if self.min_lr:
            falls = self.schedule in ("cosine", "linear", "cosine-minutes")
            _require(self, "min_lr", falls, f"needs schedule cosine, linear or cosine-minutes, not {self.schedule}")
            _require(self, "min_lr", self.min_lr < self.lr, f"must be below lr ({self.lr:g}), such as a tenth of it")
        if self.patience:
            _require(self, "patience", self.valid_interval_updates > 0, "needs valid_interval_updates above 0")
        most = self.keep_interval_updates
        rule = f"must be at most keep_interval_updates ({most}): older checkpoints are deleted"
        _require(self, "average_last", not 0 < most < self.average_last, rule)


RESUMABLE = ("lr", "min_lr", "noam_scale", "clip_norm", "weight_decay", "label_smoothing")
"""Settings that --resume-with may change."""

STOPPED_BY: dict[str, Callable[[TrainingConfig], str | None]] = {
    "lr": lambda config: "schedule" if config.schedule == "noam" else None,
    "noam_scale": lambda config: "schedule" if config.schedule != "noam" else None,
    "decayed": lambda config: None if config.weight_decay else "weight_decay",
    "valid_beam": lambda config: None if config.valid_bleu else "valid_bleu",
    "valid_bleu_tokenizer": lambda config: None if config.valid_bleu else "valid_bleu",
    "keep_best": lambda config: None if config.valid_interval_updates else "valid_interval_updates",
}
"""Setting -> the setting that disables it in this configuration, or None."""


def _is_rate(rate: str) -> bool:
    pattern, _, factor = rate.rpartition("=")
    try:
        return bool(pattern) and math.isfinite(float(factor)) and float(factor) >= 0
    except ValueError:
        return False


def _require(config: TrainingConfig, name: str, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"{name} {getattr(config, name)!r} {rule}")
