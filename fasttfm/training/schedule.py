"""Learning rate schedules: functions of the update number, so that resuming needs no state; one also of time."""

import math

from fasttfm.config.training import TrainingConfig


def learning_rate(config: TrainingConfig, d_model: int, step: int, seconds: float = 0.0) -> float:
    """Learning rate of update `step` (from 1); seconds: training time so far, including earlier sessions.

    noam            noam_scale * d_model^-0.5 * min(step^-0.5, step * warmup^-1.5)   (Vaswani et al. 2017, equation 3)
    inverse-sqrt    lr * min(step / warmup, (warmup / step)^0.5)                     (fairseq's inverse_sqrt)
    cosine          lr * step / warmup, then min_lr + (lr - min_lr) * (1 + cos(pi * progress)) / 2, min_lr at max_update
    linear          lr * step / warmup, then min_lr + (lr - min_lr) * (1 - progress), min_lr at max_update
    cosine-minutes  min(step / warmup, 1) times the cosine's, min_lr when max_minutes are over
    constant        lr * min(step / warmup, 1)
    """
    if step < 1:
        raise ValueError(f"step {step} must be at least 1: updates count from 1")
    warmup = config.warmup_updates
    if config.schedule == "noam":
        return config.noam_scale * d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
    if config.schedule == "cosine-minutes":
        progress = min(seconds / (config.max_minutes * 60), 1.0)
        return min(step / max(warmup, 1), 1.0) * _between(config, (1 + math.cos(math.pi * progress)) / 2)
    if step < warmup:
        return config.lr * step / warmup
    if config.schedule == "inverse-sqrt":
        return config.lr * (max(warmup, 1) / step) ** 0.5
    if config.schedule == "constant":
        return config.lr
    progress = min((step - warmup) / (config.max_update - warmup), 1.0)
    return _between(config, 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


def _between(config: TrainingConfig, share: float) -> float:
    """Interpolate from min_lr (share 0) to lr (share 1)."""
    return config.min_lr + (config.lr - config.min_lr) * share
