"""A layer with torch.nn's interface as one node of autograd, where kernels compute and nothing in it was exchanged."""

from typing import Any

from torch import Tensor, nn

from fasttfm.errors import ArgumentError, ArgumentTypeError
from fasttfm.functional import backends, draw_seed
from fasttfm.functional.backends import kernel_route
from fasttfm.functional.signature import renamed
from fasttfm.functional.subclasses import PLAIN_TENSORS
from fasttfm.models.layer_plan import AttentionSettings, Batch, Settings
from fasttfm.models.packing import Packing
from fasttfm.models.plain import attentions_of, fused_activation, norms_behind, plain_width
from fasttfm.models.prepared import PreparedStack, may_run, parameters_of, prepare
from fasttfm.nn import masks
from fasttfm.nn.attention import MultiheadAttention

ATTENTIONS: frozenset[Any] = frozenset({MultiheadAttention})


def computed_as_node(
    layer: Any,
    x: Tensor,
    memory: Tensor | None,
    given: list[tuple[Tensor | None, Tensor | None, bool, dict[str, str]]],
    packings: tuple[Packing | None, Packing | None] = (None, None),
) -> Tensor | None:
    """The layer's output for x, or None, where its operators have to be asked one by one.

    given: of each attention attn_mask, key_padding_mask, is_causal, and what these and its inputs are called in the
    layer. Raises as the attention for masks that do not fit.
    """
    if type(x) not in PLAIN_TENSORS or x.dim() != (3 if packings[0] is None else 2) or not may_run():
        return None
    prepared = _prepared(layer) if kernel_route(backends.current, x) == "triton" else None
    if prepared is None:
        return None
    stack, drops = prepared
    merged = []
    for attention, source, (mask, padding, causal, names) in zip(attentions_of(layer), (x, memory), given):
        if packings[0] is not None and (padding is not None or (mask is not None and not causal)):
            return None  # which raises
        source = x if source is None else source
        if packings[0] is None:
            try:
                attention.check(x, source, source, padding, mask, None)
            except (ArgumentError, ArgumentTypeError) as error:
                raise renamed(error, names) from None
        merged.append(masks.merged(None if causal else mask, padding, attention.num_heads))
    if packings[0] is not None:
        x, memory = x[None], None if memory is None else memory[None]
    batch = Batch(None, packings[0], memory, packings[1], (merged[0], None if memory is None else merged[-1]))
    dtype = stack.dtype_of_products(x, batch)
    if dtype is None:
        return None
    if drops:  # only now: the operators would draw another one
        batch = batch._replace(seed=draw_seed(x.device))
    y = stack.run(x, batch, dtype, causal=tuple([bool(each[2]) for each in given]))
    return y if packings[0] is None else y[0]


def _prepared(layer: Any) -> tuple[PreparedStack, bool] | None:
    """The layer, prepared, and whether any of its dropouts drops."""
    held = layer.__dict__.get("_prepared")
    if held is None:  # before the layer is looked at, of which this is an attribute
        layer._prepared = held = [None]
    if held[0] is None or not held[0][0].holds([layer], None):
        held[0] = _prepare(layer)
    return held[0]


def _prepare(layer: Any) -> tuple[PreparedStack, bool] | None:
    if not opens(layer) or not fused_activation(layer.activation):
        return None
    attentions, norms = attentions_of(layer), norms_behind(layer, None)
    outputs = (layer.dropout1, layer.dropout2, *([layer.dropout3] if len(attentions) > 1 else []))
    settings = Settings(
        layer.norm_first,
        fused_activation(layer.activation) or "",
        tuple([AttentionSettings(a.num_heads, False, a.dropout if a.training else 0.0) for a in attentions]),
        _p(layer.dropout),
        tuple(map(_p, outputs)),
        tuple([None if norm is None else norm.eps for norm in norms]),
        is_last=True,
        batch_first=attentions[0].batch_first,
    )
    stack = prepare([layer], None, [settings], [parameters_of(layer, norms)])
    p = [settings.hidden_dropout_p, *settings.dropout_p, *(each.dropout_p for each in settings.attentions)]
    return None if stack is None else (stack, any(each > 0.0 for each in p))


def opens(layer: Any) -> bool:
    """Return whether a layer of ours is no more than its class, with one matrix of each attention's projections."""
    kinds = frozenset({type(layer).__dict__.get("stands_for", "")}) - {""}
    return (
        plain_width(layer, kinds, ATTENTIONS) > 0
        and not any(a.in_proj_weight is None or a.bias_k is not None or a.add_zero_attn for a in attentions_of(layer))
        and len({each.batch_first for each in attentions_of(layer)}) == 1
    )


def _p(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0
