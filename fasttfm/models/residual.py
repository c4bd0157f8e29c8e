"""Residual connections with dropout and norm (Vaswani et al. 2017, section 5.4).

    post-norm   x' = LayerNorm(x + dropout(Sublayer(x)))      the paper
    pre-norm    x' = x + dropout(Sublayer(LayerNorm(x)))      tensor2tensor

Each addition is fused with the norm behind it: the sub-layer's own (post-norm), or that of the next sub-layer
(pre-norm). So one loop serves both orders. All dropouts of a forward pass share a seed and differ by site.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from torch import Tensor, nn

from fasttfm import functional as F
from fasttfm.functional.dropout import LEAST_P, NO_DROPOUT, Dropout
from fasttfm.functional.subclasses import ordinary
from fasttfm.models.plain import DROPOUT, NORM, untouched

SITES_PER_LAYER = 8
"""Dropout sites reserved per layer."""


class Site(IntEnum):
    """Dropouts of a layer, each with its own mask; encoder layers have no cross-attention."""

    SELF_ATTENTION_WEIGHTS = 0
    HIDDEN = 1
    SELF_ATTENTION = 2
    CROSS_ATTENTION = 3
    FEED_FORWARD = 4
    CROSS_ATTENTION_WEIGHTS = 5


WEIGHT_SITES = (Site.SELF_ATTENTION_WEIGHTS, Site.CROSS_ATTENTION_WEIGHTS)
"""Dropouts of attention weights."""
OUTPUT_SITES = (Site.SELF_ATTENTION, Site.CROSS_ATTENTION)
"""Dropouts of attention outputs."""


class LayerSeed(NamedTuple):
    """Seed and first dropout site of a layer; a layer that is used twice has other sites the second time."""

    seed: Tensor | None = None
    """(1,) int64, of the whole forward pass; None: no dropout."""
    first_site: int = 0

    def dropout(self, site: int, dropout: float | nn.Module) -> Any:
        """The dropout at a site of the layer; dropout: a probability, or a module as in dropout_of()."""
        if isinstance(dropout, nn.Module):
            return dropout_of(dropout, self.seed, self.first_site + site)
        if self.seed is None or dropout <= LEAST_P:
            return NO_DROPOUT
        return Dropout(dropout, self.seed, self.first_site + site)


NO_SEED = LayerSeed()


def dropout_of(module: Any, seed: Tensor | None = None, site: int = 0) -> Any:
    """The Dropout equivalent to an nn.Dropout; any other module is returned itself."""
    return Dropout(module.p if module.training else 0.0, seed, int(site)) if untouched(module, DROPOUT) else module


def probability(dropout: Any) -> float:
    """The current dropout probability; dropout: a probability or an nn.Dropout, 0 in eval mode."""
    if isinstance(dropout, nn.Module):
        return dropout_of(dropout).dropout_p
    return dropout


class SubLayer(NamedTuple):
    """Attention or feed-forward network, with its norm and the dropout of its output."""

    compute: Callable[[Tensor], Tensor]
    """(..., N) to the same shape."""
    norm: Any
    """Pre-norm: before it; post-norm: behind it."""
    dropout: Dropout | nn.Module


def through(x: Tensor, sublayers: Sequence[SubLayer], norm_first: bool, last: Any = None) -> Tensor:
    """Run x (..., N) through sub-layers; last: the norm behind a pre-norm stack, or None."""
    norms = [each.norm for each in sublayers]
    y, behind = (normalise(x, norms[0]), [*norms[1:], last]) if norm_first else (x, norms)
    for sublayer, norm in zip(sublayers, behind):
        output = sublayer.compute(y)
        if norm is None:
            return add(output, x, sublayer.dropout)
        y, s = add_and_normalise(output, x, norm, sublayer.dropout)
        x = s if norm_first else y
    return y


def add_and_normalise(output: Tensor, x: Tensor, norm: Any, dropout: Dropout | nn.Module) -> tuple[Tensor, Tensor]:
    """y = norm(s) and s = x + dropout(output), each (..., N). Under autocast y has output's dtype, s has x's."""
    if isinstance(dropout, Dropout) and _fuses(norm, x) and ordinary(output):
        return F.residual_layer_norm(output, x, norm.weight, norm.bias, norm.eps, **dropout.options())
    s = add(output, x, dropout)
    return norm(s), s


def add(output: Tensor, x: Tensor, dropout: Dropout | nn.Module) -> Tensor:
    """x + dropout(output)."""
    if not isinstance(dropout, Dropout):
        return x + dropout(output)
    if ordinary(output, x):
        return F.residual_add(output, x, **dropout.options())
    return x + nn.functional.dropout(output, dropout.dropout_p)


def normalise(x: Tensor, norm: Any) -> Tensor:
    """norm(x), (..., N)."""
    if _fuses(norm, x) and norm.normalized_shape == tuple(x.shape[-1:]) and x.is_floating_point():
        return F.layer_norm(x, norm.weight, norm.bias, norm.eps)
    return norm(x)


def _fuses(norm: Any, x: Tensor) -> bool:
    """Return whether an operator may replace the call of norm."""
    return untouched(norm, NORM) and len(norm.normalized_shape) == 1 and ordinary(x, norm.weight, norm.bias)
