"""Measures on this device which tile or route each kernel should take (`fasttfm tune`).

Every decision is a Choice (kernels/choices.py). Pieces of real work, forward and backward at the sizes that models
have, are run once to see which decisions they ask for; then each decision is measured with every answer that it can
give, on all the work that asked for it, while the other decisions stay as they are.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasttfm import functional as F
from fasttfm.errors import UserError
from fasttfm.kernels import choices
from fasttfm.kernels.chip import Chip
from fasttfm.kernels.choice_cache import Answer
from fasttfm.timing import Clock, Timing, measure

LARGEST_ERROR = 0.02
"""Of an answer's outputs against the shipped answer's, as a share of the largest: bfloat16 errs by half of it."""
LEAST_GAIN = 0.03
"""An answer goes before the shipped one only when it takes at least so much less time: timings repeat to a percent."""

Decision = tuple[str, tuple]
"""Choice and size class."""
Work = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Measured:
    """One decision, with the time of every answer that could be measured."""

    decision: Decision
    shipped: Any
    best: Any
    times: dict[str, Timing | str]
    """Answer as text -> its timing, or why it cannot run."""

    @property
    def changed(self) -> bool:
        return self.best != self.shipped

    def as_answer(self) -> Answer:
        """The answer that the cache keeps."""
        return Answer(*self.decision, str(self.best), self._median(self.best), self._median(self.shipped))

    def line(self) -> str:
        """Return the line that a person wants to read."""
        name, size_class = self.decision
        before, after = self._median(self.shipped), self._median(self.best)
        what = f"{name} {' '.join(map(str, size_class))}:"
        if not self.changed:
            return f"{what} {self.shipped} stays, {before:.1f} us"
        return f"{what} {self.shipped} -> {self.best}, {before:.1f} -> {after:.1f} us"

    def _median(self, answer: Any) -> float:
        timing = self.times[str(answer)]
        return timing.median_us if isinstance(timing, Timing) else float("nan")


def decisions_of(work: Mapping[str, Work], chip: Chip) -> dict[Decision, list[str]]:
    """Return the decisions that the pieces of work ask for on this chip, and the names of those that ask."""
    result: dict[Decision, list[str]] = {}
    for name, run in work.items():
        choices.keep(chip, choices.kept(chip))  # forgets what was asked before
        run()
        for decision in choices.asked(chip):
            result.setdefault(decision, []).append(name)
    return result


def tune(
    work: Mapping[str, Work],
    chip: Chip,
    clock: Clock,
    *,
    seconds_per_decision: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Measured]:
    """Measures decision after decision and leaves the faster answer in force for those that follow.

    Answers that cannot run here (too little shared memory, too many registers) or compute something else than the
    shipped one are passed over. Raises UserError where one ends in an error that the device does not recover from.
    """
    decisions = decisions_of(work, chip)
    in_force: dict[Decision, Any] = {}
    for done, (decision, names) in enumerate(decisions.items()):
        progress(done, len(decisions))
        name, size_class = decision
        choice = choices.CHOICES[name]
        shipped = choice.shipped(chip, *size_class)
        answers = list(dict.fromkeys((shipped, *choice.alternatives(chip, *size_class))))
        if len(answers) == 1:
            continue

        expected: dict[str, list[Tensor]] = {}

        def provider(
            answer: Any,
            decision: Decision = decision,
            names: list[str] = names,
            expected: dict[str, list[Tensor]] = expected,
        ) -> Work:
            checked = False

            def run() -> None:
                nonlocal checked
                choices.keep(chip, {**in_force, decision: str(answer)})
                if not checked:
                    torch.manual_seed(0)  # the same dropout for every answer
                for name in names:
                    outputs = work[name]()
                    if not checked:
                        found = list(_tensors(outputs))
                        _check(found, expected.setdefault(name, found))
                checked = True

            return run

        times = measure({str(a): provider(a) for a in answers}, clock, seconds=seconds_per_decision, warm_up=1)
        for answer, timing in times.items():
            if isinstance(timing, str) and timing.startswith("AcceleratorError"):
                raise UserError(
                    f"{name} {' '.join(map(str, size_class))}: {answer} ended in an error that the device does not "
                    f"recover from ({timing}); nothing is kept: please report it"
                )
        measured = Measured(decision, shipped, _fastest(answers, times), times)
        if measured.changed:
            in_force[decision] = str(measured.best)
        choices.keep(chip, in_force)
        yield measured
    progress(len(decisions), len(decisions))


def _check(found: list[Tensor], expected: list[Tensor]) -> None:
    """Raises ValueError where an answer's outputs differ from the shipped one's by more than LARGEST_ERROR."""
    for x, wanted in zip(found, expected, strict=True):
        largest = wanted.abs().max().item()
        error = (x.float() - wanted.float()).abs().max().item()
        if not error <= LARGEST_ERROR * largest:
            raise ValueError(f"its numbers are not the shipped one's: they differ by {error:.1e} of {largest:.1e}")


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Yield the tensors that a piece of work returns, however nested."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, (tuple, list)):
        for each in outputs:
            yield from _tensors(each)


def _fastest(answers: list[Any], times: Mapping[str, Timing | str]) -> Any:
    """The shipped answer (the first) unless another is clearly faster, or the shipped one cannot run."""
    known = [(t.median_us, i) for i, a in enumerate(answers) if isinstance(t := times[str(a)], Timing)]
    if not known:
        return answers[0]
    best_time, best = min(known)
    shipped = times[str(answers[0])]
    if isinstance(shipped, Timing) and best_time > shipped.median_us * (1 - LEAST_GAIN):
        return answers[0]
    return answers[best]


# -------------------------------------------------------------------------------------------------------------- work


def model_work(device: torch.device, *, quick: bool) -> dict[str, Work]:
    """The operators of a model, forward and backward, at the sizes of training.

    quick: bfloat16 (float16 where there is none) and the base model; otherwise float32 and the big model as well.
    """
    half = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    work: dict[str, Work] = {}
    for dtype in (half,) if quick else (half, torch.float32):
        for width, heads in ((512, 8),) if quick else ((512, 8), (1024, 16)):
            label = f"{str(dtype).removeprefix('torch.')} {width}"
            work |= {f"{name} {label}": run for name, run in _layer_work(width, heads, dtype, device)}
    return work


_TOKENS = 16_384
_LENGTHS = (32, 128, 512, 2048)


def _attention_work(
    heads: int, width: int, tensor: Callable[..., Tensor], device: torch.device
) -> Iterator[tuple[Any, ...]]:
    """Name, function, options and inputs: padded and masked, and a decoder's over a longer source."""
    for length in _LENGTHS:
        sequences = _TOKENS // length
        q, k, v = (tensor(sequences, heads, length, width) for _ in range(3))
        fewer = tensor(sequences, heads, max(1, length // 2), width)
        lengths = torch.arange(sequences, device=device) % length + 1
        causal = {"causal": True, "dropout_p": 0.1}
        yield f"attention {length} full", F.attention, {}, q, k, v
        yield f"attention {length} causal", F.attention, causal, q, k, v
        yield f"attention {length} lengths", F.attention, {"key_lengths": lengths, "dropout_p": 0.1}, q, k, v
        allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
        yield f"attention {length} masked", F.attention, {"mask": allowed}, q, k, v
        yield f"attention {length} masked dropout", F.attention, {"mask": allowed, "dropout_p": 0.1}, q, k, v
        yield f"attention {length} cross", F.attention, {"dropout_p": 0.1}, fewer, k, v
        joint, pairs = (tensor(sequences, length, parts, heads, width) for parts in (3, 2))
        queries = tensor(sequences, max(1, length // 2), heads, width)
        yield f"attention {length} joint", F.joint_attention, causal, joint
        yield f"attention {length} joint cross", F.joint_attention, {"dropout_p": 0.1}, pairs, queries


def _packed_attention_work(
    heads: int, width: int, tensor: Callable[..., Tensor], device: torch.device
) -> Iterator[tuple[Any, ...]]:
    """The same of sequences without padding, as `train --packed` has them."""
    for length in _LENGTHS:
        sequences, fewer = _TOKENS // length, max(1, length // 2)
        keys = torch.arange(sequences + 1, device=device) * length
        queries = torch.arange(sequences + 1, device=device) * fewer
        equal = {"query_starts": keys, "key_starts": keys, "max_query": length, "max_key": length}
        equal |= {"causal": True, "dropout_p": 0.1}
        cross = {"query_starts": queries, "key_starts": keys, "max_query": fewer, "max_key": length, "dropout_p": 0.1}
        q, k, v = (tensor(sequences * length, heads, width) for _ in range(3))
        less = tensor(sequences * fewer, heads, width)
        yield f"attention {length} packed", F.varlen_attention, equal, q, k, v
        yield f"attention {length} packed cross", F.varlen_attention, cross, less, k, v
        joint, pairs = (tensor(sequences * length, parts, heads, width) for parts in (3, 2))
        yield f"attention {length} packed joint", F.joint_varlen_attention, {"query": None, **equal}, joint
        yield f"attention {length} packed joint cross", F.joint_varlen_attention, cross, pairs, less


def _layer_work(width: int, heads: int, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Work]]:
    def tensor(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * 0.1).to(dtype).requires_grad_()

    def with_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> Work:
        return lambda: torch.autograd.grad(function(*inputs).sum(), inputs)

    for work in (_attention_work, _packed_attention_work):
        for name, function, options, *inputs in work(heads, width // heads, tensor, device):
            yield name, with_gradient(functools.partial(function, **options), *inputs)
    rows = [tensor(_TOKENS, width) for _ in range(2)]
    norm = [torch.ones(width, device=device, requires_grad=True) for _ in range(2)]
    yield "layer_norm", with_gradient(F.layer_norm, rows[0], *norm)
    yield (
        "residual_layer_norm",
        with_gradient(lambda *t: F.residual_layer_norm(*t, dropout_p=0.1)[0], *rows, *norm),
    )
    hidden = 4 * width
    weights = [tensor(hidden, width), tensor(hidden), tensor(width, hidden), tensor(width)]
    for dropout_p in (0.0, 0.1):
        yield (
            f"feed_forward {dropout_p}",
            with_gradient(lambda *t, p=dropout_p: F.feed_forward(*t, dropout_p=p), rows[0], *weights),
        )
    yield "feed_forward gelu", with_gradient(lambda *t: F.feed_forward(*t, activation="gelu"), rows[0], *weights)
    table, target = tensor(32_000, width), torch.randint(1, 32_000, (_TOKENS,), device=device)
    yield "linear_cross_entropy", with_gradient(lambda x, w: F.linear_cross_entropy(x, w, target)[0], rows[0], table)
    tokens = target.view(-1, 32)
    yield "embedding", with_gradient(lambda w: F.embed(tokens, w, scale=1.0, dropout_p=0.1), table)
