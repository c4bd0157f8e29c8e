"""Optimizer step: unscale, clip, Adam and Muon, moving average; without synchronization."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.config.training import TrainingConfig
from fasttfm.errors import UserError
from fasttfm.training.exchange import GradientExchange
from fasttfm.training.muon import Muon, is_muons
from fasttfm.training.sharding import local, part_of
from fasttfm.training.workers import Workers

_OF_ADAM = ("adam.step.", "adam.exp_avg.", "adam.exp_avg_sq.")
"""Prefixes of the names of Adam's tensors."""


class Optimization:
    """Adam, or Muon for some parameters, with optional clipping, fp16 loss scaling and moving average."""

    def __init__(
        self, model: nn.Module, config: TrainingConfig, device: torch.device, workers: Workers, *,
        captured: bool = False,
    ) -> None:  # fmt: skip
        """captured: step() and backward() run in CUDA graphs, separate ones if update_freq is above 1."""
        self.workers = workers
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        factors = rate_factors([name for name, _ in named], config.rates)
        decays = {name: config.decayed == "all" or parameter.dim() > 1 for name, parameter in named}
        kind_of = {name: (factors[name], decays[name]) for name, _ in named}
        named.sort(key=lambda entry: kind_of[entry[0]])  # by parameter group, the order of Adam's state dict
        self.names = [name for name, _ in named]
        self.sources = [parameter for _, parameter in named]
        """The model's parameters."""
        self.parameters = [local(parameter) for parameter in self.sources]
        """This rank's shards of them, or the parameters themselves: what Adam and Muon update."""
        self.is_sharded = any(mine is not source for mine, source in zip(self.parameters, self.sources))
        self.clip_norm = config.clip_norm
        self.ema_decay = config.ema_decay
        self._keeps_buffers = captured and config.update_freq > 1
        """Whether gradients keep their memory, which several graphs use."""
        weights = dict(zip(self.names, self.parameters))
        chosen = {n: p for n, p in weights.items() if config.optimizer == "muon" and is_muons(n, p)}
        self.muon = Muon(chosen, factors, {n: config.weight_decay * decays[n] for n in chosen}, workers)
        self._of_adam = [name for name in self.names if name not in chosen]
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        # fused: 1.7 ms for 2.6M weights on 2 CPU cores; foreach 7.5 ms, a plain loop 9.2 ms
        self.adam = kind(
            [
                {
                    "params": [weights[name] for name in self._of_adam if kind_of[name] == (factor, decay)],
                    "factor": factor,
                    "lr": torch.zeros((), dtype=rate_dtype(device), device=device),
                    "weight_decay": config.weight_decay if decay else 0.0,
                }
                for factor, decay in sorted({kind_of[name] for name in self._of_adam})
            ],
            betas=config.adam_betas,
            eps=config.adam_eps,
            fused=device.type in ("cpu", "cuda"),
            capturable=captured and device.type == "cuda",
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
        self.average = [parameter.detach().clone() for parameter in self.parameters] if config.ema_decay else []
        exchanges = workers.size > 1 and not self.is_sharded  # FSDP sums gradients itself
        self._exchange = GradientExchange(self.parameters, workers) if exchanges else None

    def backward(self, loss: Tensor, factor: Tensor | None = None) -> None:
        """Accumulate the gradients of `loss` times `factor`, each 0-d; None: 1."""
        self.scaler.scale(loss).backward(factor)

    def step(self, lr: Tensor) -> Tensor:
        """Update the weights and drop the gradients; returns the gradient norm before clipping (0-d).

        lr: 0-d on the device, of rate_dtype(). If the norm is not finite, weights and moments do not change: fused Adam
        and Muon check that on the device.
        """
        self.scaler.unscale_(self.adam)
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.is_sharded:
            squared = norm.square()
            self.workers.add_up(squared)
            norm = squared.sqrt()
        if self.clip_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, norm)
        for group in self.adam.param_groups:
            group["lr"].copy_(lr * group["factor"])
        if not self.scaler.is_enabled():
            self.adam.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.scaler.step(self.adam)
        if self.muon.matrices:
            self.muon.step(lr, self.adam.found_inf)  # type: ignore[attr-defined]
        self.scaler.update()
        self.forget()
        if self.average:
            with torch.no_grad():
                torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - self.ema_decay)
        return norm

    def expect_last(self) -> None:
        """Start exchanging gradients during the next backward pass, the last of the update."""
        if self._exchange is not None:
            self._exchange.expect_last()

    def add_up_gradients(self) -> None:
        """Sum the accumulated gradients over the ranks; every rank calls it once per update."""
        if self._exchange is not None:
            self._exchange.finish()
        if self.is_sharded:
            for source, mine in zip(self.sources, self.parameters):
                mine.grad = None if source.grad is None else local(source.grad)  # summed by FSDP

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients by a factor (0-d)."""
        torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def forget(self) -> None:
        """Drop the gradients, or zero them if they keep their memory."""
        if self._keeps_buffers:
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            return
        for parameter in [*self.parameters, *self.sources]:
            parameter.grad = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the moving average of the weights, if any, within the block."""
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    def _swap_average(self) -> None:
        with torch.no_grad():
            for parameter, mean in zip(self.parameters, self.average, strict=False):
                kept = parameter.detach().clone()
                parameter.copy_(mean)
                mean.copy_(kept)

    # State

    def tensors(self) -> dict[str, Tensor]:
        """Adam's moments, Muon's momenta and, with a moving average, the raw weights, by name."""
        saved = {f"muon.momentum.{name}": matrix.momentum for name, matrix in self.muon.matrices.items()}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name not in self.muon.matrices:
                saved |= {f"adam.{key}.{name}": value for key, value in self.adam.state[parameter].items()}
            if self.average:
                saved[f"raw.{name}"] = parameter
        return saved

    def values(self) -> dict[str, Any]:
        """The rest of the state: the loss scale."""
        return {"scaler": self.scaler.state_dict()}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore the state of tensors() and values() into a model with the saved weights (the average, if any).

        Raises ValueError, and changes nothing, for the state of another optimizer or with other averages.
        """
        self._refuse_others(tensors)
        tensors = {key: self._part(key, tensor) for key, tensor in tensors.items()}
        optimizer = self.adam.state_dict()
        state = {
            index: {prefix.split(".")[1]: tensors[prefix + name] for prefix in _OF_ADAM if prefix + name in tensors}
            for index, name in enumerate(self._of_adam)
        }
        self.adam.load_state_dict(
            {**optimizer, "state": {index: entries for index, entries in state.items() if entries}}
        )
        for name, matrix in self.muon.matrices.items():
            matrix.momentum.copy_(tensors[f"muon.momentum.{name}"])
        self.scaler.load_state_dict(values["scaler"])
        if self.average:
            with torch.no_grad():
                for name, parameter, mean in zip(self.names, self.parameters, self.average, strict=True):
                    mean.copy_(parameter)
                    parameter.copy_(tensors[f"raw.{name}"])

    def _refuse_others(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError for missing or superfluous tensors in a saved state."""
        needed = {f"muon.momentum.{name}" for name in self.muon.matrices}
        needed |= {f"raw.{name}" for name in self.names if self.average}
        for name in self._of_adam:  # all or none: without a gradient so far there are no moments
            moments = {f"{prefix}{name}" for prefix in _OF_ADAM}
            needed |= moments if moments & tensors.keys() else set()
        if missing := sorted(needed - tensors.keys()):
            raise ValueError(f"it has no {missing[0]}")
        if others := sorted(tensors.keys() - needed):
            raise ValueError(f"it has {others[0]}, for which this run has no use")

    def source_of(self, key: str) -> nn.Parameter | None:
        """The model's parameter that belongs to a tensor of the state."""
        name = key.split(".", 1 if key.startswith("raw.") else 2)[-1]
        return self.sources[self.names.index(name)] if name in self.names else None

    def _part(self, key: str, tensor: Tensor) -> Tensor:
        """This rank's shard of a full tensor of the state."""
        source = self.source_of(key)
        if not self.is_sharded or source is None or tensor.shape != source.shape:
            return tensor
        return part_of(tensor, source)


def rate_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the learning rate in fused Adam: on a CPU, that of a Python float."""
    return torch.float32 if device.type == "cuda" else torch.float64


def rate_factors(names: Sequence[str], rates: Sequence[str]) -> dict[str, float]:
    """Learning rate factors by parameter name: that of the last matching pattern=factor, by default 1.

    Raises UserError for a pattern that matches no name.
    """
    factors = dict.fromkeys(names, 1.0)
    for rate in rates:
        pattern, _, factor = rate.rpartition("=")
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            raise UserError(f"--rates {rate}: no parameter's name fits {pattern}; they are {', '.join(names)}")
        factors |= dict.fromkeys(matches, float(factor))
    return factors
