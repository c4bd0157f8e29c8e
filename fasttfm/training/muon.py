"""Muon: the momentum of a matrix is orthogonalized, block by block, before it changes the weights.

For a weight W with gradient G, momentum m, and beta 0.95:

    m <- beta m + (1 - beta) G
    B_i = the blocks of BLOCK rows of beta m + (1 - beta) G      (a head's rows, or those of 64 hidden units)
    W_i <- W_i - lr * RMS * sqrt(max(rows, columns)) * polar(B_i)

polar(B) is U V^T of B = U S V^T: all directions of the block change equally fast, where Adam changes each element. The
factor gives the change a root mean square of RMS, like that of Adam's, so that both go by one learning rate.

Blocks in place of whole matrices make it cheap. With r rows, c columns and n polynomials, polar() takes
4 r^2 c + 8 (n - 1) r^3 FLOPs: 42 MFLOP for a matrix of (256, 256) in 4 blocks, 470 for all of it at once.

Source: Jordan et al. 2024, Muon; Liu et al. 2025, Muon is scalable for LLM training, section 2.2 (the factor); Amsel et
al. 2025, The Polar Express (polynomials that are best in turn).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fasttfm.training.workers import Workers

BETA = 0.95
"""Decay rate of the momentum."""
RMS = 0.4
"""Root mean square of a change, in learning rates: Adam's is 0.2 to 0.4 by Liu et al."""
BLOCK = 64
"""Rows that are orthogonalized together: the usual head."""
LEAST = 0.01
"""Singular values, relative to the block's Frobenius norm, from which on polar() makes them 1 within 2%."""
POLYNOMIALS = (
    (8.0933685, -23.6204303, 17.4461518),
    (3.6365856, -2.7219267, 0.5365463),
    (2.6613000, -1.9771545, 0.4526164),
    (1.9561716, -1.3375077, 0.3838527),
)
"""(a, b, c) of a x + b x^3 + c x^5, applied in turn: each is nearest to 1 over what those before make of [LEAST, 1]."""
_PART = 24
"""Blocks at a time: 1.5 MB of 64 x 256 stay in a core's cache."""


def polar(blocks: Tensor) -> Tensor:
    """U V^T of each block U S V^T, by products alone: float32 or float64, (n, r, c) with r <= c, to the same shape.

    Singular values above LEAST of the block's Frobenius norm become 1 within 2%, smaller ones less; a block of zeros
    stays one.

    The polynomials are of the symmetric matrix X X^T (r, r), which commutes with what is made of it: X is multiplied
    once at the beginning and once at the end.
    """
    x = blocks / blocks.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(blocks.dtype).tiny)
    gram = x @ x.mT
    product = None
    for number, (a, b, c) in enumerate(POLYNOMIALS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if number + 1 < len(POLYNOMIALS):
            gram = factor @ gram @ factor
    assert product is not None
    return product @ x


def blocks_of(matrix: Tensor, by_columns: bool) -> list[Tensor]:
    """Views (n, r, c) with r <= c that are all of a matrix: blocks of BLOCK rows (columns), and the rest as one."""
    lines = matrix.T if by_columns else matrix
    whole = len(lines) // BLOCK * BLOCK
    parts = [lines[:whole].unflatten(0, (-1, BLOCK))] if whole else []
    parts += [lines[whole:].unsqueeze(0)] if whole < len(lines) else []
    return [part if part.shape[1] <= part.shape[2] else part.mT for part in parts]


def is_muons(name: str, parameter: Tensor) -> bool:
    """Return whether Muon changes a parameter: the matrices of layers, not embeddings, norms, biases and heads."""
    return parameter.dim() == 2 and ".layers." in name


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """A weight that Muon changes."""

    weight: Tensor
    """(M, N)."""
    momentum: Tensor
    """(M, N)."""
    factor: float
    """Of the learning rate."""
    decay: float
    """Share of the weight that a learning rate of 1 takes off."""
    by_columns: bool
    """Blocks are of columns: the weight maps heads or hidden units to the residual stream."""


class Muon:
    """Changes the layers' matrices of a model; the ranks divide the blocks among them."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        factors: Mapping[str, float],
        decays: Mapping[str, float],
        workers: Workers,
    ) -> None:
        """parameters: by name; factors, decays: of theirs, see Matrix."""
        self._workers = workers
        self.matrices = {
            name: Matrix(
                weight=parameter,
                momentum=torch.zeros_like(parameter, memory_format=torch.contiguous_format),
                factor=factors[name],
                decay=decays[name],
                by_columns=name.endswith(("out_proj.weight", "linear2.weight")),
            )
            for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def step(self, lr: Tensor, found_inf: Tensor) -> None:
        """Change the weights by their gradients, which all ranks must have; found_inf (0-d): 1 leaves all as it is.

        lr: the learning rate, 0-d.

        A weight without a gradient is left alone.
        """
        is_good = 1 - found_inf
        stacks: dict[torch.Size, list[tuple[Tensor, Tensor, float]]] = {}
        for matrix in self.matrices.values():
            if matrix.weight.grad is None:
                continue
            gradient = torch.where(is_good.bool(), matrix.weight.grad, 0)
            matrix.momentum.lerp_(gradient, (1 - BETA) * is_good)
            direction = gradient.lerp(matrix.momentum, BETA)
            if matrix.decay:
                matrix.weight.mul_(1 - (lr * matrix.factor * matrix.decay).float() * is_good)
            for given, weight in zip(
                blocks_of(direction, matrix.by_columns), blocks_of(matrix.weight.detach(), matrix.by_columns)
            ):
                stacks.setdefault(given.shape[1:], []).append((given, weight, matrix.factor))
        for shape, members in stacks.items():
            orthogonal = self._orthogonal(torch.cat([given for given, _, _ in members]))
            size = is_good * -lr.float() * RMS * max(shape) ** 0.5
            for (_, weight, factor), change in zip(members, orthogonal.split([len(given) for given, _, _ in members])):
                weight.add_(change * (size * factor))

    def _orthogonal(self, blocks: Tensor) -> Tensor:
        """polar() of all blocks (n, r, c), of which this rank computes its share."""
        rank, size = self._workers.rank, self._workers.size
        begin, end = (each * len(blocks) // size for each in (rank, rank + 1))
        result = torch.zeros_like(blocks) if size > 1 else torch.empty_like(blocks)
        for first in range(begin, end, _PART):
            last = min(first + _PART, end)
            result[first:last] = polar(blocks[first:last])
        self._workers.add_up(result)
        return result
