"""The losses by which a small model learns what a large one has learnt.

    soft targets     T^2 KL(softmax(z_teacher / T) || softmax(z_student / T))      DistilBERT, Hinton et al. 2015
    directions       1 - cos(h_student, h_teacher)                                 DistilBERT
    hidden states    mean((h_student W - h_teacher)^2), W learned                  TinyBERT, equations 8 and 9
    attention        mean((A_student - A_teacher)^2), A = Q K^T / sqrt(D)          TinyBERT, equation 7

The gradient of softmax(z / T) shrinks with 1 / T^2, which the factor T^2 makes good: the weight of soft targets beside
other losses does not depend on the temperature. Sources: Sanh et al. 2019; Jiao et al. 2020; Hinton et al. 2015.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fasttfm.models.attention import projected


def _wide(x: Tensor) -> Tensor:
    """x in float32, or in float64: the losses are sums over many tokens."""
    return x if x.dtype == torch.float64 else x.float()


def soft_target_loss(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 times the Kullback-Leibler divergence of softmax(student / T) from softmax(teacher / T), summed over rows.

    student, teacher (N, V): logits; no gradient flows into teacher. Returns 0-d float32 (float64 for such logits).
    """
    wanted = torch.log_softmax(_wide(teacher.detach()) / temperature, dim=-1)
    log_probabilities = torch.log_softmax(_wide(student) / temperature, dim=-1)
    divergence = nn.functional.kl_div(log_probabilities, wanted, reduction="sum", log_target=True)
    return divergence * temperature**2


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over rows of 1 - cos(student, teacher); student, teacher (N, d)."""
    return (1 - nn.functional.cosine_similarity(_wide(student), _wide(teacher.detach()), dim=-1)).sum()


def hidden_loss(student: Tensor, teacher: Tensor, projection: nn.Module | None = None) -> Tensor:
    """Sum over rows of the mean squared difference over channels; student (N, d'), teacher (N, d).

    projection: from the student's width to the teacher's, None where they are the same.
    """
    mapped = student if projection is None else projection(student)
    return (_wide(mapped) - _wide(teacher.detach())).square().mean(dim=-1).sum()


def attention_loss(student: Tensor, teacher: Tensor, lengths: Tensor) -> Tensor:
    """Mean squared difference of two layers' scores, over heads and all pairs of tokens that are not padding.

    student, teacher (B, H, L, L) before the softmax, of equally many heads; lengths (B,) int64. 0-d.
    """
    student, teacher = _wide(student), _wide(teacher.detach())
    real = torch.arange(student.shape[-1], device=student.device) < lengths[:, None]  # (B, L)
    pairs = (real[:, None, :, None] & real[:, None, None, :]).to(student.dtype)  # (B, 1, L, L)
    squared = (student - teacher).square() * pairs
    return squared.sum() / (pairs.sum() * student.shape[1])


def attention_scores(attention: Any, y: Tensor) -> Tensor:
    """Q K^T / sqrt(D), (B, H, L, L), of a models.attention.Attention over y (B, L, d)."""
    joint = projected(y, None, attention.in_proj_weight, attention.in_proj_bias, attention.num_heads).joint
    query, key, _ = joint.transpose(1, 3).unbind(2)  # (B, H, L, D)
    return query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5


class Trace:
    """Values that a pass through a stack of layers leaves behind, while watch() is entered."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        """(B, L, d) before each layer; the first is the embeddings."""
        self.outputs: list[Tensor] = []
        """(B, L, d) after each layer."""
        self.scores: list[Tensor] = []
        """(B, H, L, L) of each layer's self-attention; see attention_scores()."""


@contextlib.contextmanager
def watch(layers: Sequence[Any], *, scores: bool = False) -> Iterator[Trace]:
    """Keep what passes through layers (models.layers.EncoderLayer; one may occur several times) in a Trace.

    scores: of the attention too, whose queries and keys are then computed once more.
    """
    trace = Trace()

    def enters(_module: Any, inputs: tuple[Any, ...]) -> None:
        trace.inputs.append(inputs[0])

    def leaves(_module: Any, _inputs: Any, output: Any) -> None:
        trace.outputs.append(output)

    def attends(module: Any, inputs: tuple[Any, ...], _options: Any) -> None:
        trace.scores.append(attention_scores(module, inputs[0]))

    with contextlib.ExitStack() as hooks:
        for layer in dict.fromkeys(layers):
            hooks.callback(layer.register_forward_pre_hook(enters).remove)
            hooks.callback(layer.register_forward_hook(leaves).remove)
        for attention in dict.fromkeys(layer.self_attn for layer in layers) if scores else ():
            hooks.callback(attention.register_forward_pre_hook(attends, with_kwargs=True).remove)
        yield trace
