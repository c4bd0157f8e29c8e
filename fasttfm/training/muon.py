"""Muon: updates are the momentum of a matrix, orthogonalized in blocks.

For a weight W with gradient G, momentum m, and beta 0.95:

    m <- beta m + (1 - beta) G
    B_i = the blocks of BLOCK rows of beta m + (1 - beta) G      (a head's rows, or those of 64 hidden units)
    W_i <- W_i - lr * RMS * sqrt(max(rows, columns)) * polar(B_i)

polar(B) is U V^T of B = U S V^T: all directions of the block change equally fast; with Adam, all elements do. The
factor gives updates a root mean square of RMS, similar to Adam's, so that both use the same learning rate.

Blocks are cheaper than whole matrices. With r rows, c columns and n polynomials, polar() takes
4 r^2 c + 8 (n - 1) r^3 FLOPs: 42 MFLOP for a matrix of (256, 256) in 4 blocks, 470 for the whole.

Source: Jordan et al. 2024, Muon; Liu et al. 2025, Muon is scalable for LLM training, section 2.2 (the factor); Amsel et
al. 2025, The Polar Express (polynomials that are best in turn).
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm.training.workers import Workers

BETA = 0.95
"""Decay rate of the momentum."""
RMS = 0.4
"""Root mean square of updates at learning rate 1: Adam's is 0.2 to 0.4 (Liu et al.)."""
BLOCK = 64
"""Rows of a block: the usual head size."""
LEAST = 0.01
"""Smallest singular value, relative to the block's Frobenius norm, that polar() maps to 1 within 2%."""
POLYNOMIALS = (
    (8.0933685, -23.6204303, 17.4461518),
    (3.6365856, -2.7219267, 0.5365463),
    (2.6613000, -1.9771545, 0.4526164),
    (1.9561716, -1.3375077, 0.3838527),
)
"""(a, b, c) of a x + b x^3 + c x^5, applied in turn; each is closest to 1 on the image of [LEAST, 1] under those before
it."""
_PART = 24
"""Blocks at a time: 1.5 MB of 64 x 256 fit in a core's cache."""


def polar(blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """U V^T of each block U S V^T, by matrix products; blocks (n, r, c), r <= c, float32 or float64; out: the result's.

    Singular values above LEAST of the block's Frobenius norm become 1 within 2%, smaller ones less; zeros stay zeros.
    The polynomials are evaluated on the symmetric X X^T (r, r), so X enters only the first and the last product.
    """
    least = torch.finfo(blocks.dtype).tiny ** 0.5  # squares of smaller elements underflow, and so does the norm
    x = blocks / blocks.norm(dim=(-2, -1), keepdim=True).clamp_min(least)
    gram = x @ x.mT
    product = None
    for number, (a, b, c) in enumerate(POLYNOMIALS):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor if product is None else factor @ product
        if number + 1 < len(POLYNOMIALS):
            gram = factor @ gram @ factor
    assert product is not None
    return torch.bmm(product, x, out=out)


def blocks_of(matrix: Tensor, by_columns: bool) -> list[Tensor]:
    """Split a matrix into views (n, r, c), r <= c: blocks of BLOCK rows (columns), then the rest as one block."""
    lines = matrix.T if by_columns else matrix
    whole = len(lines) // BLOCK * BLOCK
    parts = [lines[:whole].unflatten(0, (-1, BLOCK))] if whole else []
    parts += [lines[whole:].unsqueeze(0)] if whole < len(lines) else []
    return [part if part.shape[1] <= part.shape[2] else part.mT for part in parts]


def is_muons(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter: matrices of layers, not embeddings, norms, biases or output layers."""
    return parameter.dim() == 2 and ".layers." in name


class Matrix(NamedTuple):
    """A weight that Muon updates."""

    weight: Tensor
    """(M, N)."""
    momentum: Tensor
    """(M, N)."""
    factor: float
    """Learning rate factor."""
    decay: float
    """Weight decay at learning rate 1."""
    by_columns: bool
    """Whether blocks are columns: the weight maps heads or hidden units to the residual stream."""


class Muon:
    """Muon for the matrices of a model's layers; ranks share the blocks."""

    def __init__(
        self, parameters: Mapping[str, Tensor], factors: Mapping[str, float], decays: Mapping[str, float],
        workers: Workers,
    ) -> None:  # fmt: skip
        """parameters, factors, decays: by name, see Matrix."""
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
        """Update the weights that have gradients, equal on all ranks; lr: 0-d; found_inf: 0-d, 1 skips the update."""
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
            directions, weights = (blocks_of(x, matrix.by_columns) for x in (direction, matrix.weight.detach()))
            for blocks, weight in zip(directions, weights):
                stacks.setdefault(blocks.shape[1:], []).append((blocks, weight, matrix.factor))
        for shape, members in stacks.items():
            orthogonal = self._orthogonal(torch.cat([blocks for blocks, _, _ in members]))
            size = is_good * -lr.float() * RMS * max(shape) ** 0.5
            for (_, weight, factor), change in zip(members, orthogonal.split([len(each[0]) for each in members])):
                weight.add_(change * (size * factor))

    def _orthogonal(self, blocks: Tensor) -> Tensor:
        """polar() of all blocks (n, r, c); each rank computes its share."""
        rank, size = self._workers.rank, self._workers.size
        begin, end = (each * len(blocks) // size for each in (rank, rank + 1))
        result = torch.zeros_like(blocks) if size > 1 else torch.empty_like(blocks)
        for first in range(begin, end, _PART):
            last = min(first + _PART, end)
            polar(blocks[first:last], out=result[first:last])
        self._workers.add_up(result)
        return result
