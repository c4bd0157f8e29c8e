"""Attention over packed sequences: no padding, and no length ever read by the host."""

import itertools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from fasttfm import reference
from fasttfm.functional.attention import composed, routes
from fasttfm.functional.attention.arguments import Options, Sequences, Window
from fasttfm.functional.attention.dense import fused, shares
from fasttfm.functional.attention.scoring import Causal, scores_differ, with_scoring
from fasttfm.functional.backends import chosen, values_are_checked
from fasttfm.functional.derivative import pulled_back
from fasttfm.functional.operator import Gradients, Operator, Size, casts, lowered, unplanned
from fasttfm.functional.signature import names_arguments


@names_arguments
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    max_query: int,
    max_key: int,
    *,
    causal: Causal = False,
    causal_offset: int | Tensor = 0,
    window: Window | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """attention() over packed sequences: queries and keys of all sequences one after the other, without padding.

    query (Tq, H, D), key (Tk, Hk, D), value (Tk, Hk, Dv); float32, float16 or bfloat16, one dtype, any strides; H a
    multiple of Hk, as attention() has it.
    query_starts, key_starts (B + 1,) int32 or int64 on the same device: where each sequence begins, and the end of the
    last. max_query, max_key: no sequence has more queries or keys. The numbers in the starts are checked on a CPU, and
    trusted on a GPU, where the host would have to wait for them, unless FASTTFM_CHECK=1 is in the environment. Rows
    past the last sequence are filler of a fixed token budget and give zeros.
    The others are as attention() takes them; causal="bottom_right" looks at each sequence's own lengths, and the
    dropout mask is that of the padded batch. Lengths are in the starts, and there is no mask: pad, and use attention(),
    for one. Returns (Tq, H, Dv). Raises ValueError for shapes, dtypes or numbers that do not agree, TypeError for a
    window that is not two numbers.
    """
    check(query, key, value, query_starts, key_starts)
    sequences = checked_values(query, key, Sequences(query_starts, key_starts, max_query, max_key))
    options = Options.of(query, None, None, causal, causal_offset, dropout_p, scale, seed, site)
    if scores_differ(causal, causal_offset, window, softcap, alibi_slopes, sinks):
        shape = (sequences.batch, query.shape[1], *sequences[2:])
        surplus = 0 if key_starts is query_starts else key_starts.diff() - query_starts.diff()
        options = with_scoring(options, query, shape, causal, window, softcap, alibi_slopes, sinks, surplus)
    route = asked(query, key, value, sequences, options)
    if route != "blocks" and not options.plain and not routes.kernels_score(route, query):
        call = Call(query, key, value, sequences, options, "explicit")
        _operator.check(call)
        return _composed(call)
    return _attention(query, key, value, sequences, options, route)[0]


def asked(query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, options: Options) -> str:
    """routes.asked() of packed heads (T, H, D); our own loop on a CPU trusts starts."""
    if not (query.is_cpu and sequences.batch and values_are_checked(query) and query.numel() and key.numel()):
        return chosen()
    return routes.asked(by_head(query, 1), by_head(key, 1), by_head(value, 1), options)


def check(query: Tensor, key: Tensor, value: Tensor, query_starts: Tensor, key_starts: Tensor) -> None:
    """Raises ValueError for arguments of varlen_attention() that do not agree."""
    if not query.dim() == key.dim() == value.dim() == 3:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must have three "
            "dimensions: (Tq, H, D), (Tk, H, D) and (Tk, H, Dv)"
        )
    if query.shape[2] != key.shape[2] or key.shape[:2] != value.shape[:2] or not shares(query.shape[1], key.shape[1]):
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} must agree in heads "
            "(only the query may have a multiple), query and key in head size, key and value in length"
        )
    if not (query.dtype == key.dtype == value.dtype or casts(query)):
        raise ValueError(f"query {query.dtype}, key {key.dtype} and value {value.dtype} must have one dtype")
    for name, starts in (("query_starts", query_starts), ("key_starts", key_starts)):
        if starts.dim() != 1 or starts.dtype not in (torch.int32, torch.int64) or starts.device != query.device:
            raise ValueError(
                f"{name} is {starts.dtype} {tuple(starts.shape)} on {starts.device}: int32 or int64 (B + 1,) on "
                f"{query.device} is needed"
            )
    if query_starts.shape != key_starts.shape or not query_starts.shape[0]:
        raise ValueError(
            f"query_starts {tuple(query_starts.shape)} and key_starts {tuple(key_starts.shape)} must both be (B + 1,)"
        )


def checked_values(query: Tensor, key: Tensor, sequences: Sequences) -> Sequences:
    """The sequences, with the longest where looking costs nothing, as values_are_checked() says.

    Raises ValueError for announced lengths that no kernel counts to, and, where it looks, for starts that do not rise
    from 0 up, end past the rows, or leave a longer sequence than announced.
    """
    queries, keys, *announced = sequences
    for name, most in zip(("query", "key"), announced):
        if most >= 1 << 31:
            raise ValueError(f"max_{name} is {most}: it must be below 2^31")
    if not values_are_checked(queries):
        return sequences
    found: list[Size] = []
    for name, starts, rows, most in zip(("query", "key"), (queries, keys), (query.shape[0], key.shape[0]), announced):
        if name == "key" and keys is queries and rows == query.shape[0] and announced[0] == announced[1]:
            found *= 2
            break
        values = starts.tolist()
        longest = max((b - a for a, b in itertools.pairwise(values)), default=0)
        if values[0] < 0 or values[-1] > rows or any(b < a for a, b in itertools.pairwise(values)):
            raise ValueError(f"{name}_starts must rise from 0 to at most {rows} rows: {shown(values)}")
        if longest > most:
            raise ValueError(f"max_{name} is {most} but a sequence of {name}_starts has {longest}")
        found.append(min(operator.index(most), max(longest, 1)))  # memory is made for no longer one
    return Sequences(queries, keys, *found)


def shown(values: list[int]) -> str:
    """Some of the values, in a line."""
    return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


class Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    sequences: Sequences
    options: Options
    route: str

    @property
    def empty(self) -> bool:
        """True if there is nothing to attend."""
        return not self.query.numel() or not self.key.numel()


class Saved(NamedTuple):
    call: Call
    output: Tensor
    """Empty where the weights are saved and there are no sinks."""
    saved: Tensor
    """The weights before dropout, padded, or the log-sum-exp (H, Tq), as routes.saves_weights() says."""
    kept: Tensor
    """What routes.forward() gives beside: weights padded, the log-sum-exp (H, Tq)."""


class _Backward(NamedTuple):
    grad: Tensor
    saved: Saved


# ----------------------------------------------------------------------------------------------- kernels on packed rows


def by_head(x: Tensor, batch: int) -> Tensor:
    """A packed (T, H, D) seen as (B, H, T, D): every sequence reads the same memory, from its own start on,
    copied where neighbours of a head's row are none in memory."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.transpose(0, 1).unsqueeze(0).expand(batch, -1, -1, -1)


def _kernel_forward(call: Call, covered: bool) -> tuple[Tensor, Tensor]:
    """The output (Tq, H, Dv) and the log-sum-exp (H, Tq); covered: the sequences reach to the last row."""
    query, key, value, sequences, options, route = call
    tokens, heads, _ = query.shape
    empty = query.new_empty if covered and key.numel() else query.new_zeros  # zero where no sequence reaches
    output = empty(tokens, heads, value.shape[-1])
    lse = empty(heads, tokens, dtype=torch.float32)
    if output.numel():
        q, k, v, o = (by_head(x, sequences.batch) for x in (query, key, value, output))
        routes.forward(route, q, k, v, options, (o, lse.expand(sequences.batch, -1, -1)), sequences)
    return output, lse


def kernel_backward(
    grad: Tensor, saved: Saved, out: tuple[Tensor, ...], sums: tuple[Tensor, ...] | None = None
) -> None:
    """Gradients of packed query, key and value into out, which is zero; sums as routes.backward() takes them."""
    (query, key, value, sequences, options, route), output, lse, kept = saved
    if saved.call.empty:
        return
    g, q, k, v, o = (by_head(x, sequences.batch) for x in (grad, query, key, value, output))
    out = tuple(by_head(d, sequences.batch) for d in out)
    lse = lse.expand(sequences.batch, -1, -1)
    routes.backward(route, g, q, k, v, o, lse, kept, options, out=out, sums=sums, sequences=sequences)


# ------------------------------------------------------------------------------------------------ by way of padded rows


def padded(x: Tensor, starts: Tensor, length: int) -> Tensor:
    """(T, H, D) to (B, H, length, D). Past its end a sequence repeats its last row: of other sequences and of filler it
    must not even see what is not a number."""
    if not x.shape[0]:
        return x.new_zeros(starts.shape[0] - 1, x.shape[1], length, x.shape[2])
    index = starts[:-1, None] + torch.arange(length, device=x.device)
    return x[torch.minimum(index, starts[1:, None] - 1).clamp_(min=0)].transpose(1, 2)


def packed_again(x: Tensor, starts: Tensor, like: Tensor) -> Tensor:
    """The inverse: (B, H, length, D) to (T, H, D), like's T; zero past the last sequence."""
    rows = like.shape[0]
    position = torch.arange(x.shape[2], device=x.device)
    index = starts[:-1, None] + position
    index = torch.where(position < (starts[1:] - starts[:-1])[:, None], index, rows)  # the rest goes to a row too many
    x = x.transpose(1, 2).flatten(0, 1)
    return x.new_zeros(rows + 1, *x.shape[1:]).index_copy_(0, index.flatten(), x)[:rows].clone()


def _pad(call: Call) -> tuple[Tensor, Tensor, Tensor, Options]:
    """Query, key and value of the padded batch (B, H, ., D), and its options."""
    query_starts, key_starts, max_query, max_key = call.sequences
    return (
        padded(call.query, query_starts, max_query),
        padded(call.key, key_starts, max_key),
        padded(call.value, key_starts, max_key),
        call.options._replace(key_lengths=key_starts[1:] - key_starts[:-1]),
    )


def _padded_forward(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, sequences, options, route = call
    if call.empty:
        empty_weights, empty_kept = (x.zero_() for x in _fake_saved(call))
        return query.new_zeros(*query.shape[:2], value.shape[-1]), empty_weights, empty_kept
    output, weights, kept = routes.forward(route, *_pad(call))
    if kept is not None and options.sinks is not None:
        kept = packed_again(kept[..., None], sequences.query_starts, query)[..., 0].T.contiguous()
    return packed_again(output, sequences.query_starts, query), weights, query.new_empty(0) if kept is None else kept


def _fake_saved(call: Call) -> tuple[Tensor, Tensor]:
    """Return empty tensors in the shape of what is saved, the weights among it."""
    query, sequences = call.query, call.sequences
    shape = (sequences.batch, query.shape[1], sequences.max_query, sequences.max_key)
    weights, kept = routes.fake_saved(call.route, query, shape, call.options)
    if call.options.sinks is not None:
        kept = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
    return weights, kept


def _padded_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    call, output, weights, kept = saved
    query, key, value = call[:3]
    if call.empty:
        return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    query_starts, key_starts, max_query, _ = call.sequences
    past = torch.arange(max_query, device=grad.device) >= (query_starts[1:] - query_starts[:-1])[:, None]
    g = padded(grad, query_starts, max_query).masked_fill(past[:, None, :, None], 0.0)
    q, k, v, options = _pad(call)
    d_query, d_key, d_value, _ = routes.backward(call.route, g, q, k, v, output, weights, kept, options)
    return (
        packed_again(d_query, query_starts, query),
        packed_again(d_key, key_starts, key),
        packed_again(d_value, key_starts, value),
    )


def _composed(call: Call) -> Tensor:
    """The output of options that are not plain, where no kernel computes them."""
    if call.empty:
        sinks = call.options.sinks
        nothing = sum(x[:0].sum() for x in (*call[:3], *([] if sinks is None else [sinks])))  # whose gradient is zero
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[-1]) + nothing
    return packed_again(composed.attention(*_pad(call), fused), call.sequences.query_starts, call.query)


# ------------------------------------------------------------------------------------------------------------ operators


def forward(call: Call, covered: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """The output (Tq, H, Dv), and what is saved, as Saved has it.

    covered: the sequences reach to the last row, so that none needs to be zero before.
    """
    if routes.saves_weights(call.route):
        return _padded_forward(call)
    output, lse = _kernel_forward(call, covered)
    return output, lse, output.new_empty(0)


def fake(call: Call) -> tuple[Tensor, ...]:
    """Return empty outputs of forward()'s shapes."""
    query = call.query
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, call.value.shape[-1])
    if not routes.saves_weights(call.route):
        return output, query.new_empty(heads, tokens, dtype=torch.float32), query.new_empty(0)
    return output, *_fake_saved(call)


def backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    """Gradients of packed query, key and value."""
    if routes.saves_weights(saved.call.route):
        return _padded_backward(grad, saved)
    gradients = tuple(x.new_zeros(x.shape) for x in saved.call[:3])
    kernel_backward(grad, saved, gradients)
    return gradients


def _compute_backward(call: _Backward) -> tuple[Tensor, ...]:
    grad, saved = call
    sinks = saved.call.options.sinks
    d_sinks = grad.new_empty(0)
    if sinks is not None:
        by_head = grad.transpose(0, 1), saved.output.transpose(0, 1)
        d_sinks = routes.sinks_gradient(saved.call.route, *by_head, saved.saved, saved.kept, sinks)
    return *backward(grad, saved), d_sinks


def _fake_backward(call: _Backward) -> tuple[Tensor, ...]:
    sinks = call.saved.call.options.sinks
    d_sinks = call.grad.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return *(x.new_empty(x.shape) for x in call.saved.call[:3]), d_sinks


def _differentiate(saved: Saved, wanted: Options, grad: Tensor, *_: None) -> Gradients:
    gradients = dict(zip(("query", "key", "value", "sinks"), _attention_backward(grad, saved)))
    return gradients if wanted.sinks else gradients | {"sinks": None}


def by_reference(call: Call) -> Tensor:
    """The output (Tq, H, Dv) in operations that PyTorch differentiates."""
    query_starts, key_starts, *_ = call.sequences
    given = {name: x for name, x in call.options.of_reference().items() if name not in ("mask", "key_lengths")}
    if call.options.slopes is not None:
        given["alibi_slopes"] = call.options.slopes.expand(call.sequences.batch, -1)
    return reference.varlen_attention(*call[:3], query_starts, key_starts, **given)


def flops(call: Call, backward: bool = False) -> int:
    """Operations of the products within the sequences; without numbers, as if all were as long as announced."""
    query_starts, key_starts, *longest = call.sequences
    lengths = [[most] * call.sequences.batch for most in longest]
    if type(query_starts) is Tensor and not query_starts.is_meta:
        lengths = [starts.diff().tolist() for starts in (query_starts, key_starts)]
    pairs = call.query.shape[1] * sum(map(operator.mul, *lengths))
    return routes.flops(pairs, call.query.shape[2], call.value.shape[2], call.route if backward else None)


_attention_backward = Operator(
    "attention_packed_backward",
    _Backward,
    "(Tensor, Tensor, Tensor, Tensor)",
    unplanned(_compute_backward),
    _fake_backward,
    reference=lambda call: pulled_back(by_reference, call.saved.call, ("query", "key", "value", "sinks"), call.grad),
    flops=lambda call: flops(call.saved.call, backward=True),
).call
_operator = Operator(
    "attention_packed",
    Call,
    "(Tensor, Tensor, Tensor)",
    unplanned(forward, 2),
    fake,
    decide=lambda call: routes.decide(call.route, call.query, call.value, call.sequences.max_key, call.options),
    save=routes.save,
    saved=Saved,
    backward=_differentiate,
    flops=flops,
    autocast=lowered("query", "key", "value"),  # an additive mask keeps its precision
)
_attention = _operator.call
