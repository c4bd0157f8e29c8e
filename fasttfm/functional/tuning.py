"""Autotuning of tiles and routes on this GPU (`fasttfm tune`).

Every decision is a Choice (kernels/choices.py). The operators run once, forward and backward at model sizes, to collect
the decisions that they ask for. Then each decision is timed with every possible answer, on all the work that asked for
it, with the other decisions unchanged.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.errors import UserError
from fasttfm.kernels import choices
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choice_cache import Measured
from fasttfm.system.timing import measure

LARGEST_ERROR = 0.02
"""Allowed difference from the shipped answer's outputs, relative to the largest value; bfloat16 errs by half of it."""
LEAST_GAIN = 0.03
"""Time saved, as a share, before an answer replaces the shipped one; timings repeat to a percent."""

Work = Callable[[], tuple[Tensor, ...]]


def decisions_of(work: list[Work], chip: Chip) -> dict[choices.Decision, list[Work]]:
    """Return the decisions with several answers that the work asks for on this chip, each with the work that asks."""
    result: dict[choices.Decision, list[Work]] = {}
    for run in work:
        choices.keep(chip, choices.kept(chip))  # clears the record of what was asked
        run()
        for name, size_class in choices.asked(chip):
            if len(choices.CHOICES[name].answers(chip, *size_class)) > 1:
                result.setdefault((name, size_class), []).append(run)
    return result


def tune(
    decision: choices.Decision, work: list[Work], chip: Chip, clock: Callable[[Callable], float], *, seconds: float
) -> tuple[Measured, str]:
    """Time a decision's answers, keep the fastest, and return it with a line for the log.

    Answers that cannot run here (too little shared memory, too many registers) or whose outputs differ from the shipped
    one's are skipped. Raises UserError if one causes an error that the device does not recover from.
    """
    name, size_class = decision
    in_force = choices.kept(chip)
    shipped, *others = choices.CHOICES[name].answers(chip, *size_class)
    expected: dict[int, tuple[Tensor, ...]] = {}
    checked: set[str] = set()

    def run(answer: str) -> None:
        choices.keep(chip, {**in_force, decision: answer})
        if answer in checked:
            for piece in work:
                piece()
            return
        torch.manual_seed(0)  # the same dropout for every answer
        for number, piece in enumerate(work):
            outputs = piece()
            _check(outputs, expected.setdefault(number, outputs))
        checked.add(answer)

    times = measure({each: partial(run, each) for each in (shipped, *others)}, clock, seconds=seconds)
    what = f"{name} {' '.join(map(str, size_class))}:"
    medians = {answer: median for answer, median in times.items() if isinstance(median, float)}
    refused = {answer: reason for answer, reason in times.items() if isinstance(reason, str)}
    for answer, reason in refused.items():
        if reason.startswith("AcceleratorError"):
            raise UserError(
                f"{what} {answer} ended in an error that the device does not recover from ({reason}); nothing is kept: "
                "please report it"
            )
    best = min(medians, key=medians.__getitem__, default=shipped)
    if shipped in medians and medians[best] > medians[shipped] * (1 - LEAST_GAIN):
        best = shipped
    before, after = (medians.get(answer, float("nan")) for answer in (shipped, best))
    choices.keep(chip, in_force if best == shipped else {**in_force, decision: best})
    line = f"{what} {shipped} stays, {before:.1f} us"
    if best != shipped:
        line = f"{what} {shipped} -> {best}, {before:.1f} -> {after:.1f} us"
    line += "".join(f"; {answer} is passed over: {reason}" for answer, reason in refused.items())
    return Measured(best, after, before), line


def _check(outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Raise ValueError if an answer's outputs differ from the shipped one's by more than LARGEST_ERROR."""
    for x, y in zip(outputs, expected, strict=True):
        largest = y.abs().max().item()
        error = (x.float() - y.float()).abs().max().item()
        if not error <= LARGEST_ERROR * largest:
            raise ValueError(f"its outputs differ from the shipped one's, by {error:.1e} of {largest:.1e}")


_TOKENS = 16_384
_LENGTHS = (32, 128, 512, 2048)


def model_work(device: torch.device, *, quick: bool) -> list[Work]:
    """The operators of a model, forward and backward, at training sizes.

    quick: only the base model in bfloat16 (float16 without support); else also the big model, and float32.
    """
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    kinds = [(half, 512, 8)]
    if not quick:
        kinds += [(half, 1024, 16), (torch.float32, 512, 8), (torch.float32, 1024, 16)]
    return [run for dtype, width, heads in kinds for run in operators(width, heads, dtype, device)]


def operators(width: int, heads: int, dtype: torch.dtype, device: torch.device) -> Iterator[Work]:
    """Yield the operators of layers of this width."""

    def tensor(*shape: int) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float32, device=device) * 0.1).to(dtype).requires_grad_()

    for length in _LENGTHS:
        for function, options, *inputs in _attention(length, width // heads, heads, tensor):
            yield partial(_gradients, function, options, *inputs)
    rows, residual, drop = tensor(_TOKENS, width), tensor(_TOKENS, width), {"dropout_p": 0.1}
    norm = [torch.ones(width, dtype=torch.float32, device=device, requires_grad=True) for _ in range(2)]
    yield partial(_gradients, F.layer_norm, {}, rows, *norm)
    yield partial(_gradients, F.residual_layer_norm, drop, rows, residual, *norm)
    weights = [tensor(4 * width, width), tensor(4 * width), tensor(width, 4 * width), tensor(width)]
    for options in ({}, drop, {"activation": "gelu"}):
        yield partial(_gradients, F.feed_forward, options, rows, *weights)
    table, target = tensor(32_000, width), torch.randint(1, 32_000, (_TOKENS,), device=device)
    yield partial(_gradients, F.linear_cross_entropy, {"target": target}, rows, table)
    yield partial(_gradients, partial(F.embed, target.view(-1, 32)), drop, table)


def _attention(length: int, width: int, heads: int, tensor: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    """Yield functions, options and inputs: padded, masked, and packed as in `train --packed`.

    A decoder's cross-attention has half as many queries.
    """
    batch, fewer = _TOKENS // length, max(1, length // 2)
    q, k, v = (tensor(batch, length, heads, width).transpose(1, 2) for _ in range(3))  # as projections lie
    less = tensor(batch, heads, fewer, width)
    numbers, drop = torch.arange(batch + 1, device=q.device), {"dropout_p": 0.1}
    causal = {"causal": True, **drop}
    allowed = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
    yield F.attention, {}, q, k, v
    yield F.attention, {"causal": True}, q, k, v
    yield F.attention, causal, q, k, v
    yield F.attention, {"key_lengths": numbers[:-1] % length + 1, **drop}, q, k, v
    yield F.attention, {"mask": allowed}, q, k, v
    yield F.attention, {"mask": allowed, **drop}, q, k, v
    yield F.attention, drop, less, k, v
    yield F.packed_qkv_attention, causal, tensor(batch, length, 3, heads, width)
    yield F.packed_qkv_attention, drop, tensor(batch, length, 2, heads, width), tensor(batch, fewer, heads, width)

    keys = {"cu_seqlens_k": numbers * length, "max_seqlen_k": length}
    equal = {"cu_seqlens_q": numbers * length, "max_seqlen_q": length, **keys, **causal}
    cross = {"cu_seqlens_q": numbers * fewer, "max_seqlen_q": fewer, **keys, **drop}
    q, k, v = (tensor(batch * length, heads, width) for _ in range(3))
    less = tensor(batch * fewer, heads, width)
    yield F.varlen_attention, equal, q, k, v
    yield F.varlen_attention, cross, less, k, v
    yield F.varlen_packed_qkv_attention, {"query": None, **equal}, tensor(batch * length, 3, heads, width)
    yield F.varlen_packed_qkv_attention, cross, tensor(batch * length, 2, heads, width), less


def _gradients(function: Callable[..., Any], options: dict[str, Any], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the function's output, or its first one."""
    outputs = function(*inputs, **options)
    first = outputs[0] if isinstance(outputs, tuple) else outputs
    return torch.autograd.grad(first.sum(), inputs)
